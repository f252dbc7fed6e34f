"""The models that a client predicts with, and predicting with them: configuration and data set are not needed.

:mod:`fedkace_flwr.inference.model_files` writes and reads them.

Shapes: n images, S their height and width, C classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkace_flwr.data.images import Framing
from fedkace_flwr.errors import ConfigError, ModelError
from fedkace_flwr.metrics import combined_scores
from fedkace_flwr.networks.catalogue import seeded
from fedkace_flwr.networks.network import Blueprint, Network, load_weights
from fedkace_flwr.samples import Form
from fedkace_flwr.storage.atomic import Array
from fedkace_flwr.training.loop import Preprocess, predict

GLOBAL, LOCAL = "global", "local"
"""Names of the models that can predict; a method may have others."""

MODEL, TENSORS = "model", "model.safetensors"
"""Where :mod:`fedkace_flwr.export` writes a model: the folder in that of its run, and the file of the tensors in it."""


def labels_of(classes: Tensor) -> tuple[int, ...]:
    """The numbers of the classes in a mask, bool (C,)."""
    return tuple(classes.nonzero().flatten().tolist())


def mask_of(labels: tuple[int, ...], classes: int) -> Tensor:
    """The mask of some of C classes, bool (C,)."""
    mask = torch.zeros(classes, dtype=torch.bool)
    mask[list(labels)] = True
    return mask


@dataclass(frozen=True)
class Answering:
    """The networks that a client predicts with after an evaluation.

    Attributes
    ----------
    weights : dict of str to dict of str to array
        Weights of each network, by the network's name; those of others are not kept.
    answers : dict of str to tuple of int
        For each network that predicts, the classes it predicts.
        Several predict together, by the mean of their probabilities for all classes met.
    mirrored : tuple of str
        Networks that predict each image's mirror image as well, as one more network would.
    shares : dict of str to float
        Weight of each network that predicts, for each of its views; empty if all have the same.
    """

    weights: Mapping[str, Mapping[str, Array]]
    answers: Mapping[str, tuple[int, ...]]
    mirrored: tuple[str, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class KeptModels(Answering):
    """The models of a client or of a server, with what predicting needs to know.

    Attributes
    ----------
    method, run : str
        Name of the method, and the run that the models belong to.
    round : int
        The last round evaluated.
    trained : int
        The last round trained, from which the local model comes.
    switched_at : int or None
        Round of the inference switch.
    seen : tuple of int
        The classes met.
    class_names : tuple of str
        Names of all C classes.
    framing : Framing or None
        How a picture becomes the networks' input; None if they take arrays.
    shape : tuple of int
        Of such an array, float32; empty for pictures.
    mean, std : tuple of float
        Normalisation of the input: per channel of pictures scaled to [0, 1], or along an array's first dimension.
    network : str
        Name of the networks' kind.
    width, stem : int and str
        The keys of the networks' shape.
    precision : str
        Precision in which they compute, ``float32`` or ``bfloat16``.
    """

    method: str
    run: str
    round: int
    trained: int
    switched_at: int | None
    seen: tuple[int, ...]
    class_names: tuple[str, ...]
    framing: Framing | None
    shape: tuple[int, ...] = ()
    mean: tuple[float, ...]
    std: tuple[float, ...]
    network: str = "resnet18"
    width: int
    stem: str
    precision: str

    @property
    def form(self) -> Form:
        """What the networks take."""
        return Form.picture(self.framing.size) if self.framing else Form.array(*self.shape)

    @property
    def answering(self) -> str:
        """Names of the models that predict together, often one."""
        return " and ".join(self.answers)

    def described(self) -> dict[str, Any]:
        """A JSON-ready description, without the weights."""
        plain = ("round", "trained", "switched_at", "method", "run")
        return {
            "model": self.answering,
            **{name: getattr(self, name) for name in plain},
            "seen": [self.class_names[label] for label in self.seen],
            "classes": len(self.class_names),
            **({"image_size": self.framing.size} if self.framing else {"shape": list(self.shape)}),
        }


class Predictor:
    """The networks that predict, loaded and ready. Any number of threads may use it at once.

    Parameters
    ----------
    kept : KeptModels
        The models.

    Attributes
    ----------
    preprocess : Preprocess
        Normalisation of the networks' input.
    networks : list of (Network, bool)
        Each network that predicts, and whether it sees mirror images as well.
    shares : list of float
        Weight of each view, in the order of the networks, in the mean of their probabilities; empty if all are equal.
    seen : Tensor
        The classes that they predict of those met, bool (C,).

    Raises
    ------
    ModelError
        The weights do not fit the networks.
    """

    def __init__(self, kept: KeptModels) -> None:
        self.kept = kept
        self.preprocess = Preprocess.by_statistics(kept.mean, kept.std, torch.device("cpu"), kept.form)
        self.networks = [(self._network(name), name in kept.mirrored) for name in kept.answers]
        self.shares = [
            kept.shares[name] for name in kept.answers for _ in range(1 + (name in kept.mirrored)) if kept.shares
        ]
        answered = kept.seen
        if len(kept.answers) == 1:
            answered = tuple(set(answered).intersection(*kept.answers.values()))
        self.seen = mask_of(answered, len(kept.class_names))

    def probabilities(self, images: Tensor) -> Tensor:
        """Probabilities of all classes; classes that the client has not met have 0.

        Parameters
        ----------
        images : Tensor
            uint8 (n, 3, S, S), or float32 (n, ...) of the arrays' shape.

        Returns
        -------
        Tensor
            float64 (n, C); each row sums to 1. The largest entry is the class that the client's evaluation predicts.
        """
        found = [
            predict(net, lambda block: block, images, self.preprocess, mirrored=view)
            for net, mirrored in self.networks
            for view in ((False, True) if mirrored else (False,))
        ]
        if len(found) == 1:
            return found[0].double().masked_fill(~self.seen, -torch.inf).softmax(dim=1)
        # In single precision, as clients evaluate, so that ties are decided alike.
        return combined_scores(found, self.seen, self.shares).double()

    def answer(self, image: NDArray[Any], top: int) -> dict[str, Any]:
        """The ``top`` likeliest classes of one sample, as :meth:`probabilities` takes it, JSON-ready; only classes that were met.

        Raises
        ------
        ModelError
            The probabilities are not finite.
        """
        found = self.probabilities(torch.from_numpy(image.copy())[None])[0]
        if not bool(found.isfinite().all()):
            raise ModelError("its predictions are not finite")
        ranked = [label for label in found.argsort(descending=True, stable=True).tolist() if label in self.kept.seen]
        classes = [
            {"class": self.kept.class_names[label], "probability": float(found[label])} for label in ranked[:top]
        ]
        return {"round": self.kept.round, "model": self.kept.answering, "classes": classes}

    def check(self) -> None:
        """Predict a black and a white image, or arrays of zeros and ones, which also takes the memory that answers need.

        Raises
        ------
        ModelError
            As :meth:`answer`, or a network of another package fails.
        """
        form = self.kept.form
        try:
            for shade in (0, 255 if form.is_picture else 1):
                self.answer(np.full(form.shape, shade, dtype=form.dtype), 1)
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"it cannot predict ({' '.join(str(error).split())})") from error

    def _network(self, name: str) -> Network:
        kept = self.kept
        try:
            blueprint = Blueprint(len(kept.class_names), kept.form.shape, kept.width, kept.stem)
            net = seeded(kept.network, blueprint, 0)  # which leaves the global generator alone
            load_weights(net, {key: torch.from_numpy(array) for key, array in kept.weights[name].items()})
            net.precision = {"float32": torch.float32, "bfloat16": torch.bfloat16}[kept.precision]
        except (ConfigError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ModelError(f"the weights of {name!r} do not fit ({' '.join(str(error).split())})") from error
        return net.on(torch.device("cpu")).eval()
