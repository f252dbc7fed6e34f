"""TF32, determinism, and what is recorded of them."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedkace_flwr.compute.numerics import described, driver_version, settle
from fedkace_flwr.config import Config

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")


@pytest.fixture(autouse=True)
def flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put PyTorch's flags back."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = current()
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before[:2]
    torch.backends.cudnn.deterministic = before[2]
    torch.use_deterministic_algorithms(before[3])


def current() -> tuple[bool, bool, bool, bool]:
    return (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
    )


def test_fp32_means_it_unless_tf32_is_asked_for() -> None:
    run = Config().run
    assert run.precision == "fp32" and not run.deterministic
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settle(GPU, tf32=False, deterministic=run.deterministic)
        assert current() == (False, False, False, False)
        settle(GPU, tf32=True, deterministic=False)
        assert current() == (True, True, False, False)


def test_determinism_covers_cudnn_cublas_and_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    settle(GPU, tf32=False, deterministic=True)
    assert current() == (False, False, True, True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    settle(GPU, tf32=False, deterministic=False)
    assert current() == (False, False, False, False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    settle(GPU, tf32=False, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # what the user has set stays


def test_on_a_cpu_nothing_is_set() -> None:
    before = current()
    settle(CPU, tf32=True, deterministic=True)
    assert current() == before and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    assert set(described(CPU).values()) == {None}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (x)\n", "570.124.06"),
        ("GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n", None),
    ],
)
def test_the_drivers_version_is_read_from_the_kernel(tmp_path: Path, text: str, version: str | None) -> None:
    (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path / "version") == version
    assert driver_version(tmp_path / "missing") is None
