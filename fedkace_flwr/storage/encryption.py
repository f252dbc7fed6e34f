"""What a stored file looks like outside: a checksum, and encryption at rest with a key from the environment.

A plain file is the SHA-256 of its content, and the content; a model, which has a checksum itself, the content alone. An
encrypted one is a mark, the SHA-256 of the rest, a version (1 byte), a nonce that no other write uses (12 bytes), and
the content, encrypted with AES-256 in Galois/counter mode. The file's place, which is the name of its client or run and
its own, is authenticated with the content, so that a file is read nowhere else. Mark, checksum and version stand at the
same place in every version.
"""

import base64
import binascii
import hashlib
import os
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedkace_flwr.errors import ConfigError, StateError, UnreadableStateError
from fedkace_flwr.storage.folders import EARLIER, PAST

VARIABLE = "FEDKACE_STATE_KEY"
"""The environment variable for the keys: files are written with the first and read with any."""

MODELS = "FEDKACE_MODELS_KEY"
"""The same for models, which another user may read who does not get the keys of the state."""

PLAIN = "plain"
"""Stands in the place of a key for files that are not encrypted."""

MODEL_FILES = ".safetensors"
"""How the names of models end."""

_MARK = b"\x89FEDKACE-SEALED\n"
_VERSION = 3
_KEY_BYTES, _DIGEST_BYTES, _NONCE_BYTES = 32, 32, 12
_LARGEST = 2**31 - 64  # of what AESGCM takes at once


def keys(variable: str = VARIABLE) -> list[bytes | None]:
    """The keys in a variable of the environment, None for :data:`PLAIN`; empty if it is not set.

    Raises
    ------
    ConfigError
        The variable holds something else. The message does not repeat it.
    """
    text = os.environ.get(variable, "").strip()
    return [_key(part.strip(), variable) for part in text.split(",")] if text else []


def seal(body: bytes, path: Path) -> tuple[bytes, ...]:
    """A file's bytes, in parts: its content with a checksum and, if there is a key, encrypted.

    Raises
    ------
    StateError
        The content is too large to be encrypted.
    ConfigError
        As :func:`keys`.
    """
    key = _keys_of(path)[0]
    if key is None:
        return (body,) if path.suffix == MODEL_FILES else (hashlib.sha256(body).digest(), body)
    if len(body) > _LARGEST:
        raise StateError(f"{path}: would have {len(body)} bytes, and at most {_LARGEST} can be encrypted")
    nonce = os.urandom(_NONCE_BYTES)
    head, encrypted = bytes([_VERSION]) + nonce, AESGCM(key).encrypt(nonce, body, _place_of(path))
    digest = hashlib.sha256(head)
    digest.update(encrypted)
    return _MARK, digest.digest(), head, encrypted


def unseal(content: bytes, path: Path) -> bytes:
    """Undo :func:`seal`.

    Raises
    ------
    UnreadableStateError
        The file is intact, but no key opens it: it is encrypted with another one, for another place, or by another
        version of the program; or it is plain although there is a key.
    StateError
        The file is damaged.
    ConfigError
        As :func:`keys`.
    """
    names, held = " or ".join(_variables(path)), _keys_of(path)
    mark = _MARK if names and content.startswith(_MARK) else b""
    start = 0 if not mark and path.suffix == MODEL_FILES else len(mark) + _DIGEST_BYTES
    rest = memoryview(content)[start:]
    if start and hashlib.sha256(rest).digest() != content[len(mark) : start]:
        raise StateError("its checksum does not match")
    if not mark:
        if None not in held:
            raise UnreadableStateError(
                f"it is not encrypted although {names} is set; to take over plain files, append ,{PLAIN} to the key"
            )
        return bytes(rest)
    version = int.from_bytes(rest[:1])
    if version != _VERSION:
        raise UnreadableStateError(
            f"it is encrypted in version {version} and this program reads version {_VERSION}; go on with the program "
            "that wrote it, or move the file away"
        )
    for key in filter(None, held):
        try:
            return AESGCM(key).decrypt(rest[1 : 1 + _NONCE_BYTES], rest[1 + _NONCE_BYTES :], _place_of(path))
        except (InvalidTag, OverflowError, ValueError):  # the last two for lengths that nobody has written
            continue
    if not any(held):
        raise UnreadableStateError(f"it is encrypted and {names} is not set; set it to the key that wrote the file")
    raise UnreadableStateError(
        f"it is encrypted, and no key in {names} opens it as {os.fsdecode(_place_of(path))!r:.200}: add the key that "
        "wrote it, or put it back where it was written; otherwise, someone without the key has changed it"
    )


def _key(text: str, variable: str) -> bytes | None:
    if text == PLAIN:
        return None
    try:
        found = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        found = b""
    if len(found) != _KEY_BYTES:
        held = f"it holds {len(found)} bytes" if found else "it is not base64"
        raise ConfigError(
            f"{variable}: must be {_KEY_BYTES} random bytes in base64, as `openssl rand -base64 {_KEY_BYTES}` "
            f"writes them, or several such keys and `{PLAIN}` with commas between them; {held}"
        )
    return found


def _variables(path: Path) -> tuple[str, ...]:
    """The variables whose keys a file may have: whoever holds the key of models alone can write nothing else."""
    if path.suffix != MODEL_FILES:
        return (VARIABLE,)
    return (MODELS, VARIABLE) if path.name.startswith("models-") else ()  # exported models are never encrypted


def _keys_of(path: Path) -> list[bytes | None]:
    return [key for variable in _variables(path) for key in keys(variable)] or [None]


def _place_of(path: Path) -> bytes:
    """Owner and name of a file, ``cam7/state-000002.npz``: moving the owner's folder keeps it, renaming does not."""
    folder = path.parent.resolve()
    if folder.parent.name == EARLIER:  # CLIENT/earlier/RUN/FILE
        folder = folder.parent.parent
    elif path.name.startswith("checkpoint-"):  # RUN/server/FILE, or another name of it, RUN/server/past/FILE
        folder = folder.parent.parent if folder.name == PAST else folder.parent
    return os.fsencode(f"{folder.name}/{path.name}")
