"""What the documents say of results, in sentences, is what the kept records show."""

import json
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.report.paper import CONDITION, load_paper
from experiments.results.loading import load_results

ROOT = Path(__file__).resolve().parents[3]


def test_what_is_said_of_the_run_at_the_papers_size_is_in_its_record() -> None:
    folder = ROOT / "docs" / "results" / "cifar100-full-bf16"
    page = (ROOT / "REPRODUCIBILITY.md").read_text()
    rounds = [json.loads(line) for line in next(folder.glob("*/rounds.jsonl")).read_text().splitlines()]
    assert len(rounds) == 100 and not any(line["failures"] for line in rounds)
    hours = sum(line["seconds"][part] for line in rounds for part in ("training", "selection", "evaluation")) / 3600
    assert f"The run took {hours:.1f} core hours" in page

    def average(part: str) -> float:
        return float(mean(100 * mean(line[part]) for line in rounds))

    own = mean(100 * line["accuracy"] for line in rounds)
    local, together = average("local_accuracy"), average("global_accuracy")
    published = load_paper().value("table1", "FedKACE", "cifar100_O4", "AA")
    assert published is not None
    assert f"**Its AA is {own - published:.1f} points above the paper's.**" in page
    assert f"{own - local:.1f} points more than always the local model" in page
    assert f"{own - together:.1f} points more than always the global one" in page
    assert f"confirmed: at the paper's size by {own - together:.1f} and {own - local:.1f} points" in page
    kept = load_results(folder).runs.iloc[0]
    conditions = f"{kept['class_condition'] / 1e3:.1f} thousand per class at the paper's size and O=4, and "
    assert conditions + f"{kept['condition'] / 1e6:.0f} million for the whole buffer" in page
    table = load_paper().tables["table3"]
    papers = [table[row][f"cifar100_O{overlap}"][CONDITION] / 1e3 for row in table for overlap in (0, 5)]
    assert f"rows have {min(papers):.1f} to {max(papers):.1f} thousand at O=0 and O=5" in page
    switched = rounds[-1]["switched_at"]
    assert f"All clients switch between rounds {min(switched)} and {max(switched)}." in page
    lost = {line["round"]: mean(line["local_accuracy"]) - line["accuracy"] for line in rounds}
    assert {round(100 * lost[number]) for number in range(7, 13)} == {3, 4, 5}
    assert all(lost[number] < 0 for number in lost if number >= 16) and lost[15] > 0
    reference = ROOT / "docs" / "results" / "centralized-full-bf16" / "centralized_overlap-4_seed-0" / "rounds.jsonl"
    upper = mean(100 * json.loads(line)["accuracy"] for line in reference.read_text().splitlines())
    above = load_paper().value("table1", "Centralized", "cifar100_O4", "AA")
    assert above is not None
    regret = above - published
    assert f"it lies {upper - own:.0f} points below Centralized, in the paper {regret:.0f}" in page
    late = [line for line in rounds if "global_accuracy_unmasked" in line]
    assert late[0]["round"] == 58 and late[-1]["round"] == 100 and set(late[0]["seen_classes"]) == {62}
    masks = [100 * mean(mean(line[f"global_accuracy{mask}"]) for line in late) for mask in ("_unmasked", "")]
    assert f"the global model has {masks[0]:.1f} % with every class as a possible answer, and {masks[1]:.1f} %" in page


def test_what_is_said_of_the_readings_at_the_papers_size_is_in_their_records() -> None:
    page = (ROOT / "REPRODUCIBILITY.md").read_text()

    def lines_of(reading: str) -> list[dict[str, Any]]:
        run = ROOT / "docs" / "results" / "readings-full-15" / f"fedkace_cifar100_{reading}_seed-0"
        return [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]

    default, local = lines_of("default"), lines_of("statistics-local")
    names = ("replay-classes-seen", "batching-paired", "batching-random-replay", "self-distance-exclude")
    readings = {name: lines_of(name) for name in names}
    costs = [f"{100 * (default[14]['accuracy'] - lines[14]['accuracy']):.1f}" for lines in readings.values()]
    said = "`replay-classes = seen`, the mask of section A.3, costs {} points, `batching = paired` {}, "
    said += "`random-replay` {} and `self-distance = exclude` {};"
    assert said.format(*costs) in page
    assert all(
        sum(line["accuracy"] for line in lines[:4]) > sum(line["accuracy"] for line in default[:4]) - 0.02
        for lines in readings.values()
    )
    assert [line["local_accuracy"] for line in local] == [line["local_accuracy"] for line in default]
    seen, split = (
        [
            json.loads(line)["accuracy"]
            for line in (ROOT / "docs" / "results" / folder / "fedkace_overlap-4_seed-0" / "rounds.jsonl")
            .read_text()
            .splitlines()
        ]
        for folder in ("cifar100-full-bf16-seen", "cifar100-full-bf16")
    )
    means = [f"{100 * sum(lines) / 15:.1f}" for lines in (seen, split[:15])]
    assert len(seen) == 15
    assert f"have {means[0]} % on average, and those of the cell above {means[1]} %. In the last four of them" in page
    behind = [round(100 * (one - two), 1) for one, two in zip(split[11:15], seen[11:], strict=True)]
    assert f"by {min(behind)} to {max(behind)} points" in page
    chance = 100 * sum(1 / min(100, 4 + number) for number in range(1, 101)) / 100
    paper = load_paper()
    tfcl, dcfcl = (paper.value("table1", name, "cifar100_O4", "AA") for name in ("TFCL", "DCFCL"))
    assert f"has {chance:.2f} % at O=4" in page and f"TFCL and DCFCL, have {tfcl} % and {dcfcl} %" in page


def percent(rounds: list[dict[str, Any]], part: slice = slice(None)) -> float:
    """Mean accuracy over some rounds."""
    return float(100 * mean(line["accuracy"] for line in rounds[part]))


def runs_of(folder: str, overlap: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    """The rounds of a study's kept runs with one stream, by variant."""
    paths = (ROOT / "docs" / "results" / folder).glob(f"*_overlap-{overlap}_*_seed-{seed}/rounds.jsonl")
    return {
        path.parent.name.split("_")[3]: [json.loads(line) for line in path.read_text().splitlines()] for path in paths
    }


FIRST, SECOND = slice(5), slice(10, 20)


def test_what_is_said_of_fedframe_on_20_classes_is_in_its_records() -> None:
    page = (ROOT / "docs" / "fedframe.md").read_text()
    kept = {"fedframe-reduced": (3, 4, 5), "fedframe-pictures": (0, 1, 2)}
    ranges: dict[str, list[float]] = {"over FedKACE": [], "over the best": [], "second half": [], "with parts": []}
    lowest: dict[str, list[float]] = {name: [] for name in kept}
    layer: dict[str, list[float]] = {name: [] for name in kept}
    for folder, overlap in product(kept, (4, 0)):
        for seed in kept[folder]:
            runs = runs_of(folder, overlap, seed)
            with_refed = folder == "fedframe-reduced" or seed == 0
            assert ("refed" in runs) == with_refed and len(runs) == 11 + with_refed
            means = {name: percent(lines) for name, lines in runs.items()}
            half = {name: percent(lines, SECOND) for name, lines in runs.items()}
            published = [name for name in runs if name != "fedframe" and not name.endswith("-parts")]
            ranges["over FedKACE"].append(means["fedframe"] - means["fedkace"])
            rivals = [means[name] for name in published if name != "fedkace"]
            ranges["over the best"].append(means["fedframe"] - max(rivals))
            ranges["second half"].append(half["fedframe"] - max(half[name] for name in published))
            ranges["with parts"].append(
                means["fedframe"] - max(mean for name, mean in means.items() if name.endswith("-parts"))
            )
            layer[folder].append(means["fedframe"] - means["er-balanced-parts"])
            lowest[folder] += [100 * (sum(line["local_accuracy"]) / 4 - line["accuracy"]) for line in runs["fedframe"]]
    told = {name: f"{min(each):.1f} to {max(each):.1f} points" for name, each in ranges.items()}
    assert len(ranges["with parts"]) == 12 and "in each of twelve comparisons" in page
    assert f"its average accuracy is {told['over FedKACE']} above FedKACE's" in page
    assert (
        f"and {told['over the best'].removesuffix(' points')} points above that of the best rival as published" in page
    )
    assert f"in the second half of the rounds it is {told['second half']} above the best of all of these" in page
    assert f"the best is {told['with parts']} behind" in page
    worst = {name: f"{max(each):.1f}" for name, each in lowest.items()}
    assert f"never more than {worst['fedframe-pictures']} points below that of the local models on Tiny-Image" in page
    assert f"and never more than {worst['fedframe-reduced']} on CIFAR-100" in page
    cifar, tiny = (f"{min(each):.1f} to {max(each):.1f}" for each in layer.values())
    assert f"which thus brings {cifar} points on CIFAR-100 and {tiny} on Tiny-ImageNet" in page


def test_what_is_said_of_each_part_of_fedframe_is_in_its_record() -> None:
    page = (ROOT / "docs" / "fedframe.md").read_text()
    cells = [runs_of("fedframe-parts", overlap, 3) for overlap in (4, 0)]
    assert all(len(runs) == 11 for runs in cells)

    def brings(part: str, rounds: slice = slice(None)) -> list[float]:
        """What a part brings at O=4 and at O=0, in points."""
        return [percent(runs["fedframe"], rounds) - percent(runs[part], rounds) for runs in cells]

    layer, augmentation = brings("all-but-simplex"), brings("all-but-augmentation")
    said = "without them the average accuracy is {:.1f} and {:.1f} points lower at O=4, and {:.1f} and {:.1f} at O=0"
    assert said.format(layer[0], augmentation[0], layer[1], augmentation[1]) in page
    late, early = brings("all-but-augmentation", SECOND), brings("all-but-augmentation", FIRST)
    assert f"its absence costs {late[0]:.1f} and {late[1]:.1f} points" in page
    assert f"the first quarter at O=0 is better without it, by {-early[1]:.1f} points" in page
    names = ("all-but-mean", "all-but-discriminant", "all-but-recalibration")
    first = [brings(name, FIRST) for name in names]
    four, none = ("{:.1f}, {:.1f} and {:.1f}".format(*(each[cell] for each in first)) for cell in (0, 1))
    assert f"the answers are {four} points lower without them at O=4, and {none} at O=0" in page
    change = max(abs(each) for name in names for each in brings(name, SECOND))
    assert f"in the second half they change no more than {change:.1f} points" in page
    adjusted, mirrored = brings("all-but-adjustment"), brings("all-but-mirrored-view")
    assert "bring {:.1f} and {:.1f} points, the mirrored view {:.1f} and {:.1f}".format(*adjusted, *mirrored) in page
    weights = brings("all-but-tested-weight") + brings("all-but-any-weight")
    assert f"bring {max(weights):.1f} points or less" in page and max(weights) < 0.3
    together = brings("none")
    assert f"bring {together[0]:.1f} points at O=4 and {together[1]:.1f} at O=0" in page
