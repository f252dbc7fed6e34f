"""Tests that need a GPU; elsewhere they are skipped."""

import pytest
import torch


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    """The GPU; skips the test where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU that PyTorch can use")
    return torch.device("cuda:0")
