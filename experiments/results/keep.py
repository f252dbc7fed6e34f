"""Archive the record of a run or of a study for the documentation, without the folder names of the original machine."""

import json
from pathlib import Path

from fedkace_flwr import registry as registry  # declares the methods' keys
from fedkace_flwr.config import folder_keys, path_keys
from fedkace_flwr.errors import RunError
from fedkace_flwr.storage.files import LARGEST_LOG, read_bytes, read_text, write_bytes, write_text
from fedkace_flwr.storage.names import closest_path

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
        No run has completed a round, or a file cannot be read or written.
    """
    try:
        _keep(source, target)
    except (OSError, RecursionError, ValueError) as error:
        raise RunError(f"{source}: cannot be copied to {target} ({error})") from error


def _keep(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise RunError(f"{source}: is not a folder; must be that of a run or of a study{closest_path(source)}")
    if not (source / "study.json").exists():
        _keep_run(source, target)
        if (source / _PICTURE).exists():
            _copy(source / _PICTURE, target / _PICTURE)
        return
    runs = sorted(path.parent for path in source.glob("*/rounds.jsonl") if path.stat().st_size)
    if not runs:
        raise RunError(f"{source}: no run has completed a round; keep it later")
    for run in runs:
        _keep_run(run, target / run.name)
    _copy(source / "study.json", target / "study.json")


def _keep_run(run: Path, target: Path) -> None:
    missing = [name for name in _REQUIRED if not (run / name).exists()]
    if missing:
        raise RunError(f"{run}: has no {missing[0]}; must be the folder of a run that has completed a round")
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads(read_text(run / "config.json"))
    files = path_keys() - folder_keys()  # of which the name tells enough
    kept = {key: value for key, value in config.items() if key not in folder_keys()}
    kept |= {key: Path(kept[key]).name for key in files & kept.keys()}
    write_text(target / "config.json", json.dumps(kept, indent=2) + "\n")
    _copy(run / "environment.json", target / "environment.json")
    # Only whole lines: the run may be writing one.
    lines = read_text(run / "rounds.jsonl", LARGEST_LOG).splitlines(keepends=True)
    rounds = "".join(line for line in lines if line.endswith("\n"))
    write_text(target / "rounds.jsonl", rounds)
    if (run / _SUMMARY).exists():
        _copy(run / _SUMMARY, target / _SUMMARY)


def _copy(source: Path, target: Path) -> None:
    write_bytes(target, read_bytes(source, LARGEST_LOG))
