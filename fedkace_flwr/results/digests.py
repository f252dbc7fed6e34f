"""Digests of the files and the data that a configuration names, by which a run is recognised wherever they lie."""

import hashlib
import os
from functools import lru_cache
from pathlib import Path

from fedkace_flwr.config import Config, folder_keys, path_keys
from fedkace_flwr.storage.files import open_regular

DATA = "dataset"
"""The key whose digest is that of the prepared data."""


def file_digests(config: Config, data: str = "") -> dict[str, str]:
    """Return the SHA-256 of each file that a configuration names, by key; without those that cannot be read.

    ``data`` is that of the prepared data set, if there is one.
    """
    values = config.flat()
    named = {key: str(values[key]) for key in sorted((path_keys() - folder_keys()) & values.keys()) if values[key]}
    found = {DATA: data} | {key: _digest(Path(path).expanduser()) for key, path in named.items()}
    return {key: digest for key, digest in found.items() if digest}


def _digest(path: Path) -> str:
    try:
        facts = path.stat()
        return _of_content(path, facts.st_size, facts.st_mtime_ns)
    except OSError:
        return ""  # whoever needs the file says what is wrong with it


@lru_cache(maxsize=64)
def _of_content(path: Path, size: int, changed: int) -> str:
    """Return the digest of a file that has this size and time of change; the runs of a study share it."""
    with os.fdopen(open_regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
