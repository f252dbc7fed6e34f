"""Names of runs, variants and studies that try to be more than names: in tables, plots, pages, paths and terminals."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.made.results import made_round, write_run, write_study

from fedkace_flwr.errors import ConfigError, ResultsError
from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.report.markup import in_html, in_tex
from fedkace_flwr.experiments.report.tables import Cell, ResultTable
from fedkace_flwr.experiments.report.write import write_report
from fedkace_flwr.experiments.results.loading import load_results
from fedkace_flwr.results.plot import draw_accuracy, in_plot
from fedkace_flwr.storage.names import in_markdown

SCRIPT = "<script>alert(1)</script>"
LINK = "[x](javascript:alert(1)) ![y](https://evil.example/y.png) https://evil.example www.evil.example"
TEX = r"\input{/etc/passwd} \write18{id} $x$ 100% #1 {a}_b^c ~ & | < > [5pt]"
FORMULA = "$\\frac{1}{0$ and more"
BREAK = "a\n\n# heading\n% \\input{x}\r\x1b[31m\u2028b"
NAMES = [SCRIPT, LINK, TEX, FORMULA, BREAK, "_hidden", "`code` **bold** _it_ ~~no~~ | cell", "\ud800 half", "*", "[0]"]


def table_of(name: str) -> ResultTable:
    cells = {(name, name): Cell(12.0, None, 1)}
    return ResultTable("s", "aa", name, name, [name], [name], cells, (name,))


def hostile_study(folder: Path, *names: str, study: str = "table1") -> Path:
    """Runs that differ in an axis with these values; the axis and the study have such a name too."""
    for index, _ in enumerate(names):
        write_run(folder, f"run-{index}", [0.5, 0.6])
    runs = {f"run-{index}": {names[0]: name, "seed": 0} for index, name in enumerate(names)}
    write_study(folder, runs, study=study, title=names[0], paper=None, axes=[names[0], "seed"])
    return folder


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on a study whose names are all hostile."""
    folder = tmp_path_factory.mktemp("hostile")
    write_report([hostile_study(folder / "study", *NAMES)])
    return folder / "study" / "report"


# Markdown


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_a_name_stays_text_in_markdown(name: str) -> None:
    text = table_of(name).text().markdown()
    assert not re.search(r"(?<!\\)[<>`$]", text)
    assert not re.search(r"(?<!\\)\[|(?<!\\)\]\(", text)
    assert not re.search(r"(?<!\\)://|www(?<!\\)\.", text)
    lines = text.splitlines()
    assert len(lines) == 7  # title, head, rule, one row and the note, with two blank lines
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in lines[2:5]] == [3, 3, 3]
    assert all(line.isprintable() for line in lines)


def test_ordinary_names_are_written_as_they_are() -> None:
    for name in ("CIFAR-100, O=4", "size=K8_M200, FedKACE", "27.00 ± 2.00 (n=3)", "1.94e+06 (n=1)", "lambda-max=1e4"):
        assert in_markdown(name) == name


@given(st.text())
def test_no_text_is_markup_in_markdown(text: str) -> None:
    shown = in_markdown(text)
    assert shown.isprintable()
    assert not re.search(r"(?<!\\)(\\\\)*[<>|`*$&~\[\]]", re.sub(r"\\[^\w\s]", "", shown))


# LaTeX


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_a_name_stays_text_in_latex(name: str) -> None:
    text = table_of(name).text().latex()
    commands = set(re.findall(r"\\[A-Za-z]+", "\n".join(line for line in text.splitlines() if line[0] != "%")))
    own = {r"\begin", r"\end", r"\centering", r"\caption", r"\hline"}
    text_commands = {r"\textbackslash", r"\textasciitilde", r"\textasciicircum", r"\textless", r"\textgreater"}
    assert commands <= own | text_commands | {r"\textbar", r"\pm"}
    assert [line[0] for line in text.splitlines()].count("%") == 1  # the note, a comment
    body = text.splitlines()[1:]
    assert not re.search(r"(?<!\\)[%#&]", re.sub(r" & ", "", "\n".join(body)))
    assert all(line.isprintable() for line in text.splitlines())


@given(st.text())
def test_no_text_is_a_command_in_latex(text: str) -> None:
    shown = in_tex(text)
    known = r"\\text(backslash|asciitilde|asciicircum|less|greater|bar)\{\}|\\[%&_#${}]|\{[\[*]\}|\$\\pm\$"
    assert not re.search(r"[\\{}$&#^_%~\[*\n]", re.sub(known, "", shown))


# The whole report


def test_a_report_on_hostile_names_is_written_and_holds_text_alone(report: Path) -> None:
    page = (report / "index.html").read_text()
    assert "<script>alert" not in page and in_html(SCRIPT) in page
    assert "<script" not in (report / "tables.md").read_text().replace("\\<", "")
    lines = (report / "tables.tex").read_text().splitlines()
    assert not [line for line in lines if not line.startswith("%") and "\\input" in line]
    (drawing,) = report.glob("*.svg")
    kinds = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(drawing.read_text()).iter()}
    assert "text" in kinds and not kinds & {"script", "a", "foreignObject", "image"}
    assert pd.read_csv(report / "tables.csv")["n"].max() == 1
    assert len(pd.read_parquet(report / "runs.parquet")) == len(NAMES)


def test_a_report_is_for_its_user_alone(report: Path) -> None:
    assert report.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_a_studys_name_cannot_lead_out_of_the_report(tmp_path: Path) -> None:
    names = ["..", ".", "../../outside", "/outside", ".hidden", "n" * 400, "a\nb", "plain"]
    folders = [hostile_study(tmp_path / "results" / str(n), "kind", study=name) for n, name in enumerate(names)]
    target = tmp_path / "deep" / "report"
    write_report(folders, target)
    outside = [path for path in (tmp_path / "deep").rglob("*") if target not in (path, *path.parents)]
    assert outside == []
    assert len(list(target.glob("*/tables.md"))) == len(names)  # each in a folder of its own
    assert {path.name for path in tmp_path.iterdir()} == {"results", "deep"}


def test_a_studys_name_of_dots_cannot_lead_out_of_the_report(tmp_path: Path) -> None:
    folders = [hostile_study(tmp_path / "results" / str(n), "kind", study=name) for n, name in enumerate(("..", "x"))]
    write_report(folders, tmp_path / "deep" / "report")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["report"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "change",
    [
        {"title": ["x"]},
        {"paper": 3},
        {"axes": [["x"], "seed"]},
        {"axes": [{"x": 1}]},
        {"runs": {"run-0": {"kind": ["x"], "seed": 0}}, "axes": ["kind", "seed"]},
        {"runs": {"run-0": {"kind": {"x": 1}, "seed": 0}}, "axes": ["kind", "seed"]},
    ],
    ids=lambda change: json.dumps(change)[:40],
)
def test_a_study_of_other_types_is_refused_in_one_line(change: dict[str, Any], tmp_path: Path) -> None:
    write_run(tmp_path, "run-0", [0.5])
    write_study(tmp_path, **{"runs": {"run-0": {"kind": "x", "seed": 0}}, "axes": ["kind", "seed"], **change})
    with pytest.raises(ResultsError, match=r"study\.json: is damaged") as caught:
        load_results(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_run_whose_name_no_table_can_hold_is_refused_by_name(tmp_path: Path) -> None:
    write_run(tmp_path, "good", [0.5])
    write_run(tmp_path, "bad\udcff", [0.5])
    with pytest.raises(ResultsError, match="has a run named"):
        load_results(tmp_path)


def test_links_in_the_place_of_a_reports_files_are_not_written_through(tmp_path: Path) -> None:
    folder = hostile_study(tmp_path / "study", "kind")
    write_report([folder])
    for name in ("tables.md", "runs.csv", "rounds.parquet", "index.html", "curves.png"):
        (tmp_path / name).write_text("theirs")
        (folder / "report" / name).unlink()
        (folder / "report" / name).symlink_to(tmp_path / name)
        with pytest.raises(ConfigError, match=f"{name}: was changed"):
            write_report([folder])
        assert (tmp_path / name).read_text() == "theirs"
        (folder / "report" / name).unlink()


# Plots


@pytest.mark.matrix
@pytest.mark.parametrize("name", NAMES)
def test_a_name_stays_text_in_a_plot(name: str, tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], label=in_plot(name))
    axes.set_title(in_plot(name))
    legend = axes.legend()
    figure.savefig(tmp_path / "plot.svg")
    assert len(legend.get_texts()) == 1  # none is left out
    assert in_plot("n" * 10**6) == "n" * 200 + "..."


@pytest.mark.usefixtures("pictures")
def test_the_picture_of_a_run_of_any_title_is_drawn(tmp_path: Path) -> None:
    draw_accuracy([made_round(1, 0.5)], tmp_path / "accuracy.png", title=FORMULA + BREAK)
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")


# The terminal


def test_a_summary_cannot_write_to_the_terminal_what_it_likes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = {
        "average_accuracy": 0.5,
        "final_accuracy": 0.5,
        "average_chance": 0.1,
        "clients": 2,
        "rounds": 1,
        "failures": 0,
        "switched_at": [None, None],
        "bytes": {"down": 0, "up": 0},
        "seconds": {"round": 1.0},
        "method": "\x1b]0;owned\x07[red]x[/red][/]",
        "seed": 0,
    }
    folder = tmp_path / "\x1b]0;owned\x07[red]x[red]"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(summary))
    assert main(["table", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "[red]x[red]" in printed
    (folder / "summary.json").write_text("{}")
    assert main(["table", str(folder)]) == 2
    assert "\x1b" not in capsys.readouterr().err
