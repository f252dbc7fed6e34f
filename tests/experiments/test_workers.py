"""The choice of workers: from cores, free memory and GPUs, and what a client needs of each."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
import torch

from experiments.__main__ import main
from experiments.running.workers import Machine, Need, Workers, activations, plan_workers
from experiments.studies.study import Study, load_study
from fedkace_flwr import client_app
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.training import devices
from fedkace_flwr.training.model import resnet18

GIB = 2**30
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def study(tmp_path: Path) -> Callable[..., Study]:
    """A study of three seeds over four clients on digits."""

    def make(**options: object) -> Study:
        path = tmp_path / "study.yaml"
        path.write_text(f"config: {{clients: 4, cache-dir: {tmp_path}}}\ngrid: {{seed: [0, 1, 2]}}\n")
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
    path.write_text(f"config: {{threads: 4, cache-dir: {tmp_path}}}\n")
    assert plan_workers(load_study(path, {}, tmp_path), Machine(10, 500 * GIB)).count == 2


def test_what_is_asked_for_is_done_with_a_warning(study: Callable[..., Study]) -> None:
    small = Machine(2, GIB)
    asked = plan_workers(study(workers=8), small)
    assert asked.count == 8
    cores, memory = asked.warnings
    assert "8 workers" in cores and "2 cores" in cores
    assert "--workers 1 fits" in memory or "--workers 2 fits" in memory
    assert not plan_workers(study(), Machine(2, 500 * GIB)).warnings


def test_clients_share_gpus_as_far_as_memory_goes(study: Callable[..., Study]) -> None:
    one = plan_workers(study(), Machine(16, 500 * GIB, (80 * GIB,)))
    assert (one.count, one.gpu_fraction) == (4, 0.25)
    two = plan_workers(study(), Machine(16, 500 * GIB, (80 * GIB, 80 * GIB)))
    assert (two.count, two.gpu_fraction) == (4, 0.5)
    tight = plan_workers(study(), Machine(16, 500 * GIB, (int(2.5 * one.need.gpu),)))
    assert (tight.count, tight.gpu_fraction) == (2, 0.5)
    assert tight.count * tight.need.gpu <= tight.machine.gpus[0] and not tight.warnings
    assert plan_workers(study(gpu_fraction=0.0), Machine(16, 500 * GIB, (80 * GIB,))).gpu_fraction == 0
    crowded = plan_workers(study(gpu_fraction=0.01), Machine(16, 500 * GIB, (8 * GIB,)))
    assert any("gpu-fraction = 0.01" in warning for warning in crowded.warnings)


def test_the_inline_engine_asks_ray_for_nothing(study: Callable[..., Study]) -> None:
    assert plan_workers(study(engine="inline"), Machine(16, 500 * GIB, (80 * GIB,))).gpu_fraction == 0


def test_more_gpus_than_there_are_is_refused(study: Callable[..., Study]) -> None:
    with pytest.raises(ConfigError, match=r"gpu-fraction = 2: this machine has 1 GPUs"):
        plan_workers(study(gpu_fraction=2.0), Machine(16, 500 * GIB, (80 * GIB,)))


def test_the_plan_is_a_line(study: Callable[..., Study]) -> None:
    text = str(Workers(2, 1, 0.0, Need(GIB, GIB), Machine(2, 20 * GIB)))
    assert text == "2 workers of 1 thread on 2 cores, about 2.0 GiB of 20.0 GiB free memory"
    text = str(Workers(4, 1, 0.25, Need(GIB, 2 * GIB), Machine(8, 20 * GIB, (80 * GIB,))))
    assert text.endswith("0.25 of a GPU each, about 2.0 GiB of 20.0 GiB")


@pytest.mark.parametrize(
    ("limit", "cores"), [("200000 100000", 2), ("50000 100000", 1), ("max 100000", None), ("nonsense", None)]
)
def test_a_containers_limits_count(tmp_path: Path, limit: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(limit)
    (tmp_path / "memory.max").write_text(f"{3 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    whole, found = Machine.here(tmp_path / "nothing"), Machine.here(tmp_path)
    assert found.cores == (whole.cores if cores is None else min(cores, whole.cores))
    assert found.memory <= 2 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert Machine.here(tmp_path).memory > 0


def test_activations_grow_with_width_and_area() -> None:
    """Twice the side gives four times the activations; by hand for the least: each convolution keeps its input."""
    cpu = torch.device("cpu")
    small, large = (activations(resnet18(10, 8, "cifar"), size, cpu) for size in (16, 32))
    assert 3.5 < large / small <= 4.1
    wide = activations(resnet18(10, 16, "cifar"), 32, cpu)
    assert 1.8 < wide / large <= 2.0
    assert large > 4 * 17 * 8 * 32 * 32 / 4


def test_a_process_takes_no_more_of_a_gpu_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: taken.append(share))
    for kind, share in (("cpu", 0.5), ("cuda", 0.0), ("cuda", 1.0), ("cuda", 0.25)):
        devices.limit_memory(torch.device(kind), share)
    assert taken == [0.25]


@pytest.mark.slow
def test_ray_tells_a_client_its_share_of_a_gpu() -> None:
    """Ray counts GPUs as it is told to, whether they are there or not."""
    assert client_app._share_of_gpu() == 0
    ray.init(num_cpus=1, num_gpus=1, include_dashboard=False, log_to_driver=False)
    try:
        given = ray.remote(num_gpus=0.25)(client_app._share_of_gpu)
        assert ray.get(given.remote()) == 0.25
    finally:
        ray.shutdown()


def test_a_plan_times_training_as_it_is_configured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "quickstart", "--engine", "inline", "--dry-run", "--set", "augment=flip-shift"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^plan: \d+ workers? of \d+ threads? on ", printed, re.MULTILINE), printed
