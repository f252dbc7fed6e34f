"""Predictions, scores, memory and recordings on a GPU."""

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkace_flwr.algorithms.fedkace_buffer import class_condition_number, kernel_condition_number, score_candidates
from fedkace_flwr.compute.numerics import settle
from fedkace_flwr.config import Config
from fedkace_flwr.experiments.bench.training import Setting
from fedkace_flwr.experiments.running.workers import CONTEXT, Need
from fedkace_flwr.sections import TrainingConfig
from fedkace_flwr.seeding import generator_for
from fedkace_flwr.training.cuda_graphs import KeptSteps
from fedkace_flwr.training.loop import predict, train

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(autouse=True)
def as_by_default(gpu: torch.device) -> Iterator[None]:
    """Compute as runs do by default, and leave the process so."""
    settle(gpu, tf32=False, deterministic=False)
    yield
    settle(gpu, tf32=False, deterministic=False)


@pytest.fixture
def setting(gpu: torch.device) -> Setting:
    """A client's round at the paper's sizes."""
    return Setting.draw(device=str(gpu))


def logits_of(setting: Setting, images: Tensor) -> Tensor:
    return predict(setting.net, torch.Tensor.clone, images, setting.preprocess)


def test_an_images_logits_do_not_depend_on_its_company(setting: Setting) -> None:
    together = logits_of(setting, setting.images)
    mixed = torch.randperm(len(setting.images), generator=generator_for(0, "company"))
    assert torch.equal(logits_of(setting, setting.images[mixed]), together[mixed])
    for rows in (slice(0, 1), slice(700, 731), slice(1400, 1500)):
        assert torch.equal(logits_of(setting, setting.images[rows]), together[rows])


def test_scores_and_condition_numbers_are_those_of_the_cpu(setting: Setting, gpu: torch.device) -> None:
    logits = torch.randn(1500, 100, generator=generator_for(0, "logits"))
    seen, old, labels = setting.old | setting.current, setting.old, setting.labels
    here, there = (score_candidates(each, labels, 1000, old, seen) for each in (logits, logits.to(gpu)))
    for mine, its in zip(vars(here).values(), vars(there).values(), strict=True):
        torch.testing.assert_close(its, mine, rtol=1e-9, atol=1e-9)
    mine, its = (
        [kernel_condition_number(x, seen, 1.1), class_condition_number(x, labels, seen, 1.1)]
        for x in (logits, logits.to(gpu))
    )
    assert its == pytest.approx(mine, rel=1e-6)


def test_recordings_are_kept_over_trainings(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shapes of batch, three trainings; the plain loop with the same kernels ends at the same weights."""
    made: list[object] = []
    graph = torch.cuda.CUDAGraph
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: (made.append(None), graph())[1])  # type: ignore[func-returns-value]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settle(setting.preprocess.scale.device, tf32=False, deterministic=True)
    start = {name: tensor.clone() for name, tensor in setting.net.state_dict().items()}
    kept, nets = KeptSteps(1500), (setting.net, copy.deepcopy(setting.net))
    for rate in (0.01, 0.005, 0.01):
        for net, options in zip(nets, ({"captured": True, "kept": kept}, {}), strict=True):
            net.load_state_dict(start)
            carry_out(setting, net, rate, **options)
        assert all(
            torch.equal(mine, its)
            for mine, its in zip(nets[0].state_dict().values(), nets[1].state_dict().values(), strict=True)
        )
    assert len(made) == 2


def carry_out(setting: Setting, net: Any, rate: float, **options: Any) -> None:
    new, held = slice(0, setting.chunk), slice(setting.chunk, None)
    settings = TrainingConfig(epochs=2, batch_size=32, learning_rate=rate)
    chunk, buffer = ((setting.images[part], setting.labels[part]) for part in (new, held))
    train(net, chunk, buffer, setting.balanced(), settings, setting.preprocess, generator_for(0, "order"), **options)


_MEASURED = """
import json, sys, torch
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.config import Config
config = Config.parse(json.loads(sys.argv[1]))
run_inline(config)
print(torch.cuda.max_memory_reserved(0))
"""


@pytest.mark.parametrize("step", ["off", "on"])
def test_a_run_takes_no_more_memory_than_is_planned_and_not_much_less(step: str, tmp_path: Any) -> None:
    """In a process of its own. PyTorch does not count CUDA's context, which is left out on both sides."""
    values = {
        "clients": 2, "rounds": 2, "epochs": 1, "image-size": 32, "width": 16, "samples-per-class": 60, "capacity": 300,
        "device": "cuda", "cuda-graphs": step, "results-dir": str(tmp_path), "run-name": "run",
    }  # fmt: skip
    command = [sys.executable, "-c", _MEASURED, json.dumps(values)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    reserved = int(done.stdout.splitlines()[-1])
    planned = Need.of(Config.parse(values)).gpu - CONTEXT
    assert planned / 10 < reserved <= planned
