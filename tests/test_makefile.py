"""Where `make` puts the environment: out of the folder that `flwr run .` searches for the app's files."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.cli.utils import collect_files

ROOT = Path(__file__).resolve().parents[1]


def make(folder: Path, *arguments: str) -> None:
    command = ["make", f"VENVS={folder.parent / 'venvs'}", f"PYTHON={sys.executable}", *arguments]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_environment_is_a_link_that_flower_does_not_follow(tmp_path: Path) -> None:
    folder = tmp_path / "check out"
    folder.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    make(folder, ".venv")
    (place,) = (tmp_path / "venvs").iterdir()
    assert (folder / ".venv").is_symlink() and (folder / ".venv").resolve() == place
    assert (folder / ".venv" / "bin" / "python").exists()
    assert set(collect_files(folder)) == {"Makefile"}
    make(folder, "clean")
    assert not (folder / ".venv").is_symlink() and not place.exists()
