"""Files that are either whole or absent: archives of arrays and one JSON record, and models for inference.

An archive, ``KIND-NUMBER.npz``, is in NumPy's format without pickled content, and is versioned; a model,
``models-NUMBER.safetensors``, holds a checksum itself. Around both is what :mod:`fedkace_flwr.storage.encryption` puts
there. Files are replaced as a whole, are readable by their owner only, unless a group is named, and have at most so many
bytes as one process can be expected to hold. Errors name the file.
"""

import contextlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedkace_flwr.errors import ConfigError, FedkaceError, ModelError, StateError, UnreadableStateError
from fedkace_flwr.npy import HeaderError, read_content, read_header
from fedkace_flwr.storage import encryption
from fedkace_flwr.storage.files import IrregularFileError, LargeFileError, read_bytes, write_bytes
from fedkace_flwr.storage.folders import make_folder, sync_folder

LIMIT = "FEDKACE_STATE_LIMIT"
"""The environment variable for the most MiB of a stored file."""

ANSWER, STATE, MODELS, CHECKPOINT = "answer", "state", "models", "checkpoint"
"""The kinds of files."""

METADATA = "__metadata__"
"""The name of a model's strings in its header."""

VERSION = 1
"""Version of archives of which nothing else is said."""

Array = npt.NDArray[Any]
Content = tuple[dict[str, Array], dict[str, Any]]
"""Arrays by name, and a JSON-ready record."""

_MIB = 2**20
_USUAL_LIMIT = 2**30
_LENGTH_BYTES, _LARGEST_HEADER = 8, 2**25


def limit(environment: Mapping[str, str] = os.environ) -> int:
    """Most bytes of a stored file: 1 GiB, unless the environment says otherwise.

    Raises
    ------
    ConfigError
        The variable does not hold a positive number.
    """
    text = environment.get(LIMIT, "").strip()
    if not text:
        return _USUAL_LIMIT
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text)):
        raise ConfigError(f"{LIMIT} = {text!r:.40}: must be a whole number of MiB, at least 1, for example 4096")
    return int(text) * _MIB


def write(
    path: Path,
    arrays: Mapping[str, Array],
    record: Mapping[str, Any],
    *,
    version: int = VERSION,
    most: int | None = None,
) -> None:
    """Replace an archive; it is on disk before this returns.

    Parameters
    ----------
    path : Path
        Its folder is made if necessary.
    arrays : mapping
        By any name but ``record``.
    record : mapping
        JSON-ready; without a key ``version``.
    version : int
        Version of the content.
    most : int, optional
        Most bytes that it may have, as in :func:`read_body`.

    Raises
    ------
    StateError
        It would have more bytes than are read; nothing is written.
    """
    text = json.dumps({"version": version, **record}, allow_nan=False).encode()
    columns: dict[str, Any] = {"record": np.frombuffer(text, dtype=np.uint8), **arrays}
    archive = io.BytesIO()
    np.savez(archive, **columns)
    # `getbuffer` would be a view that an error leaves in a cycle, and Python 3.12.1 crashes when it is collected.
    write_body(path, archive.getvalue(), most=most)


def write_body(path: Path, body: bytes, *, most: int | None = None, group: int | None = None) -> None:
    """Replace a file of any kind, as :func:`write` does; a group that is named may read it."""
    parts = encryption.seal(body, path)
    size, most = sum(map(len, parts)), limit() if most is None else most
    if size > most:
        raise StateError(f"{path}: would have {size} bytes, and at most {most} are read; {_raise_limit(size)}")
    make_folder(path.parent)
    write_bytes(path, *parts, mode=0o600, group=group)


def read(
    path: Path, version: int = VERSION, parse: Callable[..., Any] = lambda *content: content, *, most: int | None = None
) -> Any:
    """What ``parse`` makes of an archive's arrays and record; None if there is no file.

    Parameters
    ----------
    path, parse, most
        As for :func:`read_body`.
    version : int
        The version that the archive must have.

    Raises
    ------
    UnreadableStateError, StateError
        As :func:`read_body`; an archive of another version is unreadable.
    """
    return read_body(path, lambda body: parse(*_content(body, version)), most=most)


def read_body(path: Path, parse: Callable[[bytes], Any] = lambda body: body, *, most: int | None = None) -> Any:
    """What ``parse`` makes of what a file protects; None if there is no file.

    Parameters
    ----------
    path : Path
        The file; no link.
    parse : callable
        Raises KeyError, TypeError, ValueError or an error of this package if the content is wrong.
    most : int, optional
        Most bytes that the file may have; by default :func:`limit`. Of a larger one nothing is read.

    Raises
    ------
    UnreadableStateError
        The file may be intact, but this process cannot read it: it has too many bytes, no key opens it, or the system
        refuses.
    StateError
        The file is damaged.
    """
    with _explained(path):
        try:
            content = read_bytes(path, limit() if most is None else most, follow=False)
        except FileNotFoundError:
            return None
        return parse(encryption.unseal(content, path))


def run_of(path: Path, version: int = VERSION) -> str | None:
    """The run that an archive or a model names; None if there is no file, or it names none. Arrays are not looked at.

    Raises
    ------
    UnreadableStateError, StateError
        As :func:`read`.
    """

    def named(body: bytes) -> str | None:
        strings = path.suffix == encryption.MODEL_FILES
        told = header_of(body)[0].get(METADATA, {}) if strings else _content(body, version, alone=True)[1]
        run = told.get("run") if isinstance(told, dict) else None
        return run if isinstance(run, str) else None

    run: str | None = read_body(path, named)
    return run


def path_of(folder: Path, kind: str, number: int) -> Path:
    """A folder's file ``KIND-NUMBER.npz``, or ``models-NUMBER.safetensors``."""
    return folder / f"{kind}-{number:06d}{_suffix(kind)}"


def numbered(folder: Path, kind: str) -> list[int]:
    """Numbers of a folder's files of a kind, descending."""
    numbers = [path.stem.removeprefix(f"{kind}-") for path in folder.glob(f"{kind}-*{_suffix(kind)}")]
    # Only numbers as this package writes them: otherwise two files could have the same number.
    ours = [text for text in numbers if text.isascii() and text.isdecimal() and text == f"{int(text):06d}"]
    return sorted((int(text) for text in ours), reverse=True)


def set_aside(path: Path) -> Path:
    """Rename a damaged file, to an unused name, so that it is not read again; return the new name."""
    aside, number = path.with_suffix(".corrupt"), 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_suffix(f".corrupt-{number}")
    os.replace(path, aside)
    sync_folder(path.parent)
    return aside


def unpack(body: bytes, only: str | None = None) -> dict[str, Array]:
    """The arrays of an archive in NumPy's format, or one of them; no more memory is taken than there are bytes.

    Raises
    ------
    StateError
        The bytes are no archive of uncompressed numbers.
    """
    arrays: dict[str, Array] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > len(body):
                raise StateError("it promises more than it holds")
            for member in members:
                name = member.filename.removesuffix(".npy")
                if only is not None and name != only:
                    continue
                if member.compress_type != zipfile.ZIP_STORED or name in arrays:
                    raise StateError(f"its member {member.filename!r} is compressed, or there twice")
                arrays[name] = _array(archive.read(member))
    except (StateError, OSError, MemoryError):
        raise
    except Exception as error:  # the bytes are not trusted, and the parsers raise errors of any kind
        raise StateError(f"it is no archive of arrays ({' '.join(str(error).split())})") from error
    return arrays


def header_of(content: bytes) -> tuple[dict[str, Any], int]:
    """What a file of safetensors says before its tensors, and where these begin.

    Raises
    ------
    ModelError
        It is no such file.
    """
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    end = _LENGTH_BYTES + length
    header: object = None
    if _LENGTH_BYTES < len(content) >= end and length <= _LARGEST_HEADER:
        with contextlib.suppress(RecursionError, ValueError):
            header = json.loads(content[_LENGTH_BYTES:end])
    if not isinstance(header, dict):
        raise ModelError("it is damaged, or no file of safetensors")
    return header, end


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Name the file, and distinguish a damaged one from one that cannot be read at the moment."""
    try:
        yield
    except IrregularFileError as error:
        raise StateError(f"{path}: {error.strerror}") from error
    except LargeFileError as error:
        raise UnreadableStateError(f"{path}: {error.strerror}; move it away, or {_raise_limit(error.size)}") from error
    except OSError as error:
        raise UnreadableStateError(f"{path}: it cannot be read ({error.strerror or error})") from error
    except MemoryError as error:
        raise UnreadableStateError(f"{path}: it does not fit into memory") from error
    except ConfigError:
        raise
    except (FedkaceError, KeyError, TypeError, ValueError) as error:
        kind = UnreadableStateError if isinstance(error, UnreadableStateError) else StateError
        reason = "" if isinstance(error, FedkaceError) else f"{type(error).__name__}: "
        raise kind(f"{path}: {reason}{' '.join(str(error).split())}") from error


def _raise_limit(size: int) -> str:
    return f"set {LIMIT} to at least {-(-size // _MIB)} (MiB)"


def _suffix(kind: str) -> str:
    return encryption.MODEL_FILES if kind == MODELS else ".npz"


def _content(body: bytes, version: int, *, alone: bool = False) -> Content:
    """Arrays and record of an archive, or the record alone."""
    arrays = unpack(body, "record" if alone else None)
    try:
        record = json.loads(arrays.pop("record").tobytes(), parse_constant=_refuse)
        found = record.pop("version")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise StateError(f"its record cannot be read ({type(error).__name__})") from error
    if type(found) is not int or found < 1:
        raise StateError(f"it has version {found!r:.40}, which does not exist")
    if found != version:
        raise UnreadableStateError(f"it has version {found}, this program reads {version}; use the one that wrote it")
    assert isinstance(record, dict)
    return arrays, record


def _refuse(name: str) -> None:
    raise ValueError(name)


def _array(content: bytes) -> Array:
    file = io.BytesIO(content)
    try:
        header = read_header(file)
        left = len(content) - file.tell()
        if header.size != left:
            raise HeaderError(f"{left} bytes for an array of {header.dtype} {header.shape}")
        return read_content(file, header)
    except HeaderError as error:
        raise StateError(f"an array cannot be read ({error})") from error
