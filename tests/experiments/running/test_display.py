"""The bars of a study in progress fit the terminal."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from experiments.running.cells import Cell
from experiments.running.display import display
from fedkace_flwr.config import Config


@pytest.mark.parametrize(("width", "tells_elapsed"), [(80, False), (100, True), (140, True)])
def test_names_rounds_and_times_are_whole_at_any_width(tmp_path: Path, width: int, tells_elapsed: bool) -> None:
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
    assert run.rstrip().endswith("-:--:-- left") and ("0:00:00 elapsed" in run) == tells_elapsed
