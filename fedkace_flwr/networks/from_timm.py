"""Networks of timm (``timm:NAME``), without their output layers and without what they draw at random.

Shapes: B batch, H and W image height and width, C classes, F features.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from fedkace_flwr.compute.torchvision_compat import import_torchvision
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.networks.network import Blueprint, Network
from fedkace_flwr.sections.runs import TIMM

_OUTPUT, _BODY = ("output.weight", "output.bias"), "body."
_PROBABILITIES = ("p", "prob")  # of PyTorch's dropout, and of dropped patches; all others are called drop-something


class TimmNetwork(Network):
    """A classification model of timm for images of three channels.

    Models whose input size is fixed when they are built, such as vision transformers, are built for the images' size.

    Parameters
    ----------
    name : str
        The key ``network``.
    blueprint : Blueprint
        Its width and stem are not used.

    Raises
    ------
    ConfigError
        There is no such model, or it does not take images of this size.
    """

    def __init__(self, name: str, blueprint: Blueprint) -> None:
        super().__init__()
        self._asked, self._size = name, blueprint.image_size
        self._check_size(published(name))
        self.body = self._built(num_classes=0)
        self._check_patches()
        self.output = nn.Linear(self.body.head_hidden_size, blueprint.num_classes)

    def embed(self, x: Tensor) -> Tensor:
        """Map float images (B, 3, H, W) to features (B, F)."""
        features: Tensor = self.body(x)
        return features

    def own_name(self, name: str) -> str | None:
        """The network's name for a tensor of timm's or of its own; None for one of timm's output layer."""
        heads, own = published(self._asked).classifier or (), tuple(self.body.state_dict())
        for head in [heads] if isinstance(heads, str) else heads:
            # timm names the last layer; what is around it goes with it if the body has nothing of it.
            while (around := head.rpartition(".")[0]) and not any(each.startswith(f"{around}.") for each in own):
                head = around
            if name.startswith(f"{head}."):
                return None
        return name if name.startswith(_BODY) or name in _OUTPUT else _BODY + name

    def converted(self, stored: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The layers of a state dict of timm's or of this network's, as timm loads them for images of this size.

        Raises
        ------
        ValueError
            It does not fit; the message says why.
        """
        own = self.body.state_dict()
        named = {name.removeprefix(_BODY) if name not in own else name: tensor for name, tensor in stored.items()}
        taken = {name: each for name, each in named.items() if name not in _OUTPUT and self.own_name(name)}
        if not taken:
            raise ValueError("holds no layer of the network")
        # timm renames and resizes what publishers stored; it loads strictly if the numbers of classes agree.
        source = {"state_dict": taken, "num_classes": 0, "label_offset": None}
        try:
            filled = self._built(num_classes=0, pretrained=True, pretrained_cfg_overlay=source)
        except Exception as fault:  # its conversions may raise anything
            raise ValueError(f"does not fit the network ({' '.join(str(fault).split()):.300})") from fault
        return {_BODY + name: tensor for name, tensor in filled.state_dict().items()}

    def _built(self, **how: Any) -> Any:
        """A model of timm's, still in every pass."""
        name, create = self._asked.removeprefix(TIMM), _timm(self._asked).create_model
        try:
            try:
                body = create(name, img_size=self._size, **how)
            except TypeError as fault:
                if "img_size" not in str(fault):
                    raise
                body = create(name, **how)  # it takes images of any size
        except Exception as fault:  # models check their sizes in many ways
            if how.get("pretrained"):
                raise
            raise unfit(self._asked, self._size, f"cannot be built ({fault})") from fault
        for module in body.modules():
            for key, value in vars(module).items():
                if isinstance(value, float) and ("drop" in key or (key in _PROBABILITIES and _draws(module))):
                    setattr(module, key, 0.0)
        return body

    def _check_size(self, about: Any) -> None:
        least = max((about.min_input_size or (3, 0, 0))[1:])
        if self._size < least:
            raise ConfigError(f"image-size = {self._size}: with network = {self._asked!r}, must be at least {least}")

    def _check_patches(self) -> None:
        sides = getattr(getattr(self.body, "patch_embed", None), "patch_size", None)
        patch = max(sides) if isinstance(sides, tuple) and sides else 1
        if self._size % patch:
            nearest = max(1, round(self._size / patch)) * patch
            raise ConfigError(
                f"image-size = {self._size}: with network = {self._asked!r}, must be a multiple of the patches' size, "
                f"{patch}, such as {nearest}"
            )


def published(name: str) -> Any:
    """What timm knows of a model's published weights, as its ``PretrainedCfg``: preprocessing, sizes and sources.

    Raises
    ------
    ConfigError
        There is no such model, or timm is not installed.
    """
    timm, asked = _timm(name), name.removeprefix(TIMM)
    known: list[str] = timm.list_models()
    model, dot, _ = asked.partition(".")
    if model in known and dot:
        known = list(timm.models.get_arch_pretrained_cfgs(model))
    if asked not in known:
        longer = sorted(
            (each for each in known if asked and asked in each), key=lambda each: not each.startswith(asked)
        )
        near = longer[:3] or get_close_matches(asked, known, n=3)
        meant = f"; did you mean {', '.join(TIMM + each for each in near)}?" if near else ""
        raise ConfigError(f"network = {name!r:.200}: must be {TIMM} and a name of timm.list_models(){meant}")
    return timm.models.get_pretrained_cfg(asked) or timm.models.PretrainedCfg()


def unfit(name: str, size: int, fault: str) -> ConfigError:
    """The error for a model that does not take images of a size; it says which size was published."""
    return ConfigError(
        f"image-size = {size}: network = {name!r} {fault:.300}; {max(published(name).input_size[1:])} would fit"
    )


def _draws(module: nn.Module) -> bool:
    return "Drop" in type(module).__name__


def _timm(name: str) -> Any:
    try:
        with torch.device("cpu"):  # for tensors of theirs, wherever networks are built
            import_torchvision()  # which timm imports
            import timm
    except ImportError as fault:
        raise ConfigError(
            f"network = {name!r:.200}: the package timm cannot be imported ({fault}); pip install 'fedkace-flwr[timm]'"
        ) from fault
    return timm
