"""OFCL's client: random replay, its buffer, and where its rounds start."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.systems.in_process import Federation

from fedkace_flwr.config import Config
from fedkace_flwr.messaging import wire
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.storage.client_store import ClientStore
from fedkace_flwr.training.batches import EPOCHS, Epoch, random_replay_epoch

Make = Callable[..., Config]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.integers(2, 60), st.integers(0, 60), st.integers(2, 20), st.integers(0, 10**6))
def test_each_step_joins_as_many_distinct_draws_from_the_buffer(chunk: int, buffer: int, size: int, seed: int) -> None:
    epoch = random_replay_epoch(chunk, buffer, size, generator(seed))
    for batch in epoch.batches:
        new = int((batch < chunk).sum())
        assert new >= 2 and len(set(batch.tolist())) == len(batch) == new + min(new, buffer)
    positions = torch.cat(epoch.batches)
    assert sorted(positions[positions < chunk].tolist()) == list(range(chunk))
    assert bool((positions < chunk + buffer).all())
    assert epoch.task_draws == 1.0
    assert epoch.replay_draws * buffer == pytest.approx(len(positions) - chunk)


def test_replay_draws_are_uniform_over_the_buffer() -> None:
    drawn: Counter[int] = Counter()
    stream = generator(3)
    for _ in range(300):
        drawn.update(torch.cat(random_replay_epoch(8, 10, 4, stream).batches).tolist())
    assert all(drawn[position] == pytest.approx(240, abs=45) for position in range(8, 18))  # 3.7 deviations


def state_of(federation: Federation, client: int, round_number: int) -> ClientState:
    empty = ClientState(seen=torch.zeros(10, dtype=torch.bool), buffer=Samples.none())
    return ClientStore(federation.folder / f"client-{client:03d}", empty).before(round_number + 1)


def trained(federation: Federation, rounds: int) -> list[ClientState]:
    states = []
    for number in range(1, rounds + 1):
        federation.train(0, number)
        states.append(state_of(federation, 0, number))
    return states


def test_the_buffer_is_balanced_and_each_class_in_ascending_order(small: Make) -> None:
    federation = Federation(small(method="ofcl", rounds=4, capacity=14))
    for number, state in enumerate(trained(federation, 4), start=1):
        windows = federation.experiment.stream(0).windows[:number]
        counts = state.buffer.class_counts(10)
        assert set(counts.nonzero().squeeze(1).tolist()) == {label for window in windows for label in window}
        held = counts[counts > 0]
        assert int(held.sum()) == 14 and int(held.max() - held.min()) <= 1
        information = state.extra["information"]
        assert len(information) == 14 and bool((information >= 0).all())
        for label in counts.nonzero().squeeze(1):
            scores = information[state.buffer.labels == label]
            assert torch.equal(scores, scores.sort().values)


def test_a_class_that_the_chunk_lacks_is_cut_in_stored_order(small: Make) -> None:
    federation = Federation(small(method="ofcl", rounds=4, capacity=14, overlap=0))
    states = trained(federation, 4)
    current = federation.experiment.stream(0).windows[1:]
    kept_scores = []
    for before, after, window in zip(states, states[1:], current, strict=False):
        for label in set(before.buffer.labels.tolist()) - set(window):
            old, new = before.buffer.labels == label, after.buffer.labels == label
            count = int(new.sum())
            assert set(after.buffer.content[new].tolist()) <= set(before.buffer.content[old].tolist())
            assert after.buffer.content[new].tolist() == before.buffer.content[old][:count].tolist()
            kept_scores.append(torch.equal(after.extra["information"][new], before.extra["information"][old][:count]))
    assert kept_scores and all(kept_scores)


def test_scoring_leaves_weights_and_generators_alone_and_repeats_with_the_seed(small: Make) -> None:
    replies: list[wire.Reply] = []
    buffers: list[list[float]] = []
    for _ in range(2):
        federation = Federation(small(method="ofcl", run_name=f"run-{len(replies)}", capacity=12))
        state = torch.get_rng_state()
        replies.append(federation.train(0, 1))
        assert torch.equal(torch.get_rng_state(), state)
        buffers.append(state_of(federation, 0, 1).extra["information"].tolist())
    plain = Federation(small(method="fedavg", run_name="plain")).train(0, 1)  # no replay in the first round
    for reply in replies:
        assert all((reply.weights[name] == plain.weights[name]).all() for name in plain.weights)
    assert buffers[0] == buffers[1]


@pytest.mark.parametrize("batching", ["union", "paired"])
def test_training_replays_at_random_whatever_the_batching(
    small: Make, batching: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def noted(chunk: int, buffer: int, size: int, stream: torch.Generator) -> Epoch:
        asked.append((chunk, buffer))
        return random_replay_epoch(chunk, buffer, size, stream)

    monkeypatch.setitem(EPOCHS, "random-replay", noted)
    trained(Federation(small(method="ofcl", capacity=12, batching=batching)), 3)
    assert asked == [(16, 0), (16, 12), (16, 12)]


def test_the_local_model_answers_where_asked_for(small: Make) -> None:
    federation = Federation(small(method="ofcl", predict_with="local"))
    federation.train(0, 1)
    metrics = federation.evaluate(0, 1).metrics
    assert metrics[wire.ACCURACY] == metrics[wire.LOCAL_ACCURACY] and wire.GLOBAL_ACCURACY not in metrics
