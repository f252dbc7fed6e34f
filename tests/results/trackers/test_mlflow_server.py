"""A server of MLflow that does not answer is reported soon, and before anything has run."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console
from support.common import SMALL
from support.systems.engines import InProcessEngine

from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.experiments.running import runner
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.experiments.running.runner import run_study
from fedkace_flwr.experiments.studies.study import Study, load_study

RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
NAME = "fedkace_seed-7"


class _Overloaded(BaseHTTPRequestHandler):
    """Answers that the service is not available, for which MLflow's client tries again."""

    asked: list[str]

    def do_GET(self) -> None:  # the name that http.server gives it
        self.asked.append(self.path)
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a server that answers nothing useful has been asked."""
    paths: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Overloaded,), {"asked": paths}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
    yield paths
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    monkeypatch.setattr(runner, "InlineEngine", InProcessEngine)
    path = tmp_path / "trial.yaml"
    path.write_text(json.dumps({"config": {**SMALL, "rounds": 1}}), encoding="utf-8")
    return load_study(path, {"tracker": "mlflow"}, tmp_path / "results", engine="inline", workers=1)


@pytest.mark.parametrize(("own", "times"), [(None, 2), ("0", 1)])
def test_a_server_is_asked_again_once_or_as_often_as_the_user_has_set(
    own: str | None, times: int, asked: list[str], small: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    if own is not None:
        monkeypatch.setenv(RETRIES, own)
    with pytest.raises(
        RunError, match=r"^tracker = 'mlflow': MLflow at http://127.* MLFLOW_TRACKING_URI names another$"
    ):
        run_inline(small(tracker="mlflow"))
    assert len(asked) == times and len(set(asked)) == 1
    assert os.environ.get(RETRIES) == own  # later requests have MLflow's own patience


def test_a_study_does_not_begin_without_its_server(
    study: Study, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunError, match=r"MLflow at http://127.* cannot be used"):
        run_study(study, Console(width=200))
    assert len(asked) == 2 and NAME not in capsys.readouterr().out
    assert not (study.folder / NAME).exists()


@pytest.mark.slow
def test_a_study_that_is_finished_needs_no_server(
    study: Study, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI")
        run_study(study, Console(quiet=True))
    assert list(run_study(study, Console(quiet=True)).summaries) == [NAME] and asked == []
