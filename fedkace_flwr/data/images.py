"""Turning pictures of any size into the squares that networks are trained on, for data sets and for inference alike.

Shapes: S height and width of a data set's images.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedkace_flwr.data import pixels
from fedkace_flwr.errors import DataError

if TYPE_CHECKING:  # the processes that decode pictures for the HTTP service do without PyTorch
    from PIL.Image import Image
    from torch import Tensor


@dataclass(frozen=True)
class Framing:
    """How a picture of any size becomes a square.

    Attributes
    ----------
    size : int
        S.
    shorter : int
        Length to which the shorter side is scaled before the centre is cropped.
    scaling : {"pillow", "torch"}
        Data sets of image files scale whole pictures with Pillow. Data sets of arrays scale squares with PyTorch; of a
        picture that is not square they use the largest square in the centre.
    """

    size: int
    shorter: int
    scaling: str

    @classmethod
    def of_files(cls, size: int, shorter: int | None = None) -> "Framing":
        """Framing for a data set of image files; by default the square is as large as the picture allows."""
        return cls(size, shorter or size, "pillow")

    @classmethod
    def of_arrays(cls, size: int) -> "Framing":
        """Framing for a data set of square arrays."""
        return cls(size, size, "torch")

    def square(self, picture: "Image", max_pixels: int | None = None) -> NDArray[np.uint8]:
        """Scale an RGB picture and crop its centre: uint8 (3, S, S).

        Raises
        ------
        DataError
            A side is empty, or the scaled picture would have more than ``max_pixels``.
        """
        return self.finished(self.cut(picture, max_pixels))

    def cut(self, picture: "Image", max_pixels: int | None = None) -> NDArray[np.uint8]:
        """The part of :meth:`square` that needs no PyTorch: uint8 (3, H, H), where H = S unless PyTorch scales.

        Raises
        ------
        DataError
            As :meth:`square`.
        """
        short = min(picture.size)
        if short < 1:
            raise DataError("it has no pixels")
        if self.scaling == "torch":
            picture = _middle(picture, short)  # of a large picture, the whole need not stay in memory
            return _laid_out(picture)
        width, height = (side * self.shorter // short for side in picture.size)
        if max_pixels is not None and width * height > max_pixels:
            raise DataError(f"it is too long and thin: {picture.size[0]} x {picture.size[1]}")
        if picture.size != (width, height):
            from PIL import Image

            picture = picture.resize((width, height), Image.Resampling.BILINEAR)
        return _laid_out(_middle(picture, self.size))

    def finished(self, cut: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The rest of :meth:`square`, for what :meth:`cut` returns."""
        if self.scaling != "torch":
            return cut
        import torch

        block = torch.from_numpy(np.require(cut, requirements=["C", "W"])[None])
        return np.asarray(scaled(block, self.size)[0].numpy())


def scaled(images: "Tensor", size: int) -> "Tensor":
    """Scale square images, uint8 (n, 3, H, H), to (n, 3, S, S)."""
    if images.shape[-1] == size:
        return images
    from torch.nn.functional import interpolate

    return interpolate(images, (size, size), mode="bilinear", antialias=True)


def read_square(source: Path | bytes, framing: Framing, memory: int = pixels.PICTURE_MEMORY) -> NDArray[np.uint8]:
    """Read a picture from an untrusted source: a file, or a file's bytes.

    Parameters
    ----------
    source : Path or bytes
        In one of the formats of :mod:`fedkace_flwr.data.pixels`.
    framing : Framing
        How the picture becomes a square.
    memory : int
        Memory for decoding, in bytes; larger pictures are not decoded.

    Returns
    -------
    ndarray
        uint8 (3, S, S).

    Raises
    ------
    DataError
        The source cannot be read, is not a picture, is damaged or too large. The message is one line and does not name
        the file.
    """
    try:
        return framing.square(pixels.rgb(source, memory), pixels.max_pixels(memory=memory))
    except MemoryError as fault:
        raise DataError("it needs more memory than there is") from fault


def _middle(picture: "Image", size: int) -> "Image":
    width, height = picture.size
    if (width, height) == (size, size):
        return picture
    left, top = round((width - size) / 2), round((height - size) / 2)
    return picture.crop((left, top, left + size, top + size))


def _laid_out(picture: "Image") -> NDArray[np.uint8]:
    return np.asarray(picture, dtype=np.uint8).transpose(2, 0, 1)


FramingOf = Callable[[int], Framing]
"""Returns a data set's framing for an image size."""
