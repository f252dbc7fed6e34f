"""The models that a client predicts with, in self-contained files: configuration and data set are not needed.

A client's state folder, or a folder that a group may read, holds ``models-<round>.npz`` for its last two evaluated
rounds, written by :mod:`fedkace_flwr.storage.atomic`. Other processes read them while the client continues: a file is
either complete or absent, a new one is in place before an old one is removed, and readers use the newest readable one
and change nothing.

Shapes: n images, S their height and width, C classes.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkace_flwr.data.images import Framing
from fedkace_flwr.errors import ConfigError, StateError
from fedkace_flwr.metrics import combined_scores
from fedkace_flwr.networks.catalogue import seeded
from fedkace_flwr.networks.network import Blueprint, Network, load_weights
from fedkace_flwr.storage import atomic as durable
from fedkace_flwr.storage.earlier_runs import MODELS, EarlierRuns
from fedkace_flwr.storage.files import remove_partials
from fedkace_flwr.storage.npz import Array
from fedkace_flwr.training.loop import Preprocess, predict

logger = logging.getLogger(__name__)

GLOBAL, LOCAL, AVERAGE = "global", "local", "average"
"""Names of the models that can predict; a method may have others."""

MODEL, TENSORS = "model", "model.safetensors"
"""Where :mod:`fedkace_flwr.export` writes a model: the folder in that of its run, and the file of the tensors in it."""

_KIND, _FORMAT, _GENERATIONS, _ATTEMPTS = MODELS, 5, 2, 20
# Format 4 has no `shares`, format 3 no `network` either, formats 1 and 2 no `mirrored`, format 1 no `combined`.
_READABLE = (1, 2, 3, 4, 5)

_WRITTEN_WHEN = "clients keep one after each round if their node has a state-dir, if data-source = 'inbox', or if keep-models = 'always'"

_Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Answering:
    """The networks that a client has after an evaluation, and those that it predicts with.

    Attributes
    ----------
    weights : dict of str to dict of str to array
        Weights of each network, by the network's name.
    answers : dict of str to Tensor
        For each network that predicts, the classes it predicts, bool (C,).
    combined : {"most-confident", "mean"}
        How several networks predict: by the most confident one for each image, or by the mean of their probabilities.
    mirrored : tuple of str
        With ``mean``: networks that predict each image's mirror image as well, as one more network would.
    shares : dict of str to float
        With ``mean``: weight of each network that predicts, for each of its views; empty if all have the same.
    """

    weights: Mapping[str, Mapping[str, Array]]
    answers: Mapping[str, Tensor]
    combined: Literal["most-confident", "mean"] = "most-confident"
    mirrored: tuple[str, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class KeptModels:
    """The content of a file.

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
    framing : Framing
        How a picture becomes the networks' input.
    mean, std : tuple of float
        Normalisation of the input per channel, for pixels scaled to [0, 1].
    width, stem : int and str
        The keys of the networks' shape.
    precision : str
        Precision in which they compute, ``float32`` or ``bfloat16``.
    answers : dict of str to tuple of int
        As in :class:`Answering`, with classes by number.
    weights : dict of str to dict of str to array
        As in :class:`Answering`.
    combined : {"most-confident", "mean"}
        As in :class:`Answering`.
    mirrored : tuple of str
        As in :class:`Answering`.
    shares : dict of str to float
        As in :class:`Answering`.
    network : str
        Name of the networks' kind.
    """

    method: str
    run: str
    round: int
    trained: int
    switched_at: int | None
    seen: tuple[int, ...]
    class_names: tuple[str, ...]
    framing: Framing
    mean: _Triple
    std: _Triple
    width: int
    stem: str
    precision: str
    answers: Mapping[str, tuple[int, ...]]
    weights: Mapping[str, Mapping[str, Array]]
    combined: str = "most-confident"
    mirrored: tuple[str, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)
    network: str = "resnet18"

    @property
    def answering(self) -> str:
        """Name of the model that predicts, or how several predict together."""
        (first, *others) = self.answers
        if not others and first in (GLOBAL, LOCAL, AVERAGE):
            return first
        return "sub-models" if self.combined == "most-confident" else " and ".join(self.answers)

    def described(self) -> dict[str, Any]:
        """A JSON-ready description, without the weights."""
        plain = ("round", "trained", "switched_at", "method", "run")
        return {
            "model": self.answering,
            **{name: getattr(self, name) for name in plain},
            "seen": [self.class_names[label] for label in self.seen],
            "classes": len(self.class_names),
            "image_size": self.framing.size,
        }

    def to_record(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Split into arrays, named ``NETWORK.WEIGHT``, and a JSON-ready record."""
        arrays = {f"{name}.{key}": array for name, each in self.weights.items() for key, array in each.items()}
        framing = {"size": self.framing.size, "shorter": self.framing.shorter, "scaling": self.framing.scaling}
        others = [name for name in KeptModels.__dataclass_fields__ if name not in ("weights", "framing")]
        return arrays, {"format": _FORMAT, "framing": framing, **{name: getattr(self, name) for name in others}}

    @classmethod
    def from_record(cls, arrays: Mapping[str, Array], record: Mapping[str, Any]) -> "KeptModels":
        """Undo :meth:`to_record`.

        Raises
        ------
        StateError
            The arguments are not what :meth:`to_record` returns.
        """
        content = dict(record)
        if (found := content.pop("format", None)) not in _READABLE:
            raise StateError(f"its models have format {found}; this program reads formats 1 to 5")
        try:
            content["framing"] = Framing(**content["framing"])
            for name in ("seen", "class_names", "mean", "std", "mirrored"):
                content[name] = tuple(content.get(name, ()) if name == "mirrored" else content[name])
            content["answers"] = {name: tuple(classes) for name, classes in content["answers"].items()}
            weights: dict[str, dict[str, Array]] = {}
            for name, array in arrays.items():
                network, _, key = name.partition(".")
                weights.setdefault(network, {})[key] = array
            kept = cls(**content, weights=weights)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StateError(f"its record does not fit ({error})") from error
        if not kept.seen or not kept.answers or not set(kept.answers) <= set(weights):
            raise StateError("it names no class, or no model to predict with")
        if kept.shares and set(kept.shares) != set(kept.answers):
            raise StateError("it has weights of other models than those that predict")
        return kept


def write(folder: Path, kept: KeptModels, group: int | None = None) -> None:
    """Write a generation; then remove the run's later ones and all but its newest older one, and move other runs' aside.

    Parameters
    ----------
    folder : Path
        Made if necessary.
    kept : KeptModels
        The generation.
    group : int, optional
        Number of a group that may read folder and file.

    Raises
    ------
    StateError
        The folder cannot be given to the group, or the disk refuses the file; the generations before are still there.
    """
    try:
        _write(folder, kept, group)
    except OSError as error:
        raise StateError(
            f"{folder}: the models of round {kept.round} cannot be kept ({error.strerror or error}); those before are: "
            "make room, or give this user the right to write there"
        ) from error


def _write(folder: Path, kept: KeptModels, group: int | None) -> None:
    if group is not None:
        _open_to(group, folder)
        remove_partials(folder, f"{_KIND}-")  # in the state folder, the store does so
    earlier = EarlierRuns(folder)
    others = {number: run for number, run in earlier.runs(_KIND).items() if run != kept.run}
    if kept.round in others:
        earlier.move_out(kept.round, others.pop(kept.round), (_KIND,))
    durable.write(_path(folder, kept.round), *kept.to_record(), group=group)
    for number, run in others.items():
        earlier.move_out(number, run, (_KIND,))
    numbers = durable.numbered(folder, _KIND)
    stay = [number for number in numbers if number <= kept.round][:_GENERATIONS]
    for path in [_path(folder, number) for number in set(numbers) - set(stay)]:
        path.unlink(missing_ok=True)
    for path in earlier.place_of(kept.run).glob(f"{_KIND}-*.npz"):  # the run goes on, and these are older
        path.unlink()


def _open_to(group: int, folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chown(folder, -1, group)
        folder.chmod(0o750)
    except OSError as error:
        raise StateError(
            f"{folder}: cannot be opened to group {group}, that of models-dir ({error.strerror or error}); must belong "
            "to the SuperNode's user, who must be in the group"
        ) from error


def listing(folder: Path) -> tuple[tuple[int, int, int, int], ...]:
    """Number, inode, time and size of each generation, newest first; differs whenever a generation comes or goes."""
    found = []
    for number in durable.numbered(folder, _KIND):
        try:
            facts = _path(folder, number).stat()
        except FileNotFoundError:
            continue
        found.append((number, facts.st_ino, facts.st_mtime_ns, facts.st_size))
    return tuple(found)


def check(folder: Path) -> None:
    """Raise :class:`StateError` unless this user may read the folder, and it is not that of an exported model."""
    try:
        os.scandir(folder).close()
    except PermissionError as error:
        raise StateError(
            f"{folder}: this user may not read it; must be a folder in the SuperNode's models-dir, or be read by the "
            "SuperNode's user"
        ) from error
    except OSError as error:
        raise StateError(f"{folder}: there is no such folder; must be the state folder of a client") from error
    if (folder / TENSORS).exists() and not durable.numbered(folder, _KIND):
        raise StateError(
            f"{folder}: holds an exported model, which fedkace_flwr.load_model reads (docs/models.md); must be the "
            "state folder of a client"
        )


class Predictor:
    """The networks that predict, loaded and ready. Any number of threads may use it at once.

    Parameters
    ----------
    kept : KeptModels
        The content of a file.

    Attributes
    ----------
    preprocess : Preprocess
        Normalisation of the networks' input.
    networks : list of (Network, Tensor, bool)
        Each network that predicts, the classes it predicts, bool (C,), and whether it sees mirror images as well.
    shares : list of float
        Weight of each view, in the order of the networks, in the mean of their probabilities; empty if all are equal.
    seen : Tensor
        The classes met, bool (C,).

    Raises
    ------
    StateError
        The weights do not fit the networks.
    """

    def __init__(self, kept: KeptModels) -> None:
        self.kept = kept
        self.preprocess = Preprocess.by_statistics(kept.mean, kept.std, torch.device("cpu"))
        self.networks = [
            (self._network(name), self._mask(classes), name in kept.mirrored) for name, classes in kept.answers.items()
        ]
        self.shares = [
            kept.shares[name] for name in kept.answers for _ in range(1 + (name in kept.mirrored)) if kept.shares
        ]
        self.seen = self._mask(kept.seen)

    def probabilities(self, images: Tensor) -> Tensor:
        """Probabilities of all classes; classes that the client has not met have 0.

        Parameters
        ----------
        images : Tensor
            uint8 (n, 3, S, S).

        Returns
        -------
        Tensor
            float64 (n, C); each row sums to 1. The largest entry is the class that the client's evaluation predicts.
        """
        found = [
            (predict(net, lambda block: block, images, self.preprocess, mirrored=view), mask)
            for net, mask, mirrored in self.networks
            for view in ((False, True) if mirrored else (False,))
        ]
        if len(found) == 1:
            ((logits, mask),) = found
            return logits.double().masked_fill(~(mask & self.seen), -torch.inf).softmax(dim=1)
        # In single precision, as clients evaluate, so that ties are decided alike.
        if self.kept.combined == "mean":
            return combined_scores([logits for logits, _ in found], self.seen, self.shares).double()
        scores = torch.zeros(len(images), len(self.kept.class_names))
        for logits, mask in found:
            scores = torch.maximum(scores, logits.masked_fill(~mask, -torch.inf).softmax(dim=1))
        scores = scores.double().masked_fill(~self.seen, 0)
        return scores / scores.sum(dim=1, keepdim=True)

    def answer(self, image: NDArray[np.uint8], top: int) -> dict[str, Any]:
        """The ``top`` likeliest classes of one image, uint8 (3, S, S), JSON-ready; only classes that were met.

        Raises
        ------
        StateError
            A probability is not finite.
        """
        found = self.probabilities(torch.from_numpy(image.copy())[None])[0]
        if not bool(found.isfinite().all()):
            raise StateError(f"the models of round {self.kept.round} do not predict: probabilities are not finite")
        ranked = [label for label in found.argsort(descending=True, stable=True).tolist() if label in self.kept.seen]
        classes = [
            {"class": self.kept.class_names[label], "probability": float(found[label])} for label in ranked[:top]
        ]
        return {"round": self.kept.round, "model": self.kept.answering, "classes": classes}

    def check(self) -> None:
        """Try the models on a black and a white image, which also takes the memory that answers need.

        Raises
        ------
        StateError
            As :meth:`answer`.
        """
        size = self.kept.framing.size
        for shade in (0, 255):
            self.answer(np.full((3, size, size), shade, dtype=np.uint8), 1)

    def _network(self, name: str) -> Network:
        kept = self.kept
        try:
            blueprint = Blueprint(len(kept.class_names), kept.framing.size, kept.width, kept.stem)
            net = seeded(kept.network, blueprint, 0)  # which leaves the global generator alone
            load_weights(net, {key: torch.from_numpy(array) for key, array in kept.weights[name].items()})
            net.precision = {"float32": torch.float32, "bfloat16": torch.bfloat16}[kept.precision]
        except (ConfigError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise StateError(f"the weights of {name!r} do not fit ({' '.join(str(error).split())})") from error
        return net.to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload, no-any-return]

    def _mask(self, classes: tuple[int, ...]) -> Tensor:
        mask = torch.zeros(len(self.kept.class_names), dtype=torch.bool)
        mask[list(classes)] = True
        return mask


def load_newest(folder: Path) -> Predictor:
    """Load the newest generation that predicts; a client may write to the folder at the same time.

    Raises
    ------
    StateError
        The folder does not exist, or holds no model yet, or none that is readable and predicts.
    """
    check(folder)
    faults: dict[Path, str] = {}
    for _ in range(_ATTEMPTS):  # a listed file may be gone before it is read; then there is a newer one
        vanished = False
        for number in durable.numbered(folder, _KIND):
            path = _path(folder, number)
            try:
                content = durable.read(path)
                if content is None:
                    vanished = True
                    continue
                predictor = Predictor(KeptModels.from_record(*content))
                predictor.check()
            except (OSError, StateError) as error:
                faults[path] = " ".join(str(error).split())
                continue
            for damaged, fault in faults.items():
                logger.warning("%s: %s; using the model of round %d instead", damaged, fault, number)
            return predictor
        if not vanished:
            break
    for damaged, fault in faults.items():
        raise StateError(f"{damaged}: {fault}")
    inside = sorted(
        {
            path.parent.relative_to(folder).as_posix()
            for below in ("*", "clients/*")  # of a node's folder, and of a run's
            for path in folder.glob(f"{below}/{_KIND}-*.npz")
        }
    )
    advice = f"name one of the folders in it: {', '.join(inside)}" if inside else _WRITTEN_WHEN
    if (folder / MODEL / TENSORS).exists():
        advice += f"; fedkace_flwr.load_model reads the run's global model, {folder / MODEL}"
    raise StateError(f"{folder}: there is no model yet; {advice}")


def _path(folder: Path, round_number: int) -> Path:
    return folder / f"{_KIND}-{round_number:06d}.npz"
