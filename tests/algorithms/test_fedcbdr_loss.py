"""FedCBDR: the loss with temperatures."""

import pytest
import torch
from torch import Tensor

from fedkace_flwr.algorithms.fedcbdr_loss import TemperatureLoss
from fedkace_flwr.training.losses import Batch, TaskLoss


def objective(taus: tuple[float, float] = (0.9, 1.1), weights: tuple[float, float] = (1.1, 0.9)) -> TemperatureLoss:
    new = torch.tensor([False, False, True])
    return TemperatureLoss(
        torch.ones(3, dtype=torch.bool),
        new,
        tau_old=taus[0],
        tau_new=taus[1],
        weight_old=weights[0],
        weight_new=weights[1],
    )


def batch_of(labels: list[int], replayed: list[bool]) -> tuple[Tensor, Batch]:
    logits = torch.tensor([[2.0, 1.0, 0.5]] * len(labels), dtype=torch.float64, requires_grad=True)
    return logits, Batch(torch.empty(0), torch.tensor(labels), torch.tensor(replayed), torch.arange(len(labels)))


@pytest.mark.parametrize(
    ("labels", "replayed", "weights", "expected"),
    [
        ([0], [True], (1.0, 1.0), 0.405413),
        ([2], [False], (1.0, 1.0), 2.173090),
        ([0, 2], [True, False], (1.1, 0.9), 2.401736),
        ([0, 0, 2], [True, True, False], (1.1, 0.9), 2.401736),  # a mean on each side
        ([2], [False], (1.1, 0.9), 0.9 * 2.173090),  # no replayed sample: its term is left out
        ([2], [True], (1.1, 0.9), 1.1 * 2.173090),  # a replayed sample of a class of the chunk
    ],
)
def test_the_loss_worked_by_hand(
    labels: list[int], replayed: list[bool], weights: tuple[float, float], expected: float
) -> None:
    logits, batch = batch_of(labels, replayed)
    assert objective(weights=weights).loss(logits, torch.empty(0), batch).item() == pytest.approx(expected, abs=2e-6)


def test_without_temperatures_and_weights_it_is_twice_the_plain_loss() -> None:
    logits, batch = batch_of([0, 2, 1, 2], [True, True, False, False])
    everything = torch.ones(3, dtype=torch.bool)
    plain = TaskLoss(everything, everything).loss(logits, torch.empty(0), batch)
    scaled = objective(taus=(1.0, 1.0), weights=(1.0, 1.0)).loss(logits, torch.empty(0), batch)
    assert scaled.item() == pytest.approx(2 * plain.item(), rel=1e-6)


def test_a_class_not_met_gets_no_gradient() -> None:
    logits, batch = batch_of([0, 1], [True, False])
    seen = torch.tensor([True, True, False])
    TemperatureLoss(seen, seen, tau_old=0.9, tau_new=1.1, weight_old=1.1, weight_new=0.9).loss(
        logits, torch.empty(0), batch
    ).backward()
    assert logits.grad is not None and logits.grad[:, 2].tolist() == [0.0, 0.0] and bool(logits.grad[:, 0].all())
