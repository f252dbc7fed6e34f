"""What the documents say of results, in sentences, is what the kept records show."""

import json
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


def test_what_is_said_of_fedframe_on_20_classes_is_in_its_records() -> None:
    page = (ROOT / "docs" / "fedframe.md").read_text()
    ranges: dict[str, list[float]] = {"over FedKACE": [], "over the best": [], "second half": [], "with parts": []}
    lowest: dict[tuple[str, int], tuple[float, int]] = {}
    for folder, data, seed in (("fedframe-reduced", "cifar100", 3), ("fedframe-pictures", "folder", 0)):
        for overlap in (4, 0):
            runs = {
                path.parent.name.split("_")[3]: [json.loads(line) for line in path.read_text().splitlines()]
                for path in (ROOT / "docs" / "results" / folder).glob(
                    f"*_{data}_overlap-{overlap}_*_seed-{seed}/rounds.jsonl"
                )
            }
            means = {name: percent(lines) for name, lines in runs.items()}
            published = [name for name in runs if name not in ("fedframe", "fedkace") and not name.endswith("-parts")]
            half = {name: percent(lines, slice(10, 20)) for name, lines in runs.items()}
            assert len(runs) == 12
            ranges["over FedKACE"].append(means["fedframe"] - means["fedkace"])
            ranges["over the best"].append(means["fedframe"] - max(means[name] for name in published))
            ranges["second half"].append(half["fedframe"] - max(half[name] for name in published))
            ranges["with parts"].append(
                means["fedframe"] - max(mean for name, mean in means.items() if name.endswith("-parts"))
            )
            below = [100 * (sum(line["local_accuracy"]) / 4 - line["accuracy"]) for line in runs["fedframe"]]
            lowest[data, overlap] = max(below), below.index(max(below)) + 1
    told = {name: f"{min(each):.1f} to {max(each):.1f} points" for name, each in ranges.items()}
    assert f"Its average accuracy is {told['over FedKACE']} above FedKACE's" in page
    assert f"and {told['over the best']} above that of the best rival as published" in page
    assert f"in the second half of the rounds it is {told['second half']} above the best rival" in page
    assert f"the best is {told['with parts']} behind" in page
    worst, number = max(lowest["folder", 4], lowest["folder", 0])
    assert f"never more than {worst:.1f} points below that of the local models (Tiny-ImageNet, round {number})" in page
    assert max(lowest["cifar100", 4], lowest["cifar100", 0])[0] < 0
