"""What it costs a device to be watched: the test of each new chunk, and the gate."""

import itertools
import json
import tempfile
import time
from pathlib import Path

import torch

from fedkace_flwr.clients.base import ClientRound, ClientRule, Metrics
from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.bench.idle import cpu_seconds
from fedkace_flwr.experiments.bench.measure import Figures, ratio, spread
from fedkace_flwr.experiments.feed import drop
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.experiments.soak.federation import Federation

_UNSETTLED = 2  # first rounds, in which buffers fill
_LONGEST = 300.0  # seconds of a round
_NODE = "node-1"


def watching(repeats: int) -> Figures:
    """Measure ``repeats`` rounds of one device at the quickstart's size, on real processes, without the gate and with it."""
    rounds = _UNSETTLED + repeats
    without, gated = (_device(rounds, gate) for gate in ("off", "hold"))
    tests = _tests(rounds)
    return {
        "watching: a device's round, CPU seconds": spread(without),
        "watching: the test of its chunk, CPU seconds": spread(tests),
        "watching: the test of its chunk, share of the round": ratio(tests, without, "<= 0.1"),
        "watching: a device's round with gate = hold, against without": ratio(gated, without, "<= 1.1"),
    }


def _device(rounds: int, gate: str) -> list[float]:
    """CPU seconds of all processes of a device in each round, Flower's included."""
    stream = Config.parse({"dataset": "digits", "rounds": rounds})
    experiment = Experiment(stream)
    everything = torch.ones(experiment.num_classes, dtype=torch.bool)
    told = {
        "dataset": "inbox",
        "class-names": ",".join(experiment.dataset.class_names),
        "image-size": experiment.dataset.image_size,
        "clients": 1,
        "rounds": 0,
        "round-interval": 10.0,
        "gate": gate,
    }
    spent: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        drop(experiment, experiment.test_set(0, everything), Path(folder) / "test" / "test.npz")
        federation = Federation(Path(folder), 1, Path(folder) / "test", hurried=False)
        config = Path(folder) / "run.toml"
        config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in told.items()), encoding="utf-8")
        try:
            for number in range(1, rounds + 1):
                inbox = federation.folder / _NODE / "inbox" / "new"
                drop(experiment, experiment.chunk(0, number), inbox / f"chunk-{number}.npz")
                if number == 1:
                    federation.begin(config)
                _wait(federation.run / "rounds.jsonl", number)
                spent.append(cpu_seconds(federation, _NODE))
        finally:
            federation.end()
    return [after - before for before, after in itertools.pairwise(spent)][_UNSETTLED - 1 :]


def _wait(record: Path, number: int) -> None:
    end = time.monotonic() + _LONGEST
    while not record.exists() or record.read_bytes().count(b"\n") < number:
        if time.monotonic() > end:
            raise RunError(f"bench watching: round {number} has not ended after {_LONGEST:g} seconds")
        time.sleep(0.05)


def _tests(rounds: int) -> list[float]:
    """CPU seconds of the test of a chunk before training, in each of the same rounds, in this process."""
    spent: list[float] = []
    test = ClientRule.prequential

    def timed(rule: ClientRule, now: ClientRound, earlier: torch.Tensor) -> tuple[Metrics, dict[str, torch.Tensor]]:
        begun = time.process_time()
        try:
            return test(rule, now, earlier)
        finally:
            spent.append(time.process_time() - begun)

    with tempfile.TemporaryDirectory() as folder:
        ClientRule.prequential = timed  # type: ignore[method-assign, assignment]
        try:
            run_inline(Config.parse({"dataset": "digits", "clients": 1, "rounds": rounds, "results-dir": folder}))
        finally:
            ClientRule.prequential = test  # type: ignore[method-assign]
    return spent[_UNSETTLED:]
