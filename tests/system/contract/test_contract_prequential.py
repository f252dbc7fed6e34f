"""Every method's clients report how the models that they predict with answer a new chunk, before training on it."""

from pathlib import Path

import pytest
import torch
from support.common import rounds_of
from support.made.stored import read_state
from support.systems.contract import DISTINCT_METHODS, SHAPE, Make

from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.inference.kept_models import Predictor
from fedkace_flwr.inference.model_files import read_model

ADAPTED = {"fedframe"}  # its models are adapted to all that the client holds, which no longer has the last chunk


@pytest.mark.matrix
@pytest.mark.parametrize("method", DISTINCT_METHODS)
def test_the_new_chunk_is_a_test_before_it_is_trained_on(small: Make, method: str) -> None:
    config = small(**SHAPE, method=method, keep_models="always", overlap=1)
    run_inline(config)
    folder = Path(config.run.results_dir) / config.run.run_name
    first, _, last = rounds_of(folder)
    clients = range(config.stream.clients)
    assert first["prequential_accuracy"] == [None] * len(clients)
    if method == "centralized":  # which trains no round's model from the last one
        assert last["prequential_accuracy"] == [None] * len(clients)
        return
    experiment = Experiment(config)
    for client in clients:
        state = folder / "clients" / f"client-{client:03d}"
        chunk, seen = experiment.chunk(client, 3), read_state(state / "state-000002.npz").seen
        known = chunk.take(seen[chunk.labels].nonzero().flatten())
        assert last["prequential_samples"][client] == len(known) > 0
        if method not in ADAPTED:
            model = Predictor(read_model(state / "models-000002.safetensors"))
            answers = model.probabilities(known.images(experiment.dataset.fetch)).argmax(dim=1)
            right = int(torch.eq(answers, known.labels).sum())
            assert last["prequential_accuracy"][client] == right / len(known), client
