"""Checks of what a command will write to, made before it works for it."""

import tempfile
from pathlib import Path

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.storage.folders import make_folder


def check_output(path: Path | None) -> None:
    """Check that the file of ``--output``, if there is one, can be written.

    Raises
    ------
    ConfigError
        It cannot.
    """
    if path is None:
        return
    try:
        if path.is_dir():
            raise ConfigError(f"--output {path}: is a folder; must be a file")
        if not path.parent.is_dir():
            raise ConfigError(
                f"--output {path}: cannot be written (there is no folder {path.parent}); must be in an existing folder"
            )
        if path.is_file():
            with path.open("ab"):
                pass
        elif not path.exists():  # and so is no device either
            with tempfile.TemporaryFile(dir=path.parent):
                pass
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written ({error.strerror}); choose another file") from error


def make_output(folder: Path) -> None:
    """Make a folder for this user only, if there is none, and check that it is writable.

    Raises
    ------
    ConfigError
        It is not.
    """
    try:
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror}); choose a writable folder") from error
