"""Keep the record of a run, or of a study, in the documentation, without the folders of the machine it was made on."""

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

    A single run's picture goes along. What is kept of a study is a results folder again: a runner skips these
    runs, and the report reads them.

    Raises
    ------
    RunError
        The folder holds no finished run.
    """
    if not (source / "study.json").exists():
        _keep_run(source, target, (*_RECORD, _PICTURE))
        return
    finished = sorted(path.parent for path in source.glob("*/summary.json"))
    if not finished:
        raise RunError(f"{source}: holds no finished run")
    for run in finished:
        _keep_run(run, target / run.name, _RECORD)
    shutil.copyfile(source / "study.json", target / "study.json")


def _keep_run(run: Path, target: Path, names: Sequence[str]) -> None:
    missing = [name for name in ("config.json", *names) if not (run / name).exists()]
    if missing:
        raise RunError(f"{run}: holds no {missing[0]}; name the folder of a finished run")
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    kept = {key: value for key, value in config.items() if key not in folder_keys()}
    (target / "config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    for name in names:
        shutil.copyfile(run / name, target / name)
