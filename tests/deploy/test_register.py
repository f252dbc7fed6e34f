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


@pytest.fixture
def keys(tmp_path: Path) -> list[tuple[Path, str, int]]:
    made = []
    for seat in (0, 1):
        path = tmp_path / f"edge-{seat}.pub"
        public = ec.generate_private_key(ec.SECP384R1()).public_key()
        path.write_bytes(public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
        made.append((path, path.stem, seat))
    return made


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``register.py``, which finds whatever SuperLink is its attribute ``link``."""
    made: Any = deployed("register")
    monkeypatch.setattr(made, "read_superlink_connection", lambda name: None)
    monkeypatch.setattr(made, "init_http_client_from_connection", lambda connection: made.link)
    return made


def test_seats_survive_a_superlink_that_has_lost_its_database(
    tmp_path: Path, program: Any, keys: list[tuple[Path, str, int]]
) -> None:
    for first in (110, 220):
        program.link = SuperLink(first)
        program.register("fedkace", tmp_path / "nodes", keys)
        assert program.read(tmp_path / "nodes") == {first + 1: ("edge-0", 0), first + 2: ("edge-1", 1)}


def test_a_key_that_has_been_unregistered_is_named_and_the_others_are_registered(
    tmp_path: Path, program: Any, keys: list[tuple[Path, str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    program.link = SuperLink(110)
    program.register("fedkace", tmp_path / "nodes", keys[:1])
    program.link.nodes[0].status = "unregistered"
    with pytest.raises(SystemExit) as end:
        program.register("fedkace", tmp_path / "nodes", keys)
    assert end.value.code == 3 and program.read(tmp_path / "nodes") == {112: ("edge-1", 1)}
    assert capsys.readouterr().err.startswith(f"edge-0: left out: {keys[0][0]} has been unregistered")
