"""Streams other than the paper's: what each of them promises, and what all of them keep of the paper's."""

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedkace_flwr.data.schedules import schedule_of
from fedkace_flwr.data.stream import client_stream
from fedkace_flwr.errors import StreamError
from fedkace_flwr.keys import keys_of
from fedkace_flwr.sections import StreamConfig

KINDS = keys_of(StreamConfig)["stream"].choices


def data_set(sizes: list[int]) -> list[np.ndarray]:
    """Consecutive ids, class after class."""
    edges = np.concatenate([[0], np.cumsum(sizes)])
    return [np.arange(low, high, dtype=np.int64) for low, high in pairwise(edges)]


def table(settings: StreamConfig, classes: int, client: int = 0, seed: int = 0) -> np.ndarray:
    return schedule_of(client, seed, classes, settings).table(classes)


def with_numbers(kind: str) -> st.SearchStrategy[str]:
    """The kind of stream with any numbers that it takes."""
    numbers = {"blurred": [(0.001, 1)], "dirichlet": [(0.01, 100), (0, 1)], "quantity-skew": [(0.01, 100)]}
    return st.tuples(st.just(kind), *(st.floats(*ends).map(str) for ends in numbers.get(kind, []))).map(":".join)


@st.composite
def streams(draw: st.DrawFn) -> tuple[StreamConfig, int, int]:
    """A stream, the number of its classes, and a seed."""
    classes = draw(st.integers(2, 9))
    window = draw(st.integers(1, classes))
    settings = StreamConfig(
        clients=draw(st.integers(1, 4)),
        rounds=draw(st.integers(1, 9)),
        stream=draw(st.sampled_from(KINDS).flatmap(with_numbers)),
        window=window,
        overlap=draw(st.integers(0, window)),
        samples_per_class=draw(st.integers(2, 8)),
        shared_samples=draw(st.booleans()),
    )
    return settings, classes, draw(st.integers(0, 2**40))


@given(streams())
def test_whatever_the_stream_a_sample_is_received_once_and_is_of_its_class(case):
    settings, classes, seed = case
    ids = data_set([settings.clients * settings.rounds * settings.largest_chunk] * classes)
    received = [client_stream(client, seed, ids, settings) for client in range(settings.clients)]
    for client, stream in enumerate(received):
        schedule = schedule_of(client, seed, classes, settings)
        assert len(stream.chunks) == len(stream.windows) == settings.rounds
        for labels, counts, chunk in zip(schedule.windows, schedule.counts, stream.chunks, strict=True):
            assert chunk.dtype == np.int64 and 2 <= len(chunk) <= settings.largest_chunk
            assert (chunk // len(ids[0])).tolist() == np.repeat(labels, counts).tolist()
        everything = np.concatenate(stream.chunks)
        assert len(np.unique(everything)) == len(everything)
    if not settings.shared_samples:
        everything = np.concatenate([chunk for stream in received for chunk in stream.chunks])
        assert len(np.unique(everything)) == len(everything)


@given(streams())
def test_running_dry_is_told_before_the_first_round_and_the_ways_out_are_true(case):
    settings, classes, seed = case
    totals = [table(settings, classes, client, seed).sum(axis=0) for client in range(settings.clients)]
    needed = np.max(totals, axis=0) if settings.shared_samples else np.sum(totals, axis=0)
    assume(needed.max() > 1)
    held = np.maximum(needed, 1)

    def draw_all(settings: StreamConfig) -> None:
        for client in range(settings.clients):
            client_stream(client, seed, data_set(held.tolist()), settings)

    draw_all(settings)
    held[int(needed.argmax())] -= 1
    with pytest.raises(StreamError, match=rf"training samples of class {needed.argmax()}, the data set has") as caught:
        draw_all(settings)
    text = str(caught.value)
    assert (settings.stream == "windows") == (not text.startswith("stream = "))
    assert settings.shared_samples == ("shared-samples" not in text)
    rounds, samples = (re.search(rf"(\d+) {what}", text.split("; ")[1]) for what in ("rounds", "samples per class"))
    assert rounds or samples or "lower both keys" in text
    for key, found in (("rounds", rounds), ("samples_per_class", samples)):
        if found:
            assert 0 < int(found[1]) < getattr(settings, key)
            draw_all(replace(settings, **{key: int(found[1])}))  # type: ignore[arg-type]


@given(streams())
def test_what_the_cache_of_references_relies_on(case):
    """A client's chunks do not depend on the numbers of clients and rounds, except where the fingerprint says so."""
    settings, classes, seed = case
    settings = replace(settings, shared_samples=True)
    ids = data_set([(settings.rounds + 3) * settings.largest_chunk] * classes)
    chunks = client_stream(0, seed, ids, settings).chunks
    if not settings.why_not_longer:
        longer = client_stream(0, seed, ids, replace(settings, rounds=settings.rounds + 3)).chunks
        assert all(np.array_equal(one, other) for one, other in zip(chunks, longer, strict=False))
    if settings.kind != "quantity-skew":
        more = client_stream(0, seed, ids, replace(settings, clients=9)).chunks
        assert all(np.array_equal(one, other) for one, other in zip(chunks, more, strict=True))


# Blurred windows

BLURRED = StreamConfig(stream="blurred:0.2", rounds=40, window=3, overlap=1, samples_per_class=20)


def test_blurred_windows_have_the_totals_of_sharp_ones_and_a_share_from_elsewhere():
    blurred, sharp = table(BLURRED, 10), table(replace(BLURRED, stream="windows"), 10)
    assert blurred.sum(axis=0).tolist() == sharp.sum(axis=0).tolist()
    assert blurred.sum(axis=1).tolist() == sharp.sum(axis=1).tolist()
    elsewhere = np.maximum(blurred - sharp, 0).sum(axis=1)
    assert elsewhere.max() <= 12  # a fifth of 60 samples; of these, seven in ten come from other classes
    assert elsewhere.mean() == pytest.approx(12 * 0.7, rel=0.1)


def test_a_blurred_chunk_holds_its_windows_classes_first_and_in_their_order():
    schedule, sharp = (schedule_of(2, 0, 10, replace(BLURRED, stream=kind)) for kind in ("blurred", "windows"))
    for labels, window in zip(schedule.windows, sharp.windows, strict=True):
        assert labels[:3] == window
        assert list(labels[3:]) == sorted(labels[3:])


def test_at_least_one_sample_is_exchanged_and_with_all_exchanged_no_window_is_left():
    sharp = table(replace(BLURRED, stream="windows"), 10)
    least = np.abs(table(replace(BLURRED, stream="blurred:0.001"), 10) - sharp).sum(axis=1)
    assert set(least.tolist()) == {0, 2}  # one sample less of one class, one more of another, or the same class again
    mixed = table(replace(BLURRED, stream="blurred:1", samples_per_class=200), 10)
    np.testing.assert_allclose(mixed / 600, [mixed.sum(axis=0) / mixed.sum()] * 40, atol=0.07)


# Dirichlet

DRIFTING = StreamConfig(stream="dirichlet:0.5", rounds=6, window=5, samples_per_class=400)


@pytest.mark.parametrize("index", [0, 5])
def test_class_frequencies_follow_the_dirichlet_distribution_in_every_round(index: int):
    classes, concentration = 5, DRIFTING.numbers["concentration"]
    shares = np.array([table(DRIFTING, classes, client)[index] / 2000 for client in range(250)])
    np.testing.assert_allclose(shares.mean(axis=0), 1 / classes, atol=0.04)
    variance = (1 / classes) * (1 - 1 / classes) / (classes * concentration + 1)
    np.testing.assert_allclose(shares.var(axis=0), variance, rtol=0.2)


def test_frequencies_drift_as_fast_as_the_key_says():
    def correlation(drift: float) -> float:
        settings = replace(DRIFTING, rounds=2, stream=f"dirichlet:0.5:{drift}")
        before, after = (
            np.array([table(settings, 5, client) for client in range(300)]).transpose(1, 0, 2).reshape(2, -1)
        )
        return float(np.corrcoef(before, after)[0, 1])

    constant, slow, independent = (correlation(drift) for drift in (0.0, 0.3, 1.0))
    assert constant > 0.99 and abs(independent) < 0.1
    assert 0.5 < slow < 0.9


def test_small_concentrations_leave_one_class_and_large_ones_all():
    few = table(replace(DRIFTING, stream="dirichlet:0.01"), 10)
    assert (few.max(axis=1) / 2000 > 0.9).mean() > 0.8
    many = table(replace(DRIFTING, stream="dirichlet:1e6"), 10)
    assert np.abs(many / 2000 - 0.1).max() < 0.05


def test_a_smaller_chunk_is_the_beginning_of_a_larger_one():
    small, large = (table(replace(DRIFTING, samples_per_class=samples), 6) for samples in (20, 21))
    assert ((large - small) >= 0).all() and (large - small).sum(axis=1).tolist() == [5] * 6


# Different numbers of samples

SKEWED = StreamConfig(stream="quantity-skew:0.5", clients=8, rounds=4, samples_per_class=100)


def test_one_client_receives_the_full_number_of_samples_and_the_others_less():
    counts = [table(SKEWED, 10, client, seed=3) for client in range(8)]
    sizes = sorted(int(each.max()) for each in counts)
    assert sizes[-1] == 100 and sizes[0] < 20 and len(set(sizes)) > 4
    for client, each in enumerate(counts):
        windows = table(replace(SKEWED, stream="windows"), 10, client, seed=3)
        np.testing.assert_array_equal(each, windows // 100 * each.max())
    assert SKEWED.mean_chunk(3) == round(2 * sum(sizes) / 8)
    assert SKEWED.largest_chunk == 200


@pytest.mark.parametrize(("window", "least"), [(1, 2), (2, 1), (3, 1)])
def test_the_smallest_chunk_has_two_samples(window: int, least: int):
    settings = replace(SKEWED, window=window, overlap=0, stream="quantity-skew:0.01")
    assert min(settings.samples_of(client, 0) for client in range(8)) == least


def test_large_concentrations_make_clients_alike():
    settings = replace(SKEWED, stream="quantity-skew:1e6")
    assert all(settings.samples_of(client, 0) >= 99 for client in range(8))


def test_too_few_samples_for_any_round_tell_what_to_change() -> None:
    for changes, remedy in (
        ({"rounds": 3}, "at most 1 samples per class and round are possible"),
        (
            {"rounds": 3, "shared_samples": False, "clients": 9},
            "lower both keys, or clients, or add samples of that class",
        ),
    ):
        settings = StreamConfig(window=5, overlap=0, samples_per_class=10, **changes)  # type: ignore[arg-type]
        with pytest.raises(StreamError, match=f"the data set has 5; {remedy}$"):
            for client in range(settings.clients):
                client_stream(client, 0, data_set([5] * 5), settings)


# Divided samples


def test_divided_samples_can_be_used_up_to_the_last():
    settings = StreamConfig(clients=4, rounds=5, window=5, overlap=0, samples_per_class=10, shared_samples=False)
    ids = data_set([4 * 5 * 10] * 5)
    everything = [chunk for client in range(4) for chunk in client_stream(client, 0, ids, settings).chunks]
    assert np.array_equal(np.sort(np.concatenate(everything)), np.arange(1000))
    with pytest.raises(StreamError) as caught:
        client_stream(3, 0, data_set([199] * 5), settings)
    assert str(caught.value) == (
        "samples-per-class = 10, rounds = 5: shared-samples = false: clients up to 3 together would need 200 training "
        "samples of class 0, the data set has 199; at most 4 rounds or 9 samples per class and round are possible"
    )


def test_the_client_in_the_middle_is_refused_first():
    settings = StreamConfig(clients=4, rounds=5, window=5, overlap=0, samples_per_class=10, shared_samples=False)
    ids = data_set([100] * 5)
    client_stream(1, 0, ids, settings)
    with pytest.raises(StreamError, match="clients up to 2 together would need 150"):
        client_stream(2, 0, ids, settings)


@pytest.mark.parametrize(
    "change",
    [
        {"stream": "blurred"},
        {"stream": "dirichlet"},
        {"stream": "quantity-skew"},
        {"stream": "blurred:0.5"},
        {"stream": "dirichlet:1:0.5"},
        {"stream": "dirichlet:3"},
        {"shared_samples": False},
    ],
)
def test_every_key_changes_the_samples_and_repeats_them(change: dict[str, Any]):
    usual = StreamConfig(clients=2, rounds=6)
    ids = data_set([1000] * 10)

    def drawn(settings: StreamConfig) -> np.ndarray:
        return np.concatenate([chunk for client in (0, 1) for chunk in client_stream(client, 0, ids, settings).chunks])

    one = drawn(replace(usual, **change))
    assert np.array_equal(one, drawn(replace(usual, **change)))
    others = [usual, *(replace(usual, stream=kind) for kind in KINDS if change != {"stream": kind})]
    assert not any(np.array_equal(one, drawn(each)) for each in others)
