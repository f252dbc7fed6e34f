"""Ports that are chosen now and listened on later."""

import socket
from pathlib import Path

import pytest

from fedkace_flwr.experiments.running import ports
from fedkace_flwr.experiments.running.ports import free_ports


def test_ports_are_different_and_can_be_listened_on_together() -> None:
    found = free_ports(20)
    assert len(set(found)) == 20
    servers = [socket.create_server(("127.0.0.1", port)) for port in found]
    for server in servers:
        server.close()


def test_no_outgoing_connection_gets_one_of_the_ports() -> None:
    linux = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest = int(linux.read_text().split()[0]) if linux.exists() else 49152  # elsewhere: IANA's dynamic ports
    assert max(ports.CHOICE) < lowest


def test_a_port_that_is_taken_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = free_ports(2)
    monkeypatch.setattr(ports, "CHOICE", [taken, free])
    with socket.create_server(("127.0.0.1", taken)):
        assert free_ports(1) == [free]


def test_too_few_free_ports_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    (taken,) = free_ports(1)
    monkeypatch.setattr(ports, "CHOICE", range(taken, taken + 1))
    with (
        socket.create_server(("127.0.0.1", taken)),
        pytest.raises(OSError, match=f"only 0 of 1 ports from {taken} to {taken} are free"),
    ):
        free_ports(1)
