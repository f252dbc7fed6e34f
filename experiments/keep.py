"""Keep a run's record in the documentation, without the folders of the machine it was made on."""

import json
import shutil
from pathlib import Path

from fedkace_flwr.errors import RunError

_COPIED = ("environment.json", "rounds.jsonl", "summary.json", "accuracy.png")
_OF_THE_MACHINE = ("data-dir", "cache-dir", "state-dir", "results-dir")


def keep(run: Path, target: Path) -> None:
    """Copy a finished run's record to ``target``.

    Raises
    ------
    RunError
        The run is not finished.
    """
    missing = [name for name in ("config.json", *_COPIED) if not (run / name).exists()]
    if missing:
        raise RunError(f"{run}: holds no {missing[0]}; name the folder of a finished run")
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    kept = {key: value for key, value in config.items() if key not in _OF_THE_MACHINE}
    (target / "config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    for name in _COPIED:
        shutil.copyfile(run / name, target / name)
