"""What programs start of Flower."""

import subprocess
import sys
from pathlib import Path

import pytest

from fedkace_flwr.experiments.running.processes import staged_app
from fedkace_flwr.storage.targets import MARK

ROOT = Path(__file__).resolve().parents[3]


def bundle(app: Path, place: Path) -> bytes:
    """What Flower makes of a folder and sends to a SuperLink."""
    place.mkdir()
    command = [str(Path(sys.executable).with_name("flwr")), "build", "--app", str(app)]
    subprocess.run(command, cwd=place, check=True, capture_output=True)
    (made,) = place.glob("*.fab")
    return made.read_bytes()


@pytest.mark.slow
def test_the_staged_app_is_the_checkouts(tmp_path: Path) -> None:
    staged = staged_app(tmp_path / "app")
    packages = {"fedkace_flwr", "strategies", "clients"}
    assert {path.name for path in staged.iterdir()} == {MARK, "pyproject.toml", "LICENSE", *packages}
    assert bundle(staged, tmp_path / "of-staged") == bundle(ROOT, tmp_path / "of-checkout")
