"""Which requests are answered at all: by host name, origin, framing and token."""

import hashlib
import hmac
import ipaddress
import os
import re
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.inference.connections import Application, Receive, Send

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9.-]{1,253})(?::\d{1,5})?")
_TOKEN = re.compile(r"[\x21-\x7e]{16,1024}")
_TOKEN_BYTES = 4096


@dataclass(frozen=True)
class Access:
    """Who is answered.

    Attributes
    ----------
    hosts : frozenset of str
        Host names of the service, in lower case, besides ``localhost`` and the address that the connection came to.
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


def own_names(host: str) -> list[str]:
    """The host names that listening at ``host`` gives the service: itself, unless it is an address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return [host]
    return []


def guarded(application: Application, access: Access) -> Application:
    """Wrap an application so that it is called only for requests that ``access`` admits."""

    async def guard(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        refusal = _refusal(scope, access) if scope["type"] == "http" else None
        if refusal is None:
            await application(scope, receive, send)
            return
        status, reason = refusal
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
        await JSONResponse({"error": reason}, status, headers)(scope, receive, send)

    return guard


def _refusal(scope: MutableMapping[str, Any], access: Access) -> tuple[int, str] | None:
    headers: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name, []).append(value)
    if b"transfer-encoding" in headers:
        if b"content-length" in headers:
            return 400, "a request must not have both a content length and a transfer encoding"
        return 411, "a transfer encoding is not supported; state the content length"
    hosts = headers.get(b"host", [])
    if len(hosts) != 1 or not _is_own(hosts[0], scope, access):
        return 421, "this service does not answer for the host in the request; see --allow-host"
    own = {b"http://" + hosts[0].lower(), b"https://" + hosts[0].lower()}
    if any(origin.lower() not in own for origin in headers.get(b"origin", [])):
        return 403, "requests from other origins are refused"
    if access.token is not None and not _bears(headers.get(b"authorization", []), access.token):
        return 401, "the request must bear the service's token"
    return None


def _is_own(host: bytes, scope: MutableMapping[str, Any], access: Access) -> bool:
    found = _AUTHORITY.fullmatch(host.decode("latin-1"))
    if found is None:
        return False
    name = found[1].lower().strip("[]")
    return name == "localhost" or name in access.hosts or _is_address(name, scope)


def _is_address(name: str, scope: MutableMapping[str, Any]) -> bool:
    """Whether a host is the address that the connection came to. A name could be anyone's, an address is its own."""
    server = scope.get("server") or ("", None)
    try:
        return _address(name) == _address(str(server[0]).partition("%")[0])
    except ValueError:
        return False


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(text)
    return getattr(address, "ipv4_mapped", None) or address


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
