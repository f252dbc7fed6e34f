"""The price of the replay weight: counts that can be worked by hand, and the timed epochs."""

import pytest

from fedkace_flwr.experiments.bench.gradient_cost import NETWORKS, THOP, counts, gradient_cost

CIFAR, IMAGENET = NETWORKS

# Multiply-adds of one sample. A stage but the first: a 3x3 convolution of half as many channels at half the size,
# three of its own, and the 1x1 shortcut. Each has as many as the others, for channels double while pixels quarter.
CIFAR_STAGE = 32 * 16 * 16 * (9 * 16 + 3 * 9 * 32 + 16)
CIFAR_STEM, CIFAR_FIRST = 16 * 32 * 32 * 9 * 3, 4 * 16 * 32 * 32 * 9 * 16
IMAGENET_STAGE = 128 * 28 * 28 * (9 * 64 + 3 * 9 * 128 + 64)
IMAGENET_STEM, IMAGENET_FIRST = 64 * 112 * 112 * 49 * 3, 4 * 64 * 56 * 56 * 9 * 64
# Values that batch norm puts out: the stem, four layers of the first stage, five of each other.
CIFAR_NORMALISED = 16 * 32 * 32 * (5 + 5 / 2 + 5 / 4 + 5 / 8)
IMAGENET_NORMALISED = 64 * 56 * 56 * (8 + 5 / 2 + 5 / 4 + 5 / 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "output", "forward", "stem", "thop", "paper"),
    [
        (
            CIFAR,
            128 * 100,
            CIFAR_STEM + CIFAR_FIRST + 3 * CIFAR_STAGE + 12_800,
            CIFAR_STEM,
            4 * CIFAR_NORMALISED + 128 * (4 * 4 + 1) + 299,
            "35.68",
        ),
        (
            IMAGENET,
            512 * 100,
            IMAGENET_STEM + IMAGENET_FIRST + 3 * IMAGENET_STAGE + 51_200,
            IMAGENET_STEM,
            4 * IMAGENET_NORMALISED + 512 * (7 * 7 + 1) + 299,
            "1823.57",
        ),
    ],
    ids=["cifar", "imagenet"],
)
def test_counts_worked_by_hand(network, output: int, forward: int, stem: int, thop: float, paper: str) -> None:  # type: ignore[no-untyped-def]
    backward = 2 * forward - stem  # by inputs and by weights, but nobody asks for the gradient by the image
    assert counts(network) == {
        "output gradient": output,
        "forward": forward,
        "backward": backward,
        "weight, default": 2 * output,  # one product for the chunk, one for the buffer
        "weight, as5": 2 * backward,
        THOP: forward + thop,
    }
    assert f"{(forward + thop) / 1e6:.2f}" == paper  # its figure for the full model


@pytest.mark.slow
def test_epochs_are_timed_beside_the_counts() -> None:
    figures = gradient_cost(2, chunk=4, buffer=4)
    assert figures["CIFAR-100, multiply-adds per sample, output gradient"] == {"median": 12_800}
    for name in ("default against without weights", "as5 against without weights", "as5 against default"):
        assert 0 < figures[name]["low"] <= figures[name]["median"] <= figures[name]["high"]
