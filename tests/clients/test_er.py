"""Experience replay: the reservoir keeps every sample met with the same probability."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedkace_flwr.clients.base import ClientRound, Training
from fedkace_flwr.clients.er import ReplayClient
from fedkace_flwr.config import Config
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.samples import Samples
from fedkace_flwr.sources import StreamSource
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.storage.client_store import ClientStore
from fedkace_flwr.training.losses import TaskLoss

Make = Callable[..., Config]


@pytest.fixture
def experiment(small: Make) -> Experiment:
    return Experiment(small())


@pytest.fixture
def training(experiment: Experiment) -> Training:
    """A training of any kind: the reservoir does not look at it."""
    classes = torch.ones(10, dtype=torch.bool)
    net = experiment.network(experiment.initial_weights())
    return Training(net, TaskLoss(classes, classes), experiment.config.training, torch.Generator())


def stream_through(client: ReplayClient, training: Training, chunks: int, size: int) -> Samples:
    classes = torch.zeros(10, dtype=torch.bool)
    state = ClientState(seen=classes, buffer=Samples.none())
    for number in range(1, chunks + 1):
        ids = torch.arange((number - 1) * size, number * size)
        now = ClientRound(number, Samples.arrived(ids, ids % 10, number), state, classes)
        kept = client.maintain(now, training)
        buffer, state = kept.buffer, replace(state, round=number, buffer=kept.buffer, extra=kept.extra)
        assert len(buffer) == min(20, number * size)
        assert len(set(buffer.content.tolist())) == len(buffer)
        assert (buffer.rounds == buffer.content // size + 1).all() and (buffer.labels == buffer.content % 10).all()
    return state.buffer


def test_every_sample_is_kept_with_the_same_probability(
    experiment: Experiment, training: Training, tmp_path: Path
) -> None:
    kept: Counter[int] = Counter()
    draws, samples = 400, 60
    for number in range(draws):
        store = ClientStore(tmp_path, ClientState(torch.zeros(10).bool(), Samples.none()))
        client = ReplayClient(number, experiment, StreamSource(experiment, number), store)
        kept.update(stream_through(client, training, 6, 10).content.tolist())
    expected = draws * 20 / samples
    variance = draws * (20 / samples) * (1 - 20 / samples)
    statistic = sum((kept[sample] - expected) ** 2 for sample in range(samples)) / variance
    assert statistic < 59 + 4 * (2 * 59) ** 0.5  # four standard deviations of chi-square with 59 degrees
