"""What a failed run's log is quoted for."""

from pathlib import Path

import pytest

from experiments.running.waiting import last_error

FRAMED = """
Loading project configuration...
╭─ Error ─────────────────────────────────╮
│ The SuperLink is not available.         │
╰─────────────────────────────────────────╯
"""


@pytest.mark.parametrize(
    ("log", "quoted"),
    [
        ("", "it left no output"),
        ("one\n\ntwo\n", "two"),
        ("Traceback\n  line 3\nValueError: no\nmore\n", "ValueError: no"),
        (FRAMED, "The SuperLink is not available."),
    ],
)
def test_the_line_that_says_why(log: str, quoted: str, tmp_path: Path) -> None:
    (tmp_path / "app.log").write_text(log)
    assert last_error(tmp_path / "app.log") == quoted
