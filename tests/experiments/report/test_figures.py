"""The report's figures: which there are, and what each of their panels shows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from support.figures import drawn_in_panels
from support.made.results import write_run, write_study

from fedkace_flwr.experiments.__main__ import main


def test_figures_are_only_those_whose_data_is_there(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "one", [0.5, 0.6])
    write_run(tmp_path / "a", "two", [0.5, 0.6], capacity=15)
    write_run(tmp_path / "b", "one", [0.5], finished=False)
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "out")]) == 0
    figures = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.png")}
    assert figures == {"a/curves.png", "b/unfinished.png"}
    assert (tmp_path / "out" / "b" / "tables.md").exists()


@pytest.mark.parametrize(
    ("methods", "figure2", "figure3"),
    [
        (
            {1: ["fedkace", "fedavg"], 0: ["as4"]},
            {"digits, O=1": ["FedAVG", "FedKACE", "chance"]},
            {"digits, O=1": ["FedKACE", "chance"], "digits, O=0": ["AS4", "chance"]},
        ),
        (
            {1: ["fedkace", "as4"], 0: ["fedavg"]},
            {"digits, O=1": ["FedKACE", "chance"], "digits, O=0": ["FedAVG", "chance"]},
            {"digits, O=1": ["AS4", "FedKACE", "chance"]},
        ),
        (
            {2: ["fedavg"], 1: ["fedkace"], 0: ["as4"]},
            {"digits, O=2": ["FedAVG", "chance"], "digits, O=1": ["FedKACE", "chance"]},
            {"digits, O=1": ["FedKACE", "chance"], "digits, O=0": ["AS4", "chance"]},
        ),
    ],
)
def test_a_figure_leaves_out_the_columns_in_which_it_has_no_line(
    methods: dict[int, list[str]],
    figure2: dict[str, list[str]],
    figure3: dict[str, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    runs = {f"{method}_{overlap}": (method, overlap) for overlap, names in methods.items() for method in names}
    for name, (method, overlap) in runs.items():
        write_run(tmp_path / "s", name, [0.5, 0.6], method=method, overlap=overlap)
    told = {name: {"method": method, "overlap": overlap, "seed": 0} for name, (method, overlap) in runs.items()}
    write_study(tmp_path / "s", told, axes=["overlap", "method", "seed"], paper=None)
    assert main(["report", str(tmp_path / "s")]) == 0
    assert [drawn_in_panels(figure) for figure in saved] == [figure2, figure2, figure3, figure3]
    explained = [axes for axes in saved[0].axes if axes.get_legend()]
    assert [sorted(str(line.get_label()) for line in axes.get_lines()) for axes in explained] == [
        ["GAP", "accuracy on the buffer", "probability of the true class"]
    ]


def test_a_study_without_fedkace_has_curves(tmp_path: Path) -> None:
    for method in ("fedframe", "er"):
        write_run(tmp_path / "s", method, [0.5, 0.6], method=method)
    assert main(["report", str(tmp_path / "s")]) == 0
    assert [path.name for path in (tmp_path / "s" / "report").glob("*.png")] == ["curves.png"]


def test_a_line_without_a_value_is_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    for name, accuracies in (("one", [None, None]), ("two", [0.5, 0.6])):
        folder = write_run(tmp_path / "s", name, accuracies, capacity=15 if name == "one" else 20)
        lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        (folder / "rounds.jsonl").write_text("".join(json.dumps({**line, "chance": None}) + "\n" for line in lines))
    assert main(["report", str(tmp_path / "s")]) == 0
    assert [len(axes.get_lines()) for figure in saved for axes in figure.axes] == [1, 1]


def test_every_line_of_a_figure_lies_within_its_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Figure] = []

    def keep(figure: Figure, *_: Any, **__: Any) -> None:
        saved.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)
    for method, accuracies in (("fedkace", [0.9, 0.2]), ("er", [0.1, 0.3]), ("as4", [0.8, 0.1])):
        write_run(tmp_path / "s", method, accuracies, method=method)
    assert main(["report", str(tmp_path / "s")]) == 0
    assert len(saved) == 4  # two figures in two formats
    for axes in (axes for figure in saved for axes in figure.axes):
        drawn = [value for line in axes.get_lines() for value in np.asarray(line.get_ydata()).tolist()]
        assert drawn and axes.get_ylim()[0] == 0 and max(drawn) <= axes.get_ylim()[1]
        assert axes.get_xlim() == saved[0].axes[0].get_xlim()
