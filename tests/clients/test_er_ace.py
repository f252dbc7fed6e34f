"""ER-ACE: the asymmetric cross-entropy."""

from math import exp, log

import pytest
import torch
from support.gradients import gradient_of

from fedkace_flwr.clients.er_ace import AsymmetricLoss
from fedkace_flwr.training.losses import Batch


def test_new_samples_compete_with_the_chunks_classes_and_replayed_ones_with_all_met() -> None:
    """By hand: classes 0 and 1 are old, 2 and 3 are the chunk's, and 4 has not been met."""
    loss = AsymmetricLoss(torch.tensor([0, 0, 1, 1, 0]).bool(), torch.tensor([1, 1, 1, 1, 0]).bool())
    logits = torch.tensor([[5.0, 1, 2, 0, 9], [0, 3, 1, 1, 9], [1, 2, 0, 0, 9]], requires_grad=True)
    batch = Batch(torch.empty(0), torch.tensor([2, 3, 0]), torch.tensor([0, 0, 1]).bool(), torch.arange(3))
    value = loss.loss(logits, logits, batch)
    new = (log(1 + exp(-2)) + log(2)) / 2
    replayed = log(exp(1) + exp(2) + 2) - 1
    assert float(value) == pytest.approx(new + replayed)
    torch.autograd.backward(value)
    moved = gradient_of(logits) != 0
    assert moved.tolist() == [[0, 0, 1, 1, 0], [0, 0, 1, 1, 0], [1, 1, 1, 1, 0]]


@pytest.mark.parametrize("replayed", [False, True])
def test_a_batch_of_one_kind_alone_is_that_kinds_mean(*, replayed: bool) -> None:
    loss = AsymmetricLoss(torch.tensor([0, 1, 1]).bool(), torch.ones(3).bool())
    batch = Batch(torch.empty(0), torch.tensor([1, 2]), torch.full((2,), replayed), torch.arange(2))
    value = loss.loss(torch.zeros(2, 3), torch.zeros(2, 3), batch)
    assert float(value) == pytest.approx(log(3 if replayed else 2))
