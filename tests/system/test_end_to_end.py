"""Whole runs: the inline engine, Flower's simulation with Ray, and ``flwr run`` as a user types it."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.common import SMALL, rounds_of

from fedkace_flwr.config import Config
from fedkace_flwr.experiments.running.engines import FlowerEngine
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.experiments.running.ports import free_ports
from fedkace_flwr.results.run_folder import HOLDS
from fedkace_flwr.storage.targets import claim

ROOT = Path(__file__).resolve().parents[2]
Make = Callable[..., Config]
RUN_FILES = ("config.json", "environment.json", "rounds.jsonl", "summary.json", "accuracy.png")


@pytest.mark.usefixtures("pictures")
def test_a_run_leaves_its_files_and_its_numbers_add_up(small: Make) -> None:
    config = small(rounds=4)
    run_inline(config)
    folder = Path(config.run.results_dir) / "run"
    assert all((folder / name).stat().st_size > 0 for name in RUN_FILES)
    records = rounds_of(folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert json.loads((folder / "config.json").read_text()) == config.flat()
    assert [record["round"] for record in records] == [1, 2, 3, 4]
    means = [sum(record["client_accuracy"]) / 3 for record in records]
    assert [record["accuracy"] for record in records] == pytest.approx(means)
    assert summary["average_accuracy"] == pytest.approx(sum(means) / 4)
    for record in records:
        assert record["chance"] == pytest.approx(sum(1 / count for count in record["seen_classes"]) / 3)
        assert all(
            sum(counts) == size for counts, size in zip(record["buffer_classes"], record["buffer_size"], strict=True)
        )
        assert record["bytes"]["down"] > record["bytes"]["up"] > 0


@pytest.mark.slow
def test_learning_beats_chance_by_far_on_real_digits(small: Make) -> None:
    config = small(rounds=10, epochs=5, width=8, samples_per_class=25, capacity=60, clients=4)
    run_inline(config)
    last = rounds_of(Path(config.run.results_dir) / "run")[-1]
    assert last["chance"] == pytest.approx(0.1)
    assert last["accuracy"] > 0.6


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_flower_with_one_worker_and_the_inline_engine_agree(small: Make) -> None:
    """With two workers, ``test_killed.py`` and ``test_scale.py`` compare them."""
    inline = small(run_name="inline")
    run_inline(inline)
    folder = Path(inline.run.results_dir) / "\N{OPEN FILE FOLDER}" / "flower"
    config = small(run_name=folder.name, results_dir=str(folder.parent))
    claim(folder, HOLDS)
    FlowerEngine(1, 0.0).start(config, folder / "app.log").check()
    assert rounds_of(folder) == rounds_of(Path(inline.run.results_dir) / "inline")


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ["inline", "flower"])
def test_the_runner_fails_with_the_apps_own_error(engine: str, tmp_path: Path) -> None:
    settings = [f"--set={key}={value}" for key, value in {**SMALL, "method": "fedkace", "learning-rate": 1e30}.items()]
    command = [sys.executable, "-m", "experiments", "run", "experiments/studies/quickstart.yaml", "--engine", engine]
    done = subprocess.run(
        [*command, "--results", str(tmp_path), *settings], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "quorum" in line and "learning-rate" in line
    assert not _left_over(str(tmp_path))


@pytest.fixture
def fresh_home(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A new user's environment without a network: a HOME of its own, and proxies that lead nowhere.

    The one variable that docs/running.md names keeps Flower from installing what the app requires.
    """
    link, control, closed = free_ports(3)
    dead = f"http://127.0.0.1:{closed}"
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("FLWR", "UV", "PIP", "RAY"))}
    yield {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(tmp_path / "home"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(link),
        "FLWR_LOCAL_CONTROL_API_PORT": str(control),
        **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), dead),
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
    for number in _left_over(f"--port {link} "):
        os.kill(number, signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_plain_flwr_run_works_offline_in_a_fresh_home(fresh_home: dict[str, str], tmp_path: Path, small: Make) -> None:
    Path(fresh_home["HOME"]).mkdir()
    before = (ROOT / "pyproject.toml").read_bytes()
    changes = {**SMALL, "results-dir": str(tmp_path), "run-name": "by-hand"}
    told = " ".join(f"{key}={json.dumps(value)}" for key, value in changes.items())
    command = ["flwr", "run", ".", "--stream", "--run-config", told]
    done = subprocess.run(command, cwd=ROOT, env=fresh_home, capture_output=True, text=True, check=False)
    log = done.stdout + done.stderr
    assert (tmp_path / "by-hand" / "summary.json").exists(), log
    assert "Installing application dependencies" not in log
    assert not (Path(fresh_home["HOME"]) / ".flwr" / "runtime-envs").exists()
    assert "host 3 clients between them" in log
    assert (ROOT / "pyproject.toml").read_bytes() == before
    config = small(run_name="inline")
    run_inline(config)
    assert rounds_of(tmp_path / "by-hand") == rounds_of(tmp_path / "inline")


@pytest.mark.slow
def test_the_app_file_that_flower_builds_holds_the_code_and_nothing_else(tmp_path: Path) -> None:
    import zipfile

    command = [str(Path(sys.executable).parent / "flwr"), "build", "--app", str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    (fab,) = tmp_path.glob("*.fab")
    assert done.returncode == 0
    code = [path for part in ("fedkace_flwr", "strategies", "clients") for path in (ROOT / part).rglob("*.py")]
    wanted = {"pyproject.toml", "LICENSE", ".info/CONTENT", *(path.relative_to(ROOT).as_posix() for path in code)}
    assert set(zipfile.ZipFile(fab).namelist()) == wanted


def _left_over(words: str) -> list[int]:
    """Processes, other than this one, whose command line holds the words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if re.search(re.escape(words), line) and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found
