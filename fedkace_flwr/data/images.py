"""Turning pictures of any size into the squares that networks are trained on, for data sets and for inference alike.

Shapes: S height and width of a data set's images.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkace_flwr.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 50_000_000
"""Most pixels that a picture from outside may have, before and after scaling: 150 MB as RGB."""

_STARTS_PROGRAMS = frozenset({"EPS"})  # Pillow runs Ghostscript for these; no picture from outside may start a program


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
        short = min(picture.size)
        if short < 1:
            raise DataError("it has no pixels")
        if self.scaling == "torch":
            block = torch.from_numpy(_laid_out(_middle(picture, short))[None].copy())
            return np.asarray(scaled(block, self.size)[0].numpy())
        width, height = (side * self.shorter // short for side in picture.size)
        if max_pixels is not None and width * height > max_pixels:
            raise DataError(f"it is too long and thin: {picture.size[0]} x {picture.size[1]}")
        if picture.size != (width, height):
            from PIL import Image

            picture = picture.resize((width, height), Image.Resampling.BILINEAR)
        return _laid_out(_middle(picture, self.size))


def scaled(images: Tensor, size: int) -> Tensor:
    """Scale square images, uint8 (n, 3, H, H), to (n, 3, S, S)."""
    if images.shape[-1] == size:
        return images
    return torch.nn.functional.interpolate(images, (size, size), mode="bilinear", antialias=True)


def read_square(source: Path | bytes, framing: Framing, max_pixels: int = MAX_PIXELS) -> NDArray[np.uint8]:
    """Read a picture from an untrusted source: a file, or a file's bytes.

    Parameters
    ----------
    source : Path or bytes
        In any format that Pillow reads without external programs.
    framing : Framing
        How the picture becomes a square.
    max_pixels : int
        Larger pictures are not decoded.

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
    from PIL import Image, UnidentifiedImageError

    Image.init()
    formats = [name for name in Image.ID if name not in _STARTS_PROGRAMS]
    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        with Image.open(file, formats=formats) as found:
            width, height = found.size
            if width * height > max_pixels:
                raise DataError(f"it has {width} x {height} pixels; at most {max_pixels:,} are allowed")
            return framing.square(found.convert("RGB"), max_pixels)
    except DataError:
        raise
    except Image.DecompressionBombError as fault:
        raise DataError(f"it has too many pixels; at most {max_pixels:,} are allowed") from fault
    except UnidentifiedImageError as fault:
        raise DataError("it is not an image, or its format is not supported") from fault
    except (FileNotFoundError, IsADirectoryError, PermissionError) as fault:
        raise DataError(str(fault.strerror)) from fault
    except Exception as fault:  # on damaged files, decoders raise anything from SyntaxError to struct.error
        reason = " ".join(str(fault).split()) or type(fault).__name__
        raise DataError(f"it is damaged ({reason})") from fault


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
