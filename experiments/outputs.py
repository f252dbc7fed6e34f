"""What commands write to, and need for it."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedkace_flwr.errors import ConfigError, ResultsError


def check_output(path: Path | None) -> None:
    """Check that the file of ``--output``, if there is one, can be written: that it is new, or a regular file.

    Raises
    ------
    ConfigError
        It cannot, or is something else, such as a link or a device.
    """
    if path is None:
        return
    try:
        if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
            raise ConfigError(f"--output {path}: is not a regular file; must be one, or new")
        if not path.parent.is_dir():
            raise ConfigError(
                f"--output {path}: cannot be written (there is no folder {path.parent}); must be in an existing folder"
            )
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"--output {path}: cannot be written ({error.strerror}); choose another file") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file of ``--output`` where it cannot be written after all."""
    try:
        yield
    except OSError as fault:
        raise ResultsError(f"--output {path}: cannot be written ({fault.strerror})") from fault


@contextmanager
def needing_report(what: str) -> Iterator[None]:
    """Name the extra ``report`` if a package that a part of the program needs is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ResultsError(f"{what} needs {package}: pip install 'fedkace-flwr[report]'") from error
