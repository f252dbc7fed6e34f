"""Weights to start from, read from a file that others may have written: a state dict of PyTorch or of safetensors.

The file is the user's or, of weights that somebody published, one in the cache of their publisher's program. Nothing in the file is executed, its size is bounded, and every tensor is checked against the network.
"""

import io
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
from fedkace_flwr.networks.network import Blueprint, Network
from fedkace_flwr.sections.runs import TIMM
from fedkace_flwr.storage.files import read_bytes

LARGEST = 2**30
"""Most bytes of a file, and of what is packed in it."""

_OUTPUT, _COUNTER, _VARIANCE = "output.", ".num_batches_tracked", ".running_var"
_KINDS = (".safetensors", ".pth", ".pt")
_TORCHVISION = {
    "resnet18": ("ResNet18_Weights", 64),
    "mobilenet-v3-small": ("MobileNet_V3_Small_Weights", 16),
    "efficientnet-b0": ("EfficientNet_B0_Weights", 32),
}


def weights_for(net: Network, path: Path) -> dict[str, Tensor]:
    """Read a network's weights and statistics from a file.

    The file must hold every layer but the output layer, by the network's own names or by those of the published state
    dict (:meth:`~fedkace_flwr.networks.network.Network.own_name`, and :meth:`~fedkace_flwr.networks.network.Network.converted`),
    and no other layer. Its output layer, if it has one,
    is never taken, because the order of its classes is unknown. Batch counters are not taken either.

    Parameters
    ----------
    net : Network
        Gives names and shapes; left as it is.
    path : Path
        A file ``.safetensors``, ``.pth`` or ``.pt``.

    Returns
    -------
    dict of str to Tensor
        By the network's names, in the network's dtypes, on the CPU; without the output layer.

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
    try:
        stored = net.converted(stored)
    except ValueError as fault:
        raise _refused(path, str(fault)) from fault
    wanted = {
        name: tensor for name, tensor in net.state_dict().items() if not name.startswith(_OUTPUT) and _counts(name)
    }
    found: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        own = net.own_name(name)
        if own is None or own.startswith(_OUTPUT) or not _counts(own):
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
