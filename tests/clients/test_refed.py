"""Re-Fed: the informative model, its scores, and the client that keeps the highest."""

import math
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.gradients import gradient_of
from support.made.networks import seeded_resnet18
from support.systems.in_process import Federation
from torch import Tensor
from torch.nn import functional

from fedkace_flwr.algorithms.refed_scores import (
    Informative,
    all_gradients,
    informative_scores,
    most_informative,
    network_scores,
)
from fedkace_flwr.clients.refed import LEARNING_RATE, STEPS
from fedkace_flwr.config import Config
from fedkace_flwr.messaging import wire
from fedkace_flwr.networks.network import Network
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.client_state import ClientState
from fedkace_flwr.storage.client_store import ClientStore

Make = Callable[..., Config]
USUAL: dict[str, Any] = {"steps": STEPS, "learning_rate": LEARNING_RATE, "locality": 0.5}
SEEN = torch.tensor([True, True, False, True, False])


# A convex toy: sample i wants v to be at its target.


def toy(targets: list[float], **settings: Any) -> Informative:
    def measure(parameters: dict[str, Tensor], block: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        gradients = parameters["v"] - block[0]  # of half the square of the distance
        return gradients.square(), {"v": gradients.sum()}

    usual: dict[str, Any] = {"steps": 2, "learning_rate": 0.2, "locality": 0.5}
    samples = torch.tensor(targets, dtype=torch.float64)
    anchor = {"v": torch.zeros((), dtype=torch.float64)}
    return informative_scores(measure, lambda: [(samples,)], anchor, **{**usual, **settings})


def test_scalar_case_by_hand() -> None:
    """The mean gradient at a step of 0.2 moves v as their sum would at 0.1, but half as far towards the anchor."""
    assert float(toy([1, 3], steps=1).parameters["v"]) == pytest.approx(0.4)
    found = toy([1, 3])
    assert float(found.parameters["v"]) == pytest.approx(0.4 - 0.2 * (-1.6 + 0.5 * 0.4)) == found.drift
    assert found.scores.tolist() == pytest.approx([1 + 0.6 / 2, 3 + 2.6 / 2])


def test_a_local_informative_model_is_plain_gradient_descent_and_a_glued_one_stays_nearer() -> None:
    v = 0.0
    for _ in range(4):
        v -= 0.2 * ((v - 1) + (v - 3)) / 2
    assert float(toy([1, 3], steps=4, locality=1.0).parameters["v"]) == pytest.approx(v)
    drifts = [toy([1, 3], steps=4, locality=locality).drift for locality in (0.1, 0.3, 0.5, 0.9, 1.0)]
    assert drifts == sorted(drifts) and drifts[0] < drifts[-1]


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_scores_grow_with_the_steps_and_follow_the_samples_in_any_order(targets: list[float], random: Random) -> None:
    order = list(range(len(targets)))
    random.shuffle(order)
    scores = [toy(targets, steps=steps).scores for steps in (1, 2, 3)]
    assert bool((scores[0] >= 0).all()) and bool((scores[1] >= scores[0]).all() and (scores[2] >= scores[1]).all())
    shuffled = toy([targets[index] for index in order], steps=3).scores
    assert shuffled.tolist() == pytest.approx(scores[2][order].tolist(), abs=1e-9)


def test_a_sample_without_a_finite_gradient_is_dropped_and_a_model_that_leaves_the_numbers_stops() -> None:
    broken = toy([1, math.inf, 3])
    assert broken.scores.tolist() == [1.0, -math.inf, 3.0]  # the scores of the first step stand
    assert broken.drift == 0.0


# On the network


def network() -> Network:
    net = seeded_resnet18(5, 2, "cifar", 3)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for name, buffer in net.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return net


def data(count: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    images = torch.randn((count, 3, 8, 8), generator=generator)
    labels = SEEN.nonzero().squeeze(1)[torch.randint(3, (count,), generator=generator)]
    return images, labels


def in_blocks(count: int = 7, most: int = 3) -> Callable[[int], Iterable[tuple[Tensor, Tensor]]]:
    images, labels = data(count)
    return lambda size: zip(torch.split(images, min(size, most)), torch.split(labels, min(size, most)), strict=True)


def single_backward_passes(net: Network) -> list[dict[str, Tensor]]:
    net.eval()
    gradients = []
    for image, label in zip(*data(), strict=True):
        logits = net(image.unsqueeze(0)).masked_fill(~SEEN, -math.inf)
        net.zero_grad(set_to_none=True)
        torch.autograd.backward(functional.cross_entropy(logits, label.unsqueeze(0)))
        gradients.append({name: gradient_of(parameter).clone() for name, parameter in net.named_parameters()})
    return gradients


def squared_norm(gradient: Iterable[Tensor]) -> float:
    return sum(float(part.double().square().sum()) for part in gradient)


def test_one_backward_pass_tells_what_a_loop_of_single_ones_does() -> None:
    net = network()
    single = single_backward_passes(net)
    parameters = {name: parameter.detach() for name, parameter in net.named_parameters()}
    squared, total = all_gradients(net, SEEN)(parameters, data())
    assert squared.tolist() == pytest.approx([squared_norm(one.values()) for one in single], rel=1e-5)
    for name, part in total.items():
        torch.testing.assert_close(part, sum(one[name] for one in single), rtol=1e-4, atol=1e-5)
    assert not total["output.weight"][~SEEN].any() and not total["output.bias"][~SEEN].any()


def test_one_step_scores_by_the_gradient_at_the_global_model_whatever_lambda_and_eta() -> None:
    net = network()
    expected = [math.sqrt(squared_norm(one.values())) for one in single_backward_passes(net)]
    for locality, rate in ((0.5, 0.01), (0.1, 0.5)):
        found = network_scores(net, in_blocks(), SEEN, steps=1, learning_rate=rate, locality=locality)
        assert found.scores.tolist() == pytest.approx(expected, rel=1e-5)


def test_scores_do_not_depend_on_the_blocks() -> None:
    whole, parts = (network_scores(network(), in_blocks(most=most), SEEN, **USUAL).scores for most in (7, 2))
    torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_scoring_leaves_no_trace(training: bool) -> None:
    net = network().train(training)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    state = torch.get_rng_state()
    network_scores(net, in_blocks(), SEEN, **{**USUAL, "learning_rate": 1.0})
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(module.training == training for module in net.modules())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.equal(torch.get_rng_state(), state)


@given(st.lists(st.sampled_from([-math.inf, 0.0, 1.0, 2.5, 7.0]), max_size=20), st.integers(1, 25))
def test_the_highest_scores_are_kept_and_of_equal_ones_the_first(scores: list[float], capacity: int) -> None:
    kept = most_informative(torch.tensor(scores, dtype=torch.float64), capacity).tolist()
    ranked = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    assert kept == sorted(ranked[:capacity])


# The client


def state_of(federation: Federation, client: int, round_number: int) -> ClientState:
    empty = ClientState(seen=torch.zeros(10, dtype=torch.bool), buffer=Samples.none())
    return ClientStore(federation.folder / f"client-{client:03d}", empty).before(round_number + 1)


def ids(samples: Samples) -> list[int]:
    return sorted(samples.content.tolist())


def test_what_fits_is_kept_and_then_the_global_model_chooses_the_highest(small: Make) -> None:
    federation = Federation(small(method="refed"))
    stream = federation.experiment.stream(0)
    federation.train(0, 1)
    federation.evaluate(0, 1)
    first = state_of(federation, 0, 1).buffer
    assert ids(first) == sorted(stream.chunks[0].tolist())

    assert federation.train(0, 2).metrics[wire.BUFFER_SIZE] == 16  # the chunk's turn comes with the global model
    metrics = federation.evaluate(0, 2).metrics
    state = state_of(federation, 0, 2)
    assert metrics[wire.BUFFER_SIZE] == sum(metrics[wire.BUFFER_CLASSES]) == len(state.buffer) == 20

    experiment = federation.experiment
    net = experiment.network({name: torch.from_numpy(array) for name, array in federation.weights.items()})
    pool = first.followed_by(experiment.chunk(0, 2))
    images = experiment.preprocess(pool.images(experiment.dataset.fetch))
    scores = network_scores(net, lambda size: [(images, pool.labels)], state.seen, **USUAL).scores
    assert ids(state.buffer) == ids(pool.take(most_informative(scores, 20)))


def test_a_class_with_the_highest_losses_may_fill_the_buffer(small: Make) -> None:
    federation = Federation(small(method="refed", capacity=10, samples_per_class=20))
    bias = federation.weights["output.bias"]
    unlikely = min(federation.experiment.stream(0).windows[0])
    bias[unlikely] = -50.0
    federation.train(0, 1)
    counts = federation.evaluate(0, 1).metrics[wire.BUFFER_CLASSES]
    assert counts[unlikely] == 10 == sum(counts)


def test_rounds_missed_on_either_side_leave_the_buffer_alone(small: Make) -> None:
    federation = Federation(small(method="refed"))
    federation.train(0, 1)
    federation.evaluate(0, 1)
    first = ids(state_of(federation, 0, 1).buffer)
    federation.evaluate(0, 2)  # was not asked to train
    assert ids(state_of(federation, 0, 2).buffer) == first
    federation.train(0, 2)  # is not sent the global model
    federation.train(0, 3)
    assert ids(state_of(federation, 0, 3).buffer) == first
    federation.evaluate(0, 3)
    state = state_of(federation, 0, 3)
    assert len(state.buffer) == 20 and set(state.buffer.rounds.tolist()) <= {1, 3}
