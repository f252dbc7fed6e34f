"""Start Flower's SuperNode with a client certificate, for which the hub's nginx asks.

Flower (up to 1.42) builds the TLS context of a SuperNode from the authority's certificate alone and has no option for a
certificate of the node. Its HTTP client does accept a ready context; this file makes one. The environment names the
certificate, ``FEDKACE_CERTIFICATE``, and the key that belongs to it, ``FEDKACE_KEY``, the one that authenticates the
node to the SuperLink.
"""

import inspect
import os
import ssl
import sys
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_ssh_private_key
from flwr.supernode.fleet_http_client import FleetHttpClient

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


if __name__ == "__main__":
    from flwr.supernode.cli import flower_supernode

    present(Path(os.environ["FEDKACE_CERTIFICATE"]), Path(os.environ["FEDKACE_KEY"]))
    flower_supernode()
