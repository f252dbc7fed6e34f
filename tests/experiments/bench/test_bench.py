"""The benchmark's GPU part: every figure has its row, measured or not."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fedkace_flwr.errors import RunError
from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.bench import gpu as gpu_part
from fedkace_flwr.experiments.bench.measure import Figures, kept, report, spread, unmeasured, verdict
from fedkace_flwr.experiments.bench.suite import bench


def test_without_cuda_every_figure_says_that_it_was_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text, output = io.StringIO(), tmp_path / "figures.json"
    bench(Console(file=text, width=200), parts=["gpu"], repeats=1, processes=1, output=output)
    found = json.loads(output.read_text())
    assert found["environment"]["gpu"] is None
    figures = found["figures"]
    assert all(figure["median"] is None for figure in figures.values())
    aims = {figure["aim"] for figure in figures.values() if "aim" in figure}
    assert aims == {">= 3", "<= 0.1"}
    rows = [line for line in text.getvalue().splitlines() if "not measured" in line]
    assert len(rows) == len(figures)


def test_every_row_with_an_aim_has_a_verdict() -> None:
    text = io.StringIO()
    figures: Figures = {
        "fast": {"median": 3.0, "aim": ">= 3"},
        "slow": {"median": 2.9, "aim": ">= 3"},
        "none": {"median": None, "aim": "< 20"},
        "free": {"median": 1.0},
    }
    report(Console(file=text, width=200), figures, repeats=1, output=None)
    rows = {line.split()[0]: line.split()[-1] for line in text.getvalue().splitlines()[1:5]}
    assert rows == {"fast": "met", "slow": "missed", "none": "measured", "free": "measured"}
    assert [verdict(figure) for figure in figures.values()] == ["met", "missed", "not measured", "measured"]


def test_an_unmeasured_figure_beside_a_measured_one() -> None:
    assert unmeasured() == {"median": None}
    assert spread([1.0, 3.0, 2.0], ">= 1") == {"median": 2.0, "low": 1.0, "high": 3.0, "aim": ">= 1"}


def test_large_figures_have_no_exponent(tmp_path: Path) -> None:
    text, output = io.StringIO(), tmp_path / "figures.json"
    figures: Figures = {"many": {"median": 14486.7, "low": 9999.4, "high": 1234567.0}, "few": {"median": 0.00212307}}
    report(Console(file=text, width=200), figures, repeats=2, output=output)
    assert kept(output).splitlines()[2:4] == ["| many | 14,490 | 9999 | 1,235,000 |  |", "| few | 0.002123 |  |  |  |"]


@pytest.mark.slow
def test_the_measurement_gives_the_figures_that_are_promised() -> None:
    """A small round on the CPU: the same code, figures of no meaning."""
    small = {"epochs": 1, "chunk": 5, "buffer": 4}
    figures = gpu_part.training_on(torch.device("cpu"), 1, **small)
    assert list(figures) == list(gpu_part.AIMS)
    assert all(figure["median"] > 0 for figure in figures.values())
    assert {name: figure.get("aim", "") for name, figure in figures.items()} == gpu_part.AIMS


@pytest.mark.slow
def test_processes_train_side_by_side() -> None:
    """On the CPU, where each takes its turn: the rate is that of all of them."""
    rates = gpu_part.side_by_side("cpu", 2, 3, epochs=1, chunk=5, buffer=4)
    assert len(rates) == 3 and all(rate > 0 for rate in rates)


@pytest.mark.slow
def test_a_process_that_fails_ends_the_measurement() -> None:
    with pytest.raises(RunError, match="--processes 2: one of them failed"):
        gpu_part.side_by_side("nowhere", 2, 1, epochs=1, chunk=5, buffer=4)


def test_an_installed_package_says_that_it_has_no_benchmarks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "fedkace_flwr.experiments.bench.measure", None)
    assert main(["bench", "gpu"]) == 2
    assert capsys.readouterr().err.startswith("error: bench: is not in the installed package")


def test_kept_figures_are_shown_as_they_were_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, output = io.StringIO(), tmp_path / "figures.json"
    figures = {"rate": spread([1.0, 3.0, 2.0], ">= 1"), "other": unmeasured()}
    report(Console(file=text, width=200), figures, repeats=3, output=output)
    assert main(["bench", "--show", str(output)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[2:4] == ["| rate | 2 | 1 | 3 | >= 1 |", "| other | not measured |  |  |  |"]
    assert shown[-2] == text.getvalue().splitlines()[-1] and shown[-2].endswith("n = 3")


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"figures": {}}'])
def test_a_file_without_figures_is_named(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    if content is not None:
        path.write_text(content)
    assert main(["bench", "--show", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}: must be a file written by bench --output")
