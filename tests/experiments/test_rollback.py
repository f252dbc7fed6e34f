"""The command that lists a run's past models and orders the run to go back to one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fedkace_flwr.config import Config
from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.results.orders import Orders

Make = Callable[..., Config]


@pytest.fixture
def stopped(small: Make, tmp_path: Path) -> Path:
    """A run with past models that was stopped after its second round."""
    run = tmp_path / "stopped"

    class Stops(Orders):
        @property
        def stopped(self) -> bool:
            return (run / "rounds.jsonl").exists() and len((run / "rounds.jsonl").read_text().splitlines()) >= 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedkace_flwr.server_app.Orders", Stops)
        run_inline(small(method="er", gate="hold", run_name="stopped"))
    return run


def test_past_models_are_listed_and_the_newest_order_counts(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollback", str(stopped)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["round", "written", "accuracy", "note"]
    assert [row.split()[0] for row in rows] == ["2", "1"] and all("%" in row for row in rows)
    for to in (2, 1):
        assert main(["rollback", str(stopped), "--to", str(to)]) == 0
        assert f"round {to}" in capsys.readouterr().out
    assert Orders(stopped).rollback == 1
    assert [path.name for path in (stopped / "orders").iterdir()] == ["rollback-1"]
    assert main(["rollback", str(stopped), "--to", "7"]) == 2
    assert "--to 7: the run keeps the models of rounds 2, 1" in capsys.readouterr().err
    assert Orders(stopped).rollback == 1, "a mistake costs nothing"


def test_runs_that_cannot_go_back_are_refused(small: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_inline(small(method="er", gate="hold", run_name="finished", rounds=1))
    run_inline(small(run_name="without", rounds=1))
    for arguments, words in (
        ([tmp_path / "finished", "--to", "1"], "finished: is finished"),
        ([tmp_path / "without"], "without: keeps no past models"),
        ([tmp_path / "without", "--to", "1"], "without: keeps no past models"),
        ([tmp_path], "holds no run"),
    ):
        assert main(["rollback", *map(str, arguments)]) == 2
        assert words in capsys.readouterr().err
        assert not list(tmp_path.glob("**/orders"))
