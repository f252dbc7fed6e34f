"""OFCL's client: random replay, its buffer, and where its rounds start."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.common import rounds_of
from support.made.networks import seeded_resnet18
from support.systems.in_process import Federation
from torch import Tensor

from clients.base import ClientRound
from clients.ofcl import OfclClient
from experiments.running.inline import run_inline
from fedkace_flwr.config import Config
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.networks.network import Network
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.storage.client_store import ClientStore
from fedkace_flwr.training.batches import EPOCHS, Epoch, random_replay_epoch
from fedkace_flwr.training.snapshots import move_halfway, restored, snapshot

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


@pytest.mark.parametrize("rescore", ["current", "all"])
def test_a_class_that_the_chunk_lacks_is_cut_in_stored_order_unless_all_are_scored(small: Make, rescore: str) -> None:
    federation = Federation(small(method="ofcl", rounds=4, capacity=14, overlap=0, ofcl_rescore=rescore))
    states = trained(federation, 4)
    current = federation.experiment.stream(0).windows[1:]
    kept_scores = []
    for before, after, window in zip(states, states[1:], current, strict=False):
        for label in set(before.buffer.labels.tolist()) - set(window):
            old, new = before.buffer.labels == label, after.buffer.labels == label
            count = int(new.sum())
            assert set(after.buffer.content[new].tolist()) <= set(before.buffer.content[old].tolist())
            if rescore == "current":
                assert after.buffer.content[new].tolist() == before.buffer.content[old][:count].tolist()
            kept_scores.append(torch.equal(after.extra["information"][new], before.extra["information"][old][:count]))
    assert kept_scores and all(kept_scores) == (rescore == "current")


def test_scoring_leaves_weights_and_generators_alone_and_repeats_with_the_seed(small: Make) -> None:
    replies: list[keys.Reply] = []
    buffers: list[list[float]] = []
    for views in ("per-sample", "per-sample", "per-batch"):
        federation = Federation(small(method="ofcl", run_name=f"run-{len(replies)}", capacity=12, ofcl_views=views))
        state = torch.get_rng_state()
        replies.append(federation.train(0, 1))
        assert torch.equal(torch.get_rng_state(), state)
        buffers.append(state_of(federation, 0, 1).extra["information"].tolist())
    plain = Federation(small(method="fedavg", run_name="plain")).train(0, 1)  # no replay in the first round
    for reply in replies:
        assert all((reply.weights[name] == plain.weights[name]).all() for name in plain.weights)
    assert buffers[0] == buffers[1] != buffers[2]


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


def test_a_repeated_message_changes_nothing(small: Make) -> None:
    federation = Federation(small(method="ofcl"))
    for number in (1, 2):
        first = federation.train(0, number)
        stored = federation.state(0, number).read_bytes()
        assert federation.train(0, number).metrics == first.metrics
        assert federation.state(0, number).read_bytes() == stored
        assert federation.evaluate(0, number) == federation.evaluate(0, number)


@pytest.mark.slow
def test_three_rounds_from_end_to_end_repeat_with_the_seed(small: Make) -> None:
    root = Path(small().run.results_dir)
    for name, seed in (("first", 7), ("again", 7), ("other", 8)):
        run_inline(small(method="ofcl", run_name=name, seed=seed))
    records = rounds_of(root / "first")
    assert records == rounds_of(root / "again") != rounds_of(root / "other")
    assert [record["failures"] for record in records] == [[]] * 3
    assert [record["buffer_size"] for record in records] == [[16] * 3, [20] * 3, [20] * 3]
    assert records[0]["client_accuracy"] == records[0]["global_accuracy"]


def test_the_local_model_answers_where_asked_for(small: Make) -> None:
    federation = Federation(small(method="ofcl", inference="local"))
    federation.train(0, 1)
    metrics = federation.evaluate(0, 1).metrics
    assert metrics[keys.ACCURACY] == metrics[keys.LOCAL_ACCURACY] and keys.GLOBAL_ACCURACY not in metrics


def test_halfway_by_hand() -> None:
    net, other = (seeded_resnet18(3, 2, "cifar", seed) for seed in (1, 2))
    theirs_before = dict(other.named_buffers())
    theirs_before["stem.1.running_var"].fill_(3.0)
    theirs_before["stem.1.num_batches_tracked"].fill_(40)
    mean = (net.output.weight + other.output.weight).detach() / 2
    theirs = other.output.weight.detach().clone()
    move_halfway(net, other)
    torch.testing.assert_close(net.output.weight.detach(), mean)
    buffers = dict(net.named_buffers())
    assert buffers["stem.1.running_var"].tolist() == [2.0, 2.0] and int(buffers["stem.1.num_batches_tracked"]) == 0
    assert torch.equal(other.output.weight, theirs)


def test_a_snapshot_comes_back_as_a_network_of_its_own() -> None:
    net, like = (seeded_resnet18(3, 2, "cifar", seed) for seed in (1, 2))
    kept = {"information": torch.zeros(4), **snapshot("local", net.state_dict())}
    before = net.output.bias.detach().clone()
    with torch.no_grad():
        net.output.bias.add_(1.0)
    own = restored("local", kept, like)
    assert own is not None and own is not like and torch.equal(own.output.bias, before)
    assert not torch.equal(like.output.bias, before)
    assert restored("loc", kept, like) is None and restored("local", {"information": torch.zeros(4)}, like) is None


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """The weights from which each round is trained, as the rounds come."""
    found: list[dict[str, Tensor]] = []
    usual = OfclClient.objective

    def noted(self: OfclClient, net: Network, now: ClientRound) -> object:
        found.append(snapshot("start", net.state_dict()))
        return usual(self, net, now)

    monkeypatch.setattr(OfclClient, "objective", noted)
    return found


@pytest.mark.parametrize("merge", ["global", "half"])
def test_a_round_starts_as_the_global_model_or_half_way_to_the_last_local_one(
    small: Make, merge: str, starts: list[dict[str, Tensor]]
) -> None:
    federation = Federation(small(method="ofcl", ofcl_merge=merge))
    sent = {name: torch.from_numpy(array) for name, array in federation.weights.items()}
    first = federation.train(0, 1).weights
    federation.train(0, 3)  # it missed the second round
    for name, tensor in sent.items():
        expected = tensor
        if merge == "half" and tensor.is_floating_point():
            expected = (tensor + torch.from_numpy(first[name])) / 2
        torch.testing.assert_close(starts[0][f"start.{name}"], tensor, rtol=0, atol=0)
        torch.testing.assert_close(starts[1][f"start.{name}"], expected)
    assert len(starts) == 2


def test_the_state_holds_the_local_model_where_it_is_needed_alone(small: Make) -> None:
    for merge in ("global", "half"):
        federation = Federation(small(method="ofcl", run_name=merge, ofcl_merge=merge))
        reply, extra = federation.train(0, 1), state_of(federation, 0, 1).extra
        own = {name: tensor for name, tensor in extra.items() if name != "information"}
        assert set(own) == ({f"local.{name}" for name in reply.weights} if merge == "half" else set())
        assert all((tensor.numpy() == reply.weights[name.removeprefix("local.")]).all() for name, tensor in own.items())
