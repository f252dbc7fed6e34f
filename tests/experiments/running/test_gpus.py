"""Plans for machines with GPUs, worked by hand, and what the engines make of them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError, RunError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.running import workers as need
from fedkace_flwr.experiments.running.engines import FlowerEngine, InlineEngine
from fedkace_flwr.experiments.running.jobs import Job
from fedkace_flwr.experiments.running.runner import check_study
from fedkace_flwr.experiments.running.workers import (
    Gpu,
    Machine,
    Need,
    Workers,
    measured_gpus,
    named,
    packed,
    plan_workers,
)
from fedkace_flwr.experiments.studies.study import Study, load_study

GIB = 2**30
MANY = 500 * GIB


@pytest.fixture
def study(tmp_path: Path) -> Callable[..., Study]:
    """A study of twelve runs over ten clients on digits."""

    def make(config: str = "", **options: object) -> Study:
        path = tmp_path / "study.yaml"
        path.write_text(f"config: {{clients: 10{config}}}\ngrid: {{seed: {list(range(12))}}}\n")
        return load_study(path, {}, tmp_path / "results", **options)  # type: ignore[arg-type]

    return make


@pytest.fixture(autouse=True)
def need_of_8_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client needs 8 GiB of a GPU, so that plans can be worked by hand; 90 % of what is free is planned for."""
    monkeypatch.setattr("fedkace_flwr.experiments.running.workers.largest_need", lambda configs: Need(GIB, 8 * GIB))


def with_free(*free: float, cores: int = 64) -> Machine:
    """A machine whose GPUs have 80 GiB each, of which so many are free."""
    gpus = tuple(Gpu(str(number), 80 * GIB, int(each * GIB)) for number, each in enumerate(free))
    return Machine(cores, MANY, gpus)


def on_each(workers: Workers) -> list[int]:
    return [workers.gpus.count(gpu) for gpu in workers.machine.gpus]


@pytest.mark.parametrize(
    ("free", "counts", "fraction"),
    [
        ([], [], 0.0),
        ([80], [9], 1 / 9),  # 72 / 8
        ([40], [4], 1 / 4),  # 36 / 8 = 4.5
        ([80, 80], [5, 5], 1 / 5),  # ten clients in all
        ([80, 20], [9, 0], 1 / 9),  # equal fractions: 9 on the empty one are more than 2 on each
        ([80, 60], [5, 5], 1 / 5),  # 6 fit on the fuller one
        ([40, 38], [4, 4], 1 / 4),  # 4.5 and 4.3
        ([80, 5], [9, 0], 1 / 9),  # no room on the second
        ([80] * 8, [2, 2, 2, 2, 2, 0, 0, 0], 1 / 2),  # 10 over 8: at most 2 on one, and Ray fills one after the other
    ],
)
def test_rays_clients_share_gpus_equally(
    study: Callable[..., Study], free: list[float], counts: list[int], fraction: float
) -> None:
    workers = plan_workers(study(), with_free(*free))
    assert on_each(workers) == counts and workers.gpu_fraction == pytest.approx(fraction)
    assert workers.count == (sum(counts) or 10)
    assert not workers.warnings


@pytest.mark.parametrize(
    ("free", "counts"),
    [
        ([], []),
        ([80], [9]),
        ([80, 40], [9, 0]),  # 9 on the first are more than 4 on each
        ([80, 80], [6, 6]),
        ([80, 70, 5], [6, 6, 0]),
        ([80] * 8, [2, 2, 2, 2, 1, 1, 1, 1]),
    ],
)
def test_inline_runs_go_where_memory_is_free(study: Callable[..., Study], free: list[float], counts: list[int]) -> None:
    workers = plan_workers(study(engine="inline"), with_free(*free))
    assert on_each(workers) == counts
    assert workers.count == (sum(counts) or 12)
    for gpu in workers.used_gpus:
        each = [share for name, share in workers.places or () if name == gpu.name]
        assert sum(each) * gpu.memory <= gpu.free + 1  # together they take no more than is free
        assert min(each) * gpu.memory >= workers.need.gpu


def test_more_workers_than_fit_are_spread_all_the_same_with_a_warning(study: Callable[..., Study]) -> None:
    workers = plan_workers(study(engine="inline", workers=6), with_free(20, 10))
    assert on_each(workers) == [3, 3]
    (warning,) = workers.warnings
    assert "gpu-fraction" in warning and "GPU 0, 1" in warning and "8.0 GiB" in warning


def test_a_fraction_that_is_asked_for_is_taken(study: Callable[..., Study]) -> None:
    ten = plan_workers(study(gpu_fraction=0.1), with_free(80))
    assert (ten.count, on_each(ten), ten.gpu_fraction) == (10, [10], 0.1)
    assert ten.warnings == []  # 80 GiB hold ten clients of 8 GiB without any left over
    crowded = plan_workers(study(gpu_fraction=0.1), with_free(40))
    assert any("gpu-fraction = 0.1" in warning for warning in crowded.warnings)
    idle = plan_workers(study(gpu_fraction=0.1), with_free(80, 80))
    assert on_each(idle) == [10, 0] and any("1 of 2 GPUs" in warning for warning in idle.warnings)
    two = plan_workers(study(gpu_fraction=2.0, workers=1), with_free(80, 80))
    assert on_each(two) == [1, 0] and not two.warnings
    inline = plan_workers(study(engine="inline", gpu_fraction=0.5), with_free(80, 80))
    assert on_each(inline) == [2, 2] and inline.count == 4
    with pytest.raises(ConfigError, match=r"gpu-fraction = 3: this machine has 2 GPUs"):
        plan_workers(study(gpu_fraction=3.0), with_free(80, 80))


@pytest.mark.parametrize("engine", ["flower", "inline"])
def test_fraction_0_computes_on_the_cpu_and_says_so(study: Callable[..., Study], engine: str) -> None:
    workers = plan_workers(study(engine=engine, gpu_fraction=0.0), with_free(80, 80))
    assert workers.gpus == () and workers.visible == () and workers.places == ()
    assert str(workers).endswith("; on the CPU, 2 GPUs not used") and not workers.warnings
    alone = plan_workers(study(engine=engine, config=", device: cpu"), with_free(80))
    assert alone.gpus == () and alone.visible == ()


def test_a_full_gpu_is_not_used_and_the_plan_says_why(study: Callable[..., Study]) -> None:
    workers = plan_workers(study(), with_free(5))
    assert workers.gpus == () and workers.visible == ()
    assert workers.warnings == ["no GPU is used: a client may need 8.0 GiB, and the most that is free is 5.0 GiB"]


def test_the_plan_names_gpus_in_its_line(study: Callable[..., Study]) -> None:
    text = str(plan_workers(study(engine="inline", workers=9), with_free(80, 75)))
    assert text.endswith("; 5 + 4 on 2 GPUs, 0.2 of a GPU each, about 8.0 GiB of 16.0 GiB")


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (", device: 'cuda:1'", {}, r"device = 'cuda:1': the runner gives each worker its GPU.*CUDA_VISIBLE_DEVICES"),
        (", device: cuda", {"gpu_fraction": 0.0}, r"device = 'cuda' with gpu-fraction = 0"),
        (", device: 'cuda:0'", {"gpu_fraction": 0.0, "engine": "inline"}, r"device = 'cuda:0' with gpu-fraction = 0"),
        (", device: mps", {}, r"device = 'mps': .*float64"),
    ],
)
def test_a_device_that_a_worker_cannot_have_is_refused(
    study: Callable[..., Study], config: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_study(study(config=config, **options), machine=with_free(80, 80))


def test_a_gpu_that_is_missing_or_full_is_refused_if_it_is_asked_for(study: Callable[..., Study]) -> None:
    with pytest.raises(ConfigError, match=r"device = 'cuda': this machine has no GPU that PyTorch can use; use"):
        check_study(study(config=", device: cuda"), machine=with_free())
    with pytest.raises(ConfigError, match=r"device = 'cuda': a client may need 8.0 GiB, and the most"):
        check_study(study(config=", device: cuda"), machine=with_free(2))
    _, _, workers = check_study(study(config=", device: cuda"), machine=with_free(80))
    assert workers.gpus


def test_workers_beyond_the_places_of_a_gpu_do_not_start() -> None:
    one, two = (Gpu(name, 80 * GIB, 80 * GIB) for name in "01")
    assert packed([one, two], 9, 0.25) == (one,) * 4 + (two,) * 4
    assert packed([one, two], 3, 1 / 3) == (one,) * 3
    assert packed([one, two], 3, 2.0) == (one,)


def test_gpus_are_named_as_the_environment_names_them() -> None:
    found = [[1, 2], [3, 4]]
    assert [gpu.name for gpu in named(found, None)] == ["0", "1"]
    assert named(found, "GPU-abc, 5") == (Gpu("GPU-abc", 2, 1), Gpu("5", 4, 3))
    assert [gpu.name for gpu in named(found[:1], "3,99,4")] == ["3"]  # CUDA stops at a name that it does not know
    assert measured_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()


@pytest.mark.slow
def test_gpus_are_measured_in_a_process_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real command in the real environment; without a GPU it finds none, and says so instead of failing."""
    monkeypatch.setattr("torch.version.cuda", "12.8")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    started: list[list[str]] = []
    run = subprocess.run

    def watched(command: list[str], **options: Any) -> object:
        started.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", watched)
    found = measured_gpus(os.environ)
    (command,) = started
    assert command[:2] == [sys.executable, "-c"] and "mem_get_info" in command[2]
    assert all(0 < gpu.free <= gpu.memory for gpu in found)


def test_gpus_that_cannot_be_measured_are_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", "12.8")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    environment = {**os.environ, "PYTHONHASHSEED": "no number"}  # Python refuses to start
    with pytest.raises(RunError, match=r"^the GPUs cannot be measured \(.+\); look at nvidia-smi, or set CUDA_VIS.*$"):
        measured_gpus(environment)


def test_a_recorded_step_takes_a_steps_memory_more() -> None:
    """By hand: 1.5 times the activations of a batch of 32; the rest of the need is the same."""
    eager, recorded, auto = (Need.of(Config.parse({"cuda-graphs": wanted})) for wanted in ("off", "on", "auto"))
    step = int(1.5 * need.activations(Experiment(Config()).network_on_cpu(), (3, 8, 8)) * 32)
    assert recorded.gpu - eager.gpu == step and auto == recorded
    assert recorded.memory == eager.memory
    assert eager.gpu - eager.memory == need.CONTEXT + 64 * 2**20 + 2**30 - 450 * 2**20


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let jobs run a program in place of their module, which begins once it is told to."""
    start = subprocess.Popen

    def put(text: str) -> None:
        def popen(command: list[str], **options: Any) -> object:
            return start([sys.executable, "-c", text, command[-1]], **options)

        monkeypatch.setattr(subprocess, "Popen", popen)

    return put


BEGUN = "import os; from fedkace_flwr.experiments.running.jobs import Orders; Orders().wait(); "


def test_inline_runs_take_a_place_each_and_give_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Callable[[str], None]
) -> None:
    program(BEGUN + "print(os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('FEDKACE_GPU_SHARE'))")

    def seen(engine: InlineEngine, number: int) -> list[str]:
        logs = [tmp_path / f"{name}.log" for name in range(number)]
        jobs = [engine.start(Config(), log) for log in logs]
        for job in jobs:
            job.check()
            job.stop()  # a second time gives nothing back
        return [log.read_text().strip() for log in logs]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    engine = InlineEngine([("0", 0.5), ("0", 0.5), ("GPU-abc", 1.0)])
    places = ["0 0.5", "0 0.5", "GPU-abc 1.0"]
    assert seen(engine, 3) == places
    assert sorted(seen(engine, 3)) == places
    assert seen(InlineEngine([]), 1) == ["0.0"]
    assert seen(InlineEngine(None), 1) == ["None None"]


@pytest.mark.parametrize(
    ("threads", "outside", "seen"), [(1, None, "1"), (3, None, "3"), (0, None, "None"), (1, "8", "8")]
)
def test_numpy_takes_as_many_threads_as_a_worker_has(
    threads: int,
    outside: str | None,
    seen: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: Callable[[str], None],
) -> None:
    """Without this, twenty runs on 16 cores start 320 threads, which wait for each other. What a user has set stays."""
    program(BEGUN + "print(*(os.environ.get(f'{name}_NUM_THREADS') for name in ('OMP', 'OPENBLAS', 'MKL')))")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, outside) if outside else monkeypatch.delenv(name, raising=False)
    InlineEngine(None).start(Config.parse({"threads": threads}), tmp_path / "log").check()
    assert (tmp_path / "log").read_text().split() == [seen] * 3


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize(("visible", "seen", "gpus"), [(["1", "3"], "1,3", 2), ([], "", 0), (None, "5", 0)])
def test_rays_clients_see_the_gpus_of_the_plan(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: Callable[[str], None],
    visible: list[str] | None,
    seen: str,
    gpus: int,
) -> None:
    """A process that already waits for its run is told so as well; Ray itself is not started."""
    program(
        "import os; from fedkace_flwr.experiments.running import simulation\n"
        "simulation.run_simulation = lambda imports, gpus, **_: print('seen', gpus, os.environ['CUDA_VISIBLE_DEVICES'], '.')\n"
        "simulation._NEEDED = ()\n"
        "simulation.main()"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    for waiting in (None, Job("simulation")):
        log = tmp_path / "app.log"
        with pytest.raises(RunError):  # it leaves without a summary
            FlowerEngine(10, 0.1, waiting, visible).start(Config(), log).check()
        assert log.read_text().splitlines()[0] == f"seen {gpus} {seen} ."
