"""Which device and which precision a worker computes with."""

import pytest
import torch

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.training.devices import choose_device, choose_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_named_precision_is_taken(name, dtype):
    assert choose_precision(name, CPU) is dtype


@pytest.mark.parametrize(
    ("found", "dtype"),
    [({"avx512_bf16": True}, torch.bfloat16), ({"bf16": True}, torch.bfloat16), ({"avx2": True}, torch.float32)],
)
def test_auto_follows_the_processor(monkeypatch, found, dtype):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert choose_precision("auto", CPU) is dtype


def test_auto_is_float32_where_pytorch_cannot_tell(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert choose_precision("auto", CPU) is torch.float32


def test_unknown_names_say_what_would_be_right():
    with pytest.raises(ConfigError, match="precision = 'half': must be fp32, bf16 or auto"):
        choose_precision("half", CPU)
    with pytest.raises(ConfigError, match="device = 'gpu': must be auto, cpu, cuda or cuda:N"):
        choose_device("gpu")
