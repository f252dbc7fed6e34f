"""OFCL: Bregman information, the twelve views, random replay, and the client that keeps the most certain."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Message, MessageType
from hypothesis import given
from hypothesis import strategies as st
from support.common import rounds_of
from support.faults import FaultyGrid, only
from support.in_process import Federation
from torch import Tensor

from clients.base import ClientRound
from clients.ofcl import OfclClient
from experiments.running.inline import run_inline
from fedkace_flwr import server_app
from fedkace_flwr.algorithms.ofcl_memory import bregman_information, most_certain
from fedkace_flwr.algorithms.ofcl_views import NUMBERS, VIEWS, draw, projection, rotation_and_scale, warp
from fedkace_flwr.config import Config
from fedkace_flwr.data.torchvision_compat import import_torchvision
from fedkace_flwr.experiment import Experiment, as_arrays
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.rounds.aggregation import weighted_mean
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.client_store import ClientState, ClientStore
from fedkace_flwr.training.batches import EPOCHS, Epoch, random_replay_epoch
from fedkace_flwr.training.model import ResNet18, seeded_resnet18
from fedkace_flwr.training.snapshots import move_halfway, restored, snapshot
from strategies.ofcl import class_mean_weights

Make = Callable[..., Config]
ALL = torch.ones(3, dtype=torch.bool)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Bregman information


def test_two_views_by_hand() -> None:
    views = torch.tensor([[[2.0, 0, 0]], [[0.0, 2, 0]]])
    assert float(bregman_information(views, ALL)) == pytest.approx(0.3775500, abs=1e-7)


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 5), st.floats(0.1, 100))
def test_it_is_never_negative_and_blind_to_a_constant_of_each_view(seed, views, classes, scale) -> None:
    logits = scale * torch.randn((views, 4, classes), generator=generator(seed), dtype=torch.float64)
    active = torch.ones(classes, dtype=torch.bool)
    information = bregman_information(logits, active)
    assert bool((information >= 0).all())
    moved = logits + 10 * torch.randn((views, 4, 1), generator=generator(seed + 1), dtype=torch.float64)
    torch.testing.assert_close(bregman_information(moved, active), information, rtol=1e-9, atol=1e-9)
    same = bregman_information(logits[:1].expand(views, 4, classes), active)
    torch.testing.assert_close(same, torch.zeros_like(same), rtol=0, atol=1e-9)
    if views == 1 or classes == 1:
        torch.testing.assert_close(information, torch.zeros_like(information), rtol=0, atol=1e-9)


def test_small_noise_gives_half_its_variance_times_the_spread_of_the_prediction() -> None:
    logits, noise = torch.tensor([1.0, 0.0, -0.5], dtype=torch.float64), 0.01
    views = logits + noise * torch.randn((4000, 1, 3), generator=generator(), dtype=torch.float64)
    p = logits.softmax(0)
    expected = 0.5 * noise**2 * float((p * (1 - p)).sum())
    assert float(bregman_information(views, ALL)) == pytest.approx(expected, rel=0.05)


def test_masked_classes_do_not_count_and_broken_logits_are_the_least_certain() -> None:
    logits = torch.randn((12, 5, 3), generator=generator())
    active = torch.tensor([True, False, True])
    information = bregman_information(logits, active)
    torch.testing.assert_close(information, bregman_information(logits[..., [0, 2]], ALL[:2]))
    masked = logits.masked_fill(~active, -math.inf)
    torch.testing.assert_close(information, bregman_information(masked, active))
    logits[3, 1, 0] = math.nan
    logits[3, 2, 1] = math.nan
    broken = bregman_information(logits, active)
    assert float(broken[1]) == math.inf and float(broken[2]) == float(information[2])


# The buffer


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(1, 50), st.integers(0, 10**6))
def test_the_lowest_of_each_class_are_kept_in_even_numbers(labels, capacity, seed) -> None:
    y = torch.tensor(labels)
    information = torch.rand(len(y), generator=generator(seed), dtype=torch.float64)
    kept = most_certain(information, y, capacity, generator(1))
    counts, available = Counter(y[kept].tolist()), Counter(labels)
    assert len(kept) == len(set(kept.tolist())) == min(capacity, len(y))
    cut = [label for label in available if counts[label] < available[label]]
    if cut:
        assert max(counts[label] for label in available) - min(counts[label] for label in cut) <= 1
    for label in available:
        members = (y == label).nonzero().squeeze(1)
        ranked = members[information[members].argsort()][: counts[label]]
        assert kept[y[kept] == label].tolist() == ranked.tolist()
    order = torch.randperm(len(y), generator=generator(seed + 1))
    again = order[most_certain(information[order] + 5, y[order], capacity, generator(1))]
    assert again.tolist() == kept.tolist()


def test_of_equal_scores_the_first_stay_and_places_that_remain_are_drawn() -> None:
    y = torch.tensor([0, 1, 2] * 5)
    same = torch.zeros(15, dtype=torch.float64)
    kept = most_certain(same, y, 9, generator())
    assert kept.tolist() == [0, 3, 6, 1, 4, 7, 2, 5, 8]
    lucky = {
        max(Counter(y[most_certain(same, y, 10, generator(seed))].tolist()).items(), key=lambda x: x[1])[0]
        for seed in range(20)
    }
    assert lucky == {0, 1, 2}


# Random replay


@given(st.integers(2, 60), st.integers(0, 60), st.integers(2, 20), st.integers(0, 10**6))
def test_each_step_joins_as_many_distinct_draws_from_the_buffer(chunk, buffer, size, seed) -> None:
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


# Views


def pictures(count: int = 5, size: int = 32) -> Tensor:
    return torch.rand((count, 3, size, size), generator=generator(4))


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("size", [8, 32])
def test_each_view_is_another_picture_with_values_in_range(name: str, size: int) -> None:
    images = pictures(size=size)
    before = images.clone()
    seen = VIEWS[name](images, draw(5, generator(5)))
    assert seen.shape == images.shape and bool(seen.isfinite().all())
    assert float(seen.min()) >= 0 and float(seen.max()) <= 1 + 1e-6
    changed = [not torch.equal(one, other) for one, other in zip(seen, images, strict=True)]
    assert all(changed) or (any(changed) and size == 8)  # a slight turn of few pixels moves none of them
    assert torch.equal(images, before)


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_does_not_depend_on_the_other_images_of_its_block(name: str) -> None:
    images, numbers = pictures(), draw(5, generator(5))
    whole = VIEWS[name](images, numbers)
    torch.testing.assert_close(whole[3:4], VIEWS[name](images[3:4], numbers[3:4]))


def test_twelve_views_drawn_for_each_image_or_once_for_all() -> None:
    assert len(VIEWS) == 12
    each, once = draw(4, generator(1)), draw(4, generator(1), per_sample=False)
    assert each.shape == once.shape == (4, NUMBERS)
    assert len(each.unique(dim=0)) == 4 and len(once.unique(dim=0)) == 1
    assert torch.equal(each, draw(4, generator(1)))
    image = pictures(1).expand(4, -1, -1, -1)
    fixed = {"horizontal-flip", "vertical-flip", "invert"}
    for name, view in VIEWS.items():
        assert len(view(image, once).unique(dim=0)) == 1
        assert (len(view(image, each).unique(dim=0)) == 1) == (name in fixed)


def test_flips_and_inversion_by_hand() -> None:
    image = torch.tensor([[0.0, 0.25], [0.5, 1.0]]).expand(1, 3, 2, 2)
    none = torch.zeros(1, NUMBERS)
    expected = {
        "horizontal-flip": [[0.25, 0.0], [1.0, 0.5]],
        "vertical-flip": [[0.5, 1.0], [0.0, 0.25]],
        "invert": [[1.0, 0.75], [0.5, 0.0]],
        "brightness": [[0.0, 0.225], [0.45, 0.9]],
    }
    for name, values in expected.items():
        torch.testing.assert_close(VIEWS[name](image, none)[0, 2], torch.tensor(values))


@pytest.mark.parametrize(("name", "column", "side"), [("cutout-10", 0, 10), ("cutout-20", 2, 20)])
def test_a_cutout_is_a_black_square_cut_at_the_border(name: str, column: int, side: int) -> None:
    numbers = torch.zeros(2, NUMBERS)
    numbers[0, column : column + 2] = 0.5
    black = (VIEWS[name](torch.ones(2, 3, 32, 32), numbers) == 0).sum(dim=(2, 3))
    assert black.tolist() == [[side * side] * 3, [side * side // 4] * 3]


def test_a_crop_of_the_whole_image_is_the_image() -> None:
    numbers = torch.zeros(1, NUMBERS)
    numbers[0, 20] = 1.0
    numbers[0, 21] = 0.5 - (math.log(0.9) + math.log(1.1)) / 2 / (math.log(1.1) - math.log(0.9))
    torch.testing.assert_close(VIEWS["resized-crop"](pictures(1), numbers), pictures(1), rtol=0, atol=1e-4)


def test_geometry_agrees_with_torchvision() -> None:
    import_torchvision()
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as reference

    images = pictures(1)
    bilinear = InterpolationMode.BILINEAR
    for degrees, scale, x, y in ((30.0, 1.0, 0, 0), (-17.0, 0.6, 3, -5), (75.0, 0.7, -2, 9)):
        expected = reference.affine(images, degrees, [x, y], scale, [0.0, 0.0], bilinear)
        given = (torch.tensor([value]) for value in (degrees, scale, x / 16, y / 16))
        torch.testing.assert_close(warp(images, rotation_and_scale(*given), "bilinear"), expected, atol=1e-4, rtol=0)
    corners = torch.tensor([[[-0.75, -0.625], [0.875, -1.0], [0.5, 0.75], [-1.0, 0.625]]])
    pixels = [[float(16 * (value + 1)) for value in corner] for corner in corners[0]]
    start = [[0.0, 0.0], [32.0, 0.0], [32.0, 32.0], [0.0, 32.0]]
    expected = reference.perspective(images, start, pixels, bilinear)
    torch.testing.assert_close(warp(images, projection(corners), "bilinear"), expected, atol=1e-3, rtol=0)


# The client


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
    replies, buffers = [], []
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


# Where a round starts


def test_halfway_by_hand() -> None:
    net, other = (seeded_resnet18(3, 2, "cifar", seed) for seed in (1, 2))
    other.stem[1].running_var.fill_(3.0)
    other.stem[1].num_batches_tracked.fill_(40)
    mean = (net.output.weight + other.output.weight).detach() / 2
    theirs = other.output.weight.detach().clone()
    move_halfway(net, other)
    torch.testing.assert_close(net.output.weight.detach(), mean)
    assert net.stem[1].running_var.tolist() == [2.0, 2.0] and int(net.stem[1].num_batches_tracked) == 0
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

    def noted(self: OfclClient, net: ResNet18, now: ClientRound) -> object:
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


# The server


def test_weights_of_the_mean_by_classes_by_hand() -> None:
    assert class_mean_weights([[4, 0, 0], [4, 8, 0], [0, 8, 0]]).tolist() == [0.25, 0.5, 0.25]
    assert class_mean_weights([[1, 0, 0], [3, 0, 2]]).tolist() == [0.125, 0.875]


@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any), min_size=1, max_size=5), st.data())
def test_one_mean_by_those_weights_is_the_mean_of_the_classes_means(counts, data) -> None:
    models = [{"w": np.array([data.draw(st.floats(-9, 9))])} for _ in counts]
    by_class = []
    for label in range(4):
        having = [(model, row[label]) for model, row in zip(models, counts, strict=True) if row[label]]
        if having:
            by_class.append(weighted_mean([model for model, _ in having], [n for _, n in having]))
    expected = weighted_mean(by_class, [1.0] * len(by_class))["w"]
    weights = class_mean_weights(counts)
    assert weights.sum() == pytest.approx(1) and (weights > 0).all()
    assert weighted_mean(models, weights.tolist())["w"] == pytest.approx(expected, abs=1e-9)


class Watching(FaultyGrid):
    """Keeps the model that each evaluation brings, and every valid training reply."""

    def __init__(self, config: Config, damage: Callable[[int, int, Message], Message | None]) -> None:
        super().__init__(config, damage)
        self.sent: list[dict[str, np.ndarray]] = []
        self.trained: dict[tuple[int, int], Message] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        if messages[0].metadata.message_type == MessageType.EVALUATE:
            self.sent.append(keys.unpack(messages[0].content.array_records[keys.ARRAYS]))
        numbers = list(super().push_messages(messages))
        if messages[0].metadata.message_type == MessageType.TRAIN:
            for message, number in zip(messages, numbers, strict=True):
                told = message.content.config_records[keys.CONFIG]
                self.trained[int(told[keys.ROUND]), int(told[keys.CLIENT])] = self._replies[number]
        return numbers


def watched(config: Config, damage: Callable[[int, int, Message], Message | None] = lambda *told: told[-1]) -> Watching:
    grid = Watching(config, damage)
    server_app.run(grid, config, run_id=1)
    return grid


def test_the_global_model_is_half_the_classes_mean_and_half_the_one_before(small: Make) -> None:
    config = small(method="ofcl", rounds=2, clients=4, window=3, ofcl_aggregation="class-mean", report_classes=False)
    grid = watched(config)
    experiment = Experiment(config)
    before = as_arrays(experiment.initial_weights())
    for number, sent in enumerate(grid.sent, start=1):
        counts = [experiment.chunk(client, number).class_counts(10).tolist() for client in range(4)]
        replies = [grid.trained[number, client].content for client in range(4)]
        reported = [list(reply.metric_records[keys.METRICS][keys.CHUNK_CLASSES]) for reply in replies]
        weights = class_mean_weights(counts)
        assert reported == counts and len(set(weights.tolist())) > 1
        models = [keys.unpack(reply.array_records[keys.ARRAYS]) for reply in replies]
        for name, value in sent.items():
            if value.dtype.kind == "f":
                mean = sum(w * model[name] for w, model in zip(weights, models, strict=True))
                np.testing.assert_allclose(value, (mean + before[name]) / 2, rtol=1e-5, atol=1e-6)
        before = sent
    assert len(grid.sent) == 2


def test_class_counts_leave_a_client_where_they_are_needed_alone(small: Make) -> None:
    replies = {}
    for rule in ("mean", "class-mean"):
        config = small(method="ofcl", run_name=rule, rounds=1, ofcl_aggregation=rule)
        replies[rule] = watched(config).trained[1, 0].content
    assert keys.CHUNK_CLASSES not in replies["mean"].metric_records[keys.METRICS]
    assert keys.size_in_bytes(replies["class-mean"]) - keys.size_in_bytes(replies["mean"]) == 13 + 8 * 10


def counting(counts: object) -> Callable[[Message], Message]:
    def act(reply: Message) -> Message:
        metrics = reply.content.metric_records[keys.METRICS]
        del metrics[keys.CHUNK_CLASSES]
        if counts is not None:
            metrics[keys.CHUNK_CLASSES] = counts
        return reply

    return act


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (None, "chunk-classes = None: must be 10 whole numbers"),
        ([16], "must be 10 whole numbers"),
        ([16.0] + [0.0] * 9, "must be 10 whole numbers"),
        ([17, -1] + [0] * 8, "none negative"),
        ([17] + [0] * 9, "must add up to num-examples = 16"),
    ],
)
def test_a_client_that_does_not_say_what_it_trained_on_is_left_out(small: Make, counts: object, words: str) -> None:
    config = small(method="ofcl", rounds=2, ofcl_aggregation="class-mean")
    grid = watched(config, only(1, 2, counting(counts)))
    first, second = rounds_of(Path(config.run.results_dir) / config.run.run_name)
    assert first["failures"] == []
    (failure,) = second["failures"]
    assert (failure["client"], failure["phase"]) == (1, "training") and words in failure["reason"]
    chunks = [Experiment(config).chunk(client, 2).class_counts(10).tolist() for client in (0, 2)]
    models = [keys.unpack(grid.trained[2, client].content.array_records[keys.ARRAYS]) for client in (0, 2)]
    mean = weighted_mean([*models, grid.sent[0]], [*class_mean_weights(chunks).tolist(), 1.0])
    np.testing.assert_array_equal(grid.sent[1]["output.weight"], mean["output.weight"])
