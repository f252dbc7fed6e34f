"""Folders of results: which are runs or kept studies, and which were set aside by a later run of the same name."""

import re
from collections.abc import Iterable
from pathlib import Path

from fedkace_flwr.errors import ResultsError
from fedkace_flwr.storage.names import closest_path

KEPT_FILES = STUDY, ROUNDS, CLASSES = "study.json", "rounds.parquet", "classes.parquet"
"""The files of a kept study. The first is also that of a study with folders of runs."""

_SET_ASIDE = re.compile(r"\.\d{8}-\d{6}(-\d+)?$")


def is_set_aside(folder: Path) -> bool:
    """Return whether the folder is that of an earlier run, renamed when another one took its name."""
    return _SET_ASIDE.search(folder.name) is not None


def is_kept(folder: Path) -> bool:
    """Return whether the folder is that of a kept study."""
    return all((folder / name).exists() for name in (STUDY, ROUNDS))


def check_folders(folders: Iterable[Path]) -> None:
    """Check that there are such folders; this needs nothing that an extra installs.

    Raises
    ------
    ResultsError
        One of them is no folder.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ResultsError(f"{folder}: is not a folder; must be a results folder{closest_path(folder)}")


def within(folder: Path, path: Path) -> Path:
    """Return a path below a folder, which may be anyone's, if no link leads out of the folder.

    Raises
    ------
    ResultsError
        A link does.
    """
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ResultsError(f"{path}: is a link out of {folder}; must be a part of it, or be named itself")
    return path


def all_within(folder: Path, path: Path) -> Path:
    """Return a folder in a folder if no link leads out of that, neither in its place nor directly in it.

    Raises
    ------
    ResultsError
        A link does.
    """
    for each in within(folder, path).glob("*"):
        within(folder, each)
    return path


def studies_in(folder: Path) -> list[Path]:
    """Return the folders of studies, kept or not, in a folder of results by name.

    Raises
    ------
    ResultsError
        One of them, or a run in one, is a link out of the folder.
    """
    others = [path for path in sorted(folder.glob("*/")) if not (path / "config.json").exists()]  # than runs
    return [path for path in others if (is_kept(path) or runs_of_study(path)) and within(folder, path)]


def runs_of_study(folder: Path) -> list[Path]:
    """Return the folders of a study's runs by name, finished or not, without those set aside.

    Raises
    ------
    ResultsError
        One of them is a link out of the folder.
    """
    found = sorted(path.parent for path in folder.glob("*/config.json") if not is_set_aside(path.parent))
    for path in found:
        within(folder, path)
    return found
