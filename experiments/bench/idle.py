"""What a device spends while nothing arrives: Flower's polling alone, and questions of a run in addition."""

import json
import re
import subprocess
import tempfile
import time
from pathlib import Path

from fedkace_flwr.experiments.bench.measure import Figures, spread
from fedkace_flwr.experiments.soak.federation import Federation

_NODE = "node-1"
_DAY, _QUESTIONS_A_DAY = 86_400, 24
_WINDOW = 60.0  # seconds of a measurement
_SETTLED = 20.0  # seconds after which a federation is quiet
_QUESTION = "Receiving: query.waiting"
_CONFIG = {
    "dataset": "inbox",
    "class-names": "ok,flaw",
    "image-size": 8,
    "clients": 1,
    "rounds": 0,
    "round-interval": 10.0,
}


def idle(repeats: int) -> Figures:
    """Measure one device of a real federation with TLS and keys, ``repeats`` minutes without a run and with one.

    A run asks every ten seconds here; the figures of a day are those of one question an hour.
    """
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(Path(folder), 1, Path(folder), hurried=False)
        config = Path(folder) / "run.toml"
        config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in _CONFIG.items()), encoding="utf-8")
        try:
            federation.script("start")
            polling = [_spent(federation) for _ in range(repeats)]
            federation.begin(config)
            asking = [_spent(federation) for _ in range(repeats)]
        finally:
            federation.end()
    windows = [
        (seconds - calm[0], sent - calm[1], questions)
        for (seconds, sent, questions), calm in zip(asking, polling, strict=True)
    ]
    each = [(max(0.0, seconds) / count, max(0.0, sent) / count) for seconds, sent, count in windows if count]
    a_day = _DAY / _WINDOW
    return {
        "idle: polling, CPU seconds a day": spread([seconds * a_day for seconds, *_ in polling]),
        "idle: polling, MB a day": spread([sent * a_day / 1e6 for _, sent, _ in polling]),
        "idle: a question, CPU seconds": spread([seconds for seconds, _ in each]),
        "idle: a question, kB": spread([sent / 1e3 for _, sent in each]),
        "idle: 24 questions, CPU seconds a day": spread([_QUESTIONS_A_DAY * seconds for seconds, _ in each], "< 120"),
        "idle: 24 questions, MB a day": spread([_QUESTIONS_A_DAY * sent / 1e6 for _, sent in each], "< 1"),
    }


def _spent(federation: Federation) -> tuple[float, float, int]:
    """CPU seconds, bytes to and from the SuperLink, and questions of the device in a window."""
    time.sleep(_SETTLED)
    log = federation.folder / _NODE / "log"
    before = cpu_seconds(federation, _NODE), _sent(federation), log.read_text(errors="replace").count(_QUESTION)
    time.sleep(_WINDOW)
    after = cpu_seconds(federation, _NODE), _sent(federation), log.read_text(errors="replace").count(_QUESTION)
    moved = sum(count - before[1].get(place, 0) for place, count in after[1].items())
    return after[0] - before[0], moved, after[2] - before[2]


def cpu_seconds(federation: Federation, node: str) -> float:
    """Return the CPU seconds that a node's processes have spent so far, those that have ended included."""
    times = [process.cpu_times() for process, _ in federation.processes().get(node, ())]
    return sum(each.user + each.system + each.children_user + each.children_system for each in times)


def _sent(federation: Federation) -> dict[str, int]:
    """Bytes of each connection of the device to the SuperLink, both ways."""
    port = re.search(r"FEDKACE_SUPERLINK='?[^:]*:(\d+)", (federation.folder / _NODE / "env").read_text())
    assert port is not None
    listed = subprocess.run(["ss", "-tinH", f"dport = :{port[1]}"], capture_output=True, text=True, check=True).stdout
    own = {
        connection.laddr.port
        for process, _ in federation.processes().get(_NODE, ())
        for connection in process.net_connections("tcp")
    }
    found: dict[str, int] = {}
    for head, facts in zip(listed.splitlines()[::2], listed.splitlines()[1::2], strict=True):
        local = head.split()[3].rpartition(":")[2]
        if int(local) in own:
            found[local] = sum(int(count) for count in re.findall(r"bytes_(?:sent|received):(\d+)", facts))
    return found
