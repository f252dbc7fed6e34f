"""The client of TFCL: its rounds in two halves, its weights and its answers."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict

from fedkace_flwr.algorithms import tfcl_submodels as submodels
from fedkace_flwr.algorithms import tfcl_tags as tags
from fedkace_flwr.clients import tfcl
from fedkace_flwr.clients.round import StreamingClient
from fedkace_flwr.clients.tfcl import TfclClient
from fedkace_flwr.config import Config
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.messaging import wire
from fedkace_flwr.samples import Samples
from fedkace_flwr.sources import StreamSource
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.storage.client_store import ClientStore

Make = Callable[..., Config]
SHAPE = {"method": "tfcl", "epochs": 2, "tfcl_server_epochs": 2, "weight_decay": 1e-3}


def client_of(config: Config, number: int = 0) -> TfclClient:
    experiment = Experiment(config)
    empty = ClientState(seen=torch.zeros(experiment.num_classes, dtype=torch.bool), buffer=Samples.none())
    store = ClientStore(Path(config.run.results_dir) / f"c{number}", empty)
    return TfclClient(number, experiment, StreamSource(experiment, number), store)


def head(client: TfclClient, number: int) -> RecordDict:
    return StreamingClient(client).act("train.head", RecordDict(), number)


def tail(client: TfclClient, number: int, logits: np.ndarray | None = None) -> RecordDict:
    if logits is None:
        logits = np.zeros((16, client.experiment.num_classes), dtype=np.float32)
    content = RecordDict({wire.ARRAYS: wire.array_record({"logits": logits})})
    return StreamingClient(client).act("train.tail", content, number)


def evaluate(client: TfclClient, number: int) -> dict[str, Any]:
    return StreamingClient(client).evaluate([], {wire.ROUND: number})[2]


def state_of(client: TfclClient, number: int) -> ClientState:
    state = client.store.before(number + 1)
    assert state.round == number
    return state


def sizes_of(client: TfclClient) -> list[int]:
    return [layer.weight.numel() for layer in tags.convolutions(client.network({}))]


def test_each_round_owns_its_quota_of_each_layer_and_the_rest_is_free(small: Make) -> None:
    client = client_of(small(**SHAPE))
    sizes = sizes_of(client)
    for number in (1, 2, 3):
        head(client, number)
        tail(client, number)
        parts = torch.split(state_of(client, number).extra["tags"], sizes)
        for part, size in zip(parts, sizes, strict=True):
            quota = max(1, size // 3)
            assert [int((part == task).sum()) for task in range(1, number + 1)] == [quota] * number
            assert int((part == tags.FREE).sum()) == size - number * quota
            assert int(part.max()) == number


def test_weights_of_earlier_rounds_keep_their_bits_under_adamw_with_decay(small: Make) -> None:
    client = client_of(small(**SHAPE))
    assert client.config.training.weight_decay == 1e-3
    before: Mapping[str, torch.Tensor] | None = None
    for number in (1, 2, 3):
        head(client, number)
        middle = state_of(client, number).extra
        tail(client, number)
        extra = state_of(client, number).extra
        if before is not None:
            frozen = before["tags"] > 0
            for later in (middle, extra):
                assert torch.equal(later["weights"][frozen], before["weights"][frozen])
                assert torch.equal(later["tags"][frozen], before["tags"][frozen])
        own = extra["tags"] == number
        assert not torch.equal(extra["weights"][own], middle["weights"][own])
        assert bool((extra["weights"][extra["tags"] == tags.FREE] == 0).all())
        before = extra


def test_an_old_sub_model_answers_as_it_did(small: Make) -> None:
    client = client_of(small(**SHAPE))
    images = torch.randn(4, 3, 8, 8)
    answers: dict[int, torch.Tensor] = {}
    for number in (1, 2, 3):
        head(client, number)
        tail(client, number)
        extra = state_of(client, number).extra
        for task in range(1, number + 1):
            with torch.inference_mode():
                logits = client.sub_model(extra, task).eval()(images)
            assert torch.equal(answers.setdefault(task, logits), logits)
    assert not torch.equal(answers[1], answers[3])


def test_what_is_answered_is_the_network_that_was_trained(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pick mask, tags and all else survive the way through packed bits and the disk."""
    monkeypatch.setattr(tfcl, "PICK_LEARNING_RATE", 0.02)
    client, found = client_of(small(**SHAPE)), []
    read = tags.Claim.read

    def noted(claim: tags.Claim) -> Any:
        found.append(claim)
        return read(claim)

    images = torch.randn(4, 3, 8, 8)
    for number in (1, 2, 3):
        head(client, number)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tags.Claim, "read", noted)
            tail(client, number)
        extra = state_of(client, number).extra
        with torch.inference_mode():
            trained = found[-1].net.eval()(images)
            stored = client.sub_model(extra, int(extra[submodels.TASK])).eval()(images)
        assert torch.allclose(trained, stored, rtol=0, atol=1e-5)
    picked = tags.unpack_bits(extra["pick.2"], len(extra["tags"]))[extra["tags"] == 1]
    assert bool(picked.any()) and not bool(picked.all())


def test_more_rounds_than_room_for_them_raise_nothing(small: Make) -> None:
    """Layers of 3 rounds' room in a stream that goes on: rounds 4 and on train picks, norms and outputs."""
    client = client_of(small(**SHAPE, rounds=5, batch_size=16))
    client.config = replace(client.config, stream=replace(client.config.stream, rounds=2))
    for number in (1, 2, 3, 4):
        head(client, number)
        tail(client, number)
        assert 0 <= evaluate(client, number)[wire.ACCURACY] <= 1
    extra = state_of(client, 4).extra
    assert int((extra["tags"] == tags.FREE).sum()) == 0 and int((extra["tags"] == 4).sum()) == 0


def test_a_client_without_an_answer_ends_its_round_by_labels_alone(
    small: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = []
    for name, weight in (("none", 0.9), ("labels", 1.0), ("taught", 0.1)):
        monkeypatch.setattr(tfcl, "LABEL_WEIGHT", weight)
        config = small(**SHAPE)
        client = client_of(replace(config, run=replace(config.run, results_dir=f"{config.run.results_dir}/{name}")))
        head(client, 1)
        if name != "none":
            tail(client, 1, np.full((16, 10), 50.0, dtype=np.float32) * np.arange(10, dtype=np.float32))
        evaluate(client, 1)
        weights.append(state_of(client, 1).extra["weights"])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_round_left_open_is_ended_before_the_next_begins(small: Make) -> None:
    client = client_of(small(**SHAPE))
    head(client, 1)
    head(client, 2)
    extra = state_of(client, 2).extra
    assert "pick.1" in extra and "pending.pick" in extra


@pytest.mark.parametrize(
    ("logits", "words"),
    [
        (np.full((16, 10), np.nan, dtype=np.float32), "not finite"),
        (np.zeros((15, 10), dtype=np.float32), "(15, 10)"),
        (np.zeros((16, 10)), "float64"),
    ],
)
def test_a_bad_answer_of_the_server_is_refused_and_changes_nothing(small: Make, logits: np.ndarray, words: str) -> None:
    client = client_of(small(**SHAPE))
    head(client, 1)
    with pytest.raises(Exception, match=words.replace("(", r"\(").replace(")", r"\)")):
        tail(client, 1, logits)
    assert "pending.pick" in state_of(client, 1).extra


def test_a_tail_without_its_head_is_an_error(small: Make) -> None:
    with pytest.raises(Exception, match="client 0 has no round 1 to finish"):
        tail(client_of(small(**SHAPE)), 1)
