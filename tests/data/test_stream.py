"""The stream against the paper's description (sections 5.1 and A.1), worked by hand and by property."""

import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedkace_flwr.data.schedules import class_windows
from fedkace_flwr.data.stream import ClientStream, client_stream
from fedkace_flwr.errors import ConfigError, StreamError
from fedkace_flwr.sections import StreamConfig

GOLDEN = json.loads((Path(__file__).parents[1] / "golden.json").read_text())["windows"]


def data_set(sizes: list[int], first: int = 0) -> list[np.ndarray]:
    """Consecutive ids, class after class."""
    edges = first + np.concatenate([[0], np.cumsum(sizes)])
    return [np.arange(low, high, dtype=np.int64) for low, high in pairwise(edges)]


def paper_stream(client: int, overlap: int, *, seed: int = 0) -> ClientStream:
    settings = StreamConfig(window=5, overlap=overlap, rounds=100, samples_per_class=100)
    return client_stream(client, seed, data_set([500] * 100), settings)


@st.composite
def window_cases(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    order = draw(st.permutations(range(draw(st.integers(1, 12)))))
    window = draw(st.integers(1, len(order)))
    return list(order), window, draw(st.integers(0, window)), draw(st.integers(1, 30))


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"overlap{case['overlap']}")
def test_golden_windows(case):
    windows = class_windows(case["order"], case["window"], case["overlap"], case["rounds"])
    assert [list(window) for window in windows] == case["windows"]


def test_windows_worked_by_hand_wrap_round_in_the_clients_own_order():
    order = [3, 0, 4, 1, 2]
    assert class_windows(order, 3, 1, 4) == [(3, 0, 4), (4, 1, 2), (2, 3, 0), (0, 4, 1)]
    assert class_windows(order, 2, 2, 7) == [(3, 0), (3, 0), (4, 1), (4, 1), (2, 3), (2, 3), (0, 4)]


@given(window_cases())
def test_each_window_is_a_run_of_distinct_classes_along_the_cyclic_list(case):
    order, window, overlap, rounds = case
    windows = class_windows(order, window, overlap, rounds)
    assert len(windows) == rounds
    for classes in windows:
        assert len(set(classes)) == len(classes) == window
        places = [order.index(label) for label in classes]
        assert all((after - before) % len(order) == 1 % len(order) for before, after in pairwise(places))


@given(window_cases())
def test_adjacent_windows_share_exactly_the_overlap_where_there_are_classes_enough(case):
    order, window, overlap, rounds = case
    assume(overlap < window)
    windows = class_windows(order, window, overlap, rounds)
    # With too few classes the far end of the next window meets the near end of this one, which shares more.
    shared = overlap + max(0, 2 * window - overlap - len(order))
    for before, after in pairwise(windows):
        assert len(set(before) & set(after)) == shared
        assert before[window - overlap :] == after[:overlap]


@given(window_cases())
def test_full_overlap_stands_still_for_window_rounds_and_then_takes_the_next_classes(case):
    order, window, _, rounds = case
    windows = class_windows(order, window, window, rounds)
    for index in range(1, rounds):
        if index % window:
            assert windows[index] == windows[index - 1]
        else:
            after_the_last = (order.index(windows[index - 1][-1]) + 1) % len(order)
            assert windows[index][0] == order[after_the_last]


@pytest.mark.parametrize("overlap", [5, 4, 2, 0])
def test_papers_numbers_show_each_class_five_times_and_each_image_once(overlap):
    stream = paper_stream(3, overlap)
    appearances = Counter(label for classes in stream.windows for label in classes)
    assert appearances == dict.fromkeys(range(100), 5)
    assert all(len(chunk) == 500 for chunk in stream.chunks)
    assert np.array_equal(np.sort(np.concatenate(stream.chunks)), np.arange(50_000))


@given(
    classes=st.integers(1, 9),
    window=st.integers(1, 9),
    overlap=st.integers(0, 9),
    rounds=st.integers(1, 12),
    samples=st.integers(1, 4),
    client=st.integers(0, 50),
    seed=st.integers(0, 2**40),
)
def test_chunks_hold_the_windows_classes_in_order_and_never_a_sample_twice(
    classes, window, overlap, rounds, samples, client, seed
):
    assume(overlap <= window <= classes)
    ids = data_set([rounds * samples + label for label in range(classes)], first=1000)
    class_of = {int(sample): label for label, group in enumerate(ids) for sample in group}
    settings = StreamConfig(window=window, overlap=overlap, rounds=rounds, samples_per_class=samples)
    stream = client_stream(client, seed, ids, settings)
    assert len(stream.windows) == len(stream.chunks) == rounds
    for labels, chunk in zip(stream.windows, stream.chunks, strict=True):
        assert chunk.dtype == np.int64
        assert [class_of[int(sample)] for sample in chunk] == [label for label in labels for _ in range(samples)]
    everything = np.concatenate(stream.chunks)
    assert len(np.unique(everything)) == len(everything) == rounds * window * samples


def test_same_client_and_seed_repeat():
    first, second = paper_stream(2, 2), paper_stream(2, 2)
    assert first.windows == second.windows
    assert all(np.array_equal(one, other) for one, other in zip(first.chunks, second.chunks, strict=True))


@pytest.mark.parametrize("other", [{"client": 3, "seed": 0}, {"client": 2, "seed": 1}])
def test_another_client_and_another_seed_differ_in_classes_and_in_samples(other):
    first, second = paper_stream(2, 0), paper_stream(other["client"], 0, seed=other["seed"])
    assert first.windows != second.windows
    met = [
        [np.sort(chunk[np.flatnonzero(chunk // 500 == 7)]) for chunk in stream.chunks if 7 in chunk // 500]
        for stream in (first, second)
    ]
    assert len(met[0]) == len(met[1]) == 5
    assert not np.array_equal(met[0][0], met[1][0])


def test_clients_draw_independently_and_so_share_samples():
    settings = StreamConfig(window=4, overlap=0, rounds=1, samples_per_class=20)
    drawn = [
        set(np.concatenate(client_stream(client, 0, data_set([40] * 4), settings).chunks).tolist()) for client in (0, 1)
    ]
    # 20 of 40 twice: 10 of each class expected in common; none would mean that clients split the data.
    assert 20 <= len(drawn[0] & drawn[1]) <= 60


@pytest.mark.parametrize(
    ("client", "seed", "sizes", "overlap", "digest"),
    [
        (0, 0, [500] * 100, 4, "8d34f8cfa474b284"),
        (9, 7, [500] * 100, 5, "104cd094bc6ac58a"),
        (3, 1, [150] * 10, 1, "2d7b7d304d918b1a"),
    ],
)
def test_the_papers_stream_holds_the_samples_of_version_1(
    client: int, seed: int, sizes: list[int], overlap: int, digest: str
) -> None:
    """Samples, not only their numbers: results in the documents were computed with them."""
    small = len(sizes) == 10
    paper = StreamConfig(window=5, overlap=overlap, rounds=100, samples_per_class=100)
    chunks = client_stream(
        client, seed, data_set(sizes), StreamConfig(window=2, overlap=overlap) if small else paper
    ).chunks
    assert hashlib.sha256(np.concatenate(chunks).astype("<i8").tobytes()).hexdigest()[:16] == digest


def test_order_in_which_streams_are_drawn_does_not_matter():
    alone = paper_stream(1, 4).chunks
    paper_stream(0, 4)
    np.random.default_rng(0).random(7)
    assert all(np.array_equal(one, other) for one, other in zip(alone, paper_stream(1, 4).chunks, strict=True))


MESSAGE = re.compile(
    r"samples-per-class = (\d+), rounds = (\d+): client (\d+) would need (\d+) training samples of class (\d+), "
    r"the data set has (\d+); "
)


def numbers_in(error: StreamError) -> list[int]:
    """The six numbers of the failure, then the rounds and the samples that would do, 0 where none is named."""
    found = MESSAGE.search(str(error))
    assert found, str(error)
    remedy = str(error)[found.end() :]
    possible = [re.search(rf"(\d+) {what}", remedy) for what in ("rounds", "samples per class")]
    return [int(number) for number in found.groups()] + [int(each[1]) if each else 0 for each in possible]


def test_running_dry_names_client_class_needed_and_held():
    with pytest.raises(StreamError) as caught:
        client_stream(4, 0, data_set([50, 50, 29]), StreamConfig(window=3, overlap=0, rounds=3, samples_per_class=10))
    # Every round shows all three classes; class 2 lasts two rounds of ten, or three of nine.
    assert numbers_in(caught.value) == [10, 3, 4, 30, 2, 29, 2, 9]


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=7),
    window=st.integers(1, 7),
    overlap=st.integers(0, 7),
    rounds=st.integers(1, 15),
    samples=st.integers(1, 12),
    clients=st.integers(1, 5),
)
def test_running_dry_is_told_exactly_when_it_happens_and_both_ways_out_are_true_and_the_widest(
    sizes, window, overlap, rounds, samples, clients
):
    assume(overlap <= window <= len(sizes))
    settings = StreamConfig(clients=clients, window=window, overlap=overlap)

    def attempt(rounds: int, samples: int) -> None:
        asked = replace(settings, rounds=rounds, samples_per_class=samples)
        for client in range(clients):
            client_stream(client, 9, data_set(sizes), asked)

    plenty = data_set([10_000] * len(sizes))
    ample = [client_stream(each, 9, plenty, replace(settings, rounds=rounds)).windows for each in range(clients)]
    need = [[samples * sum(label in classes for classes in each) for label in range(len(sizes))] for each in ample]
    dry = [[label for label, size in enumerate(sizes) if each[label] > size] for each in need]
    if not any(dry):
        attempt(rounds, samples)
        return
    with pytest.raises(StreamError) as caught:
        attempt(rounds, samples)
    said_samples, said_rounds, client, needed, label, held, fewer_rounds, fewer_samples = numbers_in(caught.value)
    assert (said_samples, said_rounds) == (samples, rounds)
    assert dry[client] and not any(dry[:client])
    assert label in dry[client]
    assert (needed, held) == (need[client][label], sizes[label])
    assert fewer_rounds < rounds
    assert fewer_samples < samples
    if fewer_rounds:
        attempt(fewer_rounds, samples)
    if fewer_samples:
        attempt(rounds, fewer_samples)
    for beyond in ((fewer_rounds + 1, samples), (rounds, fewer_samples + 1)):
        with pytest.raises(StreamError):
            attempt(*beyond)


@pytest.mark.parametrize(
    ("window", "overlap", "rounds", "key"),
    [(0, 0, 3, "window"), (6, 0, 3, "window"), (3, -1, 3, "overlap"), (3, 4, 3, "overlap"), (3, 1, 0, "rounds")],
)
def test_impossible_windows_are_refused_by_the_keys_name(window, overlap, rounds, key):
    with pytest.raises(ConfigError, match=f"^{key} = "):
        class_windows(range(5), window, overlap, rounds)
    with pytest.raises(ConfigError, match=f"^{key} = "):
        client_stream(0, 0, data_set([9] * 5), StreamConfig(window=window, overlap=overlap, rounds=rounds))
