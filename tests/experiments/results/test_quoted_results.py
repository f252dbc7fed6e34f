"""What the documents say of results, in sentences, is what the kept records show."""

import json
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

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
            assert len(runs) == 11
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


FAITHFUL = ROOT / "docs" / "results" / "faithful"
EVERY, FIRST, SECOND = slice(None), slice(15), slice(30, 60)


def faithful(method: str, overlap: int, seed: int, folder: Path = FAITHFUL) -> list[dict[str, Any]]:
    """The rounds of a run at the paper's ratios; none if it is not among the kept ones."""
    path = folder / f"{method}_overlap-{overlap}_{method}_seed-{seed}" / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def percent(rounds: list[dict[str, Any]], part: slice = EVERY) -> float:
    """Mean accuracy over some rounds."""
    return 100 * float(sum(line["accuracy"] for line in rounds[part])) / len(rounds[part])


SHOWN = {
    "FedFrame": "fedframe",
    "FedKACE": "fedkace",
    "FedKACE, AS8": "as8",
    "FedKACE, AS4": "as4",
    "DER++": "derpp",
    "FedCBDR": "fedcbdr",
    "ER": "er",
}


@pytest.mark.parametrize(("label", "method"), SHOWN.items())
@pytest.mark.parametrize("seed", [0, 1])
def test_the_table_of_fedframe_on_100_classes_is_that_of_the_kept_runs(label: str, method: str, seed: int) -> None:
    runs = [faithful(method, overlap, seed) for overlap in (4, 0)]
    cells = [f"{percent(run, part):.2f}" if run else "-" for run in runs for part in (EVERY, FIRST, SECOND)]
    assert f"| {label} | {seed} | {' | '.join(cells)} |" in (ROOT / "docs" / "fedframe.md").read_text()


def test_what_is_said_of_fedframe_on_100_classes_is_in_its_records() -> None:
    page = (ROOT / "docs" / "fedframe.md").read_text()
    rivals = ("fedkace", "as4", "as7", "as8", "derpp", "fedcbdr", "er", "ofcl", "refed", "fedavg", "dcfcl", "tfcl")

    def lead(overlap: int, seed: int, part: slice) -> tuple[str, str]:
        found = {name: run for name in rivals if (run := faithful(name, overlap, seed))}
        best = max(found, key=lambda name: percent(found[name], part))
        return best, f"{percent(faithful('fedframe', overlap, seed), part) - percent(found[best], part):.1f}"

    (one, first), (two, second), (three, third) = (lead(*cell, EVERY) for cell in ((4, 0), (4, 1), (0, 0)))
    assert (one, two, three) == ("as8", "as8", "derpp")
    assert f"{first} and {second} points above that of AS8 at O=4, and {third} above that of DER++ at O=0" in page
    (one, first), (two, second), (three, third) = (lead(*cell, SECOND) for cell in ((4, 0), (4, 1), (0, 0)))
    assert (one, two, three) == ("derpp", "derpp", "derpp")
    assert f"it is {first} and {second} points above DER++ at O=4, and {third} at O=0" in page
    for overlap, seed, said in (
        (4, 0, "at O=4 by up to {} points (round {}) with seed 0"),
        (4, 1, "up to {} points (round {}) with seed 1, at O=0"),
        (0, 0, "at O=0 by up to {} points (round {}) with seed 0"),
    ):
        assert said.format(*shortfall(faithful("fedframe", overlap, seed))) in page
    assert float(shortfall(faithful("fedframe", 0, 1))[0]) < 0 and "and never with seed 1" in page
    fading = [faithful("fedframe", 4, seed, FAITHFUL.parent / "faithful-fading") for seed in (0, 1)]
    behind = [shortfall(rounds)[0] for rounds in fading]
    averages = [f"{percent(rounds):.2f} %" for rounds in fading]
    assert (
        f"{' and '.join(behind)} points in the two runs at O=4, at an average accuracy of {' and '.join(averages)};"
        in page
    )


def shortfall(rounds: list[dict[str, Any]]) -> tuple[str, int]:
    """By how many points a run of four clients falls behind its local models at most, and in which round."""
    below = [100 * (mean(line["local_accuracy"]) - line["accuracy"]) for line in rounds]
    return f"{max(below):.1f}", below.index(max(below)) + 1


def test_what_is_said_of_rejected_updates_is_in_the_records() -> None:
    lost: dict[str, list[int]] = {}
    cosines: dict[str, list[float]] = {}
    for folder in FAITHFUL.glob("*_seed-*"):
        method = folder.name.split("_")[0]
        rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        lost.setdefault(method, []).append(sum(len(line["failures"]) for line in rounds))
        cosines.setdefault(method, []).extend(each for line in rounds for each in line.get("update_cosine", []))
    page = (ROOT / "docs" / "robustness.md").read_text()
    (average,) = lost.pop("fedavg")
    assert f"{average} of the 240 updates of a run of FedAVG were rejected; the other methods lost none" in page
    assert not any(sum(each) for each in lost.values())
    assert f"median cosine {median(cosines['fedframe']):.2f}" in page and min(cosines["fedframe"]) > -0.1


def test_what_is_said_of_the_comparison_at_the_papers_ratios_is_in_its_records() -> None:
    page = (ROOT / "REPRODUCIBILITY.md").read_text()
    pairs = [(4, 0), (4, 1), (0, 0)]

    def ahead(method: str, part: slice = EVERY) -> list[float]:
        runs = [(faithful(method, *pair), faithful("fedkace", *pair)) for pair in pairs]
        return [percent(mine, part) - percent(other, part) for mine, other in runs if mine]

    equal = [f"{percent(faithful(name, 4, 0)):.2f}" for name in ("fedframe", "centralized")]
    assert f"({equal[0]} % and {equal[1]} % in seed 0)" in page
    one, two = ahead("as8")
    assert f"better by {one:.1f} and {two:.1f} points at O=4" in page
    *many, last = ahead("derpp", SECOND)
    assert f"by {min(many):.1f} points or more at O=4 and by {last:.1f} at O=0" in page
    one, two, last = ahead("fedcbdr", SECOND)
    assert last > 0 and (one > 0) != (two > 0)
    published = ("derpp", "fedcbdr", "er", "ofcl", "refed", "fedavg", "dcfcl")
    assert all(lead < 0 for method in published for lead in ahead(method, FIRST))
    (four, both, none) = [percent(faithful("fedframe", *pair)) for pair in pairs]
    best = [
        max(percent(run) for name in (*published, "as4", "as7", "as8") if (run := faithful(name, *pair)))
        for pair in pairs
    ]
    least, other = min(four - best[0], both - best[1]), none - best[2]
    assert f"at O=4 by {least:.1f} points or more in each seed, at O=0 by {other:.1f}" in page
    of_none = [percent(run) for name in (*published, "as4", "as7", "as8", "fedframe") if (run := faithful(name, 0, 0))]
    assert min(of_none) > percent(faithful("fedkace", 0, 0))


def test_what_is_said_of_the_papers_claims_at_its_ratios_is_in_the_records() -> None:
    page = (ROOT / "REPRODUCIBILITY.md").read_text()
    cells = [(4, 0), (4, 1), (0, 0)]

    def above(method: str, other: str) -> list[float]:
        runs = [(faithful(method, *cell), faithful(other, *cell)) for cell in cells]
        return [percent(mine) - percent(rival) for mine, rival in runs if mine and rival]

    one, two, three = above("fedkace", "fedcbdr")
    assert f"the next of the paper's rivals, by {one:.1f} and {two:.1f} points in two seeds" in page
    assert f"{-three:.1f} points below FedCBDR and {-above('fedkace', 'er')[2]:.1f} below ER (one seed)" in page
    (lead,) = above("fedcbdr", "ofcl")
    assert f"FedCBDR leads OFCL by {lead:.1f} points (one seed)" in page
    guessing = faithful("dcfcl", 4, 0)
    lead = percent(guessing) - 100 * mean(line["chance"] for line in guessing)
    assert f"DCFCL is {lead:.1f} points above guessing at O=4" in page
    for cell in cells:
        rounds = faithful("fedkace", *cell)
        others = [100 * mean(mean(line[f"{model}_accuracy"]) for line in rounds) for model in ("local", "global")]
        assert percent(rounds) > max(others), "the switch beats both, in every run"
    one, two, three = above("as4", "fedkace")
    (other,) = above("as8", "as7")
    assert (
        f"{one:.1f} and {two:.1f} points above FedKACE at O=4 and {three:.1f} at O=0, and AS8 {other:.1f} above" in page
    )
    (lead,) = above("as7", "fedkace")
    assert f"AS7 is {lead:.1f} points above FedKACE at O=4 (one seed)" in page
    one, two = above("as8", "fedkace")
    assert f"AS8 is {one:.1f} and {two:.1f} points above it at O=4" in page


def test_what_is_said_of_the_gpu_is_in_the_records() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    outcomes = json.loads((ROOT / "docs" / "results" / "gpu" / "tests.json").read_text())
    first, again = (outcomes[part]["figures"] for part in ("first run", "after the correction"))
    failed = {name for name, outcome in first.items() if outcome}
    assert f"Of the {len(first)} tests that need a GPU, {len(first) - len(failed)} passed at once" in page
    assert set(again) == failed and not any(again.values()) and all("memory" in name for name in failed)
    assert "reserved more than four times what was planned" in page
    assert all(memory["reserved"] > 4 * memory["planned"] for memory in outcomes["first run"]["memory"].values())
    minutes: dict[bool | str, list[float]] = {}
    for folder in FAITHFUL.glob("*_seed-*"):
        lines = (folder / "rounds.jsonl").read_text().splitlines()
        on_gpu = json.loads((folder / "environment.json").read_text())["gpu"] == "NVIDIA H200"
        which = "FedAVG" if folder.name.startswith("fedavg") else on_gpu
        minutes.setdefault(which, []).append(sum(json.loads(line)["seconds"]["round"] for line in lines) / 60)
    quick, slow, (average,) = sorted(minutes[True]), sorted(minutes[False]), minutes["FedAVG"]
    assert f"took {quick[0]:.1f} to {quick[-1]:.1f} minutes" in page and "records of fourteen" in page
    assert len(quick) == 14
    told = f"took {slow[0]:.0f} to {slow[-1]:.0f} minutes on one core of an Intel Xeon (FedAVG, which has no buffer, "
    assert f"{told}{average:.0f})" in page
    assert f"on one core each takes {slow[0]:.0f} to {slow[-1]:.0f} (" in (ROOT / "README.md").read_text()


def test_what_the_readme_says_of_100_classes_is_in_the_records() -> None:
    names = ("fedframe", "fedkace", "derpp", "fedcbdr", "er")
    means = [sum(percent(faithful(name, 4, seed)) for seed in (0, 1)) / 2 for name in names]
    said = "FedFrame has an average accuracy of {:.1f} % (mean of two seeds), FedKACE {:.1f} % and the best rival, DER++, {:.1f} %."
    page = (ROOT / "README.md").read_text()
    assert said.format(*means[:3]) in page and means[2] > max(means[3:])
    cells = [(overlap, seed) for overlap in (4, 0) for seed in (0, 1)]
    leads = [percent(faithful("fedframe", *cell)) - percent(faithful("fedkace", *cell)) for cell in cells]
    assert f"{min(leads):.0f} to {max(leads):.0f} points above FedKACE's, at the same bytes" in page
