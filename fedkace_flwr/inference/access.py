"""Which requests are answered at all: by host name, origin and token."""

import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedkace_flwr.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")
_AUTHORITY = re.compile(rb"([A-Za-z0-9.-]{1,253})(?::\d{1,5})?")
_TOKEN = re.compile(r"[\x21-\x7e]{16,1024}")
_TOKEN_BYTES = 4096


@dataclass(frozen=True)
class Access:
    """Who is answered.

    Attributes
    ----------
    hosts : frozenset of str
        Host names of the service, in lower case, besides ``localhost`` and 127.0.0.1.
    token : bytes or None
        SHA-256 of the token that a request must bear.
    """

    hosts: frozenset[str] = field(default_factory=frozenset)
    token: bytes | None = None

    @classmethod
    def of(cls, hosts: Iterable[str] = (), token_file: Path | None = None) -> "Access":
        """Check and read the settings.

        Raises
        ------
        ConfigError
            A name is not a host name, or the file holds no token or is open to everyone.
        """
        for name in hosts:
            if not _NAME.fullmatch(name):
                raise ConfigError(f"--allow-host {name!r:.100}: must be a host name, without a port")
        names = frozenset(name.lower() for name in hosts)
        return cls(names, None if token_file is None else _digest(_read_token(token_file)))


def refusal(scope: Mapping[str, Any], access: Access) -> tuple[int, str] | None:
    """Status and reason with which a request is refused; None if it is to be answered."""
    headers: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name, []).append(value)
    hosts = headers.get(b"host", [])
    found = _AUTHORITY.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if found is None or found[1].decode().lower() not in {"localhost", "127.0.0.1", *access.hosts}:
        return 421, "this service does not answer for the host in the request; see --allow-host"
    own = {b"http://" + hosts[0].lower(), b"https://" + hosts[0].lower()}
    if any(origin.lower() not in own for origin in headers.get(b"origin", [])):
        return 403, "requests from other origins are refused"
    if access.token is not None and not _bears(headers.get(b"authorization", []), access.token):
        return 401, "the request must bear the service's token"
    return None


def _bears(values: list[bytes], expected: bytes) -> bool:
    kind, _, token = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
    return hmac.compare_digest(_digest(token.strip()), expected) and kind.lower() == b"bearer"


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _read_token(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode, content = os.fstat(file.fileno()).st_mode, file.read(_TOKEN_BYTES)
    except OSError as error:
        raise ConfigError(f"--token-file {path}: cannot be read ({error.strerror or error})") from error
    if mode & 0o007:
        raise ConfigError(f"--token-file {path}: has mode {mode & 0o777:o}, so everyone can read it; run chmod 600")
    token = content.strip()
    if not _TOKEN.fullmatch(token.decode("latin-1")):
        raise ConfigError(
            f"--token-file {path}: must hold one token of 16 to 1024 printable characters without spaces, as "
            "`openssl rand -hex 32` writes one"
        )
    return token
