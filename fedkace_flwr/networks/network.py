"""What every network has: a feature extractor phi and a linear output layer h (paper, section 3).

Shapes: B batch, H and W image height and width, C classes, F features.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Self, cast

import torch
from torch import Tensor, nn

from fedkace_flwr.compute.devices import in_bf16
from fedkace_flwr.compute.memory import moved_to
from fedkace_flwr.errors import ConfigError

_IMAGENET_STEM_FROM = 112


class ShapeError(ConfigError):
    """A network does not take samples of this shape.

    Parameters
    ----------
    takes : str
        What it takes.
    shape : tuple of int
        What a sample is.
    """

    def __init__(self, takes: str, shape: tuple[int, ...]) -> None:
        fitting = "mlp or cnn1d" if len(shape) == 2 else "mlp"
        super().__init__(f"takes {takes}, and a sample has the shape {shape}; must be {fitting}")


@dataclass(frozen=True)
class Blueprint:
    """What a network is built for.

    Attributes
    ----------
    num_classes : int
        Number of outputs C: always all classes of the data set; each client masks the classes it has not seen.
    sample : int or tuple of int
        Shape of a sample; a number S stands for pictures, (3, S, S).
    width : int
        The key ``width``, at least 1.
    stem : {"auto", "cifar", "imagenet"}
        The key ``stem``.

    Raises
    ------
    ConfigError
        There is less than one class or channel.
    """

    num_classes: int
    sample: int | tuple[int, ...]
    width: int
    stem: str = "auto"

    def __post_init__(self) -> None:
        if self.num_classes < 1 or self.width < 1:
            raise ConfigError(f"num-classes = {self.num_classes}, width = {self.width}: both must be >= 1")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a sample."""
        return self.sample if isinstance(self.sample, tuple) else (3, self.sample, self.sample)

    @property
    def values(self) -> int:
        """Number of values of a sample, of any shape."""
        return math.prod(self.shape)

    @property
    def image_size(self) -> int:
        """Height and width of the images, in pixels.

        Raises
        ------
        ShapeError
            Samples have not the shape of square pictures.
        """
        if len(self.shape) != 3 or self.shape[0] != 3 or self.shape[1] != self.shape[2]:
            raise ShapeError("pictures, (3, S, S)", self.shape)
        return self.shape[2]

    @property
    def series(self) -> tuple[int, int]:
        """Channels and length of series.

        Raises
        ------
        ShapeError
            Samples have not the shape of series.
        """
        if len(self.shape) != 2:
            raise ShapeError("series, (channels, length)", self.shape)
        return self.shape[0], self.shape[1]

    @property
    def first_layers(self) -> str:
        """``stem`` with ``auto`` resolved."""
        return choose_stem(self.stem, self.image_size)


class Network(nn.Module, ABC):
    """A feature extractor and an output layer, for float samples and logits (B, C).

    Samples are pictures (B, 3, H, W), unless the network takes arrays of other shapes as well: it takes those for which
    it can be built (:class:`Blueprint`). A subclass sets ``output`` in its constructor and defines :meth:`embed`; it may define how it is split
    (:meth:`lower_half`, :meth:`upper_half`). No sample may influence another's features except by batch normalisation,
    and nothing may be drawn at random in the forward pass.

    Attributes
    ----------
    output : nn.Linear
        The output layer h, F to C.
    precision : torch.dtype
        Precision of phi's matrix products: float32, or bfloat16 by autocast. Parameters, batch-norm statistics,
        features and the output layer are float32 in both cases.
    splits : bool
        Whether the network can be split into a lower and an upper half.
    layered : bool
        Whether each parameter belongs to a layer that is used once in a pass and for which
        :func:`fedkace_flwr.training.sample_gradients.squared_norms` has a rule; samples' gradients are then faster.
    frozen : frozenset of str
        Names of the arrays of its state that never change (:func:`fedkace_flwr.networks.trainable.freeze`).
    adapted : bool
        Whether layers have adapters (:mod:`fedkace_flwr.networks.lora`), for which there is no such rule.
    """

    output: nn.Linear
    precision: torch.dtype = torch.float32
    splits: ClassVar[bool] = False
    layered: ClassVar[bool] = False
    frozen: frozenset[str] = frozenset()
    adapted: bool = False

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the layers that train, and of recurrent ones; the others stay in evaluation."""
        super().train(mode)
        if mode and self.frozen:
            living = {name.rpartition(".")[0] for name in self.state_dict().keys() - self.frozen}
            for path, module in self.named_modules():
                # cuDNN computes no gradients through recurrent layers in evaluation.
                module.training = module is self or path in living or isinstance(module, nn.RNNBase)
        return self

    @abstractmethod
    def embed(self, x: Tensor) -> Tensor:
        """Map float images (B, 3, H, W) to features (B, F), or to maps (B, F, h, w), whose means are the features."""

    def features(self, x: Tensor) -> Tensor:
        """Map float images (B, 3, H, W) to features (B, F) in the precision of the parameters, float32."""
        if self.precision is not torch.bfloat16:
            y = self.embed(x)
        else:
            with in_bf16(x.device):
                y = self.embed(x)
        y = y.to(self.output.weight.dtype)
        return y.mean(dim=(2, 3)) if y.dim() == 4 else y

    def forward(self, x: Tensor) -> Tensor:
        """Map float images (B, 3, H, W) to logits (B, C)."""
        return cast(Tensor, self.output(self.features(x)))

    def fix_output(self, weight: Tensor) -> None:
        """Replace the output layer by a fixed one, float (C, F), without bias: buffers, which no gradient changes.

        The names in the network's state stay, so that models with a fixed and a learned layer can be exchanged.
        """
        for name, value in (("weight", weight), ("bias", torch.zeros(len(weight)))):
            old = getattr(self.output, name)
            delattr(self.output, name)
            self.output.register_buffer(name, value.to(old))

    @contextmanager
    def computing_in(self, precision: torch.dtype) -> Iterator[None]:
        """Compute in another precision within the context."""
        before, self.precision = self.precision, precision
        try:
            yield
        finally:
            self.precision = before

    def lower_half(self) -> nn.Module:
        """The first layers, which share the network's weights: images to maps (B, c, h, w).

        Raises
        ------
        ConfigError
            The network cannot be split.
        """
        raise ConfigError(f"{type(self).__name__} cannot be split into a lower and an upper half")

    def upper_half(self) -> Self:
        """Remove what :meth:`lower_half` returns, in place; the network then maps (B, c, h, w) to logits (B, C).

        Raises
        ------
        ConfigError
            The network cannot be split.
        """
        raise ConfigError(f"{type(self).__name__} cannot be split into a lower and an upper half")

    def largest_map(self, *shape: int) -> tuple[int, int, int]:
        """Height, width and channels of the largest map that the network makes of an input of a shape.

        It is measured on the network's device when a size is first met. Of what is not a map, the number of values counts.
        """
        measured: dict[tuple[int, ...], tuple[int, int, int]] = self.__dict__.setdefault("_largest", {})
        if shape not in measured:
            measured[shape] = _largest_output(self, shape)
        return measured[shape]

    def on(self, device: torch.device) -> Self:
        """Move the network to a device, with the weights of convolutions over pictures in channels-last layout."""
        net = self.to(device)
        for tensor in (*net.parameters(), *net.buffers()):
            if tensor.dim() == 4:
                tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
        return net

    def own_name(self, name: str) -> str | None:
        """The network's name for a tensor of a published state dict; None for one of the published output layer."""
        return name

    def converted(self, stored: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A published state dict in which each tensor has a name that :meth:`own_name` knows.

        Raises
        ------
        ValueError
            It cannot be converted; the message says why.
        """
        return stored


class Chain(Network):
    """A network whose feature extractor is a chain of layers; the lower ones make maps.

    Attributes
    ----------
    body : nn.Sequential
        The layers that make maps.
    lower_layers : int
        Number of layers in the lower half.
    """

    body: nn.Sequential
    lower_layers: ClassVar[int]
    splits: ClassVar[bool] = True

    def lower_half(self) -> nn.Module:
        """The first layers, which share the network's weights: images to maps (B, c, h, w)."""
        return self.body[: self.lower_layers]

    def upper_half(self) -> Self:
        """Remove the first layers, in place; the network then maps (B, c, h, w) to logits (B, C)."""
        self.body = nn.Sequential(*list(self.body)[self.lower_layers :])
        return self


@torch.inference_mode()
def _largest_output(net: Network, shape: tuple[int, ...]) -> tuple[int, int, int]:
    shapes: list[torch.Size] = []

    def note(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            shapes.append(output.shape[1:])

    was_training = net.training
    hooks = [module.register_forward_hook(note) for module in net.modules()]
    try:
        net.eval()(torch.zeros(1, *shape, device=net.output.weight.device))
    finally:
        for hook in hooks:
            hook.remove()
        net.train(was_training)
    largest = max(shapes, key=torch.Size.numel)
    return (largest[1], largest[2], largest[0]) if len(largest) == 3 else (largest.numel(), 1, 1)


def choose_stem(stem: str, image_size: int) -> str:
    """Resolve ``auto``: the ImageNet stem for images of 112 pixels or more."""
    if stem != "auto":
        return stem
    return "imagenet" if image_size >= _IMAGENET_STEM_FROM else "cifar"


def load_weights(net: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy named weights into ``net``; every name in its state must be present."""
    net.load_state_dict(moved_to(weights, next(net.parameters()).device), strict=True)
