"""NVIDIA's Multi-Process Service: started for a study, ended after it, with a stand-in for NVIDIA's program."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fedkace_flwr.errors import ConfigError, RunError
from fedkace_flwr.experiments.running import runner
from fedkace_flwr.experiments.running.machine import Gpu, Machine
from fedkace_flwr.experiments.running.need import Need
from fedkace_flwr.experiments.running.service import MultiProcessService
from fedkace_flwr.experiments.running.workers import Workers

GIB = 2**30
GPU = Gpu("0", 80 * GIB, 80 * GIB)
ON_GPU = Workers(2, 1, 0.5, Need(GIB, GIB), Machine(2, 20 * GIB, (GPU,)), (GPU, GPU))
ON_CPU = Workers(2, 1, 0.0, Need(GIB, GIB), Machine(2, 20 * GIB))

Install = Callable[[str], dict[str, str]]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Put a control program on the path: with ``-d`` it does as it is told, otherwise it notes what it is sent."""

    def make(started: str = "exit 0") -> dict[str, str]:
        path = tmp_path / "bin" / "nvidia-cuda-mps-control"
        path.parent.mkdir(exist_ok=True)
        note = f'echo "$* ${{CUDA_VISIBLE_DEVICES-all}} $CUDA_MPS_PIPE_DIRECTORY" >> {tmp_path}/calls\n'
        path.write_text(f'#!/bin/sh\n{note}if [ "$1" = -d ]; then {started}; fi\ncat >> {tmp_path}/sent\n')
        path.chmod(0o755)
        return {"PATH": f"{path.parent}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "1"}

    return make


def test_the_service_is_started_in_a_folder_of_its_own_and_told_to_quit(install: Install, tmp_path: Path) -> None:
    outside = install("exit 0")
    with MultiProcessService(outside, tmp_path) as service:
        pipes = service.environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(pipes).is_dir() and Path(pipes).stat().st_mode & 0o777 == 0o700
        assert Path(service.environment["CUDA_MPS_LOG_DIRECTORY"]).is_dir()
        assert service.environment["CUDA_VISIBLE_DEVICES"] == "1"  # the clients' GPUs are as they were
        assert not (tmp_path / "sent").exists()
    assert (tmp_path / "sent").read_text() == "quit\n"
    started, ended = (tmp_path / "calls").read_text().splitlines()
    assert started == f"-d all {pipes}" and ended.endswith(pipes)


def test_a_service_that_does_not_start_says_why(install: Install, tmp_path: Path) -> None:
    service = MultiProcessService(install('echo "An instance of this daemon is already running" >&2; exit 1'), tmp_path)
    with pytest.raises(RunError, match=r"--mps: .* did not start \(An instance.*running\); run without --mps"), service:
        pass
    assert not (tmp_path / "sent").exists()  # nothing was started, so nothing is ended
    with pytest.raises(RunError, match=r"exit status 3"), MultiProcessService(install("exit 3"), tmp_path):
        pass


def test_what_is_missing_is_said_before_any_run(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"--mps: nvidia-cuda-mps-control is not installed"):
        MultiProcessService({"PATH": str(tmp_path)}, tmp_path)
    monkeypatch.setenv("PATH", install("exit 0")["PATH"])
    runner.check_service(ON_GPU)
    with pytest.raises(ConfigError, match=r"--mps: the workers compute on the CPU"):
        runner.check_service(ON_CPU)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match=r"--mps with RAY_ADDRESS"):
        runner.check_service(ON_GPU)
