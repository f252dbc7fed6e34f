"""A short simulated year of a federation of real SuperNodes, in which everything happens once."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.tools import need_tools

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(3000)]


def test_a_federation_lives_through_a_year(tmp_path: Path) -> None:
    need_tools("openssl", "ssh-keygen")
    command = [sys.executable, "-m", "experiments", "soak", "--rounds", "20", "--output", str(tmp_path / "soak")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout and (tmp_path / "soak" / "year.png").exists()
