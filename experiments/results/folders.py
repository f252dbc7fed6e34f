"""Folders of results: which are runs, and which were set aside by a later run of the same name."""

import re
from pathlib import Path

_SET_ASIDE = re.compile(r"\.\d{8}-\d{6}(-\d+)?$")


def is_set_aside(folder: Path) -> bool:
    """Return whether the folder is that of an earlier run, renamed when another one took its name."""
    return _SET_ASIDE.search(folder.name) is not None


def runs_of_study(folder: Path) -> list[Path]:
    """Return the folders of a study's runs by name, finished or not, without those set aside."""
    return sorted(path.parent for path in folder.glob("*/config.json") if not is_set_aside(path.parent))
