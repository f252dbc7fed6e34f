"""What a report says of streams and of stored buffers: the terms of Theorem 3, samples by class and round, images."""

import base64
import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedkace_flwr.config import Config
from fedkace_flwr.errors import StateError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.report.page.images import PER_CLASS, Budget, held, newest_state
from fedkace_flwr.experiments.report.page.theorem import distances, pair_distances, proportions
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.client_state import Answer, ClientState
from fedkace_flwr.storage.client_store import ClientStore

# Theorem 3


def test_distances_between_clients_worked_by_hand() -> None:
    one = proportions([[1, 1, 0, 0], [0, 1, 1, 0]])
    other = proportions([[0, 0, 3, 3], [0, 3, 3, 0]])
    assert one.tolist() == [[0.5, 0.5, 0, 0], [0.25, 0.5, 0.25, 0]]
    largest, average = pair_distances([one, other, one])
    # round 1: nothing in common; round 2: |1/4 - 0| + |1/2 - 1/4| + |1/4 - 1/2| + |0 - 1/4| over 2
    assert largest.tolist() == [1.0, 0.5]
    assert average.tolist() == pytest.approx([2 / 3, 1 / 3])


def test_distances_of_a_stream_are_those_of_its_chunks() -> None:
    config = Config.parse({"clients": 3, "rounds": 6, "window": 2, "overlap": 1, "seed": 5})
    found = distances(config)
    assert found is not None
    assert found.factor == pytest.approx(8 / 3)
    assert len(found.largest) == 6
    assert all(0 <= low <= high <= 1 for low, high in zip(found.average, found.largest, strict=True))
    everything = distances(Config.parse({"clients": 2, "rounds": 5, "window": 2, "overlap": 0}))
    assert everything is not None and everything.largest[-1] == 0.0  # all ten classes met once by both
    assert distances(Config.parse({"clients": 1})) is None
    assert distances(Config.parse({"dataset": "folder"})) is None  # its files decide on the classes
    assert distances(Config.parse({"dataset": "folder"}), classes=10) is not None


@pytest.mark.parametrize("stream", ["windows", "blurred", "dirichlet", "quantity-skew"])
def test_distances_follow_from_the_samples_that_clients_receive(stream: str) -> None:
    config = Config.parse({"stream": stream, "clients": 3, "rounds": 4, "samples-per-class": 8, "seed": 3})
    experiment = Experiment(config)
    counts = np.array([[experiment.chunk(k, t).class_counts(10).numpy() for t in range(1, 5)] for k in range(3)])
    received = counts.cumsum(axis=1)
    shares = received / received.sum(axis=2, keepdims=True)
    last = [np.abs(shares[one, -1] - shares[other, -1]).sum() / 2 for one, other in ((0, 1), (0, 2), (1, 2))]
    found = distances(config)
    assert found is not None
    assert found.largest[-1] == pytest.approx(max(last)) and found.average[-1] == pytest.approx(sum(last) / 3)


# Stored buffers


def stored(folder: Path, samples: Samples, round_number: int = 3) -> ClientStore:
    seen = torch.ones(10, dtype=torch.bool)
    store = ClientStore(folder / "clients" / "client-000", ClientState(seen, Samples.none(), run="x"))
    store.save_trained(ClientState(seen, samples, run="x", round=round_number), Answer({}, 1, {}))
    return store


def test_a_stored_buffer_is_counted_by_class_and_round_and_the_file_is_left_alone(tmp_path: Path) -> None:
    samples = Samples(torch.arange(4), torch.tensor([1, 1, 1, 7]), torch.tensor([1, 3, 3, 2]))
    stored(tmp_path, samples)
    state = newest_state(tmp_path, 0)
    assert state is not None and state.round == 3
    found = held(state, 10, 3, None, Budget(10**6))
    assert found.arrivals[1] == [1, 0, 2] and found.arrivals[7] == [0, 1, 0]
    assert np.sum(found.arrivals) == 4
    assert not found.strips  # by id, and no data set
    assert newest_state(tmp_path, 1) is None
    (path,) = tmp_path.glob("clients/client-000/state-*.npz")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    with pytest.raises(StateError, match=re.escape(str(path))):
        newest_state(tmp_path, 0)
    assert path.read_bytes() == content[:-1] + b"x"  # not set aside, as a client would


def test_kept_images_are_few_and_end_with_the_budget(tmp_path: Path) -> None:
    pixels = torch.randint(0, 256, (30, 3, 8, 8), dtype=torch.uint8)
    labels = torch.tensor([0] * 20 + [1] * 10)
    stored(tmp_path, Samples(pixels, labels, torch.arange(30) % 3 + 1))
    state = newest_state(tmp_path, 0)
    assert state is not None
    budget = Budget(10**6)
    strips = held(state, 10, 3, None, budget).strips
    assert [(strip.label, strip.kept, len(strip.rounds)) for strip in strips] == [
        (0, 20, PER_CLASS),
        (1, 10, PER_CLASS),
    ]
    assert all(list(strip.rounds) == sorted(strip.rounds) for strip in strips)
    image = Image.open(io.BytesIO(base64.b64decode(strips[0].source.partition(",")[2])))
    assert (image.format, image.size) == ("PNG", (32 * PER_CLASS, 32))
    assert budget.left == 10**6 - sum(len(strip.source) for strip in strips)
    assert not held(state, 10, 3, None, Budget(100)).strips
