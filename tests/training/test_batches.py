"""What an epoch draws (Reading ``batching``)."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedkace_flwr.training.batches import EPOCHS, Epoch, paired_epoch, samples_in_epoch, union_epoch


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(epoch: Epoch) -> Counter[int]:
    return Counter(torch.cat(epoch.batches).tolist())


SIZES = {"chunk": st.integers(1, 60), "buffer": st.integers(0, 60), "size": st.integers(2, 20)}


@given(chunk=SIZES["chunk"], buffer=SIZES["buffer"], size=SIZES["size"], seed=st.integers(0, 10**6))
def test_union_covers_every_position_once_without_lonely_samples(chunk, buffer, size, seed):
    epoch = union_epoch(chunk, buffer, size, generator(seed))
    assert drawn(epoch) == dict.fromkeys(range(chunk + buffer), 1)
    lengths = [len(batch) for batch in epoch.batches]
    assert all(length == size for length in lengths[:-1])
    assert lengths[-1] <= size + 1
    assert min(lengths) > 1 or chunk + buffer == 1
    assert (epoch.task_draws, epoch.replay_draws) == (1.0, 1.0 if buffer else 0.0)


@given(chunk=SIZES["chunk"], buffer=st.integers(1, 60), size=SIZES["size"], seed=st.integers(0, 10**6))
def test_paired_halves_are_equal_the_longer_side_passed_once_the_shorter_cycled_evenly(chunk, buffer, size, seed):
    epoch = paired_epoch(chunk, buffer, size, generator(seed))
    for batch in epoch.batches[:-1]:
        assert len(batch) == 2 * size
    for batch in epoch.batches:
        new = int((batch < chunk).sum())
        assert 2 * new == len(batch) >= 2
    counts = drawn(epoch)
    sides = [[counts[p] for p in range(chunk)], [counts[p] for p in range(chunk, chunk + buffer)]]
    assert sum(counts.values()) == sum(map(sum, sides)) == 2 * max(chunk, buffer)
    longer, shorter = sorted(sides, key=len, reverse=True)
    assert set(longer) == {1}
    assert max(shorter) - min(shorter) <= 1
    assert epoch.task_draws == pytest.approx(sum(sides[0]) / chunk)
    assert epoch.replay_draws == pytest.approx(sum(sides[1]) / buffer)


@pytest.mark.parametrize("size", [2, 5, 32])
def test_paired_without_buffer_passes_once_over_the_chunk(size):
    epoch = paired_epoch(11, 0, size, generator(0))
    assert drawn(epoch) == dict.fromkeys(range(11), 1)
    assert min(len(batch) for batch in epoch.batches) > 1
    assert (epoch.task_draws, epoch.replay_draws) == (1.0, 0.0)


@pytest.mark.parametrize("batching", sorted(EPOCHS))
def test_epochs_are_shuffled_repeat_with_the_seed_and_differ_along_it(batching):
    first, again = generator(5), generator(5)
    epochs = [EPOCHS[batching](40, 20, 8, first) for _ in range(2)]
    repeated = [EPOCHS[batching](40, 20, 8, again) for _ in range(2)]
    orders = [torch.cat(epoch.batches).tolist() for epoch in epochs]
    assert orders == [torch.cat(epoch.batches).tolist() for epoch in repeated]
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])


@pytest.mark.parametrize("batching", sorted(EPOCHS))
@given(chunk=SIZES["chunk"], buffer=st.just(0) | st.integers(21, 60), size=SIZES["size"])
def test_the_samples_of_an_epoch_are_counted_without_drawing_them(batching, chunk, buffer, size):
    epoch = EPOCHS[batching](chunk, buffer, size, generator(0))
    assert samples_in_epoch(batching, chunk, buffer) == sum(map(len, epoch.batches))


def test_union_mixes_both_sides():
    epoch = union_epoch(500, 500, 100, generator(0))
    shares = [float((batch < 500).double().mean()) for batch in epoch.batches]
    assert all(0.25 < share < 0.75 for share in shares)
