"""Ports of the loopback for servers that are started a little later."""

import contextlib
import random
import socket

# The system takes the local ports of outgoing connections from 32768 (Linux) or 49152 (IANA) upwards, so that a port
# from there may be taken between the choice and the start of the server.
CHOICE = range(20000, 32768)


def free_ports(count: int) -> list[int]:
    """Draw different ports of the loopback that nothing listens on now.

    Parameters
    ----------
    count : int
        Number of ports, at most ``len(CHOICE)``.

    Returns
    -------
    list of int
        The ports, all from :data:`CHOICE`.

    Raises
    ------
    OSError
        If fewer ports are free.
    """
    # Not seeded: two programs that start at the same time must draw different ports, and no result depends on them.
    drawn = random.SystemRandom().sample(CHOICE, len(CHOICE))
    free: list[int] = []
    while drawn and len(free) < count:
        port = drawn.pop()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            free.append(port)
    if len(free) < count:
        raise OSError(f"only {len(free)} of {count} ports from {min(CHOICE)} to {max(CHOICE)} are free")
    return free
