"""Runs whose server ends in the middle."""

import contextlib
from pathlib import Path

import pytest

from fedkace_flwr.config import Config
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.results.run_folder import RunFolder
from fedkace_flwr.storage.checkpoint import Checkpoint


def cut_after_round(config: Config, number: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose server died right after a round was recorded and its checkpoint stored."""
    add = RunFolder.save

    def save(self: RunFolder, checkpoint: Checkpoint) -> None:
        add(self, checkpoint)
        if checkpoint.round == number:
            raise SystemExit("cut off")

    with monkeypatch.context() as patch, contextlib.suppress(SystemExit):
        patch.setattr(RunFolder, "save", save)
        run_inline(config)
    assert len((Path(config.run.results_dir, config.run.run_name) / "rounds.jsonl").read_text().splitlines()) == number
    return Path(config.run.results_dir, config.run.run_name)
