"""Which device and which precision a worker computes with, and its share of a GPU's memory."""

import copy
import subprocess
import sys

import pytest
import torch
from support.gradients import gradient_of
from torch import nn

from fedkace_flwr import client_app
from fedkace_flwr.compute.devices import GPU_SHARE, choose_device, choose_precision, in_bf16, limit_memory
from fedkace_flwr.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process counts two GPUs, which it never touches."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("name", "share", "index"), [("auto", None, 0), ("auto", 0.1, 0), ("cuda", None, 0), ("cuda:1", 1.0, 1)]
)
@pytest.mark.usefixtures("gpus")
def test_a_gpu_always_carries_its_index(name: str, share: float | None, index: int) -> None:
    device = choose_device(name, share)
    assert device.type == "cuda" and device.index == index
    assert torch.cuda._utils._get_device_index(device) == index  # what PyTorch's functions ask of a device


@pytest.mark.usefixtures("gpus")
def test_without_a_share_of_a_gpu_a_process_computes_on_the_cpu_or_says_why_not() -> None:
    assert choose_device("auto", 0.0) == CPU
    assert choose_device("cpu", 0.5) == CPU
    with pytest.raises(ConfigError, match=r"device = 'cuda': this client was given no share of a GPU; .*0\.1"):
        choose_device("cuda", 0.0)
    with pytest.raises(ConfigError, match=r"device = 'cuda:2': this process sees 2 CUDA devices"):
        choose_device("cuda:2")


@pytest.mark.usefixtures("gpus")
def test_a_share_is_taken_by_pytorchs_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last call, into the driver, is missing: the function's own checks of its arguments are PyTorch's."""
    taken: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(
        torch._C, "_cuda_setMemoryFraction", lambda share, device: taken.append((share, device)), raising=False
    )
    for name, share in (("cpu", 0.5), ("auto", 0.0), ("cuda", 1.0), ("auto", 0.25), ("cuda:1", 0.1)):
        limit_memory(choose_device(name), share)
    assert taken == [(0.25, 0), (0.1, 1)]
    with pytest.raises(ValueError, match="specified index"):
        limit_memory(torch.device("cuda"), 0.5)


def test_outside_ray_a_process_has_a_share_if_it_is_told_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert client_app._share_of_gpu() is None
    monkeypatch.setenv(GPU_SHARE, "0.25")
    assert client_app._share_of_gpu() == 0.25


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_named_precision_is_taken(name: str, dtype: torch.dtype) -> None:
    assert choose_precision(name, CPU) is dtype


@pytest.mark.parametrize(
    ("found", "dtype"),
    [({"avx512_bf16": True}, torch.bfloat16), ({"bf16": True}, torch.bfloat16), ({"avx2": True}, torch.float32)],
)
def test_auto_follows_the_processor(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, bool], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert choose_precision("auto", CPU) is dtype


def test_auto_is_float32_where_pytorch_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert choose_precision("auto", CPU) is torch.float32


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(16, 32, 3, 2), (4, 16, 9, 9)),
        (nn.Linear(40, 24), (6, 40)),
        (nn.Conv1d(16, 8, 5, padding=2), (4, 16, 20)),
    ],
)
def test_without_instructions_for_bf16_layers_give_the_exact_result_rounded(
    monkeypatch: pytest.MonkeyPatch, layer: nn.Module, shape: tuple[int, ...]
) -> None:
    """Layer, gradient of its input and of its parameters, beside those of float64 from the same rounded factors."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True}, raising=False)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16().float().requires_grad_()
    exact_layer, exact_x = copy.deepcopy(layer).bfloat16().double(), x.detach().double().requires_grad_()
    with in_bf16(CPU):
        y = layer(x)
    exact_y = exact_layer(exact_x)
    assert y.dtype is torch.bfloat16
    for each in (y, exact_y):
        torch.autograd.backward(each.double().sum())
    found = [y, gradient_of(x), *map(gradient_of, layer.parameters())]
    wanted = [exact_y, gradient_of(exact_x), *map(gradient_of, exact_layer.parameters())]
    for one, exact in zip(found, wanted, strict=True):
        assert torch.allclose(one.double(), exact, rtol=1 / 250, atol=1e-5)


def test_unknown_names_say_what_would_be_right() -> None:
    with pytest.raises(ConfigError, match="precision = 'half': must be fp32, tf32, bf16 or auto"):
        choose_precision("half", CPU)
    for name in ("gpu", "cuda:", "cuda:-1", "cuda:one", "cpu:0", "auto:1"):
        with pytest.raises(ConfigError, match=f"device = '{name}': must be auto, cpu, cuda or cuda:N"):
            choose_device(name)


def test_apples_gpus_are_refused_with_the_reason() -> None:
    for name in ("mps", "mps:0"):
        with pytest.raises(ConfigError, match=f'device = {name!r}: .* no float64.*; use device = "cpu"'):
            choose_device(name)


@pytest.mark.slow
def test_choosing_a_device_starts_no_cuda() -> None:
    """A process that only plans must not initialise CUDA; is_initialized says whether it has."""
    program = "import torch; from fedkace_flwr.compute.devices import choose_device; choose_device('auto')"
    program += "; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", program], check=True)
