"""The local model's weight, from how well a client's models predict each new chunk before it is trained on."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedkace_flwr.algorithms.prequential import WEIGHTS, best_weight, no_evidence, with_chunk


def chunk(local: list[float], received: list[float], latest: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    first, second = (torch.tensor(each, dtype=torch.float64) for each in (local, received))
    return first, second, torch.tensor(latest, dtype=torch.bool)


def test_a_chunk_by_hand() -> None:
    evidence = with_chunk(no_evidence(), *chunk([0.9, 0.2, 0.1], [0.5, 0.6, 0.3], [True, False, False]))
    half = WEIGHTS.index(0.5)
    assert evidence[0, half] == pytest.approx(math.log(0.701))
    assert evidence[1, half] == pytest.approx(math.log(0.401) + math.log(0.201))
    assert evidence[:, -1].tolist() == [1, 2]
    later = with_chunk(evidence, *chunk([0.4], [0.4], [True]))
    assert later[0, half] == pytest.approx(math.log(0.701) / 2 + math.log(0.401))
    assert later[:, -1].tolist() == [1.5, 1]


@pytest.mark.parametrize("usual", [0.0, 1 / 3, 0.5, 1.0])
def test_without_evidence_the_usual_weight_holds(usual: float) -> None:
    assert best_weight(no_evidence(), 1.0, usual) == usual
    nothing = with_chunk(no_evidence(), *chunk([], [], []))
    assert best_weight(nothing, 0.3, usual) == usual


def test_the_better_model_gets_more_weight_and_few_images_move_it_little() -> None:
    def weight(images: int, local: float, received: float) -> float:
        some = chunk([local] * images, [received] * images, [False] * images)
        return best_weight(with_chunk(no_evidence(), *some), 0.5, 0.5)

    assert weight(500, 0.8, 0.2) == WEIGHTS[-1] and weight(500, 0.2, 0.8) == WEIGHTS[0]
    assert 0.5 < weight(5, 0.8, 0.2) < weight(20, 0.8, 0.2) < weight(500, 0.8, 0.2)
    assert weight(500, 0.4, 0.4) == 0.5


def test_the_classes_learned_last_count_by_their_share_of_all_classes_however_many_images_they_have() -> None:
    """The local model is right on the many images of its latest classes, and the received ones on the few others."""
    evidence = no_evidence()
    for _ in range(6):
        many, few = 90, 10
        latest = [True] * many + [False] * few
        evidence = with_chunk(evidence, *chunk([0.9] * many + [0.1] * few, [0.1] * many + [0.9] * few, latest))
    assert best_weight(evidence, 0.9, 0.5) > 0.8
    assert best_weight(evidence, 0.5, 0.5) == 0.5
    assert best_weight(evidence, 0.1, 0.5) < 0.2


def test_a_client_whose_better_model_changes_follows_within_a_few_chunks() -> None:
    evidence, weights = no_evidence(), []
    for number in range(10):
        good, bad = [0.7] * 50, [0.3] * 50
        evidence = with_chunk(evidence, *chunk(*((good, bad) if number < 5 else (bad, good)), [False] * 50))
        weights.append(best_weight(evidence, 0.2, 1 / 3))
    assert weights[4] > 0.7 and weights[7] < 0.3


probabilities = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@given(probabilities, probabilities, st.floats(0, 1), st.floats(0, 1))
def test_any_probabilities_give_one_of_the_weights(
    local: list[float], received: list[float], share: float, usual: float
) -> None:
    size = min(len(local), len(received))
    some = chunk(local[:size], received[:size], [index % 2 == 0 for index in range(size)])
    assert best_weight(with_chunk(no_evidence(), *some), share, usual) in WEIGHTS
