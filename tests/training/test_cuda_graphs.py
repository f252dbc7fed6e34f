"""Steps over static tensors: on a CPU bit for bit what the plain loop does, for all losses, batchings and precisions."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.made.networks import seeded_resnet18
from torch import Tensor

from fedkace_flwr.algorithms.fedcbdr_loss import TemperatureLoss
from fedkace_flwr.algorithms.fedkace_loss import BalancedReplayLoss, FullGradientReplayLoss
from fedkace_flwr.algorithms.fedkace_replay import GradientBalance
from fedkace_flwr.compute.seats import undone
from fedkace_flwr.errors import RunError
from fedkace_flwr.networks.resnet import ResNet18
from fedkace_flwr.sections import TrainingConfig
from fedkace_flwr.training import loop as training
from fedkace_flwr.training.batches import EPOCHS
from fedkace_flwr.training.cuda_graphs import KeptSteps, StaticSteps, tensors_in
from fedkace_flwr.training.distillation import DistillationLoss
from fedkace_flwr.training.loop import Preprocess, optimiser_of, train
from fedkace_flwr.training.losses import Batch, Objective, TaskLoss
from fedkace_flwr.training.steps import take_step

CLASSES = 5
CURRENT = torch.tensor([False, True, True, False, False])
OLD = torch.tensor([True, True, False, False, False])
PREPROCESS = Preprocess.by_statistics((0.4, 0.5, 0.6), (0.3, 0.25, 0.2), torch.device("cpu"))
TEMPERATURES = {"tau_old": 0.9, "tau_new": 1.1, "weight_old": 1.1, "weight_new": 0.9}

OBJECTIVES: dict[str, Callable[[ResNet18], Objective]] = {
    "task": lambda net: TaskLoss(CURRENT, OLD),
    "balanced": lambda net: BalancedReplayLoss(CURRENT, OLD, GradientBalance()),
    "balanced with bias": lambda net: BalancedReplayLoss(
        CURRENT, OLD, GradientBalance("mean", task_size=10, replay_size=7), gradient_bias=True
    ),
    "full gradient": lambda net: FullGradientReplayLoss(CURRENT, OLD, GradientBalance(), list(net.parameters())),
    "temperature": lambda net: TemperatureLoss(CURRENT | OLD, CURRENT, **TEMPERATURES),
}


def samples(count: int, allowed: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
    classes = allowed.nonzero().squeeze(1)
    return images, classes[torch.randint(len(classes), (count,), generator=generator)]


def trained(
    objective_of: Callable[[ResNet18], Objective],
    *,
    captured: bool,
    new: int = 10,
    held: int = 7,
    precision: torch.dtype = torch.float32,
    kept: KeptSteps | None = None,
    **changes: Any,
) -> tuple[dict[str, Tensor], Objective]:
    net = seeded_resnet18(CLASSES, 2, "cifar", 0)
    net.precision = precision
    objective = objective_of(net)
    settings: dict[str, Any] = {"epochs": 3, "batch_size": 4, **changes}
    chunk, buffer = samples(new, CURRENT, 1), samples(held, OLD, 2)
    generator = torch.Generator().manual_seed(3)
    train(
        net, chunk, buffer, objective, TrainingConfig(**settings), PREPROCESS, generator, captured=captured, kept=kept
    )
    return net.state_dict(), objective


each = pytest.mark.parametrize(
    ("name", "batching", "precision"),
    [
        *((name, "union", torch.float32) for name in OBJECTIVES),
        *(("balanced", batching, torch.bfloat16) for batching in sorted(EPOCHS)),
        ("full gradient", "paired", torch.float32),
    ],
)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[set[tuple[int, ...]]]:
    """For each training that took static steps the shapes of batch that it prepared."""
    found: list[set[tuple[int, ...]]] = []
    epoch = StaticSteps.epoch

    def watched(steps: StaticSteps, batches: list[Tensor]) -> Tensor:
        total = epoch(steps, batches)
        if not steps.__dict__.get("met"):
            steps.__dict__["met"] = set()
            found.append(steps.__dict__["met"])
        steps.__dict__["met"].update(tuple(shape) for shape in steps._steps)
        return total

    monkeypatch.setattr(StaticSteps, "epoch", watched)
    return found


@each
def test_static_steps_end_where_the_plain_loop_ends(name, batching, precision, shapes):
    plain, one = trained(OBJECTIVES[name], captured=False, batching=batching, precision=precision)
    assert not shapes
    static, other = trained(OBJECTIVES[name], captured=True, batching=batching, precision=precision)
    ragged = {"union": {(4,), (5,)}, "paired": {(8,), (4,)}, "random-replay": {(8,), (4,)}}
    assert shapes == [ragged[batching]]
    assert all(torch.equal(plain[key], static[key]) for key in plain)
    if isinstance(one, BalancedReplayLoss):
        assert isinstance(other, BalancedReplayLoss)
        assert one.weights == other.weights and one.balance.skipped == other.balance.skipped == 0
        assert len(set(one.weights)) == 3


@pytest.mark.slow
@each
def test_a_recorded_step_ends_where_the_plain_loop_ends(name, batching, precision, recordings):
    """A stand-in records and plays: nothing of the step lies in Python, nor in a tensor that is made anew."""
    plain, one = trained(OBJECTIVES[name], captured=False, batching=batching, precision=precision)
    played, other = trained(OBJECTIVES[name], captured=True, batching=batching, precision=precision)
    steps = {"union": (3, 1), "paired": (2, 1), "random-replay": (2, 1)}
    assert sorted(recording.played for recording in recordings) == sorted(3 * count for count in steps[batching])
    assert all(torch.equal(plain[key], played[key]) for key in plain)
    if isinstance(one, BalancedReplayLoss):
        assert isinstance(other, BalancedReplayLoss)
        assert one.weights == other.weights and len(set(one.weights)) == 3


class Waiting(TaskLoss):
    """A loss that reads a value back in every step."""

    def loss(self, logits: Tensor, features: Tensor, batch: Batch) -> Tensor:
        loss = super().loss(logits, features, batch)
        return loss * float(loss.detach() > 0)


def waiting(net: ResNet18) -> Objective:
    return Waiting(CURRENT, OLD)


def test_a_step_that_cannot_be_recorded_is_taken_eagerly_with_one_warning(recordings, caplog):
    kept = KeptSteps()
    logging.getLogger("fedkace_flwr").propagate = True
    try:
        played = [trained(waiting, captured=True, kept=kept)[0] for _ in range(2)]
    finally:
        logging.getLogger("fedkace_flwr").propagate = False
    # A record that reaches two loggers' handlers is captured twice; it is still one warning.
    (warning,) = (record.getMessage() for record in set(caplog.records) if record.levelno == logging.WARNING)
    assert "cannot be recorded" in warning and "waits for the device" in warning and "\n" not in warning
    assert [recording.played for recording in recordings] == [0]  # after one failure nothing more is tried
    plain, _ = trained(waiting, captured=False)
    assert all(torch.equal(plain[key], found[key]) for key in plain for found in played)


def distilled(net: ResNet18) -> Objective:
    teacher = torch.randn(10, CLASSES, generator=torch.Generator().manual_seed(5))
    return DistillationLoss(CURRENT | OLD, OLD, teacher, 0.2, 2.0)


def test_distillation_from_some_classes_can_be_recorded(recordings):
    plain, _ = trained(distilled, captured=False, held=0)
    played, _ = trained(distilled, captured=True, held=0)
    assert sorted(recording.played for recording in recordings) == [3, 6]
    assert all(torch.equal(plain[key], played[key]) for key in plain)


@dataclass(frozen=True)
class Round:
    """One training of one client."""

    name: str
    new: int
    held: int
    rate: float = 0.01

    def carried_out(self, net: ResNet18, kept: KeptSteps | None, **changes: Any) -> dict[str, Tensor]:
        """Train the process's network, which has received a model."""
        net.load_state_dict(seeded_resnet18(CLASSES, 2, "cifar", self.new + self.held).state_dict())
        objective = (OBJECTIVES | {"distilled": distilled})[self.name](net)
        settings = TrainingConfig(epochs=2, batch_size=4, learning_rate=self.rate, **changes)
        chunk, buffer = samples(self.new, CURRENT, self.new), samples(self.held, OLD, self.held)
        generators = [torch.Generator().manual_seed(seed) for seed in (self.new, self.held)]
        options: dict[str, Any] = {"captured": kept is not None, "kept": kept, "augmentation": generators[1]}
        train(net, chunk, buffer, objective, settings, PREPROCESS, generators[0], **options)
        weights = getattr(objective, "weights", [])
        return {name: tensor.clone() for name, tensor in net.state_dict().items()} | {"weights": torch.tensor(weights)}


def same_in_all(rounds: list[Round], room: int, **changes: Any) -> None:
    nets, kept = [seeded_resnet18(CLASSES, 2, "cifar", 0) for _ in range(2)], KeptSteps(room)
    for each in rounds:
        plain, played = each.carried_out(nets[0], None, **changes), each.carried_out(nets[1], kept, **changes)
        assert all(torch.equal(plain[key], played[key]) for key in plain), each


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OBJECTIVES, "distilled"])
@pytest.mark.parametrize(
    "changes", [{}, {"augment": "flip-shift", "logit_adjustment": 1.0}], ids=["plain", "augmented"]
)
def test_a_step_is_recorded_once_and_serves_all_rounds_and_clients(name, changes, recordings):
    """Whole batches of 4 and a rest of 2; the first round has no buffer, which is another step for a balanced loss."""
    held = [0, 4, 8, 0, 4] if name != "distilled" else [0, 0, 0, 0, 0]
    same_in_all([Round(name, 10, each, 0.01 * (1 + each)) for each in held], 18, **changes)
    kinds = 2 if "balanced" in name or name == "full gradient" else 1
    assert len(recordings) == 2 * kinds
    steps = sum(2 * -(-(10 + each) // 4) for each in held)
    assert sum(recording.played for recording in recordings) == steps


def test_more_samples_than_there_is_room_for_begin_anew(recordings):
    same_in_all([Round("task", 8, 0), Round("task", 8, 4), Round("task", 8, 8)], 0)
    assert len(recordings) == 2  # 8 samples, then room for 16


def test_another_loss_shape_or_optimiser_is_another_step(recordings):
    rounds = [Round("task", 8, 0), Round("temperature", 8, 0), Round("task", 8, 0)]
    same_in_all(rounds, 8)
    assert len(recordings) == 2
    net, kept = seeded_resnet18(CLASSES, 2, "cifar", 0), KeptSteps(8)
    for decay in (0.0, 0.1, 0.1):
        Round("task", 8, 0).carried_out(net, kept, weight_decay=decay)
    assert len(recordings) == 4
    another = seeded_resnet18(CLASSES, 2, "cifar", 0)
    Round("task", 8, 0).carried_out(another, kept, weight_decay=0.1)
    assert len(recordings) == 5
    for word in ("sgd", "sgd:0.9", "sgd:0.9", "nesterov"):
        Round("task", 8, 0).carried_out(another, kept, weight_decay=0.1, optimiser=word)
    assert len(recordings) == 8


@pytest.mark.parametrize("word", ["sgd", "sgd:0.9", "nesterov"])
def test_a_recorded_step_of_sgd_serves_all_rounds(word, recordings):
    same_in_all([Round("task", 8, held, 0.01 * (1 + held)) for held in (0, 8, 0)], 16, optimiser=word)
    assert len(recordings) == 1


def test_a_loss_that_hides_tensors_is_recorded_each_time(recordings):
    """What a closure holds cannot be replaced, so that a kept recording would go on reading it."""

    def hidden(net: ResNet18) -> Objective:
        loss, factor = TaskLoss(CURRENT, OLD), torch.tensor(float(len(recordings) + 1))
        plain = loss.loss
        loss.loss = lambda logits, features, batch: factor * plain(logits, features, batch)  # type: ignore[method-assign]
        return loss

    kept = KeptSteps()
    net = seeded_resnet18(CLASSES, 2, "cifar", 0)
    for _ in range(2):
        settings = TrainingConfig(epochs=1, batch_size=4)
        data = samples(8, CURRENT, 1), samples(0, OLD, 2)
        train(net, *data, hidden(net), settings, PREPROCESS, torch.Generator(), captured=True, kept=kept)
    assert [recording.played for recording in recordings] == [2, 2]


def test_a_recording_that_fails_later_keeps_the_ones_before(recordings):
    """The ragged last batch of the first epoch fails; whole batches go on being played."""

    class Ragged(TaskLoss):
        def loss(self, logits: Tensor, features: Tensor, batch: Batch) -> Tensor:
            loss = super().loss(logits, features, batch)
            return loss if len(batch.labels) == 4 else loss * float(loss.detach() > 0)

    outcomes = [trained(lambda net: Ragged(CURRENT, OLD), captured=captured)[0] for captured in (False, True)]
    assert [recording.played for recording in recordings] == [9, 0]
    assert all(torch.equal(outcomes[0][key], outcomes[1][key]) for key in outcomes[0])


@pytest.mark.parametrize(("new", "held", "size"), [(2, 0, 4), (9, 0, 4), (3, 5, 4), (1, 1, 2), (6, 3, 32)])
def test_small_rounds_and_empty_buffers_are_the_same_too(new, held, size):
    runs = [
        trained(OBJECTIVES["balanced"], captured=captured, new=new, held=held, batch_size=size)
        for captured in (False, True)
    ]
    (plain, one), (static, other) = runs
    assert all(torch.equal(plain[key], static[key]) for key in plain)
    assert isinstance(one, BalancedReplayLoss) and isinstance(other, BalancedReplayLoss)
    assert one.weights == other.weights
    assert one.balance.skipped == other.balance.skipped


def test_a_loss_that_is_no_number_is_the_same_error():
    with pytest.raises(RunError, match="not finite; try a learning-rate below 1e"):
        trained(OBJECTIVES["balanced"], captured=True, learning_rate=1e30)


def test_a_hook_between_steps_or_an_optimiser_to_continue_with_takes_the_plain_loop(shapes):
    settings, called = TrainingConfig(epochs=1, batch_size=4), []
    for more in ("hook", "optimiser"):
        net = seeded_resnet18(CLASSES, 2, "cifar", 0)
        train(
            net,
            samples(8, CURRENT, 1),
            samples(0, OLD, 2),
            TaskLoss(CURRENT, OLD),
            settings,
            PREPROCESS,
            torch.Generator(),
            optimiser=optimiser_of(net, settings) if more == "optimiser" else None,
            after_step=(lambda *step: called.append(step)) if more == "hook" else None,
            captured=True,
        )
    assert called == [(1, 0.5), (1, 1.0)]
    assert shapes == []


def test_warm_up_steps_leave_no_trace():
    """What a recording does before it records: steps that change everything, taken back in place."""
    net = seeded_resnet18(CLASSES, 2, "cifar", 0).train()
    objective = BalancedReplayLoss(CURRENT, OLD, GradientBalance())
    optimiser = optimiser_of(net, TrainingConfig(), capturable=True)
    pool = training.pool_of(samples(6, CURRENT, 1), samples(4, OLD, 2), PREPROCESS)
    objective.begin_epoch(1.0, 1.0)

    def changed() -> list[Tensor]:
        return tensors_in(net, optimiser, objective)

    before = {id(tensor): (tensor, tensor.data_ptr(), tensor.detach().clone()) for tensor in changed()}
    for _ in range(2):  # the second time the optimiser and the balance have something to remember
        with undone(changed):
            take_step(net, pool, objective, optimiser, torch.arange(10))
            assert not torch.equal(net.output.weight, before[id(net.output.weight)][2])
            assert len(changed()) > len(before)
        assert all(tensor.data_ptr() == place for tensor, place, _ in before.values())
        assert all(torch.equal(tensor, value) for tensor, _, value in before.values())
        assert all(not bool(tensor.any()) for tensor in changed() if id(tensor) not in before)
