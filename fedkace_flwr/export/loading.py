"""Loading a model that was taken away, and predicting with it: no run, no data set and no Flower are needed.

Shapes: n samples, S height and width of the network's input, C classes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image, fromarray
from torch import Tensor

from fedkace_flwr.data import pixels
from fedkace_flwr.data.images import Framing, read_square
from fedkace_flwr.errors import DataError, FedkaceError, ModelError
from fedkace_flwr.inference.array_input import as_arrays_of
from fedkace_flwr.inference.kept_models import KeptModels, Predictor
from fedkace_flwr.inference.model_files import read_model

Picture = str | Path | Image | NDArray[np.uint8] | Tensor
"""What :meth:`LoadedModel.predict` takes for one image."""

Numbers = NDArray[np.float32] | Tensor
"""What it takes for arrays."""


class Predictions(NamedTuple):
    """What a model says about n samples.

    Attributes
    ----------
    labels : list of str
        Name of each sample's likeliest class.
    probabilities : array
        float64 (n, C): each sample's probabilities of all classes, in the order of ``class_names``; 0 for classes that
        had not been met.
    """

    labels: list[str]
    probabilities: NDArray[np.float64]


class LoadedModel:
    """A model that is ready to predict. Any number of threads may use it at once.

    Parameters
    ----------
    kept : KeptModels
        The model.

    Attributes
    ----------
    class_names : tuple of str
        Names of all C classes.
    classes_met : tuple of str
        Names of those that can be predicted.
    image_size : int
        S; pictures of other sizes are scaled and cropped as the data set's were. 0 of a model of arrays.
    shape : tuple of int
        Of the sample that the networks take: (3, S, S) or the array's.
    method, network : str
        How it was trained, and what it is.
    round : int
        The round after which it was taken.

    Raises
    ------
    ModelError
        The weights do not fit the network.
    """

    def __init__(self, kept: KeptModels) -> None:
        try:
            self._predictor = Predictor(kept)
        except FedkaceError as error:
            raise ModelError(str(error)) from error
        self._framing = kept.framing
        self.class_names = kept.class_names
        self.classes_met = tuple(kept.class_names[label] for label in kept.seen)
        self.image_size, self.shape = kept.framing.size if kept.framing else 0, kept.form.shape
        self.method, self.network, self.round = kept.method, kept.network, kept.round

    def __repr__(self) -> str:
        size = " x ".join(map(str, self.shape[1:] if self.image_size else self.shape))
        return f"<{self.network} by {self.method}, round {self.round}: {len(self.class_names)} classes, {size}>"

    def predict(self, images: Picture | Sequence[Picture] | Numbers) -> Predictions:
        """Classify images or, by a model of arrays, these.

        Parameters
        ----------
        images : picture, or sequence of pictures; or array
            An array or tensor of float32, of the model's ``shape`` or of n such. A picture is a file's path, a Pillow image, or an array or tensor of uint8: (H, W, 3) or (H, W) of any size, or
            (3, S, S) as the network takes it. An array (n, 3, S, S) or (n, H, W, 3) holds n images.

        Raises
        ------
        DataError
            Something is not an image, or not such an array; the message names it.
        """
        if self._framing is None:
            stack: NDArray[Any] = as_arrays_of(self.shape, images)
        else:
            squares = [_square(name, picture, self._framing) for name, picture in _listed(images)]
            stack = np.stack(squares) if squares else np.empty((0, *self.shape), np.uint8)
        found = self._predictor.probabilities(torch.from_numpy(stack)).numpy()
        return Predictions([self.class_names[label] for label in found.argmax(axis=1)], found)


def load_model(path: str | Path) -> LoadedModel:
    """Load a model from the folder that a run or ``fedkace export`` has left; nothing in its files is executed.

    Parameters
    ----------
    path : path-like
        The folder, in which no link is followed, or the file ``model.safetensors``, of which nothing else is needed.

    Raises
    ------
    ModelError
        There is no model, or it is damaged.
    """
    path = Path(path).expanduser()
    kept = read_model(path)
    try:
        return LoadedModel(kept)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def _listed(images: object) -> list[tuple[str, object]]:
    """Single pictures, each with what names it in an error."""
    if isinstance(images, Tensor):
        images = images.cpu().numpy()
    if isinstance(images, np.ndarray) and images.ndim == 4:
        return [(f"image {number}", image) for number, image in enumerate(images)]
    if isinstance(images, str | Path | Image | np.ndarray):
        return [(str(images) if isinstance(images, str | Path) else "the image", images)]
    if not isinstance(images, Sequence):
        raise DataError(f"images are {type(images).__name__}; must be a picture, or a sequence of pictures")
    return [
        (str(image) if isinstance(image, str | Path) else f"image {number}", image)
        for number, image in enumerate(images)
    ]


def _square(name: str, picture: object, framing: Framing) -> NDArray[np.uint8]:
    """One picture as the network takes it, uint8 (3, S, S)."""
    try:
        if isinstance(picture, str | Path):
            return read_square(Path(picture), framing)
        if isinstance(picture, Tensor):
            picture = picture.cpu().numpy()
        if isinstance(picture, np.ndarray):
            if picture.dtype != np.uint8:
                raise DataError(f"it is an array of {picture.dtype}; must be of uint8, from 0 to 255")
            if picture.shape == (3, framing.size, framing.size):
                return picture
            if picture.ndim not in (2, 3) or (picture.ndim == 3 and picture.shape[2] != 3):
                size = framing.size
                raise DataError(
                    f"it is an array of shape {picture.shape}; must be (3, {size}, {size}), (H, W, 3) or (H, W)"
                )
            picture = fromarray(np.ascontiguousarray(picture))
        if not isinstance(picture, Image):
            raise DataError(f"it is a {type(picture).__name__}; must be a path, a Pillow image, or an array")
        return framing.square(pixels.as_viewed(picture))
    except DataError as error:
        raise DataError(f"{name}: {error}") from error
