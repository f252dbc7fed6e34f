"""Logits stored with a buffer, and the loss over them."""

import pytest
import torch
from torch import Tensor

from fedkace_flwr.samples import Samples
from fedkace_flwr.training.losses import Batch, TaskLoss
from fedkace_flwr.training.stored_logits import StoredLogits, StoredLogitsLoss, identities

SEEN = torch.tensor([True, True, False])


def by_id(*ids: int) -> Samples:
    content = torch.tensor(ids, dtype=torch.int64)
    return Samples.arrived(content, content % 3, 1)


def by_pixel(*values: int) -> Samples:
    content = torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 4, 4)
    return Samples.arrived(content, torch.zeros(len(values), dtype=torch.int64), 1)


@pytest.mark.parametrize("made", [by_id, by_pixel])
def test_rows_are_found_again_in_any_order_and_unknown_samples_know_no_class(made) -> None:  # type: ignore[no-untyped-def]
    stored = StoredLogits.none(3).joined_by(made(5, 6, 7), torch.arange(9.0).view(3, 3), SEEN)
    stored = stored.joined_by(made(8), torch.full((1, 3), 9.0), torch.ones(3, dtype=torch.bool))
    found = StoredLogits.read(stored.tensors(), 3).of(made(8, 6, 9))
    assert found.logits.tolist() == [[9, 9, 9], [3, 4, 5], [0, 0, 0]]
    assert found.known.tolist() == [[True] * 3, SEEN.tolist(), [False] * 3]


def test_pixels_and_label_tell_samples_apart() -> None:
    one = by_pixel(5, 5)
    relabelled = Samples(one.content, torch.tensor([0, 1]), one.rounds)
    assert identities(one)[0] == identities(one)[1]
    assert identities(relabelled)[0] != identities(relabelled)[1]
    assert identities(by_pixel(5))[0] != identities(by_pixel(6))[0]


def test_nothing_is_stored_at_first() -> None:
    found = StoredLogits.read({}, 3).of(by_id(1, 2))
    assert not found.known.any() and found.logits.shape == (2, 3)


def test_the_loss_by_hand() -> None:
    """Two replayed samples: one with two known classes, one whose logits are not known."""
    stored = StoredLogits.none(3).joined_by(by_id(4), torch.tensor([[1.0, 2.0, 7.0]]), SEEN).of(by_id(4, 5))
    seen = torch.ones(3, dtype=torch.bool)
    plain = TaskLoss(seen, seen)
    loss = StoredLogitsLoss(plain, stored, 0.5, chunk=10)
    logits = torch.zeros(3, 3, requires_grad=True)
    batch = Batch(torch.empty(0), torch.tensor([0, 1, 2]), torch.tensor([False, True, True]), torch.tensor([3, 10, 11]))

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits)[0]

    expected = float(plain.loss(logits, logits, batch)) + 0.5 * (1**2 + 2**2) / 2
    value = loss.loss(logits, logits, batch)
    assert float(value) == pytest.approx(expected)
    pull = gradient(value) - gradient(plain.loss(logits, logits, batch))
    assert pull.tolist() == [[0, 0, 0], pytest.approx([-0.5, -1.0, 0]), [0, 0, 0]]


def test_without_a_replayed_sample_in_the_batch_it_is_the_other_loss() -> None:
    seen = torch.ones(3, dtype=torch.bool)
    stored = StoredLogits.none(3).joined_by(by_id(4), torch.ones(1, 3), SEEN).of(by_id(4))
    logits = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    batch = Batch(torch.empty(0), torch.tensor([0, 1]), torch.tensor([False, False]), torch.tensor([0, 1]))
    loss = StoredLogitsLoss(TaskLoss(seen, seen), stored, 3.0, chunk=2)
    assert torch.equal(loss.loss(logits, logits, batch), TaskLoss(seen, seen).loss(logits, logits, batch))
