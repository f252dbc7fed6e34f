"""Archive the record of a run or of a study for the documentation, without the folder names of the original machine."""

import json
import shutil
from pathlib import Path

from fedkace_flwr import registry as registry  # declares the methods' keys
from fedkace_flwr.config import folder_keys
from fedkace_flwr.errors import RunError

_REQUIRED = ("config.json", "environment.json", "rounds.jsonl")
_SUMMARY, _PICTURE = "summary.json", "accuracy.png"


def keep(source: Path, target: Path) -> None:
    """Copy the record of a run, or of every run of a study that has a round, to ``target``.

    Of an unfinished run the completed rounds are copied. A single run's plot is copied too. The copy of a study is
    itself a results folder: the report can read it, and the runner skips the finished runs in it. An unfinished run
    is resumed from its own folder, which has the checkpoints.

    Raises
    ------
    RunError
        No run has completed a round.
    """
    if not (source / "study.json").exists():
        _keep_run(source, target)
        if (source / _PICTURE).exists():
            shutil.copyfile(source / _PICTURE, target / _PICTURE)
        return
    runs = sorted(path.parent for path in source.glob("*/rounds.jsonl") if path.stat().st_size)
    if not runs:
        raise RunError(f"{source}: no run has completed a round; keep it later")
    for run in runs:
        _keep_run(run, target / run.name)
    shutil.copyfile(source / "study.json", target / "study.json")


def _keep_run(run: Path, target: Path) -> None:
    missing = [name for name in _REQUIRED if not (run / name).exists()]
    if missing:
        raise RunError(f"{run}: has no {missing[0]}; must be the folder of a run that has completed a round")
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    kept = {key: value for key, value in config.items() if key not in folder_keys()}
    (target / "config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(run / "environment.json", target / "environment.json")
    # Only whole lines: the run may be writing one.
    lines = (run / "rounds.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    rounds = "".join(line for line in lines if line.endswith("\n"))
    (target / "rounds.jsonl").write_text(rounds, encoding="utf-8")
    if (run / _SUMMARY).exists():
        shutil.copyfile(run / _SUMMARY, target / _SUMMARY)
