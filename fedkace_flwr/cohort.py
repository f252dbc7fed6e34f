"""Several clients' networks trained together: stacked, with one step for all of them.

A small network leaves a GPU mostly idle. Here each of K networks keeps its own samples, order, masks and replay
weight; a step takes a batch of each, their convolutions run as one grouped convolution, and one AdamW, which works
element by element, updates the stacked parameters. So every client ends where it would have ended alone, up to
rounding. Shapes: K clients, n samples of a client, B samples of its batch, C classes, F features.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from fedkace_flwr.batches import EPOCHS
from fedkace_flwr.config import TrainingConfig
from fedkace_flwr.errors import RunError
from fedkace_flwr.model import ResNet18
from fedkace_flwr.objectives import BalancedReplayLoss, Batch, Objective, TaskLoss
from fedkace_flwr.replay import masked_cross_entropy, with_bias_column
from fedkace_flwr.steps import Pool, StaticSteps, memory_of
from fedkace_flwr.training import (
    Preprocess,
    diverged,
    learning_rates,
    optimiser_of,
    pool_of,
    set_learning_rate,
    train,
)


@dataclass(frozen=True)
class Learner:
    """A network and what it is to learn.

    Attributes
    ----------
    net : ResNet18
        Trained in place.
    chunk, buffer : tuple of Tensor
        Images, uint8 (n, 3, H, W), and labels, int64 (n,).
    objective : Objective
        The loss.
    generator : torch.Generator
        Orders the samples.
    """

    net: ResNet18
    chunk: tuple[Tensor, Tensor]
    buffer: tuple[Tensor, Tensor]
    objective: Objective
    generator: torch.Generator


def stackable(objective: Objective) -> bool:
    """Whether learners with this loss can train together; one that changes an objective's loss is another one."""
    return type(objective) in _STACKED


def train_all(
    learners: Sequence[Learner], settings: TrainingConfig, preprocess: Preprocess, *, captured: bool = False
) -> list[RunError | None]:
    """Train learners, together those with as many samples of either kind and the same loss, the others alone.

    Parameters
    ----------
    learners : sequence of Learner
        Of networks that are alike but for their weights, on the device of ``preprocess``.
    settings, preprocess, captured
        As in :func:`fedkace_flwr.training.train`.

    Returns
    -------
    list of RunError or None
        For each learner what its training came to, were it to be raised.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, learner in enumerate(learners):
        groups.setdefault(_likeness(learner) or index, []).append(index)
    outcomes: list[RunError | None] = [None] * len(learners)
    for group in groups.values():
        members = [learners[index] for index in group]
        run = _train_stacked if len(group) > 1 else _train_alone
        for index, outcome in zip(group, run(members, settings, preprocess, captured), strict=True):
            outcomes[index] = outcome
    return outcomes


def _likeness(learner: Learner) -> tuple[Hashable, ...] | None:
    if not stackable(learner.objective):
        return None
    bias = isinstance(learner.objective, BalancedReplayLoss) and learner.objective.gradient_bias
    sizes = len(learner.chunk[1]), len(learner.buffer[1])
    return (*sizes, type(learner.objective), bias, learner.net.precision)


def _train_alone(
    learners: Sequence[Learner], settings: TrainingConfig, preprocess: Preprocess, captured: bool
) -> list[RunError | None]:
    (one,) = learners
    try:
        train(one.net, one.chunk, one.buffer, one.objective, settings, preprocess, one.generator, captured=captured)
    except RunError as error:
        return [error]
    return [None]


def _train_stacked(
    learners: Sequence[Learner], settings: TrainingConfig, preprocess: Preprocess, captured: bool
) -> list[RunError | None]:
    """As :func:`~fedkace_flwr.training.train` for all at once; one whose loss is not finite spoils its own alone."""
    stack = _Stack(learners, settings, preprocess, captured)
    sizes = len(learners[0].chunk[1]), len(learners[0].buffer[1])
    starts = torch.arange(len(learners)).unsqueeze(1) * sum(sizes)
    outcomes: list[RunError | None] = [None] * len(learners)
    for number, rate in enumerate(learning_rates(settings, range(settings.epochs)), start=1):
        epochs = [EPOCHS[settings.batching](*sizes, settings.batch_size, each.generator) for each in learners]
        batches = [torch.stack(orders) + starts for orders in zip(*(each.batches for each in epochs), strict=True)]
        finite = stack.epoch(batches, (epochs[0].task_draws, epochs[0].replay_draws), rate)
        for index, fine in enumerate(finite):
            if not fine and outcomes[index] is None:
                outcomes[index] = diverged(number, settings)
    stack.write_back()
    return outcomes


class _Stack:
    """The networks of some learners as one, with their samples, losses and optimiser."""

    def __init__(
        self, learners: Sequence[Learner], settings: TrainingConfig, preprocess: Preprocess, captured: bool
    ) -> None:
        self._nets = [learner.net.train() for learner in learners]
        whole = [_Whole(net) for net in self._nets]
        self._parameters, self._buffers = stack_module_state(whole)
        self._forward = vmap(partial(functional_call, whole[0]))
        pools = [pool_of(learner.chunk, learner.buffer, preprocess) for learner in learners]
        images, labels, replayed = (
            torch.cat([getattr(pool, name) for pool in pools]) for name in ("images", "labels", "replayed")
        )
        self._pool = Pool(images, labels, replayed, preprocess)
        self._losses = _STACKED[type(learners[0].objective)]([learner.objective for learner in learners])
        self._optimiser = optimiser_of(list(self._parameters.values()), settings, capturable=captured)
        self._total = torch.zeros(len(learners), device=preprocess.scale.device)
        self._steps = StaticSteps(self._take, self._changed, self._total) if captured else None

    def epoch(self, batches: Sequence[Tensor], draws: tuple[float, float], rate: float) -> list[bool]:
        """Take a step for each of the batches, positions (K, B); tells whose loss is finite."""
        set_learning_rate(self._optimiser, rate)
        self._losses.begin_epoch(*draws)
        if self._steps is not None:
            self._steps.epoch(batches)
        else:
            self._total.zero_()
            for order in batches:
                self._total += self._take(order.to(self._total.device))
        self._losses.end_epoch()
        return [bool(each) for each in self._total.isfinite().tolist()]

    @torch.no_grad()
    def write_back(self) -> None:
        """Give each network its own weights and statistics."""
        stacked = {**self._parameters, **self._buffers}
        for index, net in enumerate(self._nets):
            for name, tensor in _Whole(net).state_dict().items():
                tensor.copy_(stacked[name][index])

    def _take(self, positions: Tensor) -> Tensor:
        """A step of each, positions (K, B); returns their losses, (K,)."""
        batch = self._pool.batch(positions)
        images = batch.images.view(*positions.shape, *batch.images.shape[1:])
        logits, features = self._forward((self._parameters, self._buffers), (images,))
        losses = self._losses.losses(logits, features, batch)
        self._optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(losses.sum())  # each depends on its own network alone
        self._optimiser.step()
        return losses.detach()

    def _changed(self) -> list[Tensor]:
        memory = [*memory_of(self._optimiser), *self._losses.held()]
        return [*self._parameters.values(), *self._buffers.values(), *memory]


class _Whole(nn.Module):
    """A network that gives its features beside its logits."""

    def __init__(self, net: ResNet18) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.net.features(x)
        return self.net.output(features), features


class _StackedTask:
    """:class:`~fedkace_flwr.objectives.TaskLoss` of each of K learners."""

    def __init__(self, objectives: Sequence[TaskLoss]) -> None:
        masks = torch.stack([objective.masks for objective in objectives])
        self._masks, self._rows = masks, torch.arange(len(masks), device=masks.device).unsqueeze(1)
        self._objectives = objectives

    def begin_epoch(self, task_draws: float, replay_draws: float) -> None:
        for objective in self._objectives:
            objective.begin_epoch(task_draws, replay_draws)

    def losses(self, logits: Tensor, features: Tensor, batch: Batch) -> Tensor:
        """The loss of each, (K,); logits (K, B, C), features (K, B, F), the batch's labels and flags (K, B)."""
        return masked_cross_entropy(logits, batch.labels, self._masks_of(batch))[0].mean(dim=1)

    def held(self) -> list[Tensor]:
        return []

    def end_epoch(self) -> None:
        for objective in self._objectives:
            objective.end_epoch()

    def _masks_of(self, batch: Batch) -> Tensor:
        return self._masks[self._rows, batch.replayed.long()]


class _StackedReplay(_StackedTask):
    """:class:`~fedkace_flwr.objectives.BalancedReplayLoss` of each; their own balances set their weights."""

    def __init__(self, objectives: Sequence[BalancedReplayLoss]) -> None:
        super().__init__(objectives)
        self._balanced = objectives
        self._gradient_bias = objectives[0].gradient_bias
        self._replays = False
        # Weight less 1, (K, 1); draws of chunk and buffer, of all alike. In tensors, for a recorded step to read.
        self._excess = self._masks.new_zeros((len(objectives), 1), dtype=torch.float64)
        self._draws = self._masks.new_ones(2, dtype=torch.float64)
        self._sums: list[Tensor] = []

    def begin_epoch(self, task_draws: float, replay_draws: float) -> None:
        super().begin_epoch(task_draws, replay_draws)
        self._replays = replay_draws > 0
        weights = torch.tensor([[objective.weights[-1]] for objective in self._balanced], dtype=torch.float64)
        self._excess.copy_(weights - 1)
        self._draws.copy_(torch.tensor([task_draws, replay_draws], dtype=torch.float64))

    def losses(self, logits: Tensor, features: Tensor, batch: Batch) -> Tensor:
        losses, residual = masked_cross_entropy(logits, batch.labels, self._masks_of(batch))
        replayed = batch.replayed.to(losses.dtype)
        if self._replays:
            self._observe(residual, features.detach(), replayed)
        weighted: Tensor = losses * (1 + self._excess.to(losses.dtype) * replayed)
        return weighted.mean(dim=1)

    def _observe(self, residual: Tensor, features: Tensor, replayed: Tensor) -> None:
        known = with_bias_column(features) if self._gradient_bias else features
        task_draws, replay_draws = self._draws.to(residual.dtype)
        shares = (1 - replayed) / task_draws, replayed / replay_draws
        gradients = [(residual * share.unsqueeze(-1)).mT @ known for share in shares]
        if not self._sums:
            self._sums = [torch.zeros_like(gradient) for gradient in gradients]
        for total, gradient in zip(self._sums, gradients, strict=True):
            total.add_(gradient)

    def held(self) -> list[Tensor]:
        return self._sums

    def end_epoch(self) -> None:
        if self._sums:
            for objective, task, replay in zip(self._balanced, *self._sums, strict=True):
                objective.balance.observe(task=task, replay=replay)
        super().end_epoch()
        for total in self._sums:
            total.zero_()


_STACKED: dict[type, Callable[..., _StackedTask]] = {TaskLoss: _StackedTask, BalancedReplayLoss: _StackedReplay}
