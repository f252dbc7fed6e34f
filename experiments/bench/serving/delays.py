"""Time the answers that a good caller gets while others attack, and the memory that the service takes meanwhile."""

import contextlib
import http.client
import multiprocessing
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from experiments.bench.measure import Figures, spread
from experiments.bench.serving import bombs
from experiments.bench.serving.attacks import ATTACKS, EVERYTHING, run_attack
from fedkace_flwr.data.images import Framing
from fedkace_flwr.errors import RunError
from fedkace_flwr.experiment import as_arrays
from fedkace_flwr.inference import kept_models
from fedkace_flwr.inference.kept_models import KeptModels
from fedkace_flwr.networks.resnet import seeded_resnet18

_CLASSES, _WIDTH, _SIDE = 100, 64, 32
_REQUESTS, _LOOK_SECONDS, _GIVE_UP_SECONDS = 8, 0.02, 60.0
_MIB = 2**20
_USUAL = "640 x 480"
_GOOD = {_USUAL: (640, 480), "1920 x 1080": (1920, 1080)}


def service(repeats: int) -> Figures:
    """Measure a service with a ResNet-18 for CIFAR-100; the good callers send JPEGs."""
    count = _REQUESTS * repeats
    with tempfile.TemporaryDirectory(prefix="fedkace-bench-") as folder:
        kept_models.write(Path(folder), _model())
        figures: Figures = {}
        usual: dict[str, float] = {}
        with _serving(Path(folder)) as (process, port):
            for size, shape in _GOOD.items():
                picture = bombs.photo(*shape)
                quiet = [_answered(port, picture) for _ in range(count)]
                usual[size] = statistics.median(quiet)
                figures[f"answer to a JPEG of {size}, undisturbed, seconds"] = spread(quiet)
            figures["memory when idle, MiB"] = {"median": memory_of(process) / _MIB}
        for name in (*ATTACKS, EVERYTHING):
            with _serving(Path(folder)) as (process, port):
                times, memory = _under(name, process, port, count)
            for size, seconds in times.items():
                aim = "<= 1" if size == _USUAL else ""
                figures[f"{name}: delay of {size}, seconds"] = spread([each - usual[size] for each in seconds], aim)
            figures[f"{name}: more memory, MiB"] = {"median": memory / _MIB, "aim": "<= 244"}
    return figures


def _model() -> KeptModels:
    net = seeded_resnet18(_CLASSES, _WIDTH, "cifar", seed=0)
    everything = tuple(range(_CLASSES))
    return KeptModels(
        method="fedkace",
        run="bench",
        round=1,
        trained=1,
        switched_at=1,
        seen=everything,
        class_names=tuple(f"class {label}" for label in everything),
        framing=Framing.of_arrays(_SIDE),
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        width=_WIDTH,
        stem="cifar",
        precision="float32",
        answers={kept_models.GLOBAL: everything},
        weights={kept_models.GLOBAL: as_arrays(net.state_dict())},
    )


@contextlib.contextmanager
def _serving(folder: Path) -> Iterator[tuple[psutil.Process, int]]:
    command = [sys.executable, "-m", "fedkace_flwr.inference.predict", "serve", "--state", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+:(\d+)$", line)
        if found is None:
            raise RunError(f"the service did not start: {line.strip()}")
        try:
            yield psutil.Process(process.pid), int(found[1])
        finally:
            process.kill()


def _answered(port: int, picture: bytes) -> float:
    """Seconds until a picture is answered, on a connection of its own."""
    begun = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_GIVE_UP_SECONDS)
    try:
        connection.request("POST", "/predict", picture)
        status = connection.getresponse().status
    finally:
        connection.close()
    if status != http.client.OK:
        raise RunError(f"a good caller was answered with status {status}")
    return time.perf_counter() - begun


def _under(name: str, process: psutil.Process, port: int, count: int) -> tuple[dict[str, list[float]], int]:
    """Return the good callers' times under an attack, and by how many bytes the service's memory grew at most."""
    pictures = {size: bombs.photo(*shape) for size, shape in _GOOD.items()}
    for picture in pictures.values():
        _answered(port, picture)
    before, peak, over = memory_of(process), [0], threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_SECONDS):
            peak[0] = max(peak[0], memory_of(process))

    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    attacker = context.Process(target=run_attack, args=(name, port, sender), daemon=True)
    watcher = threading.Thread(target=watch)
    watcher.start()
    attacker.start()
    try:
        receiver.recv()
        times = {size: [_answered(port, picture) for _ in range(count)] for size, picture in pictures.items()}
    finally:
        attacker.kill()
        attacker.join()
        over.set()
        watcher.join()
    return times, peak[0] - before


def memory_of(process: psutil.Process) -> int:
    """Bytes of memory that the service's processes take; what several share is counted once."""
    total = 0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error, OSError):
            text = Path(f"/proc/{each.pid}/smaps_rollup").read_text(encoding="ascii")
            total += sum(int(size) for size in re.findall(r"^Pss:\s+(\d+) kB$", text, re.MULTILINE)) * 1024
    return total
