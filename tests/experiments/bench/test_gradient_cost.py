"""The price of the replay weight: counts that can be worked by hand, and the command."""

import json
from pathlib import Path

import pytest

from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.bench.gradient_cost import NETWORKS, counts, readings

CIFAR, IMAGENET = NETWORKS

# Multiply-adds of one sample. A stage but the first: a 3x3 convolution of half as many channels at half the size,
# three of its own, and the 1x1 shortcut. Each has as many as the others, for channels double while pixels quarter.
CIFAR_STAGE = 32 * 16 * 16 * (9 * 16 + 3 * 9 * 32 + 16)
CIFAR_STEM, CIFAR_FIRST = 16 * 32 * 32 * 9 * 3, 4 * 16 * 32 * 32 * 9 * 16
IMAGENET_STAGE = 128 * 28 * 28 * (9 * 64 + 3 * 9 * 128 + 64)
IMAGENET_STEM, IMAGENET_FIRST = 64 * 112 * 112 * 49 * 3, 4 * 64 * 56 * 56 * 9 * 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "output", "forward", "stem"),
    [
        (CIFAR, 128 * 100, CIFAR_STEM + CIFAR_FIRST + 3 * CIFAR_STAGE + 12_800, CIFAR_STEM),
        (IMAGENET, 512 * 100, IMAGENET_STEM + IMAGENET_FIRST + 3 * IMAGENET_STAGE + 51_200, IMAGENET_STEM),
    ],
    ids=["cifar", "imagenet"],
)
def test_counts_worked_by_hand(network, output: int, forward: int, stem: int) -> None:  # type: ignore[no-untyped-def]
    backward = 2 * forward - stem  # by inputs and by weights, but nobody asks for the gradient by the image
    assert counts(network) == {
        "output gradient": output,
        "forward": forward,
        "backward": backward,
        "weight, default": 2 * output,  # one product for the chunk, one for the buffer
        "weight, as5": 2 * backward,
    }
    assert output == network.output  # as the paper has it


@pytest.mark.slow
def test_the_papers_figure_for_the_full_model_is_one_forward_pass() -> None:
    """By the rule that counts batch norm, pooling and a softmax too; no other reading comes near in both networks."""
    # Values that batch norm puts out: the stem, four layers of the first stage, five of each other.
    normalised = {
        CIFAR: 16 * 32 * 32 * (5 + 5 / 2 + 5 / 4 + 5 / 8),
        IMAGENET: 64 * 56 * 56 * (8 + 5 / 2 + 5 / 4 + 5 / 8),
    }
    pooled = {CIFAR: 128 * (4 * 4 + 1), IMAGENET: 512 * (7 * 7 + 1)}
    for network, said in ((CIFAR, "35.68"), (IMAGENET, "1823.57")):
        found = readings(network)
        best: dict[str, dict[str, float]] = {}
        rest: dict[str, dict[str, float]] = {}
        for name, figure in found.items():
            (best if "pooling" in name and "stem" not in name else rest)[name] = figure
        rule, softmax = (figure["count"] for figure in best.values())
        forward = counts(network)["forward"]
        assert rule == forward + 4 * normalised[network] + pooled[network]
        assert softmax == rule + 299
        assert f"{softmax / 1e6:.2f}" == said
        assert all(abs(figure["against_paper"]) < 2e-4 for figure in best.values())
        assert all(abs(figure["against_paper"]) > 2e-3 for figure in rest.values())


@pytest.mark.slow
def test_the_command_prints_and_writes_counts_and_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "cost.json"
    size = ["--chunk", "4", "--buffer", "4", "--repeats", "2"]
    assert main(["gradient-cost", *size, "--output", str(target)]) == 0
    printed = capsys.readouterr().out
    for text in ("12.8 K", "51.2 K", "139.35 M", "7018.42 M", "5443 x", "1823.57 M", "as5 against default", "n = 2"):
        assert text in printed, text
    content = json.loads(target.read_text())
    assert content["samples"] == {"chunk": 4, "buffer": 4}
    assert content["environment"]["repeats"] == 2
    assert content["multiply_adds_per_sample"] == {network.name: counts(network) for network in NETWORKS}
    figures = content["figures"]
    # Two backward passes on top of a forward and a backward one.
    assert figures["as5 against default, by multiply-adds"]["median"] == pytest.approx(2.33, abs=0.01)
    for name in ("default against without weights", "as5 against without weights", "as5 against default"):
        assert 0 < figures[name]["low"] <= figures[name]["median"] <= figures[name]["high"]


@pytest.mark.parametrize("option", [["--chunk", "1"], ["--buffer", "0"], ["--repeats", "0"]])
def test_sizes_that_will_not_do_are_refused(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gradient-cost", *option]) == 2
    assert f"error: {option[0]} {option[1]}: must be >= " in capsys.readouterr().err


def test_the_page_says_what_the_kept_output_says() -> None:
    docs = Path(__file__).resolve().parents[3] / "docs"
    kept = json.loads((docs / "results" / "gradient_cost.json").read_text())
    page = (docs / "method.md").read_text()
    for network in NETWORKS:
        found = counts(network)
        assert kept["multiply_adds_per_sample"][network.name] == found
        for count in found.values():
            assert f"| {count / 1e6:.2f} M |" in page or f"| {count / 1e3:.1f} K |" in page
    for name in ("as5 against default", "default against without weights"):
        figure = kept["figures"][name]
        assert f"{figure['median']:.2f} ({figure['low']:.2f} to {figure['high']:.2f}) times" in page
