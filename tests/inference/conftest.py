"""A client's folder with a made model."""

from pathlib import Path

import pytest
from support.made.models import constant

from fedkace_flwr.inference import model_files as serving


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A client's folder with one generation: round 3 answers class 3."""
    serving.write(tmp_path / "client", constant(3, 3, seen=(1, 3, 4)))
    return tmp_path / "client"
