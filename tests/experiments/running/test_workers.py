"""The choice of workers: from cores, free memory and GPUs, and what a client needs of each."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fedkace_flwr.experiments.__main__ import main
from fedkace_flwr.experiments.running.workers import Machine, Need, Workers, activations, plan_workers
from fedkace_flwr.experiments.studies.study import Study, load_study
from fedkace_flwr.networks.resnet import resnet18

GIB = 2**30
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def study(tmp_path: Path) -> Callable[..., Study]:
    """A study of three seeds over four clients on digits."""

    def make(**options: object) -> Study:
        path = tmp_path / "study.yaml"
        path.write_text("config: {clients: 4}\ngrid: {seed: [0, 1, 2]}\n")
        return load_study(path, {}, tmp_path / "results", **options)  # type: ignore[arg-type]

    return make


def test_workers_are_no_more_than_cores_clients_runs_and_memory_allow(study: Callable[..., Study]) -> None:
    plenty = Machine(64, 500 * GIB)
    assert plan_workers(study(), Machine(2, 500 * GIB)).count == 2
    assert plan_workers(study(), plenty).count == 4  # clients
    assert plan_workers(study(engine="inline"), plenty).count == 3  # runs
    need = plan_workers(study(), plenty).need.memory
    assert plan_workers(study(), Machine(64, 3 * need)).count == 2  # a tenth is left for others
    assert plan_workers(study(), Machine(64, need // 2)).count == 1


def test_threads_take_cores(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text("config: {threads: 4}\n")
    assert plan_workers(load_study(path, {}, tmp_path), Machine(10, 500 * GIB)).count == 2


def test_what_is_asked_for_is_done_with_a_warning(study: Callable[..., Study]) -> None:
    small = Machine(2, GIB)
    asked = plan_workers(study(workers=8), small)
    assert asked.count == 8
    cores, memory = asked.warnings
    assert "8 workers" in cores and "2 cores" in cores
    assert "--workers 1 fits" in memory or "--workers 2 fits" in memory
    assert not plan_workers(study(), Machine(2, 500 * GIB)).warnings


def test_the_plan_is_a_line() -> None:
    text = str(Workers(2, 1, 0.0, Need(GIB, GIB), Machine(2, 20 * GIB)))
    assert text == "2 workers of 1 thread on 2 cores, about 2.0 GiB of 20.0 GiB free memory"


def write_all(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.mark.parametrize("limit", ["50000 100000", "max 100000", "nonsense"])
@pytest.mark.parametrize("place", ["0::/", "0::/system.slice/mine.service", "0::/outside/the/container"])
def test_the_limits_of_a_process_s_control_group_count(tmp_path: Path, limit: str, place: str) -> None:
    whole = Machine.here(tmp_path)
    write_all(tmp_path / "proc/self", cgroup=place)
    top = tmp_path / "sys/fs/cgroup"
    inner = top / place[4:] if "outside" not in place else top
    write_all(
        inner, cpu__max=limit, memory__max=3 * 2**20, memory__current=2**21, memory__stat=f"inactive_file {2**19}"
    )
    found = Machine.here(tmp_path)
    assert found.memory == 2**20 + 2**19  # the page cache is given up when somebody needs the memory
    assert found.cores == (1 if limit.startswith("50000") else whole.cores)


def test_the_tightest_limit_around_a_process_counts(tmp_path: Path) -> None:
    write_all(tmp_path / "proc/self", cgroup="0::/jobs/mine")
    jobs = tmp_path / "sys/fs/cgroup/jobs"
    write_all(jobs, memory__max=5000, memory__current=1000, cpu__max="100000 100000")
    write_all(jobs / "mine", memory__max="max", memory__current=500, cpu__max="max 100000")
    assert Machine.here(tmp_path) == Machine(1, 4000)


def test_activations_grow_with_width_and_area() -> None:
    """Twice the side gives four times the activations; by hand for the least: each convolution keeps its input."""
    small, large = (activations(resnet18(10, 8, "cifar"), (3, size, size)) for size in (16, 32))
    assert 3.5 < large / small <= 4.1
    wide = activations(resnet18(10, 16, "cifar"), (3, 32, 32))
    assert 1.8 < wide / large <= 2.0
    assert large > 4 * 17 * 8 * 32 * 32 / 4


def test_a_plan_times_training_as_it_is_configured(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["method=fedkace", "augment=flip-shift"]
    assert main(["run", "quickstart", "--engine", "inline", "--dry-run", "--set", *changes]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^plan: \d+ workers? of \d+ threads? on ", printed, re.MULTILINE), printed
