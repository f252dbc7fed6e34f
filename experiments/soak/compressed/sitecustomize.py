"""Compressed time: in a simulated year, Flower's processes wait a third of their usual times.

Python imports a file of this name at its start; the soak puts its folder first in ``PYTHONPATH``. A SuperNode looks for
messages every second instead of every third. Heartbeats come every ten seconds, so that what was killed is given up
after 20 seconds instead of a minute.
"""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

_FACTOR = 3
_PROGRAM = next((Path(word).name for word in sys.orig_argv[1:] if not word.startswith("-")), "")

if _PROGRAM.startswith(("flower-", "flwr-", "superlink.py", "supernode.py")):
    from flwr.common import constant

    vars(constant)["HEARTBEAT_DEFAULT_INTERVAL"] //= _FACTOR
if "supernode" in _PROGRAM:
    from flwr.supernode import start_client_internal

    hurried = {**vars(time), "sleep": lambda seconds: time.sleep(seconds / _FACTOR)}
    vars(start_client_internal)["time"] = SimpleNamespace(**hurried)
