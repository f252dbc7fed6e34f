"""Labelled samples, by id and by pixel through one interface."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedkace_flwr.samples import Form, Samples

SHAPE = (3, 2, 2)
FORM = Form(np.dtype(np.uint8), SHAPE)
IMAGES = torch.arange(40 * 12, dtype=torch.int64).remainder(256).to(torch.uint8).reshape(40, *SHAPE)
LABELS = torch.arange(40) % 6


def fetch(ids: Tensor) -> Tensor:
    return IMAGES[ids]


def no_fetch(ids: Tensor) -> Tensor:
    raise AssertionError("samples held by pixel need nothing fetched")


def by_id(ids: list[int], round_number: int) -> Samples:
    chosen = torch.tensor(ids, dtype=torch.int64)
    return Samples.arrived(chosen, LABELS[chosen], round_number)


def by_pixel(ids: list[int], round_number: int) -> Samples:
    chosen = torch.tensor(ids, dtype=torch.int64)
    return Samples.arrived(IMAGES[chosen], LABELS[chosen], round_number)


def assert_alike(ids: Samples, pixels: Samples) -> None:
    assert len(ids) == len(pixels)
    assert torch.equal(ids.images(fetch), pixels.images(no_fetch))
    assert ids.images(fetch).dtype == pixels.images(no_fetch).dtype == torch.uint8
    assert torch.equal(ids.labels, pixels.labels)
    assert torch.equal(ids.rounds, pixels.rounds)
    assert torch.equal(ids.class_counts(6), pixels.class_counts(6))


@given(st.data())
def test_ids_and_pixels_stay_alike_through_any_selection_and_joining(data: st.DataObject) -> None:
    ids, pixels = Samples.none(), Samples.none(FORM)
    assert_alike(ids, pixels)
    for round_number in range(1, data.draw(st.integers(1, 4)) + 1):
        chunk = data.draw(st.lists(st.integers(0, 39), max_size=8))
        ids = ids.followed_by(by_id(chunk, round_number))
        pixels = pixels.followed_by(by_pixel(chunk, round_number))
        assert_alike(ids, pixels)
        if len(ids):
            kept = torch.tensor(data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=8)), dtype=torch.int64)
            ids, pixels = ids.take(kept), pixels.take(kept)
            assert_alike(ids, pixels)


def test_taking_and_joining_worked_by_hand() -> None:
    both = by_id([7, 3], 1).followed_by(by_id([12], 2))
    assert both.content.tolist() == [7, 3, 12]
    assert both.labels.tolist() == [1, 3, 0]
    assert both.rounds.tolist() == [1, 1, 2]
    assert len(both) == 3
    taken = both.take(torch.tensor([2, 0, 0]))
    assert taken.content.tolist() == [12, 7, 7]
    assert taken.labels.tolist() == [0, 1, 1]
    assert taken.rounds.tolist() == [2, 1, 1]
    assert both.content.tolist() == [7, 3, 12]


@pytest.mark.parametrize("make", [by_id, by_pixel])
def test_class_counts_have_a_place_for_every_class(make) -> None:  # type: ignore[no-untyped-def]
    assert make([0, 6, 1], 1).class_counts(8).tolist() == [2, 1, 0, 0, 0, 0, 0, 0]
    assert make([], 1).class_counts(3).tolist() == [0, 0, 0]


def test_no_samples_are_none_of_either_kind() -> None:
    assert Samples.none().content.dtype == torch.int64
    assert Samples.none(FORM).images(no_fetch).shape == (0, *SHAPE)
    assert len(Samples.none()) == len(Samples.none(FORM)) == 0
    joined = Samples.none().followed_by(by_id([4], 3))
    assert joined.content.tolist() == [4]
    assert joined.labels.dtype == joined.rounds.dtype == torch.int64


def test_taking_copies_and_does_not_change_the_whole() -> None:
    whole = by_pixel([1, 2, 3], 1)
    part = whole.take(torch.tensor([1]))
    part.content.zero_()
    assert torch.equal(whole.images(no_fetch), IMAGES[1:4])
