"""OFCL's twelve perturbed views of an image (Serra and Buettner, ICLR 2025, arXiv 2405.18925).

A view is a pure function of images and of numbers drawn for them beforehand, so a sample's views do not depend on the
block that it is computed in. Rotations, shifts, crops and perspectives are all projective maps of image coordinates,
applied to a whole block at once with one matrix per image; coordinates run from -1 to 1 across the image, x to the
right and y downwards.

Shapes: B images, H and W height and width. Images are float (B, 3, H, W) in [0, 1], not normalised; numbers
are float (B, NUMBERS) in [0, 1).
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

View = Callable[[Tensor, Tensor], Tensor]

NUMBERS = 24
"""Numbers drawn for each image, for all views together."""

_CIFAR_SIDE = 32  # the published sizes of the cut-outs are pixels of such images


def draw(count: int, generator: torch.Generator) -> Tensor:
    """Draw the numbers that determine the views of ``count`` images, float32 (count, NUMBERS), uniform in [0, 1)."""
    return torch.rand((count, NUMBERS), generator=generator)


def rotation_and_scale(degrees: Tensor, scale: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Matrices (B, 3, 3) that turn by ``degrees`` clockwise, scale about the centre, then shift; all (B,).

    Like all matrices in this module, they map positions of the result to positions of the source.
    """
    angle = torch.deg2rad(degrees)
    cos, sin, zero, one = angle.cos() / scale, angle.sin() / scale, torch.zeros_like(x), torch.ones_like(x)
    rows = [cos, sin, -cos * x - sin * y, -sin, cos, sin * x - cos * y, zero, zero, one]
    return torch.stack(rows, dim=1).view(-1, 3, 3)


def projection(corners: Tensor) -> Tensor:
    """Matrices (B, 3, 3) that move the image's corners to ``corners``.

    Parameters
    ----------
    corners : Tensor
        Float (B, 4, 2): x and y of the upper left, upper right, lower right and lower left corner.
    """
    x, y = corners.double().unbind(dim=2)
    zero, one = torch.zeros_like(x), torch.ones_like(x)
    source = torch.tensor([[-1, -1], [1, -1], [1, 1], [-1, 1]], dtype=torch.float64, device=x.device)
    u, v = source.unbind(dim=1)
    across = torch.stack([x, y, one, zero, zero, zero, -u * x, -u * y], dim=2)
    down = torch.stack([zero, zero, zero, x, y, one, -v * x, -v * y], dim=2)
    solution = torch.linalg.solve(torch.cat([across, down], dim=1), torch.cat([u, v]).expand(len(x), 8))
    return torch.cat([solution, one[:, :1]], dim=1).view(-1, 3, 3).to(corners.dtype)


def warp(images: Tensor, matrices: Tensor, mode: str) -> Tensor:
    """Apply projective maps (B, 3, 3), ``bilinear`` or ``nearest``; pixels from outside the source are 0."""
    height, width = images.shape[2:]
    x, y = (
        (2 * torch.arange(size, dtype=images.dtype, device=images.device) + 1) / size - 1 for size in (width, height)
    )
    places = torch.stack([x.expand(height, width), y.unsqueeze(1).expand(height, width), x.new_ones(height, width)], -1)
    found = torch.einsum("bij,hwj->bhwi", matrices, places)
    grid = found[..., :2] / found[..., 2:]
    return functional.grid_sample(images, grid, mode=mode, padding_mode="zeros", align_corners=False)


def _between(numbers: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * numbers


def _cutout(side: int, first: int) -> View:
    """Black out a square around a uniformly drawn pixel; parts outside the image are ignored."""

    def view(images: Tensor, numbers: Tensor) -> Tensor:
        covered = []
        for offset, size in enumerate(images.shape[2:]):
            length = max(1, round(side * size / _CIFAR_SIDE))
            start = (numbers[:, first + offset : first + offset + 1] * size).long() - length // 2
            pixels = torch.arange(size, device=images.device)
            covered.append((pixels >= start) & (pixels < start + length))
        hole = covered[0].unsqueeze(2) & covered[1].unsqueeze(1)
        return images.masked_fill(hole.unsqueeze(1), 0.0)

    return view


def _rotation(most: float, column: int) -> View:
    def view(images: Tensor, numbers: Tensor) -> Tensor:
        degrees = _between(numbers[:, column], -most, most)
        zero = torch.zeros_like(degrees)
        return warp(images, rotation_and_scale(degrees, zero + 1, zero, zero), "nearest")

    return view


def _brightness(images: Tensor, numbers: Tensor) -> Tensor:
    return (images * _between(numbers[:, 7], 0.9, 1.1).view(-1, 1, 1, 1)).clamp(0.0, 1.0)


def _perspective(images: Tensor, numbers: Tensor) -> Tensor:
    """Move each corner inwards by up to a quarter of the image."""
    inwards = numbers[:, 8:16].reshape(-1, 4, 2) * 0.5
    signs = torch.tensor([[-1, -1], [1, -1], [1, 1], [-1, 1]], dtype=images.dtype, device=images.device)
    return warp(images, projection(signs * (1 - inwards)), "bilinear")


def _affine(images: Tensor, numbers: Tensor) -> Tensor:
    """Turn by up to 20 degrees, shift by up to 0.1 of the width and 0.3 of the height, shrink to 0.5 to 0.75."""
    degrees, scale = _between(numbers[:, 16], -20.0, 20.0), _between(numbers[:, 17], 0.5, 0.75)
    x, y = _between(numbers[:, 18], -0.2, 0.2), _between(numbers[:, 19], -0.6, 0.6)
    return warp(images, rotation_and_scale(degrees, scale, x, y), "nearest")


def _resized_crop(images: Tensor, numbers: Tensor) -> Tensor:
    """Enlarge a part of 0.8 to 1 of the area and of aspect 0.9 to 1.1; a side longer than the image's is cut."""
    area = _between(numbers[:, 20], 0.8, 1.0)
    ratio = _between(numbers[:, 21], math.log(0.9), math.log(1.1)).exp()
    width, height = (area * ratio).sqrt().clamp_max(1.0), (area / ratio).sqrt().clamp_max(1.0)
    x, y = (1 - width) * _between(numbers[:, 22], -1.0, 1.0), (1 - height) * _between(numbers[:, 23], -1.0, 1.0)
    zero, one = torch.zeros_like(x), torch.ones_like(x)
    matrices = torch.stack([width, zero, x, zero, height, y, zero, zero, one], dim=1).view(-1, 3, 3)
    return warp(images, matrices, "bilinear")


VIEWS: Mapping[str, View] = {
    "cutout-10": _cutout(10, 0),
    "cutout-20": _cutout(20, 2),
    "horizontal-flip": lambda images, numbers: images.flip(3),
    "vertical-flip": lambda images, numbers: images.flip(2),
    "rotation-10": _rotation(10.0, 4),
    "rotation-45": _rotation(45.0, 5),
    "rotation-90": _rotation(90.0, 6),
    "brightness": _brightness,
    "perspective": _perspective,
    "affine": _affine,
    "resized-crop": _resized_crop,
    "invert": lambda images, numbers: 1.0 - images,
}


def _hidden(share: float, first: int) -> View:
    """Hide a part of the last dimension, features or time, around a uniformly drawn place: it takes the mean."""

    def view(samples: Tensor, numbers: Tensor) -> Tensor:
        length = samples.shape[-1]
        places = torch.arange(length, device=samples.device)
        centre = (numbers[:, first, None] * length).floor()
        hidden = (places - centre).abs() <= share * length / 2
        return samples.masked_fill(hidden.view(len(samples), *(1 for _ in samples.shape[2:]), length), 0.0)

    return view


def _scaled(strength: float, first: int) -> View:
    """Multiply a sample by a drawn factor around 1."""

    def view(samples: Tensor, numbers: Tensor) -> Tensor:
        factors = _between(numbers[:, first], 1 - strength, 1 + strength)
        return samples * factors.view(-1, *(1 for _ in samples.shape[1:]))

    return view


def _shifted(strength: float, first: int) -> View:
    """Add a drawn amount to all values of a sample."""

    def view(samples: Tensor, numbers: Tensor) -> Tensor:
        amounts = _between(numbers[:, first], -strength, strength)
        return samples + amounts.view(-1, *(1 for _ in samples.shape[1:]))

    return view


def _wave(strength: float, first: int) -> View:
    """Add a sine of a drawn frequency and phase along all values, which changes each by another amount."""

    def view(samples: Tensor, numbers: Tensor) -> Tensor:
        frequency, phase = numbers[:, first : first + 2].unbind(dim=1)
        places = torch.arange(samples[0].numel(), device=samples.device)
        wave = torch.sin(2 * math.pi * (frequency[:, None] * places + phase[:, None]))
        return samples + strength * wave.view(samples.shape)

    return view


ARRAY_VIEWS: Mapping[str, View] = {
    f"{name}-{strength:g}": make(strength, 5 * place + first)
    for place, strength in enumerate((0.1, 0.2, 0.4))
    for first, (name, make) in enumerate(
        {"hidden": _hidden, "scaled": _scaled, "shifted": _shifted, "wave": _wave}.items()
    )
}
"""As many views of arrays, float (B, ...) and normalised. OFCL has views of images alone; these are chosen like them: a
part is hidden or values change, slightly and strongly."""
