"""Encryption at rest, with a key from the environment; without a key, files are stored in plain form.

A sealed file is a mark of 16 bytes, a SHA-256 of the rest, a version, the first bytes of a hash of the key, a nonce
that no other write uses, and the content encrypted with AES-256 in Galois/counter mode. Mark and checksum are at the
same place in every version, so damage, another key and a newer version can be distinguished.
"""

import base64
import binascii
import hashlib
import os
from collections.abc import Mapping

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedkace_flwr.errors import ConfigError, StateError, UnreadableStateError

VARIABLE = "FEDKACE_STATE_KEY"
MODELS_VARIABLE = "FEDKACE_MODELS_KEY"
"""Of the key of models that another user may read, who does not get the key of the state."""

VERSION = 1

_MARK = b"\x89FEDKACE-SEALED\n"
_KEY_BYTES = 32
_DIGEST_BYTES = 32
_NAME_BYTES = 8
_NONCE_BYTES = 12
_TAG_BYTES = 16
_HEAD_BYTES = 1 + _NAME_BYTES + _NONCE_BYTES


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


def is_sealed(content: bytes) -> bool:
    """Whether a file's content, or its beginning, is that of a sealed file."""
    return content[: len(_MARK)] == _MARK


def seal(body: bytes | memoryview, secret: bytes) -> bytes:
    """Encrypt a file's content.

    Parameters
    ----------
    body : bytes-like
        The content to encrypt.
    secret : bytes
        The key.
    """
    head = bytes([VERSION]) + _name(secret) + os.urandom(_NONCE_BYTES)
    sealed = head + AESGCM(secret).encrypt(head[-_NONCE_BYTES:], bytes(body), _MARK + head)
    return _MARK + hashlib.sha256(sealed).digest() + sealed


def unseal(content: bytes) -> bytes:
    """Undo :func:`seal`, with one of the keys in the environment.

    Raises
    ------
    UnreadableStateError
        The file is intact; the key is missing or a different one, or the file has a newer version.
    StateError
        The file is damaged.
    ConfigError
        The environment does not hold a key.
    """
    start = len(_MARK) + _DIGEST_BYTES
    sealed = memoryview(content)[start:]
    if hashlib.sha256(sealed).digest() != content[len(_MARK) : start]:
        raise StateError("its checksum does not match")
    if len(sealed) < _HEAD_BYTES + _TAG_BYTES:
        raise StateError("it is cut short")
    head = bytes(sealed[:_HEAD_BYTES])
    if head[0] > VERSION:
        raise UnreadableStateError(
            f"it is encrypted in version {head[0]}, this program reads {VERSION}; update the program"
        )
    if head[0] != VERSION:
        raise StateError(f"it is encrypted in version {head[0]}, which does not exist")
    held = [each for each in (key(), key(variable=MODELS_VARIABLE)) if each is not None]
    if not held:
        raise UnreadableStateError(f"it is encrypted and {VARIABLE} is not set; set it to the key that wrote the file")
    secret = next((each for each in held if head[1 : 1 + _NAME_BYTES] == _name(each)), None)
    if secret is None:
        raise UnreadableStateError(
            f"it is encrypted with another key than that in {VARIABLE}; set it to the key that wrote the file"
        )
    try:
        return AESGCM(secret).decrypt(head[-_NONCE_BYTES:], bytes(sealed[_HEAD_BYTES:]), _MARK + head)
    except InvalidTag:
        raise StateError("it was changed by someone without the key") from None


def _name(secret: bytes) -> bytes:
    """A name that identifies a key and reveals nothing about it."""
    return hashlib.sha256(b"fedkace_flwr name of a key\0" + secret).digest()[:_NAME_BYTES]
