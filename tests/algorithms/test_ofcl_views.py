"""OFCL: the twelve views."""

import math

import pytest
import torch
from torch import Tensor

from fedkace_flwr.algorithms.ofcl_views import ARRAY_VIEWS, NUMBERS, VIEWS, draw, projection, rotation_and_scale, warp
from fedkace_flwr.compute.torchvision_compat import import_torchvision


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int = 5, size: int = 32) -> Tensor:
    return torch.rand((count, 3, size, size), generator=generator(4))


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("size", [8, 32])
def test_each_view_is_another_picture_with_values_in_range(name: str, size: int) -> None:
    images = pictures(size=size)
    before = images.clone()
    seen = VIEWS[name](images, draw(5, generator(5)))
    assert seen.shape == images.shape and bool(seen.isfinite().all())
    assert float(seen.min()) >= 0 and float(seen.max()) <= 1 + 1e-6
    changed = [not torch.equal(one, other) for one, other in zip(seen, images, strict=True)]
    assert all(changed) or (any(changed) and size == 8)  # a slight turn of few pixels moves none of them
    assert torch.equal(images, before)


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_does_not_depend_on_the_other_images_of_its_block(name: str) -> None:
    images, numbers = pictures(), draw(5, generator(5))
    whole = VIEWS[name](images, numbers)
    torch.testing.assert_close(whole[3:4], VIEWS[name](images[3:4], numbers[3:4]))


def test_twelve_views_drawn_for_each_image() -> None:
    assert len(VIEWS) == 12
    each = draw(4, generator(1))
    assert each.shape == (4, NUMBERS)
    assert len(each.unique(dim=0)) == 4
    assert torch.equal(each, draw(4, generator(1)))
    image = pictures(1).expand(4, -1, -1, -1)
    fixed = {"horizontal-flip", "vertical-flip", "invert"}
    for name, view in VIEWS.items():
        assert (len(view(image, each).unique(dim=0)) == 1) == (name in fixed)


def test_flips_and_inversion_by_hand() -> None:
    image = torch.tensor([[0.0, 0.25], [0.5, 1.0]]).expand(1, 3, 2, 2)
    none = torch.zeros(1, NUMBERS)
    expected = {
        "horizontal-flip": [[0.25, 0.0], [1.0, 0.5]],
        "vertical-flip": [[0.5, 1.0], [0.0, 0.25]],
        "invert": [[1.0, 0.75], [0.5, 0.0]],
        "brightness": [[0.0, 0.225], [0.45, 0.9]],
    }
    for name, values in expected.items():
        torch.testing.assert_close(VIEWS[name](image, none)[0, 2], torch.tensor(values))


@pytest.mark.parametrize(("name", "column", "side"), [("cutout-10", 0, 10), ("cutout-20", 2, 20)])
def test_a_cutout_is_a_black_square_cut_at_the_border(name: str, column: int, side: int) -> None:
    numbers = torch.zeros(2, NUMBERS)
    numbers[0, column : column + 2] = 0.5
    black = (VIEWS[name](torch.ones(2, 3, 32, 32), numbers) == 0).sum(dim=(2, 3))
    assert black.tolist() == [[side * side] * 3, [side * side // 4] * 3]


def test_a_crop_of_the_whole_image_is_the_image() -> None:
    numbers = torch.zeros(1, NUMBERS)
    numbers[0, 20] = 1.0
    numbers[0, 21] = 0.5 - (math.log(0.9) + math.log(1.1)) / 2 / (math.log(1.1) - math.log(0.9))
    torch.testing.assert_close(VIEWS["resized-crop"](pictures(1), numbers), pictures(1), rtol=0, atol=1e-4)


def test_geometry_agrees_with_torchvision() -> None:
    import_torchvision()
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as reference

    images = pictures(1)
    bilinear = InterpolationMode.BILINEAR
    for degrees, scale, x, y in ((30.0, 1.0, 0, 0), (-17.0, 0.6, 3, -5), (75.0, 0.7, -2, 9)):
        expected = reference.affine(images, degrees, [x, y], scale, [0.0, 0.0], bilinear)
        given = (torch.tensor([value]) for value in (degrees, scale, x / 16, y / 16))
        torch.testing.assert_close(warp(images, rotation_and_scale(*given), "bilinear"), expected, atol=1e-4, rtol=0)
    corners = torch.tensor([[[-0.75, -0.625], [0.875, -1.0], [0.5, 0.75], [-1.0, 0.625]]])
    pixels = [[float(16 * (value + 1)) for value in corner] for corner in corners[0]]
    start = [[0.0, 0.0], [32.0, 0.0], [32.0, 32.0], [0.0, 32.0]]
    expected = reference.perspective(images, start, pixels, bilinear)
    torch.testing.assert_close(warp(images, projection(corners), "bilinear"), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ARRAY_VIEWS)
@pytest.mark.parametrize("shape", [(13,), (3, 20), (2, 3, 4)], ids=str)
def test_each_view_of_an_array_is_another_and_depends_on_its_own_numbers_alone(
    name: str, shape: tuple[int, ...]
) -> None:
    samples, numbers = torch.randn((5, *shape), generator=generator(4)), draw(5, generator(5))
    before, seen = samples.clone(), ARRAY_VIEWS[name](samples, numbers)
    assert len(ARRAY_VIEWS) == len(VIEWS) and torch.equal(samples, before)
    assert seen.shape == samples.shape and bool(seen.isfinite().all())
    assert all(not torch.equal(one, other) for one, other in zip(seen, samples, strict=True))
    torch.testing.assert_close(seen[3:4], ARRAY_VIEWS[name](samples[3:4], numbers[3:4]))
