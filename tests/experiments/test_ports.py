"""Ports that are chosen now and listened on later."""

import socket
import sys
from pathlib import Path

import pytest

from experiments.running import ports
from experiments.running.ports import free_ports


def test_ports_are_different_and_can_be_listened_on_together() -> None:
    found = free_ports(20)
    assert len(set(found)) == 20
    servers = [socket.create_server(("127.0.0.1", port)) for port in found]
    for server in servers:
        server.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the range of local ports from Linux's /proc")
def test_no_outgoing_connection_gets_one_of_the_ports() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
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
