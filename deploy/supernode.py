"""Start Flower's SuperNode with a client certificate, for which the hub's nginx asks, and with patience.

Flower (up to 1.42) builds the TLS context of a SuperNode from the authority's certificate alone and has no option for a
certificate of the node. Its HTTP client does accept a ready context; this file makes one. The environment names the
certificate, ``FEDKACE_CERTIFICATE``, and the key that belongs to it, ``FEDKACE_KEY``, the one that authenticates the
node to the SuperLink.

For up to a minute after a SuperNode was killed, the SuperLink counts it as online and refuses its successor; a SuperNode
of Flower's then ends. This one asks again. The SuperLink gives the same answer for a key that is not registered.

After an error that it does not retry, Flower's SuperNode goes on living offline: its connection or its heartbeat has
ended, but the thread of its Runtime API keeps the process. This one ends, so that systemd starts it anew.
"""

import inspect
import os
import ssl
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_ssh_private_key
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supernode.fleet_http_client import FleetHttpClient

PATIENCE, PAUSE = 150.0, 5.0  # seconds
EXPECTED = ["server_address", "insecure", "root_certificates", "interceptors", "retry_invoker"]


def client_context(authority: bytes, certificate: Path, key: Path) -> ssl.SSLContext:
    """Return a context that verifies the server as Flower's does, and presents a certificate.

    Parameters
    ----------
    authority : bytes
        The authority's certificate, PEM.
    certificate : Path
        The node's certificate, PEM.
    key : Path
        The node's private key in OpenSSH's format.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=authority.decode("ascii"))
    pem = load_ssh_private_key(key.read_bytes(), None).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    # OpenSSL cannot read OpenSSH's format, and `load_cert_chain` reads files only: this one exists in memory alone.
    descriptor = os.memfd_create("key")
    try:
        os.write(descriptor, pem)
        context.load_cert_chain(certificate, f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context


def present(certificate: Path, key: Path) -> None:
    """Make every connection of this process to a SuperLink present the certificate."""

    def from_server_address(
        cls: type[FleetHttpClient],
        server_address: str,
        insecure: bool,
        root_certificates: bytes | str | None,
        interceptors: Any,
        *,
        retry_invoker: Any = None,
    ) -> FleetHttpClient:
        if insecure or not isinstance(root_certificates, bytes):
            sys.exit("error: FEDKACE_CERTIFICATE: a certificate can be presented only with --root-certificates FILE")
        context = client_context(root_certificates, certificate, key)
        url = f"https://{server_address}"
        return cls(url, interceptors=interceptors, verify=context, retry_invoker=retry_invoker)

    if list(inspect.signature(FleetHttpClient.from_server_address).parameters) != EXPECTED:
        sys.exit("error: FEDKACE_CERTIFICATE: this version of Flower connects in another way; see deploy/supernode.py")
    FleetHttpClient.from_server_address = classmethod(from_server_address)  # type: ignore[method-assign,assignment]


def patient(activate: Callable[..., Any], patience: float = PATIENCE, pause: float = PAUSE) -> Callable[..., Any]:
    """Return a function that activates a node, and repeats it for some seconds while the SuperLink refuses the node."""

    def activated(*arguments: Any) -> Any:
        end, told = time.monotonic() + patience, False
        while True:
            try:
                return activate(*arguments)
            except httpx.HTTPStatusError as error:
                refusal = FlowerError.from_json(error.response.text)
                refused = refusal is not None and refusal.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED
                if not refused or time.monotonic() >= end:
                    raise
            if not told:
                print(
                    f"waiting up to {patience:g} s: the SuperLink still counts this node's last process as online, "
                    "or its key is not registered (register.sh)",
                    flush=True,
                )
                told = True
            time.sleep(pause)

    return activated


def end_after(fault: threading.ExceptHookArgs) -> None:
    """Print what a thread has died of, and end the process with code 1."""
    threading.__excepthook__(fault)
    os._exit(1)


if __name__ == "__main__":
    from flwr.supernode.cli import flower_supernode

    if os.environ.get("FEDKACE_CERTIFICATE"):
        present(Path(os.environ["FEDKACE_CERTIFICATE"]), Path(os.environ["FEDKACE_KEY"]))
    FleetHttpClient.ActivateNode = patient(FleetHttpClient.ActivateNode)  # type: ignore[method-assign]
    threading.excepthook = end_after
    flower_supernode()
    os._exit(1)  # it returns after an error alone
