"""What the documents say of the runs at the paper's ratios is what their kept records show."""

import json
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results"
EVERY, FIRST, SECOND = slice(None), slice(15), slice(30, 60)
SEEDS = (0, 1, 2)
CELLS = list(product((4, 0), (EVERY, SECOND)))
PUBLISHED = ("fedcbdr", "ofcl", "refed", "derpp", "er", "fedavg", "dcfcl", "tfcl")
ABLATIONS = ("as4", "as7", "as8")
PARTS = ("er-balanced", "er", "fedcbdr", "fedkace", "derpp")

Rounds = list[dict[str, Any]]


def read(path: Path) -> Rounds:
    """The rounds of a run; none if it is not among the kept ones."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(method: str, overlap: int, seed: int, folder: str = "faithful") -> Rounds:
    return read(RESULTS / folder / f"{method}_overlap-{overlap}_{method}_seed-{seed}" / "rounds.jsonl")


def with_parts(method: str, overlap: int, seed: int) -> Rounds:
    name = f"{method}_cifar100_overlap-{overlap}_{method}-parts_seed-{seed}"
    return read(RESULTS / "fedframe-faithful" / name / "rounds.jsonl")


def percent(rounds: Rounds, part: slice = EVERY) -> float:
    """Mean accuracy over some rounds."""
    return float(100 * mean(line["accuracy"] for line in rounds[part]))


def ahead(one: str, other: str, overlap: int, part: slice = EVERY) -> list[float]:
    """By how many points a method is above another, for each seed that both have been run with."""
    runs = [(run(one, overlap, seed), run(other, overlap, seed)) for seed in SEEDS]
    return [percent(mine, part) - percent(theirs, part) for mine, theirs in runs if mine and theirs]


def best_rival(overlap: int, seed: int, part: slice = EVERY) -> tuple[str, float]:
    """The best of FedKACE, its ablations and the rivals as published, and FedFrame's lead over it."""
    found = {name: mine for name in ("fedkace", *ABLATIONS, *PUBLISHED) if (mine := run(name, overlap, seed))}
    best = max(found, key=lambda name: percent(found[name], part))
    return best, percent(run("fedframe", overlap, seed), part) - percent(found[best], part)


def told(leads: list[float]) -> str:
    return f"{', '.join(f'{lead:.1f}' for lead in leads[:-1])} and {leads[-1]:.1f}"


def page(name: str) -> str:
    return (ROOT / name).read_text()


def test_fedframes_leads_over_the_methods_as_published() -> None:
    text = page("docs/fedframe.md")
    best = {(overlap, part.start): [best_rival(overlap, seed, part) for seed in SEEDS] for overlap, part in CELLS}
    (four, none), (four_later, none_later) = (
        [told([lead for _, lead in best[overlap, part.start]]) for overlap in (4, 0)] for part in (EVERY, SECOND)
    )
    assert (
        f"average accuracy is {four} points above the best one's at O=4 (AS8 in each seed), and {none} at O=0" in text
    )
    assert f"it is {four_later} points above DER++, the best there, at O=4, and {none_later} at O=0" in text
    assert {name for name, _ in best[4, None]} == {"as8"} and {name for name, _ in best[0, None]} == {"derpp", "as8"}
    assert {name for overlap in (4, 0) for name, _ in best[overlap, 30]} == {"derpp"}


def test_fedframes_leads_over_the_methods_with_its_parts() -> None:
    text = page("docs/fedframe.md")
    leads: dict[int, list[float]] = {}
    names: dict[int, list[str]] = {}
    for overlap, seed in product((4, 0), SEEDS):
        found = {name: percent(with_parts(name, overlap, seed)) for name in PARTS}
        best = max(found, key=lambda name: found[name])
        names.setdefault(overlap, []).append(best)
        leads.setdefault(overlap, []).append(percent(run("fedframe", overlap, seed)) - found[best])
    assert names == {4: ["er-balanced"] * 3, 0: ["fedcbdr", "fedcbdr", "er"]}
    said = f"by {told(leads[4])} points at O=4 (balanced ER), and by {told(leads[0])} at O=0 (FedCBDR, in the third seed ER)"
    assert said in text
    least, most = min(map(min, leads.values())), max(map(max, leads.values()))
    assert f"points behind on 20 classes, and {least:.1f} to {most:.1f} on 100" in text

    def over(name: str, overlap: int, part: slice = EVERY) -> list[float]:
        runs = [(run("fedframe", overlap, seed), with_parts(name, overlap, seed)) for seed in SEEDS]
        return [percent(mine, part) - percent(theirs, part) for mine, theirs in runs]

    averages = {name: [mean(over(name, overlap)) for overlap in (4, 0)] for name in PARTS}
    assert [min(averages, key=lambda name: averages[name][cell]) for cell in (0, 1)] == ["er-balanced", "fedcbdr"]
    said = "FedFrame is {:.1f} points above balanced ER-parts at O=4 and {:.1f} above FedCBDR-parts at O=0"
    assert said.format(averages["er-balanced"][0], averages["fedcbdr"][1]) in text
    layer = [told(over("er-balanced", overlap)) for overlap in (4, 0)]
    assert f"the output layer alone, which thus brings {layer[0]} points at O=4, and {layer[1]} at O=0" in text
    assert f"DER++-parts is nearer: FedFrame is above it by {told(over('derpp', 4, SECOND))} points" in text
    four, none = (
        mean(percent(with_parts("er", overlap, seed)) - percent(run("er", overlap, seed)) for seed in (0, 1))
        for overlap in (4, 0)
    )
    assert f"The parts bring ER {four:.1f} points at O=4 and {none:.1f} at O=0" in text


def shortfall(rounds: Rounds) -> tuple[float, int]:
    """By how many points a run of four clients falls behind its local models at most, and in which round."""
    below = [100 * (mean(line["local_accuracy"]) - line["accuracy"]) for line in rounds]
    return max(below), below.index(max(below)) + 1


def test_fedframe_against_its_own_local_models() -> None:
    text = page("docs/fedframe.md")
    four, none = ([shortfall(run("fedframe", overlap, seed)) for seed in SEEDS] for overlap in (4, 0))
    assert f"at O=4 by up to {told([below for below, _ in four])} points in the three seeds" in text
    assert f"(rounds {four[0][1]}, {four[1][1]} and {four[2][1]})" in text
    ever = [(below, number) for below, number in none if below > 0]
    assert f"at O=0 by up to {told([below for below, _ in ever])} points in two of them" in text
    assert f"(rounds {ever[0][1]} and {ever[1][1]})" in text
    gaps = [
        max(
            mean(mean(line["local_accuracy"]) - line["accuracy"] for line in lines) for lines in zip(*runs, strict=True)
        )
        for runs in ([run("fedframe", overlap, seed) for seed in SEEDS] for overlap in (4, 0))
    ]
    assert f"it is never more than {100 * gaps[0]:.1f} points behind at O=4 and {100 * gaps[1]:.1f} at O=0" in text
    classes = run("fedframe", 4, 2)[1]["seen_classes"]
    assert 25 * sum(classes) == 600 and "one point is six of all clients' 600 answers" in text
    fading = [run("fedframe", 4, seed, "faithful-fading") for seed in (0, 1)]
    behind = " and ".join(f"{shortfall(rounds)[0]:.1f}" for rounds in fading)
    averages = " and ".join(f"{percent(rounds):.2f} %" for rounds in fading)
    assert f"by up to {behind} points in two runs at O=4, at an average accuracy of {averages};" in text


def test_what_is_said_of_rejected_updates() -> None:
    lost: dict[str, list[int]] = {}
    cosines = []
    for path in (RESULTS / "faithful").glob("*_seed-*/rounds.jsonl"):
        method, overlap, *_ = path.parent.name.split("_")
        rounds = read(path)
        if number := sum(len(line["failures"]) for line in rounds):
            lost.setdefault(f"{method}, {overlap}", []).append(number)
        if method == "fedframe":
            cosines += [each for line in rounds for each in line["update_cosine"]]
    text = page("docs/robustness.md")
    (four,), (none,), (one,) = (
        lost.pop(cell) for cell in ("fedavg, overlap-4", "fedavg, overlap-0", "dcfcl, overlap-0")
    )
    assert f"{four} of the 240 updates of FedAVG's run at O=4 were rejected, and {none} at O=0" in text
    assert one == 1 and "DCFCL lost one update" in text and not lost
    assert f"median cosine {median(cosines):.2f}" in text and min(cosines) > -0.1


def test_what_every_seed_shows() -> None:
    text = page("REPRODUCIBILITY.md")
    four, none = (min(best_rival(overlap, seed)[1] for seed in SEEDS) for overlap in (4, 0))
    assert f"at O=4 by {four:.1f} points or more and at O=0 by {none:.1f} or more" in text
    for overlap, said in ((4, "({} and {} over the same two seeds)"), (0, "({} and {})")):
        means = [mean(percent(run(name, overlap, seed)) for seed in (0, 1)) for name in ("fedframe", "centralized")]
        assert said.format(*(f"{each:.1f} %" for each in means)) in text
    random = ahead("as8", "fedkace", 4) + ahead("as8", "fedkace", 0)
    assert len(random) == 6 and min(random) > 0
    within = f"by {min(random):.1f} to {max(random):.1f} points"
    assert f"it is better in all six runs, {within}" in text and f"above FedKACE in all six runs, {within}" in text
    assert all(lead < 0 for name in PUBLISHED for overlap in (4, 0) for lead in ahead(name, "fedkace", overlap, FIRST))
    four, none = (min(ahead("derpp", "fedkace", overlap, SECOND)) for overlap in (4, 0))
    assert f"by {four:.1f} points or more at O=4 and by {none:.1f} or more at O=0" in text
    assert f"FedCBDR is ahead at O=0, by {min(ahead('fedcbdr', 'fedkace', 0, SECOND)):.1f} or more" in text
    assert sum(lead > 0 for lead in ahead("fedcbdr", "fedkace", 4, SECOND)) == 1


def test_the_papers_claims_at_its_ratios() -> None:
    text = page("REPRODUCIBILITY.md")
    assert f"the next of the paper's rivals, by {told(ahead('fedkace', 'fedcbdr', 4))} points" in text
    assert (
        f"At O=0 it is below FedCBDR, by {told(ahead('fedcbdr', 'fedkace', 0))} points, and below ER and DER++" in text
    )
    assert all(min(ahead(name, "fedkace", 0)) > 0 for name in ("er", "derpp", *ABLATIONS))
    assert all(abs(lead) < 1 for lead in ahead("derpp", "fedkace", 4))
    one, two = (f"{lead:.1f}" for lead in ahead("fedcbdr", "ofcl", 4))
    assert one == two and f"FedCBDR's over OFCL ({one} points in two seeds)" in text
    assert f"OFCL leads Re-Fed by {told(ahead('ofcl', 'refed', 4))} points" in text
    order = ("fedcbdr", "fedkace", "ofcl", "refed", "fedavg")
    assert all(min(ahead(better, worse, 0)) > 0 for better, worse in pairwise(order))
    assert all(min(ahead(better, worse, 4)) > 0 for better, worse in pairwise(("fedkace", *order[:1], *order[2:])))
    guessing = {
        (name, overlap): percent(rounds) - 100 * mean(line["chance"] for line in rounds)
        for name, overlap in product(("tfcl", "dcfcl"), (0, 4))
        if (rounds := run(name, overlap, 0))
    }
    above = [f"{guessing[name, overlap]:.1f}" for overlap in (0, 4) for name in ("tfcl", "dcfcl")]
    said = "confirmed at O=0, where they are {} and {} points above guessing; at O=4 {} and {} (one seed)"
    assert said.format(*above) in text
    for overlap, seed in product((4, 0), SEEDS):
        rounds = run("fedkace", overlap, seed)
        others = [100 * mean(mean(line[f"{model}_accuracy"]) for line in rounds) for model in ("local", "global")]
        assert percent(rounds) > max(others), "the switch beats both, in every run"
    weights = [lead for o in (4, 0) for pair in (("as4", "fedkace"), ("as8", "as7")) for lead in ahead(*pair, o)]
    assert len(weights) == 8 and min(weights) > 0
    assert f"weight 1 is better in all eight comparisons, by {min(weights):.1f} to {max(weights):.1f} points" in text
    *better, worse = sorted(ahead("as7", "fedkace", 4) + ahead("as7", "fedkace", 0), reverse=True)
    assert (
        f"in three of four runs, by {better[-1]:.1f} to {better[0]:.1f} points, and {-worse:.1f} below it in one"
        in text
    )


def test_how_long_the_runs_took() -> None:
    shared = ("refed", "tfcl")  # beside other work
    minutes: dict[str | None, list[float]] = {}
    for path in [*RESULTS.glob("faithful/*_seed-*/rounds.jsonl"), *RESULTS.glob("fedframe-faithful/*/rounds.jsonl")]:
        gpu = json.loads((path.parent / "environment.json").read_text())["gpu"]
        taken = sum(line["seconds"]["round"] for line in read(path)) / 60
        if gpu or path.parent.name.split("_")[0] not in shared:
            minutes.setdefault(gpu, []).append(taken)
    (average, *slow), old, new = (sorted(minutes[gpu]) for gpu in (None, "NVIDIA H200", "NVIDIA H100 80GB HBM3"))
    text = page("docs/gpu.md")
    assert (
        f"took {old[0]:.1f} to {old[-1]:.1f} minutes on the H200 and {new[0]:.1f} to {new[-1]:.1f} on the H100" in text
    )
    assert len(old) == 14 and "records of fourteen" in text and len(new) == 43 + 14
    slowly = f"took {slow[0]:.0f} to {slow[-1]:.0f} minutes on one core of an Intel Xeon"
    assert slowly in text and f"FedAVG, which has no buffer, {average:.0f}" in text
    assert f"on one core each takes {slow[0]:.0f} to {slow[-1]:.0f} (" in page("README.md")
    together = json.loads((RESULTS / "gpu" / "studies.json").read_text())
    least, *_, most = sorted(together["rounds of the unfinished runs"])
    assert 9 < together["seconds"] / 60 < 9.5 and together["continued, seconds"] < 150
    assert f"nine minutes {together['finished runs']} runs were finished and ten more had {least} to {most} of" in text
    assert f"On an H100, {together['finished runs']} runs" in page("README.md")
    later = json.loads((RESULTS / "gpu" / "studies-together.json").read_text())
    assert later["runs at a time"] == 32 and 11 < later["seconds"] / 60 < 11.5
    *small, large, few = later["finished runs"]
    assert f"eleven and a half minutes {sum(small) + few} runs on 20 classes, of 20 rounds, and {large} on 100" in text
    kept = [json.loads(path.read_text())["gpu"] for path in RESULTS.glob("faithful/*_seed-*/environment.json")]
    assert f"Of these {len(kept)} runs, {sum(map(bool, kept))} were computed on" in page("REPRODUCIBILITY.md")


def test_the_speeds_of_a_gpu_are_the_measured_ones() -> None:
    text = page("docs/gpu.md")
    figures = json.loads((RESULTS / "bench" / "gpu.json").read_text())["figures"]
    rows = {
        "plain, `fp32`": "eager",
        "recorded, `fp32`": "captured",
        "recorded, `tf32 = true`": "captured, tf32",
        "recorded, `bf16`": "captured, bf16",
        "recorded, `fp32`, `deterministic`": "captured, deterministic",
    }
    speeds = {kind: figures[f"training, {kind}, samples per second"]["median"] for kind in rows.values()}
    for row, kind in rows.items():
        shown = speeds[kind] if kind == "eager" else round(speeds[kind], -1)
        ratio = 1 if kind == "eager" else f"{figures[f'{kind} step against eager']['median']:.1f}"
        assert f"| {row} | {shown:,.0f} | {ratio} |" in text
    assert f"took {speeds['captured'] / speeds['captured, deterministic']:.1f} times as long" in text
    hours, minutes, less = (29.7e6 / speeds[kind] / 60 for kind in ("eager", "captured", "captured, bf16"))
    assert (
        f"that is {hours / 60:.1f} hours with plain steps and {minutes:.0f} minutes with recorded ones, {less:.0f} in"
        in text
    )


def test_the_tests_that_need_a_gpu() -> None:
    text = page("docs/gpu.md")
    outcomes = json.loads((RESULTS / "gpu" / "tests.json").read_text())
    first, again = (outcomes[part]["figures"] for part in ("first run", "after the correction"))
    failed = {name for name, outcome in first.items() if outcome}
    assert f"Of the {len(first)} tests that need a GPU, {len(first) - len(failed)} passed at once" in text
    assert set(again) == failed and not any(again.values()) and all("memory" in name for name in failed)
    assert "reserved more than four times what was planned" in text
    assert all(memory["reserved"] > 4 * memory["planned"] for memory in outcomes["first run"]["memory"].values())


def test_what_the_readme_says_of_100_classes() -> None:
    names = ("fedframe", "fedkace", "derpp", "fedcbdr", "er", "ofcl", "refed")
    means = [mean(percent(mine) for seed in SEEDS if (mine := run(name, 4, seed))) for name in names]
    said = "FedFrame has an average accuracy of {:.1f} % (mean of three seeds), FedKACE {:.1f} % and the best rival, DER++, {:.1f} %."
    assert said.format(*means[:3]) in page("README.md") and means[2] > max(means[3:])
    leads = ahead("fedframe", "fedkace", 4) + ahead("fedframe", "fedkace", 0)
    assert f"{min(leads):.0f} to {max(leads):.0f} points above FedKACE's, at the same bytes" in page("README.md")
