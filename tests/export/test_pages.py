"""The pages on models and on Python tell the truth: a test types what they say to type."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.common import SMALL
from support.made.models import constant, picture
from support.systems.engines import InProcessEngine
from support.tools import need_modules

from fedkace_flwr.config import Config
from fedkace_flwr.experiments import api
from fedkace_flwr.experiments.running import runner
from fedkace_flwr.experiments.running.inline import run_inline
from fedkace_flwr.export.folder import write_folder
from fedkace_flwr.export.onnx_file import to_onnx

DOCS = Path(__file__).resolve().parents[2] / "docs"
STUDY = "config: {rounds: 2, clients: 2, epochs: 1, width: 2, samples-per-class: 4, capacity: 10}\n"


def executed(page: str) -> dict[str, Any]:
    """Execute the page's Python, one block after the other."""
    names: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    return names


@pytest.mark.slow
def test_models_are_loaded_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_modules("onnx", "onnxscript", "onnxruntime")
    monkeypatch.chdir(tmp_path)
    for name in ("seven.png", "three.png"):
        (tmp_path / name).write_bytes(picture())
    settings = {"results-dir": "results/quickstart", "run-name": "fedkace_seed-0", "rounds": 2}
    run_inline(Config.parse({**SMALL, **settings}))
    kept = constant(1, 3)
    write_folder(tmp_path / "taken", kept, onnx=to_onnx(kept)[0])
    names = executed("models.md")
    assert len(names["labels"]) == 2 and names["probabilities"].argmax(axis=1).tolist() == [3, 3]
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    met = names["about"]["classes_met"]
    with torch.inference_mode():
        alone = names["net"](names["prepared"](images))[:, met].softmax(dim=1)
    wanted = names["load_model"]("results/quickstart/fedkace_seed-0/model").predict(images).probabilities
    assert np.allclose(wanted[:, met], alone, atol=1e-5)


@pytest.mark.slow
def test_runs_go_from_python_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quickstart.yaml").write_text(STUDY + "grid: {method: [fedkace, fedframe]}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(api, "find_study", lambda name: tmp_path / f"{name}.yaml")
    monkeypatch.setattr(runner, "InlineEngine", InProcessEngine)
    names = executed("python.md")
    assert names["page"] == tmp_path / "results" / "mine" / "report" / "index.html"
    assert set(names["found"].models) == {"fedkace_seed-0", "er_seed-0"}
    assert (tmp_path / "results" / "quickstart" / "fedframe_seed-0" / "summary.json").exists()
