"""TFCL: tags, picks, pruning and distillation by themselves, then rounds over the real apps."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Message, MessageType, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from support.common import rounds_of

from clients.tfcl import TfclClient
from experiments.running.inline import InlineGrid, run_inline
from fedkace_flwr import client_app, server_app
from fedkace_flwr.algorithms import tfcl_submodels as submodels
from fedkace_flwr.algorithms import tfcl_tags as tags
from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.messaging import records as keys
from fedkace_flwr.messaging.records import Reply
from fedkace_flwr.registry import METHODS, Method
from fedkace_flwr.samples import Samples
from fedkace_flwr.sections import TrainingConfig
from fedkace_flwr.sources import StreamSource
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.storage.client_store import ClientStore
from fedkace_flwr.training.distillation import (
    DistilledLoss,
    lower_half,
    mean_bce,
    soft_cross_entropy,
    softened_divergence,
    upper_half,
)
from fedkace_flwr.training.loop import Preprocess, adamw, train
from fedkace_flwr.training.losses import Batch, TaskLoss
from fedkace_flwr.training.model import seeded_resnet18
from strategies.tfcl import Tfcl, linked, teach

Make = Callable[..., Config]
ACTIONS = ("train.head", "train.tail")
SHAPE = {"method": "tfcl", "epochs": 2, "tfcl_server_epochs": 2, "weight_decay": 1e-3}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "tfcl", Method(Tfcl, TfclClient, actions=ACTIONS))
    for action in ACTIONS:
        if action not in _ROUTED:
            _ROUTED.add(action)
            client_app._register(action)


_ROUTED = {action for method in METHODS.values() for action in method.actions}


def client_of(config: Config, number: int = 0) -> TfclClient:
    experiment = Experiment(config)
    empty = ClientState(seen=torch.zeros(experiment.num_classes, dtype=torch.bool), buffer=Samples.none())
    store = ClientStore(Path(config.run.results_dir) / f"c{number}", empty)
    return TfclClient(number, experiment, StreamSource(experiment, number), store)


def head(client: TfclClient, number: int) -> RecordDict:
    return client.act("train.head", RecordDict(), number)


def tail(client: TfclClient, number: int, logits: np.ndarray | None = None) -> RecordDict:
    if logits is None:
        logits = np.zeros((16, client.experiment.num_classes), dtype=np.float32)
    return client.act("train.tail", RecordDict({keys.ARRAYS: keys.array_record({"logits": logits})}), number)


def evaluate(client: TfclClient, number: int) -> dict[str, Any]:
    return client.evaluate([], {keys.ROUND: number})[2]


def state_of(client: TfclClient, number: int) -> ClientState:
    state = client.store.before(number + 1)
    assert state.round == number
    return state


def sizes_of(client: TfclClient) -> list[int]:
    return [layer.weight.numel() for layer in tags.convolutions(client._network([]))]


# Tags and masks


def test_the_binariser_gives_zeros_and_ones_and_lets_gradients_through():
    pick = torch.tensor([0.01, 0.005, 0.0051, -1.0], requires_grad=True)
    upstream = torch.tensor([1.0, -2.0, 3.0, 4.0])
    picked = tags.binarise(pick)
    assert picked.tolist() == [1.0, 0.0, 1.0, 0.0]
    picked.backward(upstream)
    assert torch.equal(pick.grad, upstream)


def test_a_sub_model_computes_with_its_own_and_with_picked_earlier_weights_and_trains_no_others():
    owners = torch.tensor([0, 1, 1, 2, 3], dtype=torch.int16)
    weights = torch.tensor([5.0, 2.0, 3.0, 4.0, 6.0], requires_grad=True)
    pick = torch.tensor([0.01, 0.01, 0.0, 0.01, 0.01], requires_grad=True)
    effective = tags.effective_weights(weights, owners, 2, tags.binarise(pick))
    assert effective.tolist() == [0.0, 2.0, 0.0, 4.0, 0.0]
    effective.backward(torch.full((5,), 10.0))
    assert weights.grad.tolist() == [0.0, 0.0, 0.0, 10.0, 0.0]
    assert pick.grad.tolist() == [0.0, 20.0, 30.0, 0.0, 0.0]  # upstream times the frozen weight, of earlier rounds


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.5, 2.0]), min_size=1, max_size=40), st.data())
def test_pruning_keeps_exactly_so_many_and_none_smaller_than_what_it_frees(values, data):
    weights = torch.tensor(values)
    owned = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    count = data.draw(st.integers(0, len(values)))
    kept = tags.largest(weights, owned, count)
    assert int(kept.sum()) == min(count, int(owned.sum()))
    assert not bool((kept & ~owned).any())
    freed = owned & ~kept
    if bool(kept.any()) and bool(freed.any()):
        assert float(weights[kept].abs().min()) >= float(weights[freed].abs().max())


@given(st.integers(0, 1000), st.integers(1, 1000), st.floats(0, 1), st.floats(0, 1))
def test_the_ramp_falls_from_all_to_the_quota(claimed, quota, one, other):
    assert tags.ramp(claimed, quota, 0.0) == claimed
    assert tags.ramp(claimed, quota, 1.0) == min(claimed, quota)
    early, late = sorted([one, other])
    assert tags.ramp(claimed, quota, early) >= tags.ramp(claimed, quota, late)


def test_the_ramp_is_cubic():
    assert tags.ramp(1000, 200, 0.5) == 200 + 800 // 8


def test_quotas_share_a_layer_out_and_leave_none_empty():
    assert tags.quotas([100, 432, 7], 10) == [10, 43, 1]


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_packed_bits_come_back(bits):
    mask = torch.tensor(bits)
    packed = tags.pack_bits(mask)
    assert len(packed) == -(-len(bits) // 8)
    assert torch.equal(tags.unpack_bits(packed, len(bits)), mask)


def test_weights_read_and_written_make_the_same_network():
    one, other = seeded_resnet18(5, 2, "cifar", 1), seeded_resnet18(5, 2, "cifar", 2)
    one = one.to(memory_format=torch.channels_last)
    tags.write_weights(other, *tags.read_weights(one))
    images = torch.randn(3, 3, 8, 8)
    assert torch.equal(one.eval()(images), other.eval()(images))
    assert sum(len(part) for part in tags.read_weights(one)) == sum(
        tensor.numel() for tensor in one.state_dict().values() if tensor.is_floating_point()
    )


def test_an_older_task_learns_in_a_copy_that_no_other_task_sees():
    owners, empty = torch.tensor([1, 1, 2, 0], dtype=torch.int16), torch.empty(0)
    known = {f"classes.{task}": torch.tensor([task == 1]) for task in (1, 2)}
    known |= {"weights": torch.tensor([1.0, 2.0, 3.0, 0.0]), "tags": owners}
    kept = submodels.with_learned(known, 1, torch.tensor([10.0, 20.0, 3.0, 0.0]), empty, owners)
    assert submodels.weights_of(kept, 1).tolist() == [10.0, 20.0, 3.0, 0.0]
    assert submodels.weights_of(kept, 2).tolist() == [1.0, 2.0, 3.0, 0.0]

    later = torch.tensor([1, 1, 2, 3], dtype=torch.int16)
    grown = {**kept, "classes.3": torch.tensor([False])}
    kept = submodels.with_learned(grown, 3, torch.tensor([1.0, 2.0, 3.0, 7.0]), empty, later)
    assert submodels.weights_of(kept, 1).tolist() == [10.0, 20.0, 3.0, 7.0]
    assert submodels.weights_of(kept, 3).tolist() == [1.0, 2.0, 3.0, 7.0]
    assert kept["weights"].tolist() == [1.0, 2.0, 3.0, 7.0]
    assert submodels.task_with(kept, torch.tensor([True])) == 1


def test_a_mask_that_comes_back_lets_through_what_it_did():
    picked = torch.tensor([True, False, True])
    mask = tags.mask_of(picked)
    assert torch.equal(tags.binarise(mask).bool(), picked)
    assert torch.allclose((mask - tags.PICK_THRESHOLD).abs(), torch.tensor(0.005))


# Distillation


def random_logits(seed: int, size: int = 6, classes: int = 5) -> torch.Tensor:
    return torch.randn(size, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_divergence_is_zero_and_at_rest_where_student_and_teacher_agree():
    student, mask = random_logits(0).requires_grad_(), torch.tensor([True, False, True, True, False])
    divergence = softened_divergence(student, student.detach() + 3, mask, 5.0)
    assert divergence.shape == (6,)
    assert torch.allclose(divergence, torch.zeros(6, dtype=torch.float64), atol=1e-12)
    divergence.sum().backward()
    assert torch.allclose(student.grad, torch.zeros_like(student), atol=1e-12)


def test_divergence_is_the_textbooks_over_each_samples_own_classes():
    student, teacher = random_logits(1), random_logits(2)
    masks = torch.rand(6, 5, generator=torch.Generator().manual_seed(3)) < 0.6
    masks[:, 2] = True
    found = softened_divergence(student, teacher, masks, 2.5)
    for row, mask in enumerate(masks):
        q, p = (student[row, mask] / 2.5).softmax(0), (teacher[row, mask] / 2.5).softmax(0)
        assert found[row].item() == pytest.approx(2.5**2 * float((p * (p / q).log()).sum()), abs=1e-12)


def test_divergence_differs_from_soft_cross_entropy_by_the_teachers_entropy():
    student, teacher = random_logits(4), random_logits(5)
    mask = torch.tensor([True, True, False, True, True])
    difference = (
        soft_cross_entropy(student, teacher, mask, 2.0) - softened_divergence(student, teacher, mask, 2.0).mean() / 4
    )
    assert difference.item() == pytest.approx(soft_cross_entropy(teacher, teacher, mask, 2.0).item(), abs=1e-12)


@pytest.mark.parametrize("kind", ["cross-entropy", "bce"])
def test_a_label_weight_of_one_is_plain_training(kind):
    logits, labels = random_logits(6), torch.tensor([0, 2, 0, 3, 3, 2])
    mask = torch.tensor([True, False, True, True, False])
    batch = Batch(torch.empty(6, 0), labels, torch.zeros(6, dtype=torch.bool), torch.arange(6))
    make = {"temperature": 5.0, "kind": kind}
    with_teacher = DistilledLoss(mask.expand(6, 5), random_logits(7), weight=1.0, **make)
    by_labels = DistilledLoss(mask.expand(6, 5), None, weight=0.3, **make)
    loss = with_teacher.loss(logits, logits, batch)
    assert torch.equal(loss, by_labels.loss(logits, logits, batch))
    plain = TaskLoss(mask, mask).loss(logits, logits, batch) if kind == "cross-entropy" else None
    assert plain is None or torch.equal(loss, plain)
    half = DistilledLoss(mask.expand(6, 5), random_logits(7), weight=0.5, **make).loss(logits, logits, batch)
    divergence = softened_divergence(logits, random_logits(7), mask, 5.0) / (3 if kind == "bce" else 1)
    assert half.item() == pytest.approx(0.5 * float(loss) + 0.5 * float(divergence.mean()), abs=1e-12)


def test_bce_is_the_mean_over_the_classes_left():
    logits, labels = random_logits(8, size=2, classes=3), torch.tensor([0, 2])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    p = logits.sigmoid()
    first = -(p[0, 0].log() + (1 - p[0, 1]).log()) / 2
    second = -((1 - p[1, 0]).log() + (1 - p[1, 1]).log() + p[1, 2].log()) / 3
    assert mean_bce(logits, labels, mask).item() == pytest.approx(float(first + second) / 2, abs=1e-12)


def test_the_two_halves_of_a_network_make_the_whole():
    net, images = seeded_resnet18(5, 2, "cifar", 1).eval(), torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        whole, maps = net(images), lower_half(net)(images)
        assert maps.shape == (3, 4, 4, 4)
        assert torch.equal(upper_half(net)(maps), whole)


# Training in parts


def test_training_in_two_parts_with_the_optimiser_kept_is_training_at_once():
    plan, mask = TrainingConfig(epochs=4, batch_size=8), torch.ones(5, dtype=torch.bool)
    draws = torch.Generator().manual_seed(0)
    chunk = torch.randint(0, 256, (8, 3, 8, 8), dtype=torch.uint8, generator=draws), torch.arange(8) % 5
    empty = chunk[0][:0], chunk[1][:0]
    as_is = Preprocess.by_statistics((0.5,) * 3, (0.3,) * 3, torch.device("cpu"))
    once, parts = (seeded_resnet18(5, 2, "cifar", 1).to(memory_format=torch.channels_last) for _ in range(2))

    def run(net: Any, **more: Any) -> None:
        train(net, chunk, empty, TaskLoss(mask, mask), plan, as_is, draws, **more)

    draws.manual_seed(1)
    run(once)
    draws.manual_seed(1)
    optimiser = adamw(parts, plan)
    shares: list[tuple[int, float]] = []
    run(parts, optimiser=optimiser, epochs=range(2), after_step=lambda *told: shares.append(told))
    resumed = adamw(parts, plan)
    tags.write_moments(resumed, tags.read_moments(optimiser), 2)
    run(parts, optimiser=resumed, epochs=range(2, 4), after_step=lambda *told: shares.append(told))
    assert shares == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0)]
    for one, other in zip(once.parameters(), parts.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-5)


def test_the_learning_rate_of_a_part_is_the_one_it_has_in_the_whole():
    plan, net = TrainingConfig(epochs=4, batch_size=8), seeded_resnet18(5, 2, "cifar", 1)
    images, labels, mask = torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.arange(4), torch.ones(5, dtype=torch.bool)
    as_is = Preprocess.by_statistics((0.5,) * 3, (0.3,) * 3, torch.device("cpu"))
    rates: list[float] = []
    for part in (range(1), range(1, 3), range(3, 4)):
        optimiser = adamw(net, plan)
        train(
            net,
            (images, labels),
            (images[:0], labels[:0]),
            TaskLoss(mask, mask),
            plan,
            as_is,
            torch.Generator().manual_seed(0),
            optimiser=optimiser,
            epochs=part,
            after_step=lambda *_, held=optimiser: rates.append(held.param_groups[0]["lr"]),
        )
    assert rates == pytest.approx([0.01 * (1 + np.cos(np.pi * epoch / 4)) / 2 for epoch in range(4)], rel=1e-9)


# One client's rounds


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
    before: torch.Tensor | None = None
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


# Two classes a round of four or six, so that they come back in every second or third round.
RETURNING = {"window": 2, "overlap": 0, "num_classes": 4, "tfcl_trace": "class-set"}


@pytest.mark.parametrize("changes", [{}, RETURNING])
def test_what_is_answered_is_the_network_that_was_trained(small: Make, changes: dict[str, Any]) -> None:
    """Pick mask, tags and all else survive the way through packed bits and the disk."""
    client, found = client_of(small(**SHAPE, tfcl_pick_learning_rate=0.02, **changes)), []
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
        assert 0 <= evaluate(client, number)[keys.ACCURACY] <= 1
    extra = state_of(client, 4).extra
    assert int((extra["tags"] == tags.FREE).sum()) == 0 and int((extra["tags"] == 4).sum()) == 0


def test_repeated_messages_get_the_stored_answer(small: Make) -> None:
    client = client_of(small(**SHAPE))
    first, second = head(client, 1), head(client, 1)
    assert first == second
    ended = tail(client, 1)
    state = state_of(client, 1)
    again = tail(client, 1, np.ones((16, 10), dtype=np.float32))
    assert ended == again
    assert head(client, 1) == first
    after = state_of(client, 1)
    assert all(torch.equal(after.extra[name], state.extra[name]) for name in state.extra)
    assert evaluate(client, 1) == evaluate(client, 1)


def test_a_client_without_an_answer_ends_its_round_by_labels_alone(small: Make) -> None:
    weights = []
    for name, weight in (("none", 0.9), ("labels", 1.0), ("taught", 0.1)):
        config = small(**SHAPE, tfcl_label_weight=weight)
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


@pytest.mark.parametrize("inference", ["latest", "most-confident"])
def test_predictions_stay_within_the_classes_met(small: Make, inference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from clients import tfcl

    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    measure = tfcl.accuracy

    def noted(scores: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> float:
        seen.append((scores.masked_fill(~mask, -torch.inf).argmax(1), mask))
        if inference == "most-confident":
            assert bool(mask[scores.argmax(1)].all())
        return measure(scores, labels, mask)

    monkeypatch.setattr(tfcl, "accuracy", noted)
    client = client_of(small(**SHAPE, tfcl_inference=inference))
    for number in (1, 2):
        head(client, number)
        tail(client, number)
        reported = evaluate(client, number)
        predicted, mask = seen[-1]
        assert bool(mask[predicted].all()) and int(mask.sum()) == reported[keys.SEEN_CLASSES]
    if inference == "most-confident":
        assert len(set(seen[-1][0].tolist())) > 1


def test_one_epoch_prunes_and_leaves_nothing_to_distil(small: Make) -> None:
    client = client_of(small(**{**SHAPE, "epochs": 1}))
    head(client, 1)
    tail(client, 1)
    assert int((state_of(client, 1).extra["tags"] == 1).sum()) == sum(max(1, s // 3) for s in sizes_of(client))


# What the publication leaves open


def trained(client: TfclClient, *numbers: int) -> Mapping[str, torch.Tensor]:
    for number in numbers:
        head(client, number)
        tail(client, number)
    return state_of(client, numbers[-1]).extra


@pytest.mark.parametrize("start", ["fresh", "copy"])
def test_an_output_layer_begins_as_at_the_start_of_the_run_or_as_it_was_last(small: Make, start: str) -> None:
    client = client_of(small(**SHAPE, tfcl_head=start))
    first = trained(client, 1)
    still = replace(client.config.training, learning_rate=1e-30)
    client.config = replace(client.config, training=still)
    second = trained(client, 2)
    initial = client._network([]).output.weight.detach().clone()
    before, after = (
        client.sub_model(extra, task).output.weight.detach().clone() for extra, task in ((first, 1), (second, 2))
    )
    assert not torch.equal(initial, before)
    assert torch.equal(after, before if start == "copy" else initial)


def test_literally_the_first_round_claims_all_and_no_other_gets_any(small: Make) -> None:
    client = client_of(small(**SHAPE, tfcl_prune="literal"))
    first = trained(client, 1)
    assert bool((first["tags"] == 1).all()) and "pick.1" in first
    later = trained(client, 2, 3)
    assert torch.equal(later["tags"], first["tags"]) and torch.equal(later["weights"], first["weights"])
    assert not torch.equal(later["rest.3"], later["rest.2"])
    assert 0 <= evaluate(client, 3)[keys.ACCURACY] <= 1


def test_literally_a_task_is_pruned_in_its_second_round(small: Make) -> None:
    """Classes change every second round."""
    client = client_of(small(**SHAPE, rounds=4, overlap=2, tfcl_prune="literal", tfcl_trace="class-set"))
    sizes = sizes_of(client)
    quotas = [max(1, size // 4) for size in sizes]

    def owned(extra: Mapping[str, torch.Tensor], task: int) -> list[int]:
        return [int((part == task).sum()) for part in torch.split(extra["tags"], sizes)]

    assert owned(trained(client, 1), 1) == sizes
    second = trained(client, 2)
    assert owned(second, 1) == quotas
    assert bool((second["weights"][second["tags"] == tags.FREE] == 0).all())
    assert owned(trained(client, 3), 3) == [size - quota for size, quota in zip(sizes, quotas, strict=True)]
    fourth = trained(client, 4)
    assert owned(fourth, 1) == owned(fourth, 3) == quotas
    assert submodels.finished(fourth) == [1, 3]


def test_a_task_that_goes_on_trains_its_own_weights_and_claims_none(small: Make) -> None:
    client = client_of(small(**SHAPE, overlap=2, tfcl_trace="class-set"))
    first, second = trained(client, 1), trained(client, 2)
    assert torch.equal(first["tags"], second["tags"]) and submodels.opened(second) == [1]
    own = first["tags"] == 1
    assert not torch.equal(first["weights"][own], second["weights"][own])
    assert bool((second["weights"][~own] == 0).all())
    assert submodels.opened(trained(client, 3)) == [1, 3]


@pytest.mark.parametrize("prune", ["within-round", "literal"])
def test_a_task_that_comes_back_changes_its_own_sub_model_and_no_other(small: Make, prune: str) -> None:
    client = client_of(small(**SHAPE, **{**RETURNING, "num_classes": 6}, rounds=8, tfcl_prune=prune))
    images, answers, tasks = torch.randn(4, 3, 8, 8), dict[int, torch.Tensor](), []
    for number in range(1, 9):
        extra = trained(client, number)
        tasks.append(int(extra[submodels.TASK]))
        for task in submodels.finished(extra):
            with torch.inference_mode():
                logits = client.sub_model(extra, task).eval()(images)
            if task == tasks[-1]:
                assert task == number or not torch.equal(answers[task], logits)
                answers[task] = logits
            assert torch.equal(answers[task], logits)
    assert tasks == [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("inference", ["latest", "most-confident"])
def test_who_came_back_answers(small: Make, inference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(small(**SHAPE, **RETURNING, tfcl_inference=inference))
    trained(client, 1, 2, 3)
    asked: list[int] = []
    of = client.sub_model
    monkeypatch.setattr(client, "sub_model", lambda extra, task: (asked.append(task), of(extra, task))[1])
    evaluate(client, 3)
    assert asked == ([1] if inference == "latest" else [1, 2])


def test_a_returning_round_that_is_repeated_or_left_open_ends_alike(small: Make) -> None:
    """Round 3 goes on with the first one's task; it is trained again from the disk, and ended by the next message."""
    config = small(**SHAPE, **RETURNING, rounds=4)

    def ended(name: str) -> TfclClient:
        client = client_of(replace(config, run=replace(config.run, results_dir=f"{config.run.results_dir}/{name}")))
        trained(client, 1, 2)
        return client

    plain, repeated, open_ended = ended("plain"), ended("repeated"), ended("open")
    first = head(plain, 3)
    evaluate(plain, 3)
    head(repeated, 3)
    (repeated.store.folder / "state-000003.npz").unlink()
    again = head(repeated, 3)
    assert all(first.array_records[keys.ARRAYS][n].data == a.data for n, a in again.array_records[keys.ARRAYS].items())
    evaluate(repeated, 3)
    head(open_ended, 3)
    wanted = state_of(plain, 3).extra
    for client in (plain, repeated, open_ended):
        head(client, 4)
        found = client.store.before(4).extra if client is not open_ended else {}
        assert all(torch.equal(found[name], wanted[name]) for name in found if name != "tail")
    fourth = state_of(plain, 4).extra
    for client in (repeated, open_ended):
        other = state_of(client, 4).extra
        assert set(other) == set(fourth)
        assert all(torch.equal(other[name], fourth[name]) for name in fourth if name != "tail")


# The server's network


def lesson(client: int, size: int) -> Reply:
    rng = np.random.default_rng(client)
    seen = np.isin(np.arange(10), [client, client + 1])
    weights = {
        "features": rng.normal(size=(size, 8, 4, 4)).astype(np.float32),
        "logits": rng.normal(size=(size, 10)).astype(np.float32),
        "labels": rng.choice([client, client + 1], size),
        "seen": seen,
    }
    return Reply(client, weights, size, {})


def test_each_client_gets_its_own_samples_logits_in_its_own_order_whoever_answered_first(small: Make) -> None:
    config = small(**SHAPE)
    lessons = {client: lesson(client, size) for client, size in ((0, 5), (1, 9), (2, 3))}
    taught = teach(lessons, 10, config, 1)
    other = teach(dict(reversed(lessons.items())), 10, config, 1)
    assert {client: logits.shape for client, logits in taught.items()} == {0: (5, 10), 1: (9, 10), 2: (3, 10)}
    assert all(np.array_equal(taught[client], other[client]) for client in taught)
    assert not np.array_equal(taught[0], teach(lessons, 10, config, 2)[0])


def test_the_servers_network_learns_the_labels(small: Make) -> None:
    lessons = {client: lesson(client, 12) for client in (0, 5)}
    taught = teach(lessons, 10, small(**{**SHAPE, "tfcl_server_epochs": 15}), 1)
    for client, logits in taught.items():
        told = lessons[client].weights
        predicted = np.where(told["seen"], logits, -np.inf).argmax(1)
        assert (predicted == told["labels"]).mean() > 0.9
        swapped = taught[client][::-1]
        assert (np.where(told["seen"], swapped, -np.inf).argmax(1) == told["labels"]).mean() < 0.9


def test_nobody_to_teach_is_no_error(small: Make) -> None:
    assert teach({}, 10, small(**SHAPE), 1) == {}


def test_a_diverging_network_is_an_error_of_its_own(small: Make) -> None:
    with pytest.raises(RunError):
        teach({0: lesson(0, 8)}, 10, small(**{**SHAPE, "learning_rate": 1e30}), 1)


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (0.0, [[0, 1, 2, 3, 4]]),
        (0.2, [[0, 1, 2, 4], [3]]),  # 0 and 2 share nothing, but 1 and 4 link them
        (1 / 3, [[0, 1, 2, 4], [3]]),
        (0.34, [[0, 4], [1], [2], [3]]),
        (1.0, [[0, 4], [1], [2], [3]]),
    ],
)
def test_groups_are_those_linked_by_common_classes(threshold: float, expected: list[list[int]]) -> None:
    sets = {0: {1, 2}, 1: {2, 3}, 2: {3, 4}, 3: {7, 8}, 4: {1, 2}}
    held = {client: frozenset(classes) for client, classes in sets.items()}
    assert linked(held, threshold) == expected
    assert linked(dict(reversed(held.items())), threshold) == expected


def test_a_threshold_is_met_by_the_share_that_it_names() -> None:
    ten, seven = frozenset(range(10)), frozenset(range(7))
    assert linked({0: ten, 1: seven}, 0.7) == [[0, 1]]
    assert linked({}, 0.5) == []


# Whole runs


class Meddler(InlineGrid):
    """An inline grid that may change or lose replies, and keeps which messages were sent."""

    def __init__(self, config: Config, meddle: Callable[[str, int, int, Message], Message | None]) -> None:
        super().__init__(client_app.app, config.stream.clients, config.flat(), run_id=1)
        self._meddle = meddle
        self.sent: list[tuple[str, int, int]] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            kind, told = message.metadata.message_type, message.content.config_records[keys.CONFIG]
            (number,) = super().push_messages([message])
            numbers.append(number)
            if kind == MessageType.QUERY:
                continue
            place = kind, int(told[keys.ROUND]), int(told[keys.CLIENT])
            self.sent.append(place)
            reply = self._meddle(*place, self._replies.pop(number))
            if reply is not None:
                self._replies[number] = reply
        return numbers


def as_it_is(kind: str, number: int, client: int, reply: Message) -> Message:
    return reply


def run(config: Config, meddle: Callable[[str, int, int, Message], Message | None] = as_it_is) -> tuple[Path, Meddler]:
    grid = Meddler(config, meddle)
    server_app.run(grid, config, run_id=1)
    return Path(config.run.results_dir) / config.run.run_name, grid


def test_three_rounds_give_the_same_numbers_twice(small: Make) -> None:
    for name in ("first", "again"):
        run_inline(small(**SHAPE, run_name=name))  # three rounds, as in ``SMALL``
    root = Path(small().run.results_dir)
    first = rounds_of(root / "first")
    assert first == rounds_of(root / "again")
    assert [record["failures"] for record in first] == [[], [], []]
    assert all(value is not None for record in first for value in record["client_accuracy"])
    assert all(record["client_drift"] is None for record in first)


def spoilt(name: str, array: np.ndarray) -> Callable[[Message], Message]:
    def act(reply: Message) -> Message:
        reply.content.array_records[keys.ARRAYS][name] = Array(array)
        return reply

    return act


FAULTS = {
    "nan": (spoilt("features", np.full((16, 8, 4, 4), np.nan, dtype=np.float32)), "'features' holds values that are"),
    "order": (spoilt("features", np.zeros((8, 16, 4, 4), dtype=np.float32)), "not float32"),
    "size": (spoilt("features", np.zeros((16, 8, 2, 2), dtype=np.float32)), "others'"),
    "flat": (spoilt("features", np.zeros((16, 8), dtype=np.float32)), "not float32 (0, 8, 0, 0)"),
    "labels": (spoilt("labels", np.full(16, 10)), "a class that the client has not met"),
    "silence": (lambda reply: None, "no reply"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_reply_is_left_out_and_named_and_its_sender_comes_back(small: Make, fault: str) -> None:
    act, words = FAULTS[fault]

    def meddle(kind: str, number: int, client: int, reply: Message) -> Message | None:
        return act(reply) if (kind, number, client) == ("train.head", 1, 1) else reply

    config = small(**SHAPE, rounds=2, deadline=2.0 if fault == "silence" else 60.0)
    folder, grid = run(config, meddle)
    first, second = rounds_of(folder)
    (failure,) = first["failures"]
    assert (failure["client"], failure["phase"]) == (1, "training") and words in failure["reason"]
    assert second["failures"] == []
    assert ("train.tail", 1, 1) not in grid.sent
    assert ("train.tail", 2, 1) in grid.sent
    assert first["client_accuracy"][1] is not None  # it ends its round by labels alone


def test_a_client_whose_answer_gets_lost_ends_its_round_all_the_same(small: Make) -> None:
    def meddle(kind: str, number: int, client: int, reply: Message) -> Message | None:
        return None if (kind, number, client) == ("train.tail", 1, 0) else reply

    folder, _ = run(small(**SHAPE, rounds=2, deadline=2.0), meddle)
    first, second = rounds_of(folder)
    assert [(f["client"], f["phase"]) for f in first["failures"]] == [(0, "tail")]
    assert second["failures"] == [] and None not in first["client_accuracy"]


def test_too_few_good_replies_stop_the_run(small: Make) -> None:
    def meddle(kind: str, number: int, client: int, reply: Message) -> Message | None:
        return FAULTS["nan"][0](reply) if kind == "train.head" and client < 2 else reply

    with pytest.raises(RunError, match=r"round 1, training: 1 of 3 clients gave a valid reply.*client 0"):
        run(small(**SHAPE), meddle)


def test_a_diverging_server_leaves_the_clients_to_themselves(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from strategies import tfcl

    def diverge(*args: object) -> None:
        raise RunError("epoch 1: the training loss is not finite")

    monkeypatch.setattr(tfcl, "teach", diverge)
    folder, grid = run(small(**SHAPE, rounds=1))
    assert "train.tail" not in {kind for kind, _, _ in grid.sent}
    assert None not in rounds_of(folder)[0]["client_accuracy"]


def test_a_group_learns_from_its_own_members_alone(small: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from strategies import tfcl

    asked: list[list[int]] = []

    def noted(lessons: Any, *told: Any) -> Any:
        asked.append(sorted(lessons))
        return teach(lessons, *told)

    monkeypatch.setattr(tfcl, "teach", noted)
    config = small(**SHAPE, rounds=2, clients=6, window=3, tfcl_group="class-overlap", tfcl_group_jaccard=0.5)

    def lose(kind: str, number: int, client: int, reply: Message) -> Message | None:
        return FAULTS["nan"][0](reply) if (kind, number, client) == ("train.head", 2, 1) else reply

    folder, _ = run(config, lose)
    records, experiment = rounds_of(folder), Experiment(config)
    assert asked == [group for record in records for group in record["groups"]]
    for record, present in zip(records, ({0, 1, 2, 3, 4, 5}, {0, 2, 3, 4, 5}), strict=True):
        windows = {k: frozenset(experiment.stream(k).windows[record["round"] - 1]) for k in present}
        assert record["groups"] == linked(windows, 0.5)
    assert any(1 < len(group) < 6 for record in records for group in record["groups"])


def test_one_group_of_all_is_the_round(small: Make) -> None:
    folders = [
        run(small(**SHAPE, run_name=name, **changes))[0]
        for name, changes in (("round", {}), ("linked", {"tfcl_group": "class-overlap", "tfcl_group_jaccard": 0.0}))
    ]
    plain, grouped = (rounds_of(folder) for folder in folders)
    assert [record.pop("groups") for record in grouped] == [[[0, 1, 2]]] * 3
    assert grouped == plain


def test_a_group_whose_network_diverges_leaves_the_others_their_logits(
    small: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strategies import tfcl

    def diverge(lessons: Any, *told: Any) -> Any:
        if 0 in lessons:
            raise RunError("epoch 1: the training loss is not finite")
        return teach(lessons, *told)

    monkeypatch.setattr(tfcl, "teach", diverge)
    config = small(**SHAPE, rounds=1, tfcl_group="class-overlap", tfcl_group_jaccard=1.0)
    folder, grid = run(config)
    (record,) = rounds_of(folder)
    assert record["groups"] == [[0], [1], [2]] and None not in record["client_accuracy"]
    assert {client for kind, _, client in grid.sent if kind == "train.tail"} == {1, 2}
