"""The file of nodes that the registration of keys leaves, with a stand-in for the SuperLink's list of nodes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from support.systems.proxy import deployed


class SuperLink:
    """Gives every new key a node id."""

    def __init__(self, first: int) -> None:
        self.nodes: list[SimpleNamespace] = []
        self._next = first

    def ListNodes(self, request: Any) -> SimpleNamespace:
        return SimpleNamespace(nodes_info=self.nodes)

    def RegisterNode(self, request: Any) -> SimpleNamespace:
        self._next += 1
        node = SimpleNamespace(public_key=request.public_key, node_id=self._next, status="registered")
        self.nodes.append(node)
        return node


def test_seats_survive_a_superlink_that_has_lost_its_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, keys = deployed("register"), []
    for seat in (0, 1):
        path = tmp_path / f"edge-{seat}.pub"
        public = ec.generate_private_key(ec.SECP384R1()).public_key()
        path.write_bytes(public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
        keys.append((path, path.stem, seat))
    monkeypatch.setattr(program, "read_superlink_connection", lambda name: None)
    for first in (110, 220):
        link = SuperLink(first)
        monkeypatch.setattr(program, "init_http_client_from_connection", lambda connection, link=link: link)
        program.register("fedkace", tmp_path / "nodes", keys)
        assert program.read(tmp_path / "nodes") == {first + 1: ("edge-0", 0), first + 2: ("edge-1", 1)}
