"""Archive the record of a run or of a study for the documentation, without the folder names of the original machine."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from fedkace_flwr import registry as registry  # declares the methods' keys
from fedkace_flwr.config import folder_keys
from fedkace_flwr.errors import RunError

_RECORD = ("environment.json", "rounds.jsonl", "summary.json")
_PICTURE = "accuracy.png"


def keep(source: Path, target: Path) -> None:
    """Copy the record of a finished run, or of all finished runs of a study, to ``target``.

    A single run's plot is copied too. The copy of a study is itself a results folder: the runner skips the runs in it,
    and the report can read them.

    Raises
    ------
    RunError
        The folder has no finished run.
    """
    if not (source / "study.json").exists():
        _keep_run(source, target, (*_RECORD, _PICTURE))
        return
    finished = sorted(path.parent for path in source.glob("*/summary.json"))
    if not finished:
        raise RunError(f"{source}: has no finished run")
    for run in finished:
        _keep_run(run, target / run.name, _RECORD)
    shutil.copyfile(source / "study.json", target / "study.json")


def _keep_run(run: Path, target: Path, names: Sequence[str]) -> None:
    missing = [name for name in ("config.json", *names) if not (run / name).exists()]
    if missing:
        raise RunError(f"{run}: has no {missing[0]}; must be the folder of a finished run")
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    kept = {key: value for key, value in config.items() if key not in folder_keys()}
    (target / "config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    for name in names:
        shutil.copyfile(run / name, target / name)
