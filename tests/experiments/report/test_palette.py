"""One method has one colour in the plot of a run's comparison and in the figures."""

from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from support.made.results import write_run, write_study

from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.report.comparison import draw_comparisons
from fedkace_flwr.experiments.report.names import COLOURS, INK, colours, method_name
from fedkace_flwr.experiments.studies.study import load_study

METHODS = ("centralized", "er", "fedkace", "refed", "fedavg", "fedframe")


def test_methods_of_the_project_come_first_and_colours_repeat_late() -> None:
    given = colours({"ER": "er", "Centralized": "centralized", "FedKACE": "fedkace"})
    assert (given["FedKACE"], given["ER"], given["Centralized"]) == (COLOURS[0], COLOURS[1], INK)
    many = colours({f"M={number:02d}": "fedkace" for number in range(12)})
    assert many["M=00"] == many["M=10"] == COLOURS[0] and len(set(many.values())) == len(COLOURS)


def test_a_method_has_the_same_colour_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = ", ".join(METHODS)
    (tmp_path / "compare.yaml").write_text(f"config: {{dataset: digits, rounds: 2}}\ngrid: {{method: [{grid}]}}\n")
    folder = tmp_path / "results" / "compare"
    for method in METHODS:
        write_run(folder, method, [0.5, 0.6], method=method)
    write_study(folder, {method: {"method": method} for method in METHODS}, paper=None, axes=["method"])
    drawn: list[dict[str, str]] = []
    save = Figure.savefig

    def keep(figure: Figure, *given: object, **more: object) -> None:
        lines = [line for axes in figure.axes[:1] for line in axes.get_lines()]
        drawn.append({str(line.get_label()): to_hex(line.get_color()) for line in lines})
        save(figure, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", keep)
    draw_comparisons(load_study(tmp_path / "compare.yaml", {}, results=tmp_path / "results"))
    assert main(["report", str(folder)]) == 0
    comparison, *figures = drawn
    assert set(comparison) == {*map(method_name, METHODS), "chance"} and len(set(comparison.values())) == len(
        comparison
    )
    assert figures
    for each in figures:
        assert each.items() <= comparison.items()


def test_variants_of_methods_share_a_picture_of_the_running_study(tmp_path: Path) -> None:
    (tmp_path / "parts.yaml").write_text(
        "config: {dataset: digits, rounds: 2}\n"
        "grid: {overlap: [1, 0], variant: {er: {method: er}, er-wide: {method: er, width: 8}, fedkace: {method: fedkace}}}\n"
    )
    study = load_study(tmp_path / "parts.yaml", {}, results=tmp_path / "results")
    for name, config in study.runs.items():
        write_run(study.folder, name, [0.5, 0.6], method=config.method, overlap=config.stream.overlap)
    pictures = draw_comparisons(study)
    assert [path.name for path in pictures] == ["accuracy_overlap-1_seed-0.png", "accuracy_overlap-0_seed-0.png"]
