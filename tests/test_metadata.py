"""What pyproject.toml, CITATION.cff and the changelog say about the package, and that they agree."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fedkace_flwr

ROOT = Path(__file__).resolve().parents[1]
ABOUT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = ABOUT["project"]
CITATION: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yaml").read_text(encoding="utf-8"))


def names_of(lines: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for line in lines}


def test_the_main_job_needs_no_extra() -> None:
    """What heavy extras hold is not required; what the main job imports is, Flower's simulation among it."""
    required = names_of(PROJECT["dependencies"])
    assert {"flwr", "torch", "torchvision", "numpy", "scikit-learn", "scipy", "matplotlib", "rich"} <= required
    (flower,) = (Requirement(line) for line in PROJECT["dependencies"] if line.startswith("flwr"))
    assert flower.extras == {"simulation"}
    extras = PROJECT["optional-dependencies"]
    assert set(extras) == {
        "hub",
        "metrics",
        "mlflow",
        "report",
        "serve",
        "tensorboard",
        "timm",
        "wandb",
        "onnx",
        "fuzz",
        "dev",
    }
    for name in ("hub", "metrics", "mlflow", "report", "serve", "tensorboard", "timm", "wandb", "onnx", "fuzz"):
        assert extras[name] and not names_of(extras[name]) & required
    assert "uv" not in ABOUT["tool"] and not (ROOT / "uv.toml").exists(), "no overrides for Flower's uv"


def test_flower_is_pinned_to_the_minor_releases_that_the_tests_pass_with() -> None:
    (flower,) = (Requirement(line) for line in PROJECT["dependencies"] if line.startswith("flwr"))
    assert flower.specifier.contains(version("flwr"))
    major, minor = map(int, ABOUT["tool"]["flwr"]["app"]["flwr-version-target"].split(".")[:2])
    assert flower.specifier.contains(f"{major}.{minor}.0") and not flower.specifier.contains(f"{major}.{minor + 1}.0")
    assert not flower.specifier.contains(f"{major}.{minor - 2}.0")


def test_the_version_is_the_same_everywhere() -> None:
    assert fedkace_flwr.__version__ == PROJECT["version"] == CITATION["version"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    dated = re.findall(r"^## (\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)$", changes, re.MULTILINE)
    assert dated[0] == (PROJECT["version"], str(CITATION["date-released"]))


def test_the_workflow_runs_every_supported_version_of_python() -> None:
    (matrix,) = (job["strategy"]["matrix"]["python"] for job in WORKFLOW["jobs"].values() if "strategy" in job)
    named = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", line)}
    assert set(matrix) == named
    assert PROJECT["requires-python"] == f">={min(matrix, key=lambda text: int(text.partition('.')[2]))}"
    text = (ROOT / ".github" / "workflows" / "tests.yaml").read_text(encoding="utf-8")
    targets = set(re.findall(r"\bmake ([a-z-]+)", text))
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert targets and targets <= known
