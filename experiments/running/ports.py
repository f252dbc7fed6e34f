"""Ports of the loopback for servers that are started a little later."""

import random
import socket
from contextlib import suppress

# The system takes the local ports of outgoing connections from 32768 (Linux) or 49152 (IANA) upwards, so that a port
# from there may be taken between the choice and the start of the server.
CHOICE = range(20000, 32768)


def free_ports(count: int) -> list[int]:
    """Draw different ports of the loopback that nothing listens on now.

    Not seeded: two programs that start at the same time must draw different ports, and no result depends on them.

    Raises
    ------
    OSError
        Fewer ports are free.
    """
    free: list[int] = []
    for port in random.SystemRandom().sample(CHOICE, len(CHOICE)):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            free.append(port)
        if len(free) == count:
            return free
    raise OSError(f"only {len(free)} of {count} ports from {min(CHOICE)} to {max(CHOICE)} are free")
