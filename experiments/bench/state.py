"""Time and disk space of a client's state, and the gain from sharing tests between clients."""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from experiments.bench.measure import Figures, interleaved, ratio, spread
from experiments.bench.training import BUFFER, CHUNK, CLASSES, SIZE, Setting
from fedkace_flwr.experiment import as_arrays
from fedkace_flwr.samples import Samples
from fedkace_flwr.seeding import generator_for
from fedkace_flwr.storage.client_state import Answer, ClientState
from fedkace_flwr.storage.client_store import ClientStore
from fedkace_flwr.training.logits_cache import SharedLogits
from fedkace_flwr.training.loop import predict

_CLIENTS, _TESTS = 10, 2000
_KIB = 1024


def state(repeats: int) -> Figures:
    """Time writing and reading a round's state with a buffer of 1000, held by id (simulation) or by pixel (devices)."""
    figures: Figures = {}
    generator = generator_for(0, "bench-state")
    labels = torch.randint(0, CLASSES, (BUFFER,), generator=generator)
    pixels = torch.randint(0, 256, (BUFFER, 3, SIZE, SIZE), dtype=torch.uint8, generator=generator)
    seen = torch.ones(CLASSES, dtype=torch.bool)
    answer = Answer(as_arrays(Setting.draw().net.state_dict()), CHUNK, {})
    for kind, content in {"ids": torch.arange(BUFFER), "pixels": pixels}.items():
        empty = ClientState(seen, Samples.none(None if kind == "ids" else (3, SIZE, SIZE)))
        with tempfile.TemporaryDirectory(prefix="fedkace-bench-") as folder:
            store = ClientStore(Path(folder), empty)
            kept = replace(empty, buffer=Samples.arrived(content, labels, 1), round=1)
            write, read = interleaved([partial(store.save_trained, kept, answer), partial(store.before, 2)], repeats)
            figures[f"write a round's outcome, buffer by {kind}, seconds"] = spread(write)
            figures[f"read the state, buffer by {kind}, seconds"] = spread(read)
            size = next(Path(folder).glob("state-*")).stat().st_size / _KIB
            aim = {"aim": "< 100"} if kind == "ids" else {}
            figures[f"state on the disk, buffer by {kind}, KiB"] = {"median": size, **aim}
    reply = sum(array.nbytes for array in answer.arrays.values()) / _KIB
    return figures | {"the round's stored reply, the model's size, KiB": {"median": reply}}


def evaluation(repeats: int) -> Figures:
    """Time tests of one model for ten clients: together and separately."""
    setting = Setting.draw()
    setting.net.precision = torch.float32
    generator = generator_for(0, "bench-evaluation")
    images = torch.randint(0, 256, (_TESTS, 3, SIZE, SIZE), dtype=torch.uint8, generator=generator)
    labels = torch.arange(_TESTS) // (_TESTS // CLASSES)
    everything = Samples.arrived(torch.arange(_TESTS), labels, 0)

    def logits_of(samples: Samples) -> torch.Tensor:
        return predict(setting.net, lambda ids: images[ids], samples.content, setting.preprocess)

    def apart() -> None:
        for _ in range(_CLIENTS):
            logits_of(everything)

    def together() -> None:
        shared = SharedLogits()
        for _ in range(_CLIENTS):
            shared(setting.net, everything, logits_of)

    alone, shared = interleaved([apart, together], repeats)
    return {
        "test ten clients by one model, each by itself, seconds": spread(alone),
        "test them together, seconds": spread(shared),
        "together against each by itself": ratio(shared, alone, "<= 0.25"),
    }
