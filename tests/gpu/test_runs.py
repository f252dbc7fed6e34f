"""Whole runs on a GPU: recorded as plain, together as alone, resumed as whole, and every method."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.common import rounds_of

from fedkace_flwr.config import Config
from fedkace_flwr.experiments.running.engines import FlowerEngine
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.experiments.running.workers import Machine
from fedkace_flwr.networks.catalogue import NETWORKS
from fedkace_flwr.registry import METHODS
from fedkace_flwr.results.run_folder import HOLDS, RunFolder
from fedkace_flwr.storage.checkpoint import Checkpoint
from fedkace_flwr.storage.targets import claim

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

Make = Callable[..., Config]
GPU: dict[str, Any] = {"device": "cuda", "deterministic": True}


@pytest.fixture
def run(small: Make, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Run a small configuration on the GPU; return its rounds without times."""

    def record(name: str, **changes: Any) -> list[dict[str, Any]]:
        run_inline(small(run_name=name, **{**GPU, **changes}))
        return rounds_of(tmp_path / name)

    return record


@pytest.mark.parametrize("method", ["fedkace", "fedframe", "derpp", "flwf", "fedprox", "refed"])
def test_a_recorded_run_is_the_plain_run(run: Callable[..., list[dict[str, Any]]], method: str) -> None:
    assert run("plain", method=method, cuda_graphs="off") == run("recorded", method=method, cuda_graphs="on")


@pytest.mark.parametrize("network", sorted(set(NETWORKS) - {"resnet18"}))
def test_a_recorded_run_of_another_network_is_the_plain_run(
    run: Callable[..., list[dict[str, Any]]], network: str
) -> None:
    plain, recorded = (run(wanted, network=network, rounds=2, cuda_graphs=wanted) for wanted in ("off", "on"))
    assert plain == recorded and [record["failures"] for record in plain] == [[], []]


def test_a_run_repeats_itself(run: Callable[..., list[dict[str, Any]]]) -> None:
    assert run("once") == run("again")


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_runs_for_two_rounds(
    run: Callable[..., list[dict[str, Any]]], method: str, tmp_path: Path
) -> None:
    rounds = run("run", method=method, rounds=2, deterministic=False)
    assert [record["failures"] for record in rounds] == [[], []]
    assert all(record["accuracy"] > 0 for record in rounds)
    facts = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert facts["gpu"] and facts["driver"] and facts["cuda"] and facts["cudnn"]
    assert (facts["tf32"], facts["deterministic"]) == (False, False)


def test_a_resumed_run_is_the_whole_run(
    run: Callable[..., list[dict[str, Any]]], small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run("whole")
    save = RunFolder.save

    def cut(folder: RunFolder, checkpoint: Checkpoint) -> None:
        save(folder, checkpoint)
        if checkpoint.round == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", cut)
        with pytest.raises(KeyboardInterrupt):
            run("cut")
    run_inline(small(run_name="cut", resume=True, **GPU))
    assert rounds_of(tmp_path / "cut") == whole


@pytest.mark.federation
def test_clients_that_share_a_gpu_under_ray_give_the_same_run(
    run: Callable[..., list[dict[str, Any]]], small: Make, tmp_path: Path
) -> None:
    alone = run("alone")
    config = small(run_name="together", **GPU)
    claim(tmp_path / "together", HOLDS)
    name = Machine.here().gpus[0].name
    FlowerEngine(3, 0.25, visible=[name]).start(replace(config), tmp_path / "together" / "app.log").check()
    assert rounds_of(tmp_path / "together") == alone


def test_planning_leaves_no_cuda_context() -> None:
    program = "import torch; from fedkace_flwr.experiments.running.workers import Machine; gpus = Machine.here().gpus; "
    program += "assert gpus and all(0 < gpu.free <= gpu.memory for gpu in gpus); "
    program += "assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", program], check=True)
