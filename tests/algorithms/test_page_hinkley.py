"""Page and Hinkley's test of a stream of accuracies."""

import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict
from statistics import median

import numpy as np
import pytest

from fedkace_flwr.algorithms.page_hinkley import PageHinkley


def alarms(stream: Iterable[float], samples: int, test: PageHinkley | None = None) -> list[int]:
    """Rounds with an alarm, counted from 1."""
    test = test or PageHinkley()
    return [number for number, accuracy in enumerate(stream, start=1) if test.add(float(accuracy), samples)]


def draws(generator: np.random.Generator, accuracy: float, samples: int, rounds: int) -> list[float]:
    return list(generator.binomial(samples, accuracy, rounds) / samples)


def test_a_fall_by_hand() -> None:
    test = PageHinkley()
    assert alarms([0.7, 0.9] * 10, 16, test) == []
    assert test.rounds == 20
    assert [test.before, test.mean, test.variance] == pytest.approx([0.8, 0.8, 0.01])
    assert not test.add(0.4, 16)  # spread sqrt(0.8 x 0.2 / 16) = 0.1: 4 below, less 0.5
    assert [test.fallen, test.mean] == pytest.approx([3.5, 0.78])
    assert test.variance == pytest.approx(0.95 * (0.01 + 0.05 * 0.4**2))
    assert not test.add(0.4, 16)  # spread sqrt(0.0171)
    assert test.fallen == pytest.approx(3.5 + 0.38 / 0.0171**0.5 - 0.5)
    assert test.add(0.2, 16)
    assert asdict(test) == {"rounds": 1, "mean": 0.2, "variance": 0.0, "fallen": 0.0, "before": pytest.approx(0.8)}


def test_no_verdict_comes_before_the_stream_is_known_and_one_odd_round_gives_none() -> None:
    assert alarms([1.0] * 9 + [0.0], 50) == []
    assert alarms([0.9] * 30 + [0.0] + [0.9] * 30, 50) == []


def test_few_samples_say_little() -> None:
    steady = [1.0] * 30
    assert alarms([*steady, 0.0, 0.0], 1) == []
    assert alarms([*steady, 0.5, 0.5, 0.5], 2) == []
    assert alarms([*steady, 0.5, 0.5, 0.5], 200) == [33]


def test_a_state_that_went_through_json_goes_on_as_the_test_would_have() -> None:
    generator = np.random.default_rng(3)
    stream = draws(generator, 0.8, 10, 60) + draws(generator, 0.3, 10, 20) + draws(generator, 0.8, 10, 40)
    assert alarms(stream, 10)
    for cut in range(0, len(stream), 7):
        first = PageHinkley()
        before = alarms(stream[:cut], 10, first)
        again = PageHinkley(**json.loads(json.dumps(asdict(first))))
        assert before + [cut + number for number in alarms(stream[cut:], 10, again)] == alarms(stream, 10)


@pytest.mark.parametrize("samples", [1, 10, 50])
def test_what_gets_harder_little_by_little_gives_no_alarm(samples: int) -> None:
    generator = np.random.default_rng(0)
    falling = generator.binomial(samples, np.linspace(0.9, 0.6, 1000)) / samples
    assert alarms(falling, samples) == []


@pytest.mark.slow
@pytest.mark.parametrize("samples", [10, 50])
def test_false_alarms_are_fewer_than_one_in_30000_rounds(samples: int) -> None:
    generator = np.random.default_rng(1)
    assert sum(len(alarms(draws(generator, level, samples, 60_000), samples)) for level in (0.5, 0.8, 0.95)) <= 6


FALLS = {
    (10, 0.6): (0.75, 14),
    (10, 0.4): (0.99, 5),
    (10, 0.2): (0.99, 3),
    (50, 0.6): (0.99, 4),
    (50, 0.4): (0.99, 3),
    (50, 0.2): (0.99, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("samples, level", FALLS)
def test_a_sudden_fall_is_found_as_soon_as_the_module_says(samples: int, level: float) -> None:
    generator, delays = np.random.default_rng(2), list[int]()
    for _ in range(1000):
        test = PageHinkley()
        alarms(draws(generator, 0.8, samples, 60), samples, test)
        delays += itertools.islice(alarms(draws(generator, level, samples, 40), samples, test), 1)
    share, rounds = FALLS[samples, level]
    assert len(delays) / 1000 == pytest.approx(share, abs=0.03)
    assert median([*delays, *[1000] * (1000 - len(delays))]) == pytest.approx(rounds, abs=1)
