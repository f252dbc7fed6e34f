"""The bars of a study in progress fit the terminal."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from fedkace_flwr.config import Config
from fedkace_flwr.experiments.running.cells import Cell
from fedkace_flwr.experiments.running.display import Display, display


@pytest.mark.parametrize("width", [80, 100, 140])
def test_names_rounds_and_times_are_whole_at_any_width(tmp_path: Path, width: int) -> None:
    cell = Cell("fedkace_seed-0", Config.parse({"results-dir": str(tmp_path), "rounds": 15}))
    cell.folder.mkdir()
    (cell.folder / "rounds.jsonl").write_text(json.dumps({"round": 1, "accuracy": 0.9055}) + "\n")
    with display(Console(force_terminal=True, width=width, file=io.StringIO()), [cell]) as shown:
        shown.begin(cell, 1)
        shown.follow(cell)
        assert shown._progress is not None
        page = Console(width=width, file=io.StringIO(), record=True)
        page.print(shown._progress.get_renderable())
    whole, run = page.export_text().rstrip("\n").split("\n")
    assert "…" not in whole + run and "1/15" in run
    assert run.startswith("fedkace_seed-0 ") and "accuracy 90.55 %, so far 90.55 %" in run
    assert run.rstrip().endswith("-:--:-- left")


@pytest.mark.parametrize("notebook", [False, True], ids=["terminal", "notebook"])
def test_the_bars_of_a_continued_run_begin_where_it_was_left(tmp_path: Path, notebook: bool) -> None:
    cell = Cell("fedkace_seed-0", Config.parse({"results-dir": str(tmp_path), "rounds": 4}))
    cell.folder.mkdir()
    record = cell.folder / "rounds.jsonl"
    record.write_text("".join(json.dumps({"round": k, "accuracy": k / 10}) + "\n" for k in (1, 2)))
    output = io.StringIO()
    console = Console(force_terminal=True, width=140, file=output)
    bars = Progress("{task.description} {task.completed} of {task.total} {task.fields[note]}", console=console)
    shown = Display(Console(force_jupyter=notebook, width=140, file=output), 1, 4, bars)
    with record.open("a") as more:
        shown.begin(cell, 1)
        assert [task.completed for task in bars.tasks] == [2, 2]
        assert bars.tasks[1].fields["note"] == "accuracy 20.00 %, so far 15.00 %"
        more.write(json.dumps({"round": 3, "accuracy": 0.6}) + "\n")
    shown.follow(cell)
    assert [task.completed for task in bars.tasks] == [3, 3]
    assert bars.tasks[1].fields["note"] == "accuracy 60.00 %, so far 30.00 %"
    shown.end(cell, note="")
    assert bars.tasks[0].completed == 4
    said = ["continuing after round 2 of 4", "round 3 of 4, accuracy 60.00 %, so far 30.00 %"]
    assert [line.partition(": ")[2] for line in output.getvalue().splitlines()] == ([] if notebook else said)


def test_a_round_that_was_dropped_does_not_count_in_the_mean(tmp_path: Path) -> None:
    """A resumed run repeats rounds that were not yet in a checkpoint; other clients may answer then."""
    cell, output = Cell("run", Config.parse({"results-dir": str(tmp_path), "rounds": 3})), io.StringIO()
    cell.folder.mkdir()
    shown = Display(Console(width=100, file=output), 1, 3, None)
    for accuracies in ([0.5, 0.9], [0.5], [0.5, 0.7, 0.6]):
        lines = [json.dumps({"round": number, "accuracy": value}) for number, value in enumerate(accuracies, 1)]
        (cell.folder / "rounds.jsonl").write_text("".join(f"{line}\n" for line in lines))
        shown.follow(cell)
    assert output.getvalue().splitlines()[-1] == "run: round 3 of 3, accuracy 60.00 %, so far 60.00 %"
