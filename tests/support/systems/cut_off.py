"""Runs that have ended, and runs whose server ended in the middle; each is made once, and copied for each test."""

import contextlib
import json
import os
import shutil
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
        _run(config, f"cut off after {number}")
    folder = Path(config.run.results_dir, config.run.run_name)
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == number
    return folder


def finished(config: Config) -> Path:
    """A whole run."""
    return _run(config, "finished")


def _run(config: Config, end: str) -> Path:
    """Run a configuration, or copy an earlier run of it."""
    place = {"results-dir": config.run.results_dir, "run-name": config.run.run_name}
    folder = Path(config.run.results_dir, config.run.run_name)
    if folder.exists() or config.flat()["tracker"] in ("mlflow", "wandb"):  # which write outside of the folder
        run_inline(config)
        return folder
    told = json.dumps({**config.flat(), "results-dir": "", "run-name": "", "end": end}, sort_keys=True)
    kept = Path(os.environ["FEDKACE_CACHE_DIR"], "runs", str(hash(told)))
    if not kept.exists():
        try:
            run_inline(config)
        finally:
            if folder.exists():
                shutil.copytree(folder, kept)
        return folder
    shutil.copytree(kept, folder)
    (folder / "config.json").write_text(json.dumps({**json.loads((folder / "config.json").read_text()), **place}))
    return folder
