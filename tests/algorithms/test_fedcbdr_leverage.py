"""FedCBDR: leverage scores through masks, and the draw."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.doubles.leverage import pinv_leverage
from torch import Tensor

from fedkace_flwr.algorithms import fedcbdr_leverage as cbdr
from fedkace_flwr.seeding import generator_for


def federated_leverage(
    clients: list[Tensor], seed: int, *, joint: bool = True, off: bool | None = None
) -> list[Tensor]:
    """As the two halves do it; ``off``: the clients take their masks off again."""
    lefts = [cbdr.random_orthogonal(len(x), generator_for(seed, "p", k)) for k, x in enumerate(clients)]
    right = cbdr.random_orthogonal(clients[0].shape[1], generator_for(seed, "q"))
    masked = [cbdr.mask(x, left, right) for x, left in zip(clients, lefts, strict=True)]
    together = torch.split(cbdr.left_factor(torch.cat(masked)), [len(x) for x in clients])
    rows = together if joint else [cbdr.left_factor(x) for x in masked]
    off = joint if off is None else off
    return [cbdr.leverage(cbdr.unmask(u, p) if off else u) for u, p in zip(rows, lefts, strict=True)]


def features(seed: int, sizes: Iterable[int] = (30, 22, 41), width: int = 12) -> list[Tensor]:
    generator = generator_for(seed, "features")
    return [torch.randn(n, width, dtype=torch.float64, generator=generator).relu().exp() - 1 for n in sizes]


def test_a_random_orthogonal_matrix_is_orthogonal_and_the_streams() -> None:
    first, again, other = (cbdr.random_orthogonal(20, generator_for(0, "q", round)) for round in (1, 1, 2))
    assert torch.allclose(first @ first.T, torch.eye(20, dtype=torch.float64), atol=1e-12)
    assert torch.equal(first, again) and not torch.allclose(first, other)


@pytest.mark.parametrize("seed", range(3))
def test_unmasked_scores_are_the_leverage_of_all_features_together(seed: int) -> None:
    clients = features(seed)
    scores = torch.cat(federated_leverage(clients, seed))
    stacked = torch.cat(clients)
    plain = torch.from_numpy(np.linalg.svd(stacked.numpy(), full_matrices=False)[0]).square().sum(dim=1)
    assert torch.allclose(scores, plain, rtol=0, atol=1e-8)
    assert torch.allclose(scores, pinv_leverage(stacked), rtol=0, atol=1e-8)
    assert float(scores.sum()) == pytest.approx(12, abs=1e-8)
    assert float(scores.min()) >= 0 and float(scores.max()) <= 1 + 1e-9


def test_scores_do_not_depend_on_the_masks() -> None:
    clients = features(3)
    for one, other in zip(federated_leverage(clients, 1), federated_leverage(clients, 2), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-8)


def test_with_the_mask_on_only_a_clients_total_is_right() -> None:
    clients = features(4)
    true, masked = federated_leverage(clients, 1), federated_leverage(clients, 1, off=False)
    for one, other in zip(true, masked, strict=True):
        assert float(one.sum()) == pytest.approx(float(other.sum()), abs=1e-8)
        assert not torch.allclose(one, other, rtol=0, atol=1e-2)


def test_dead_and_repeated_features_change_nothing() -> None:
    clients = features(6)
    wider = [torch.cat([x, torch.zeros(len(x), 3).double(), x[:, :4], 2 * x[:, 1:2]], dim=1) for x in clients]
    for one, other in zip(federated_leverage(clients, 1), federated_leverage(wider, 1), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-8)
    assert sum(float(s.sum()) for s in federated_leverage(wider, 2)) == pytest.approx(12, abs=1e-8)


def test_fewer_samples_than_features_and_no_features_at_all() -> None:
    few = federated_leverage(features(7, sizes=(3, 4), width=12), 1)
    assert torch.allclose(torch.cat(few), torch.ones(7, dtype=torch.float64), atol=1e-8)
    none = federated_leverage([torch.zeros(5, 4).double(), torch.zeros(2, 4).double()], 1)
    assert torch.cat(none).tolist() == [0.0] * 7


def test_scores_survive_features_of_any_size() -> None:
    clients = features(8)
    for factor in (1e-200, 1e200):
        for one, other in zip(
            federated_leverage(clients, 1), federated_leverage([factor * x for x in clients], 1), strict=True
        ):
            assert torch.allclose(one, other, rtol=0, atol=1e-8)


# The draw


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(6, 70), st.integers(0, 10**6))
def test_a_draw_is_distinct_full_and_as_even_as_the_classes_allow(labels: list[int], capacity: int, seed: int) -> None:
    classes = torch.tensor(labels)
    scores = torch.rand(len(labels), dtype=torch.float64, generator=generator_for(seed, "scores"))
    kept = cbdr.draw(scores, classes, capacity, generator_for(seed, "draw"))
    assert len(set(kept.tolist())) == len(kept) == min(capacity, len(labels))
    assert kept.tolist() == sorted(kept.tolist()) and int(kept.min()) >= 0 and int(kept.max()) < len(labels)
    before, after = (torch.bincount(part, minlength=6) for part in (classes, classes[kept]))
    assert bool((after[before > 0] > 0).all())
    open_classes = after[after < before]
    assert len(open_classes) == 0 or int(after.max()) - int(open_classes.min()) <= 1


def test_how_many_of_each_class_does_not_depend_on_the_scores() -> None:
    labels = torch.tensor([0] * 9 + [1] * 9 + [2] * 9)
    ones, zeros = (torch.full((27,), value, dtype=torch.float64) for value in (1.0, 0.0))
    for seed in range(5):
        first, second = (labels[cbdr.draw(s, labels, 11, generator_for(seed))] for s in (ones, zeros))
        assert torch.bincount(first).tolist() == torch.bincount(second).tolist()


def test_a_sample_is_drawn_in_proportion_to_its_score() -> None:
    scores, labels = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    generator = generator_for(0, "proportion")
    count = torch.bincount(torch.cat([cbdr.draw(scores, labels, 1, generator) for _ in range(3000)]), minlength=4)
    assert torch.allclose(count.double() / 3000, scores, atol=0.03)


def test_samples_without_leverage_fill_what_the_others_leave() -> None:
    scores = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0], dtype=torch.float64)
    kept = cbdr.draw(scores, torch.zeros(5, dtype=torch.int64), 3, generator_for(0)).tolist()
    assert {1, 3} < set(kept) and len(kept) == 3
