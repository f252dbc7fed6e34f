"""Weights to start from, read from a file that others may have written: a state dict of PyTorch or of safetensors.

The file is the user's or, of weights that somebody published, one in the cache of their publisher's program. Nothing in the file is executed, its size is bounded, and every tensor is checked against the network.
"""

import io
import json
import math
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import torch
from safetensors.torch import load
from torch import Tensor

from fedkace_flwr.compute.torchvision_compat import import_torchvision
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.networks import from_timm
from fedkace_flwr.networks.lora import DOWN, UP
from fedkace_flwr.networks.network import Blueprint, Network
from fedkace_flwr.sections.runs import TIMM
from fedkace_flwr.storage.files import read_bytes

LARGEST = 2**30
"""Most bytes of a file, and of what is packed in it."""

_OUTPUT, _COUNTER, _VARIANCE = "output.", ".num_batches_tracked", ".running_var"
_KINDS = (".safetensors", ".pth", ".pt")
_PEFT, _PEFTS_CONFIG = "base_model.model.", "adapter_config.json"
_PEFTS_ADAPTER = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_LARGEST_CONFIG = 2**20
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal")  # others change the body's weights, too
_MEANS_MORE = re.compile(r"use_(?!rslora).*|.*_config|alpha_pattern|layer_replication|lora_bias|alora_.*")
"""Keys of peft's configuration under which an adapter is more than alpha / r BA."""
_TORCHVISION = {
    "resnet18": ("ResNet18_Weights", 64),
    "mobilenet-v3-small": ("MobileNet_V3_Small_Weights", 16),
    "efficientnet-b0": ("EfficientNet_B0_Weights", 32),
}


def weights_for(net: Network, path: Path) -> dict[str, Tensor]:
    """Read a network's weights and statistics, its adapters, or both from a file.

    The file must hold every layer but the output layer, by the network's own names or by those of the published state
    dict (:meth:`~fedkace_flwr.networks.network.Network.own_name`, and :meth:`~fedkace_flwr.networks.network.Network.converted`),
    and no other layer, unless it holds adapters alone. Its output layer, if it has one,
    is never taken, because the order of its classes is unknown. Batch counters are not taken either. Adapters of some
    layers are enough; they have the network's own names or, with ``adapter_config.json`` beside the file, those of peft.

    Parameters
    ----------
    net : Network
        Gives names and shapes; left as it is.
    path : Path
        A file ``.safetensors``, ``.pth`` or ``.pt``.

    Returns
    -------
    dict of str to Tensor
        By the network's names, in the network's dtypes, on the CPU; without the output layer. Adapters have the file's
        rank, which is at most the network's.

    Raises
    ------
    ConfigError
        The file cannot be read, or does not fit the network; the message names the first layer that is missing,
        unknown, or of the wrong shape or kind.
    """
    try:
        stored = _read(path)
    except OSError as fault:
        raise _refused(path, f"cannot be read ({fault.strerror or fault})") from fault
    adapters, body = _parted(net, path, stored)
    found = _adapters(net, path, adapters)
    if found and not any(_counts(own) for name in body if (own := _own_name(net, name))):
        return found
    return found | _body(net, path, body)


def holds_body(weights: Mapping[str, Tensor]) -> bool:
    """Whether weights as :func:`weights_for` returns them are more than adapters."""
    return any(not name.endswith((DOWN, UP)) for name in weights)


def _own_name(net: Network, name: str) -> str | None:
    """The network's name for a tensor; None for one of the output layer."""
    own = net.own_name(name)
    return None if own is None or own.startswith(_OUTPUT) else own


def _body(net: Network, path: Path, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    try:
        stored = net.converted(stored)
    except ValueError as fault:
        raise _refused(path, str(fault)) from fault
    wanted = {
        name: tensor
        for name, tensor in net.state_dict().items()
        if not name.startswith(_OUTPUT) and not name.endswith((DOWN, UP)) and _counts(name)
    }
    found: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        own = _own_name(net, name)
        if own is None or not _counts(own):
            continue
        if own not in wanted:
            raise _refused(path, f"holds {name!r:.200}, which the network has not; must hold its layers alone")
        if own in found:
            raise _refused(path, f"holds {name!r:.200}, the network's {own!r}, twice; must hold it once")
        found[own] = _fitting(path, name, tensor, wanted[own])
    for name in wanted:
        if name not in found:
            raise _refused(path, f"lacks {name!r}; must hold all layers of the network but the output layer")
    return found


_Adapters = dict[str, dict[str, tuple[str, Tensor]]]
"""By the network's name of the weight, and by half: the file's name and the tensor."""


def _parted(net: Network, path: Path, stored: Mapping[str, Tensor]) -> tuple[_Adapters, dict[str, Tensor]]:
    """Adapters, without those of the output layer and with peft's factor in B, and the other tensors."""
    adapters: _Adapters = {}
    body: dict[str, Tensor] = {}
    held, factor = net.state_dict().keys(), None
    for name, tensor in stored.items():
        of_peft = name.startswith(_PEFT)
        short = name.removeprefix(_PEFT).replace(".base_layer.", ".") if of_peft else name
        if of_peft and (pefts := _PEFTS_ADAPTER.fullmatch(short)):
            factor = _pefts_factor(path) if factor is None else factor
            weight, half = f"{pefts[1]}.weight", DOWN if pefts[2] == "A" else UP
            if tensor.layout is torch.strided and tensor.is_floating_point() and tensor.dim() > 1:  # others are refused
                tensor = tensor.flatten(1)  # of convolutions
                tensor = tensor.float() * factor[0] / tensor.shape[1] ** factor[1] if half == UP else tensor
        elif short.endswith((DOWN, UP)):
            half = DOWN if short.endswith(DOWN) else UP
            weight = short.removesuffix(half)
        else:
            body[short] = tensor
            continue
        if (own := _own_name(net, weight)) is None:
            continue
        if of_peft and own + half not in held:  # peft's name for the projections of attention
            own = own.removesuffix("weight") + "in_proj_weight"
        if own + half not in held:
            must = "must hold its layers alone" if net.adapted else "must be without adapters, or trainable 'lora'"
            raise _refused(path, f"holds the adapter {name!r:.200}, which the network has not; {must}")
        if half in adapters.setdefault(own, {}):
            raise _refused(path, f"holds {name!r:.200}, the network's {own + half!r}, twice; must hold it once")
        adapters[own][half] = name, tensor
    return adapters, body


def _adapters(net: Network, path: Path, stored: _Adapters) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    held = net.state_dict()
    for own, halves in stored.items():
        if len(halves) < 2:
            raise _refused(path, f"holds {next(iter(halves.values()))[0]!r:.200} alone; must hold both of its matrices")
        rank, most = len(halves[DOWN][1]) if halves[DOWN][1].dim() else 0, len(held[own + DOWN])
        if not 1 <= rank <= most:
            raise _refused(path, f"the rank of {halves[DOWN][0]!r:.200} is {rank}; must be 1 to {most} (see lora-rank)")
        found[own + DOWN] = _fitting(path, *halves[DOWN], held[own + DOWN][:rank])
        found[own + UP] = _fitting(path, *halves[UP], held[own + UP][:, :rank])
    return found


def _pefts_factor(path: Path) -> tuple[float, float]:
    """alpha, and the power of r by which it is divided."""
    beside = path.with_name(_PEFTS_CONFIG)
    try:
        told = json.loads(read_bytes(beside, _LARGEST_CONFIG))
        alpha, power = float(told["lora_alpha"]), 0.5 if told.get("use_rslora") else 1.0
        more = [key for key, value in told.items() if value and _MEANS_MORE.fullmatch(key)]
        plain = told.get("peft_type") == "LORA" and told.get("init_lora_weights", True) in _PLAIN_STARTS
    except OSError as fault:
        why = fault.strerror or fault
        raise _refused(path, f"holds adapters of peft: its {_PEFTS_CONFIG} must be beside it ({why})") from fault
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise _refused(path, f"holds adapters of peft: {str(beside)!r:.500} is none of peft's LoRA") from fault
    if more or not plain or not math.isfinite(alpha):
        key = more[0] if more else "peft_type, lora_alpha or init_lora_weights"
        raise _refused(path, f"holds adapters of peft: {str(beside)!r:.500} sets {key:.100}; must be of plain LoRA")
    return alpha, power


def published_weights(net: Network, name: str, blueprint: Blueprint) -> dict[str, Tensor]:
    """Weights and statistics that a network was published with, as :func:`weights_for` returns them.

    They are downloaded to the cache of their publisher's program, unless they are there.

    Parameters
    ----------
    net : Network
        Gives names and shapes; left as it is.
    name : str
        The key ``network``.
    blueprint : Blueprint
        What the network was built for.

    Raises
    ------
    ConfigError
        There are none for such a network, or they can be neither found nor downloaded, or do not fit.
    """
    told = f"pretrained = true with network = {name!r}"
    if not name.startswith(TIMM):
        if name not in _TORCHVISION:
            known = f"{', '.join(_TORCHVISION)} or {TIMM}NAME"
            raise ConfigError(f"{told}, which has no published weights: must be false, or network {known}")
        width = _TORCHVISION[name][1]
        if (blueprint.width, blueprint.first_layers) != (width, "imagenet"):
            raise ConfigError(
                f"{told}, width = {blueprint.width} and stem = {blueprint.first_layers!r}: must be width = {width} and "
                "stem = 'imagenet', as published"
            )
    try:
        path = _timms_file(name, told) if name.startswith(TIMM) else _torchvisions_file(name)
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as fault:  # of the network or of the file system; the hubs' errors are such
        reason = " ".join(str(fault).split())
        raise ConfigError(
            f"{told}: the weights are not in the cache and cannot be downloaded ({reason:.300}); copy the cache of a "
            "machine that has them (HF_HOME for timm, TORCH_HOME for torchvision), or set weights-file"
        ) from fault
    try:
        return weights_for(net, path)
    except ConfigError as fault:
        raise ConfigError(f"{told}: {str(fault).removeprefix('weights-file = ')}") from fault


def _torchvisions_file(network: str) -> Path:
    url = getattr(import_torchvision().models, _TORCHVISION[network][0]).DEFAULT.url
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlsplit(url).path).name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = path.stem.rpartition("-")[2]  # its first figures are part of the name
        torch.hub.download_url_to_file(url, str(path), digest, progress=False)
    return path


def _timms_file(network: str, told: str) -> Path:
    from huggingface_hub import hf_hub_download  # which timm needs

    about = from_timm.published(network)
    if not about.hf_hub_id:
        raise ConfigError(f"{told}, whose weights are not on the Hugging Face Hub: must be false")
    repository, _, revision = about.hf_hub_id.partition("@")
    # Every repository of timm's holds its weights in this format too, which needs no unpickling.
    name = Path(about.hf_hub_filename or "model").stem.replace("pytorch_model", "model")
    return Path(hf_hub_download(repository, f"{name}.safetensors", revision=revision or None))


def _counts(name: str) -> bool:
    return not name.endswith(_COUNTER)


def _fitting(path: Path, name: str, tensor: Tensor, wanted: Tensor) -> Tensor:
    if tensor.shape != wanted.shape:
        shapes = f"{tuple(tensor.shape)}, must be {tuple(wanted.shape)}"
        raise _refused(path, f"the shape of {name!r:.200} is {shapes:.200} (see width and stem)")
    if tensor.layout is not torch.strided or tensor.is_floating_point() != wanted.is_floating_point():
        raise _refused(path, f"{name!r:.200} is {tensor.dtype}, {tensor.layout}; must be {wanted.dtype}")
    taken = tensor.detach().to(wanted.dtype)
    if not bool(taken.isfinite().all()) or (name.endswith(_VARIANCE) and bool((taken < 0).any())):
        raise _refused(path, f"{name!r:.200} holds values that are not finite, or negative variances")
    return taken.contiguous()


def _read(path: Path) -> Mapping[str, Tensor]:
    if path.suffix not in _KINDS:
        raise _refused(path, f"must be a file {', '.join(_KINDS[:-1])} or {_KINDS[-1]}")
    content = read_bytes(path, LARGEST)
    stored = _from_safetensors(path, content) if path.suffix == _KINDS[0] else _from_pytorch(path, content)
    if not isinstance(stored, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in stored.items()
    ):
        raise _refused(path, "must hold a state dict: names and tensors, nothing else")
    return stored


def _from_safetensors(path: Path, content: bytes) -> object:
    try:
        return load(content)
    except Exception as fault:  # its parser's errors have no common class
        raise _refused(path, f"is damaged, or no file of safetensors ({fault!s:.200})") from fault


def _from_pytorch(path: Path, content: bytes) -> object:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            size = sum(part.file_size for part in archive.infolist())
    except Exception as fault:  # zipfile, too, raises more than its own error on damaged bytes
        raise _refused(path, "is damaged, or was not written by torch.save of PyTorch 1.6 or later") from fault
    if size > LARGEST:
        raise _refused(path, f"unpacks to {size} bytes; at most {LARGEST} are read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as fault:  # the unpickler may raise anything on damaged bytes
        first = (str(fault).splitlines() or [""])[0]
        raise _refused(path, f"is damaged, or holds more than names and tensors ({first:.200})") from fault


def _refused(path: Path, fault: str) -> ConfigError:
    return ConfigError(f"weights-file = {str(path)!r:.500}: {fault}")
