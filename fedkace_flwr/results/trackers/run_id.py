"""The name under which a tracker knows a run, kept in the run's folder so that a resumed run goes on under it."""

import json
from pathlib import Path

from fedkace_flwr.errors import RunError
from fedkace_flwr.storage import files

FILE = "tracker.json"


def known_run(folder: Path, tracker: str) -> str | None:
    """Return the run's name at a tracker, or None if that tracker does not know it.

    Raises
    ------
    RunError
        The file is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        told = json.loads(files.read_text(path, files.LARGEST_TEXT))
        return str(told["run"]) if told["tracker"] == tracker else None
    except (OSError, KeyError, TypeError, ValueError) as fault:
        raise RunError(f"{path}: cannot be read ({fault}); remove it, and the tracker begins a new run") from fault


def keep_run(folder: Path, tracker: str, run: str) -> None:
    """Write the run's name at a tracker."""
    files.write_text(folder / FILE, json.dumps({"tracker": tracker, "run": run}) + "\n")
