"""Runs from Python: what they return, what they refuse, and how they go in a script and in a real Jupyter kernel."""

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from matplotlib.figure import Figure
from support.common import SMALL, rounds_of
from support.systems.engines import InProcessEngine
from support.tools import need_modules

import fedkace_flwr
from fedkace_flwr import load_model
from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError, FedkaceError, ResultsError, RunError
from fedkace_flwr.experiments.api import StudyResult, run
from fedkace_flwr.experiments.running import runner
from fedkace_flwr.experiments.running.inline import run_inline

TINY: dict[str, Any] = {"rounds": 2, "clients": 2, "epochs": 1, "width": 2, "samples-per-class": 4, "capacity": 10}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StudyResult]:
    """Two methods."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "InlineEngine", InProcessEngine)
        results = tmp_path_factory.mktemp("results")
        yield run({**TINY, "method": ["er", "fedavg"]}, name="pair", results=results, engine="inline", seeds=[1])


def test_rounds_and_runs_are_data_frames(found: StudyResult) -> None:
    rounds = found.rounds
    names = {"er_seed-1", "fedavg_seed-1"}
    assert set(rounds["run"]) == set(found.summaries) == names and len(rounds) == 4
    for name in names:
        own = rounds[rounds["run"] == name]
        assert own["accuracy"].tolist() == [record["accuracy"] for record in rounds_of(found.folder / name)]
    assert set(found.runs["method"]) == {"er", "fedavg"} and found.runs["finished"].all()
    shown = found._repr_mimebundle_()
    assert "fedavg_seed-1" in shown["text/html"] and "AA %" in shown["text/plain"]
    assert repr(found) == f"<2 finished runs in {found.folder}>" and not found.failures


def test_whole_numbers_may_be_of_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "InlineEngine", InProcessEngine)
    keys: dict[str, Any] = {"rounds": np.int64(1), "epochs": [np.int32(1)], "seeds": np.arange(1, 2)}
    found = run({**TINY, "method": "er"}, name="numpy", results=tmp_path, engine="inline", **keys)
    assert list(found.summaries) == ["er_epochs-1_seed-1"]


def test_the_plot_is_a_figure_that_any_notebook_shows(found: StudyResult) -> None:
    figure = found.plot()
    assert isinstance(figure, Figure)
    lines = {str(line.get_label()): line for line in figure.axes[0].get_lines()}
    assert set(lines) == {*found.summaries, "chance"}
    accuracies = [record["accuracy"] for record in rounds_of(found.folder / "er_seed-1")]
    assert np.asarray(lines["er_seed-1"].get_ydata()).tolist() == accuracies
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_models_can_be_loaded(found: StudyResult) -> None:
    assert set(found.models) == set(found.summaries)
    assert load_model(found.models["er_seed-1"]).round == 2


@pytest.mark.slow
def test_the_report_is_the_page_of_the_study(found: StudyResult) -> None:
    page = found.report()
    assert page == found.folder / "report" / "index.html" and "fedavg" in page.read_text()


def test_a_finished_run_is_resumed_only_with_its_own_keys(found: StudyResult) -> None:
    before = sorted(found.folder.parent.rglob("*"))
    with pytest.raises(
        ConfigError, match=r"^er_seed-1: capacity = 99: the run in \S+ was begun with \d+; resume it with that"
    ):
        run(
            {**TINY, "capacity": 99, "method": "er", "seed": 1, "resume": True},
            name="pair",
            results=found.folder.parent,
        )
    assert sorted(found.folder.parent.rglob("*")) == before


def test_a_second_call_skips_finished_runs_and_shows_its_own_alone(
    found: StudyResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InProcessEngine, "start", lambda *_: pytest.fail("nothing is left to run"))
    config = Config.parse({**TINY, "method": "er", "seed": 1})
    again = run(config, name="pair", results=found.folder.parent, engine="inline")
    assert set(again.summaries) == {"er_seed-1"} == set(again.rounds["run"])


def test_keys_override_a_study_by_name_and_progress_can_be_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "InlineEngine", InProcessEngine)
    keys = {key.replace("-", "_"): value for key, value in TINY.items()}
    options = {"results": tmp_path, "engine": "inline", "only": "fedkace"}
    result = fedkace_flwr.run("quickstart", progress=False, overlap=[0, 1], **options, **keys)  # type: ignore[arg-type]
    assert set(result.summaries) == {"fedkace_overlap-0_seed-0", "fedkace_overlap-1_seed-0"}
    assert result.folder == tmp_path / "quickstart" and capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_a_sweep_of_a_study_that_has_been_run_has_frames_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last cell of docs/notebooks/first_stream.ipynb suggests it."""
    monkeypatch.setattr(runner, "InlineEngine", InProcessEngine)
    keys = {key.replace("-", "_"): value for key, value in TINY.items()} | {"capacity": 40}
    options: dict[str, Any] = {"results": tmp_path, "engine": "inline", "only": "fedkace", "progress": False}
    run("quickstart", **options, **keys)
    found = run("quickstart", **options, **{**keys, "capacity": [20, 40, 80]})
    names = [f"fedkace_capacity-{capacity}_seed-0" for capacity in (20, 40, 80)]
    assert list(found.summaries) == names and set(found.rounds["run"]) == set(names)
    assert set(found.runs["capacity"]) == {20, 40, 80}
    table = (found.report().parent / "tables.md").read_text()
    assert "All runs are of FedKACE." in table
    assert [line.split(" ")[1] for line in table.split("###")[1].splitlines() if line.startswith("| M=")] == [
        *("M=20", "M=40", "M=80")
    ]
    assert "fedkace_capacity-40_seed-0 repeats fedkace_seed-0." in table and "(n=2)" not in table


@pytest.mark.parametrize(
    ("arguments", "keys", "message"),
    [
        ("quikstart", {}, "quikstart: unknown study; .*did you mean quickstart?"),
        ({"epoch": 3}, {}, "trial: unknown key epoch = 3; did you mean epochs?"),
        ({"epochs": {3}}, {}, r"epochs = \{3\}: must be a number, a text, True or False, or a list of these"),
        ({}, {"epochs": "many"}, "epochs = 'many': must be a whole number"),
        ({}, {"worker": 2}, "unknown key worker = 2"),
        ({}, {"name": "../x"}, "name = '../x': must be a plain name"),
        ({}, {"name": "a.b"}, "name = 'a.b': must be a plain name.*, and without a suffix"),
        ({}, {"engine": "x"}, "engine = 'x': must be flower or inline"),
        ({"dataset": "digits", "window": 20}, {"engine": "inline"}, "window = 20: must be at most"),
        (None, {}, "study = None: must be a study's name, a path, a mapping of configuration keys or a Config"),
        (["a"], {}, r"study = \['a'\]: must be a study's name"),
        ("quickstart", {"seeds": 1}, r"seeds = 1: must be a list of whole numbers >= 0, such as \[0, 1\]"),
        ("quickstart", {"seeds": "1"}, "seeds = '1': must be a list of whole numbers"),
        ("quickstart", {"seeds": [0.5]}, "seed = 0.5: must be a whole number"),
        ("quickstart", {"only": 1}, "only = 1: must be a text or a list of texts"),
        ("quickstart", {"only": [1]}, r"only = \[1\]: must be a text or a list of texts"),
        ("quickstart", {"scale": 1}, "scale = 1: must be a text"),
        ("quickstart", {"engine": 1}, "engine = 1: must be flower or inline"),
        ("quickstart", {"engine": ["inline"]}, "engine = .*: must be flower or inline"),
        ("quickstart", {"workers": "many"}, "workers = 'many': must be a whole number"),
        ({}, {"name": 1}, "name = 1: must be a plain name"),
    ],
)
def test_mistakes_are_the_commands_one_line_errors(
    tmp_path: Path, arguments: Any, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(FedkaceError, match=message) as refused:
        run(arguments, results=tmp_path, **keys)
    assert "\n" not in str(refused.value) and isinstance(refused.value, ConfigError)
    assert not list(tmp_path.rglob("rounds.jsonl"))


@pytest.mark.parametrize("results", [None, 1, ["results"]])
def test_results_that_are_no_path_are_refused(results: Any) -> None:
    with pytest.raises(ConfigError, match=r"^results = .*: must be the path of a folder$"):
        run("quickstart", results=results)


def test_without_a_finished_run_the_error_is_raised_and_else_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "InlineEngine", InProcessEngine)
    bad = {**TINY, "method": "er", "learning-rate": 1e30}
    with pytest.raises(RunError, match=r"er_seed-0: .*learning-rate"):
        run(bad, results=tmp_path, engine="inline")
    result = run({**bad, "learning-rate": [1e30, 0.01]}, results=tmp_path, engine="inline")
    assert list(result.summaries) == ["er_learning-rate-0.01_seed-0"]
    assert "learning-rate" in result.failures["er_learning-rate-1e+30_seed-0"]
    assert repr(result).startswith("<1 finished runs, 1 failed in ")
    assert "error: er_learning-rate-1e+30_seed-0: " in capsys.readouterr().out


def test_a_missing_package_is_answered_with_the_command_that_installs_it(
    found: StudyResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [
        name for name in sys.modules if name.partition(".")[0] == "pandas" or "fedkace_flwr.experiments.res" in name
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ResultsError, match=r"rounds needs pandas: pip install 'fedkace-flwr\[report\]'"):
        _ = StudyResult(found.folder, found.summaries).rounds


def test_files_of_a_user_may_have_the_names_of_the_folders(tmp_path: Path) -> None:
    for name in ("clients", "strategies", "experiments"):
        (tmp_path / f"{name}.py").write_text("mine = True\n")
    (tmp_path / "script.py").write_text(
        "import clients, experiments, strategies\n"
        "from fedkace_flwr import run\n"
        "from fedkace_flwr.clients.derpp import METHOD\n"
        "assert clients.mine and strategies.mine and experiments.mine\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, tmp_path / "script.py"], cwd=tmp_path, env=environment, check=True)


@pytest.mark.slow
def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(f"import fedkace_flwr\nprint(fedkace_flwr.run({TINY!r}, engine='inline'))\n")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"<1 finished runs in {tmp_path / 'results' / 'trial'}>\n")
    assert done.stdout.count("starting") == 1


# In a Jupyter kernel


class Notebook:
    """A real kernel, and what its cells say."""

    def __init__(self, folder: Path) -> None:
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(kernel_name="python3", cwd=str(folder))

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def execute(self, text: str, interrupt_at: str = "") -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Execute a cell; return the reply, and its output. The kernel is interrupted at output that holds a text."""
        asked, outputs = self.client.execute(textwrap.dedent(text)), list[dict[str, Any]]()
        while True:
            message = self.client.get_iopub_msg(timeout=300)
            if message["parent_header"].get("msg_id") != asked:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
            outputs.append(message)
            if interrupt_at and re.search(interrupt_at, str(message["content"])):
                self.manager.interrupt_kernel()
                interrupt_at = ""
        while (reply := self.client.get_shell_msg(timeout=300))["parent_header"]["msg_id"] != asked:
            pass
        return reply["content"], outputs


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    need_modules("ipykernel")
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "jupyter"))
    made = Notebook(tmp_path)
    yield made
    made.close()


@pytest.mark.slow
def test_a_notebook_shows_bars_is_interrupted_and_goes_on_exactly(notebook: Notebook, tmp_path: Path) -> None:
    settings = {**SMALL, "method": "er", "rounds": 12, "seed": 7}
    whole = Config.parse({**settings, "results-dir": str(tmp_path), "run-name": "whole"})
    run_inline(whole)
    cell = f"import fedkace_flwr\nfound = fedkace_flwr.run({settings!r}, name='cells', engine='inline')"

    reply, outputs = notebook.execute(cell, interrupt_at=r"er_seed-7.*accuracy \d")
    assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
    folder = tmp_path / "results" / "cells" / "er_seed-7"
    done = len(rounds_of(folder))
    assert 1 <= done < 12 and not (folder / "summary.json").exists()
    assert not [process for process in psutil.process_iter(["cmdline"]) if _names(process, str(tmp_path / "results"))]
    bars = [message for message in outputs if message["msg_type"] in ("display_data", "update_display_data")]
    (first, *later) = [message for message in bars if message["content"].get("transient", {}).get("display_id")]
    shown = {message["content"]["transient"]["display_id"] for message in later}
    assert shown == {first["content"]["transient"]["display_id"]}
    assert "all runs" in later[-1]["content"]["data"]["text/html"]
    counted = {int(number) for number in re.findall(r"(\d+)/12", str(later[-1]["content"]))}
    assert 1 <= max(counted) <= done, "another round may end between the last bar and the interruption"

    reply, outputs = notebook.execute(cell)
    assert reply["status"] == "ok" and rounds_of(folder) == rounds_of(tmp_path / "whole")
    assert not [line for message in outputs for line in re.findall(r"round \d+ of", str(message["content"]))]

    reply, outputs = notebook.execute("print(list(found.rounds['round']))\nfound.plot()")
    assert "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]" in str(outputs)
    assert any("image/png" in message["content"].get("data", {}) for message in outputs)
    reply, _ = notebook.execute("fedkace_flwr.run('quickstart', epoch=3)")
    assert reply["ename"] == "ConfigError" and reply["evalue"].endswith("did you mean epochs?")


def _names(process: psutil.Process, text: str) -> bool:
    return text in " ".join(process.info["cmdline"] or [])
