"""Encryption at rest, with a key from the environment; without a key, files are stored in plain form.

A sealed file of version 2 is, in this order:

======  =============================================================================================
bytes   content
======  =============================================================================================
16      a mark
32      SHA-256 of the rest
1       the version
8       the first bytes of a hash of the key
12      a nonce that no other write uses
16      a stamp, by which this write can be recognised (:mod:`fedkace_flwr.storage.ledger`)
2       the length of the place
any     the place: owner and name of the file (:mod:`fedkace_flwr.storage.places`)
any     the content, encrypted with AES-256 in Galois/counter mode
======  =============================================================================================

Everything before the content is authenticated with it. Version 1 has neither stamp nor place. Mark and checksum are at
the same place in every version, so damage, another key and a newer version can be distinguished.
"""

import base64
import binascii
import functools
import hashlib
import logging
import os
from collections.abc import Mapping
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedkace_flwr.errors import ConfigError, StateError, UnreadableStateError

logger = logging.getLogger(__name__)

VARIABLE = "FEDKACE_STATE_KEY"
FORMER = "FEDKACE_STATE_KEY_OLD"
"""The key before the present one: files under it are read, and none is written."""

MIGRATE = "FEDKACE_STATE_MIGRATE"
"""Whether files are taken over that a key does not protect: plain ones, and those that are sealed in version 1."""

MODELS = "FEDKACE_MODELS_KEY"
"""The key of models that another user may read, who does not get the key of the state."""

VERSION = 2
STAMP_BYTES = 16

_MARK = b"\x89FEDKACE-SEALED\n"
_KEY_BYTES = 32
_DIGEST_BYTES = 32
_NAME_BYTES = 8
_NONCE_BYTES = 12
_TAG_BYTES = 16
_LENGTH_BYTES = 2
_MODELS_FILE = "models-"
_HEAD_BYTES = {1: 1 + _NAME_BYTES + _NONCE_BYTES, 2: 1 + _NAME_BYTES + _NONCE_BYTES + STAMP_BYTES + _LENGTH_BYTES}

LONGEST_HEAD = len(_MARK) + _DIGEST_BYTES + _HEAD_BYTES[VERSION]
"""Bytes of a sealed file up to its place."""

_ADVICE = f"set {MIGRATE}=1 to take it over once, or run `python -m fedkace_flwr.storage migrate`"


class Opened(NamedTuple):
    """What was in a sealed file: its content, and the stamp of its write; None in version 1."""

    body: bytes
    stamp: bytes | None


def key(environment: Mapping[str, str] = os.environ, variable: str = VARIABLE) -> bytes | None:
    """The key in a variable of the environment; None if there is none.

    Raises
    ------
    ConfigError
        The variable does not hold a key. The message does not repeat its content.
    """
    text = environment.get(variable, "").strip()
    if not text:
        return None
    try:
        found = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        found = b""
    if len(found) != _KEY_BYTES:
        held = f"it holds {len(found)} bytes" if found else "it is not base64"
        raise ConfigError(
            f"{variable}: must be {_KEY_BYTES} random bytes in base64, as `openssl rand -base64 {_KEY_BYTES}` "
            f"writes them; {held}"
        )
    return found


def key_of_models() -> bytes | None:
    """The key for models that another user may read: their own, or that of the state if they have none.

    Raises
    ------
    ConfigError
        As :func:`key`.
    """
    return key(variable=MODELS) or key()


def migrating(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether files are taken over that the key does not protect.

    Raises
    ------
    ConfigError
        The variable holds something else than 0 or 1.
    """
    text = environment.get(MIGRATE, "").strip()
    if text not in ("", "0", "1"):
        raise ConfigError(f"{MIGRATE} = {text!r:.40}: must be 1 to take over files that are not protected, or 0")
    return text == "1"


def check_plain(place: str, migrate: bool | None = None) -> None:
    """Check that a plain file may be read.

    Parameters
    ----------
    place : str
        Where the file lies.
    migrate : bool, optional
        Whether plain files are taken over; by default as :func:`migrating` says.

    Raises
    ------
    UnreadableStateError
        There is a key, and plain files are not to be taken over: anyone can have written this one.
    """
    variable = next((each for each in _variables(place) if each != FORMER and key(variable=each) is not None), None)
    if variable is not None and not _takes_over(place, migrate):
        raise UnreadableStateError(f"it is not encrypted although {variable} is set; {_ADVICE}")


def is_sealed(content: bytes) -> bool:
    """Whether a file's content, or its beginning, is that of a sealed file."""
    return content[: len(_MARK)] == _MARK


def is_current(content: bytes, secret: bytes) -> bool:
    """Whether a file is sealed in the present version under this key, by what its head says."""
    start = len(_MARK) + _DIGEST_BYTES
    return is_sealed(content) and content[start : start + 1 + _NAME_BYTES] == bytes([VERSION]) + _name(secret)


def seal(body: bytes | memoryview, secret: bytes, place: str, stamp: bytes | None = None) -> bytes:
    """Encrypt a file's content.

    Parameters
    ----------
    body : bytes-like
        The content to encrypt.
    secret : bytes
        The key.
    place : str
        Where the file belongs: it is read nowhere else.
    stamp : bytes, optional
        By which this write is to be recognised; by default a new one.
    """
    named, nonce = place.encode(errors="surrogateescape"), os.urandom(_NONCE_BYTES)
    head = bytes([VERSION]) + _name(secret) + nonce + (stamp or new_stamp())
    head += len(named).to_bytes(_LENGTH_BYTES, "big") + named
    sealed = head + AESGCM(secret).encrypt(nonce, bytes(body), _MARK + head)
    return _MARK + hashlib.sha256(sealed).digest() + sealed


def stamp_in(head: bytes) -> bytes | None:
    """The stamp in the first :data:`LONGEST_HEAD` bytes of a file, not authenticated; None if there is none."""
    start = len(_MARK) + _DIGEST_BYTES
    if not is_sealed(head) or len(head) < LONGEST_HEAD or head[start] != VERSION:
        return None
    return head[start + 1 + _NAME_BYTES + _NONCE_BYTES :][:STAMP_BYTES]


def new_stamp() -> bytes:
    """A stamp that no other write has."""
    return os.urandom(STAMP_BYTES)


def unseal(content: bytes, place: str, migrate: bool | None = None) -> Opened:
    """Undo :func:`seal`, with a key in the environment.

    Parameters
    ----------
    content : bytes
        The file's content.
    place : str
        Where the file lies.
    migrate : bool, optional
        Whether files of version 1 are taken over; by default as :func:`migrating` says.

    Raises
    ------
    UnreadableStateError
        The file is intact; the key is missing or a different one, or the file belongs to another owner, has a newer
        version, or has version 1 and such files are not to be taken over.
    StateError
        The file is damaged, or was written under another name.
    ConfigError
        The environment does not hold a key.
    """
    start = len(_MARK) + _DIGEST_BYTES
    sealed = memoryview(content)[start:]
    if hashlib.sha256(sealed).digest() != content[len(_MARK) : start]:
        raise StateError("its checksum does not match")
    version, head = _head(sealed)
    secret = _secret_of(head, place)
    nonce = head[1 + _NAME_BYTES :][:_NONCE_BYTES]
    try:
        body = AESGCM(secret).decrypt(nonce, bytes(sealed[len(head) :]), _MARK + head)
    except InvalidTag:
        raise StateError("it was changed by someone without the key") from None
    if version == 1:
        if not _takes_over(place, migrate):
            raise UnreadableStateError(f"it is encrypted in version 1, which does not say where it belongs; {_ADVICE}")
        return Opened(body, None)
    _check_place(head[_HEAD_BYTES[2] :].decode(errors="surrogateescape"), place)
    return Opened(body, head[1 + _NAME_BYTES + _NONCE_BYTES :][:STAMP_BYTES])


def _takes_over(place: str, migrate: bool | None) -> bool:
    if migrate is None and migrating():
        _warn(place.partition("/")[0])
        return True
    return bool(migrate)


@functools.cache
def _warn(owner: str) -> None:
    logger.warning(
        "%s has files that %s does not protect; they are taken over because %s is 1, and encrypted when they are next "
        "written; unset it then",
        owner,
        VARIABLE,
        MIGRATE,
    )


def _head(sealed: memoryview) -> tuple[int, bytes]:
    """The version, and what is authenticated with the content."""
    version = sealed[0] if len(sealed) else 0
    if version > VERSION:
        raise UnreadableStateError(
            f"it is encrypted in version {version}, this program reads up to {VERSION}; update the program"
        )
    if version not in _HEAD_BYTES:
        raise StateError(
            f"it is encrypted in version {version}, which does not exist" if len(sealed) else "it is empty"
        )
    length = _HEAD_BYTES[version]
    if version > 1:
        length += int.from_bytes(sealed[length - _LENGTH_BYTES : length], "big")
    if len(sealed) < length + _TAG_BYTES:
        raise StateError("it is cut short")
    return version, bytes(sealed[:length])


def _variables(place: str) -> tuple[str, ...]:
    """The variables whose keys a file may have: whoever holds the key of models alone can write nothing else."""
    is_model = place.rpartition("/")[2].startswith(_MODELS_FILE)
    return (VARIABLE, FORMER, MODELS) if is_model else (VARIABLE, FORMER)


def _secret_of(head: bytes, place: str) -> bytes:
    """The key whose name a head gives."""
    held = {each: found for each in _variables(place) if (found := key(variable=each)) is not None}
    if not held:
        raise UnreadableStateError(f"it is encrypted and {VARIABLE} is not set; set it to the key that wrote the file")
    for secret in held.values():
        if head[1 : 1 + _NAME_BYTES] == _name(secret):
            return secret
    raise UnreadableStateError(
        f"it is encrypted with another key than that in {' or '.join(held)}; set it to the key that wrote the file"
    )


def _check_place(written: str, place: str) -> None:
    if written == place:
        return
    (owner, _, name), (own, _, wanted) = written.rpartition("/"), place.rpartition("/")
    if owner != own:
        raise UnreadableStateError(
            f"it was written as {written!r:.200} and lies at {place!r:.200}; put it back, or give the folder its "
            "former name"
        )
    raise StateError(f"it was written under the name {name!r:.100} and not as {wanted!r:.100}")


def _name(secret: bytes) -> bytes:
    """A name that identifies a key and reveals nothing about it."""
    return hashlib.sha256(b"fedkace_flwr name of a key\0" + secret).digest()[:_NAME_BYTES]
