"""Clients trained together end where each ends alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedkace_flwr.cohort import Learner, train_all
from fedkace_flwr.config import TrainingConfig
from fedkace_flwr.errors import RunError
from fedkace_flwr.model import seeded_resnet18
from fedkace_flwr.objectives import BalancedReplayLoss, FullGradientReplayLoss, Objective, TaskLoss
from fedkace_flwr.replay import GradientBalance
from fedkace_flwr.training import Preprocess

CLASSES = 6
SINGLE = Preprocess.by_statistics((0.4, 0.5, 0.6), (0.3, 0.25, 0.2), torch.device("cpu"))
DOUBLE = Preprocess(SINGLE.scale.double(), SINGLE.shift.double())
Kind = Callable[[Tensor, Tensor], Objective]


def balanced(current: Tensor, old: Tensor) -> Objective:
    return BalancedReplayLoss(current, old, GradientBalance())


def balanced_with_bias(current: Tensor, old: Tensor) -> Objective:
    return BalancedReplayLoss(current, old, GradientBalance("mean", task_size=10, replay_size=7), gradient_bias=True)


def samples(count: int, allowed: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
    classes = allowed.nonzero().squeeze(1)
    return images, classes[torch.randint(len(classes), (count,), generator=generator)]


def learner(number: int, kind: Kind, new: int = 10, held: int = 7, dtype: torch.dtype = torch.float64) -> Learner:
    """A client whose weights, samples, classes and order are its own."""
    label = torch.arange(CLASSES)
    current, old = (label - number) % CLASSES < 2, (label - number - 1) % CLASSES < 3
    net = seeded_resnet18(CLASSES, 2, "cifar", number).to(dtype)
    chunk, buffer = samples(new, current, 10 + number), samples(held, old, 20 + number)
    return Learner(net, chunk, buffer, kind(current, old), torch.Generator().manual_seed(30 + number))


def state_of(one: Learner) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in one.net.state_dict().items()}


def both_ways(
    make: Callable[[int], Learner], count: int, settings: TrainingConfig, preprocess: Preprocess = DOUBLE, **more: bool
) -> tuple[list[Learner], list[Learner]]:
    together, alone = ([make(number) for number in range(count)] for _ in range(2))
    assert train_all(together, settings, preprocess, **more) == [None] * count
    for one in alone:
        assert train_all([one], settings, preprocess) == [None]
    return together, alone


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("batching", ["union", "paired", "random-replay"])
@pytest.mark.parametrize("kind", [TaskLoss, balanced, balanced_with_bias])
def test_each_ends_as_it_would_alone(kind, batching, captured, stacks):
    """Two epochs with replay, a ragged last batch; what is left is rounding, in float64."""
    settings = TrainingConfig(epochs=2, batch_size=4, batching=batching)
    together, alone = both_ways(lambda number: learner(number, kind), 3, settings, captured=captured)
    assert stacks == [3]
    for one, other in zip(together, alone, strict=True):
        for name, value in state_of(other).items():
            assert torch.allclose(one.net.state_dict()[name], value, rtol=1e-6, atol=1e-9), name
        assert int(one.net.state_dict()["stem.1.num_batches_tracked"]) > 0
        assert torch.equal(one.generator.get_state(), other.generator.get_state())
        if isinstance(one.objective, BalancedReplayLoss):
            assert isinstance(other.objective, BalancedReplayLoss)
            assert one.objective.weights == pytest.approx(other.objective.weights, rel=1e-8)
            assert one.objective.weights[1] != 1.0
            assert one.objective.balance.weight == pytest.approx(other.objective.balance.weight, rel=1e-6)
    assert len({float(one.net.output.weight.detach().sum()) for one in together}) == 3


@pytest.mark.parametrize("kind", [TaskLoss, balanced_with_bias])
def test_a_recorded_step_of_several_is_the_same_to_the_last_bit(kind, recordings):
    settings = TrainingConfig(epochs=3, batch_size=4)
    called, played = ([learner(number, kind, dtype=torch.float32) for number in range(3)] for _ in range(2))
    assert train_all(called, settings, SINGLE) == train_all(played, settings, SINGLE, captured=True) == [None] * 3
    assert sorted(recording.played for recording in recordings) == [3, 9]
    for one, other in zip(called, played, strict=True):
        for name, value in state_of(one).items():
            assert torch.equal(value, other.net.state_dict()[name]), name
        if isinstance(one.objective, BalancedReplayLoss):
            assert one.objective.weights == other.objective.weights and one.objective.weights[2] != 1.0


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_single_and_half_precision_stay_close_after_one_epoch(precision):
    def make(number: int) -> Learner:
        one = learner(number, balanced, dtype=torch.float32)
        one.net.precision = precision
        return one

    settings = TrainingConfig(epochs=1, batch_size=9, learning_rate=1e-4)
    together, alone = both_ways(make, 3, settings, SINGLE)
    for one, other in zip(together, alone, strict=True):
        moved = other.net.output.weight - make(0).net.output.weight
        assert float(moved.detach().abs().max()) > 1e-4
        assert torch.allclose(one.net.output.weight, other.net.output.weight, rtol=0, atol=2.1e-4)
        statistics = [each.net.state_dict()["stem.1.running_var"] for each in (one, other)]
        assert torch.allclose(*statistics, rtol=2e-2, atol=0)


def test_only_those_with_as_many_samples_and_the_same_loss_go_together(stacks):
    full = seeded_resnet18(CLASSES, 2, "cifar", 9).double()
    learners = [
        learner(0, balanced),
        learner(1, balanced, held=6),
        learner(2, balanced),
        learner(3, TaskLoss),
        learner(4, balanced, held=6),
        Learner(
            full,
            *(learner(5, balanced).chunk, learner(5, balanced).buffer),
            FullGradientReplayLoss(
                (torch.arange(CLASSES) - 5) % CLASSES < 2,
                (torch.arange(CLASSES) - 6) % CLASSES < 3,
                GradientBalance(),
                list(full.parameters()),
            ),
            torch.Generator(),
        ),
    ]
    before = [state_of(one) for one in learners]
    assert train_all(learners, TrainingConfig(epochs=1, batch_size=4), DOUBLE) == [None] * 6
    assert sorted(stacks) == [2, 2]
    for one, state in zip(learners, before, strict=True):
        assert not torch.equal(one.net.output.weight, state["output.weight"])


def test_an_empty_buffer_leaves_the_weight_at_one():
    settings = TrainingConfig(epochs=3, batch_size=4)
    together, alone = both_ways(lambda number: learner(number, balanced, held=0), 2, settings)
    for one, other in zip(together, alone, strict=True):
        assert isinstance(one.objective, BalancedReplayLoss)
        assert one.objective.weights == [1.0] * 3 and one.objective.balance.skipped == 0
        assert torch.allclose(one.net.output.weight, other.net.output.weight, rtol=1e-6, atol=1e-9)


def test_one_that_diverges_fails_alone():
    settings = TrainingConfig(epochs=2, batch_size=4)
    learners = [learner(number, balanced) for number in range(3)]
    with torch.no_grad():
        learners[1].net.output.weight.fill_(torch.nan)
    outcomes = train_all(learners, settings, DOUBLE)
    assert outcomes[0] is None and outcomes[2] is None
    assert isinstance(outcomes[1], RunError) and str(outcomes[1]).startswith("epoch 1: the training loss is not finite")
    fine = learner(2, balanced)
    assert train_all([fine], settings, DOUBLE) == [None]
    assert torch.allclose(learners[2].net.output.weight, fine.net.output.weight, rtol=1e-6, atol=1e-9)
