"""The buffers that clients hold, from their stored states: when each sample came, and a few of the images.

Nothing is changed or fetched: a state file is read where it lies, and a data set is opened only where its files
already are.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from fedkace_flwr.config import Config
from fedkace_flwr.data.datasets import Dataset, load_dataset
from fedkace_flwr.errors import DataError, FedkaceError
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.client_state import ClientState, read_state

PER_CLASS = 8
_EDGE = 32  # pixels of a thumbnail
_COLOURS = 96


@dataclass
class Budget:
    """How many bytes of images a page may still take in."""

    left: int

    def take(self, size: int) -> bool:
        """Take so many bytes, if they are left."""
        if size > self.left:
            self.left = 0  # what comes later would leave gaps: all or nothing from here on
            return False
        self.left -= size
        return True


@dataclass(frozen=True)
class Strip:
    """Some of the images that a client keeps of one class.

    Attributes
    ----------
    label, kept : int
        The class, and how many of it are kept in all.
    rounds : sequence of int
        In which round each of the shown images came.
    source : str
        A PNG as a data URI, the images side by side; empty where there are none.
    """

    label: int
    kept: int
    rounds: Sequence[int]
    source: str


@dataclass(frozen=True)
class Held:
    """One client's newest stored buffer.

    Attributes
    ----------
    round : int
        The round it was stored in.
    arrivals : sequence of sequence of int
        Class, then round from 1: how many of the kept samples came then.
    strips : sequence of Strip
        A class each; empty where images are left out.
    """

    round: int
    arrivals: Sequence[Sequence[int]]
    strips: Sequence[Strip] = field(default=())


def newest_state(run: Path, state_dir: str, client: int) -> ClientState | None:
    """A client's newest stored state; None where there is none.

    Raises
    ------
    StateError
        It is damaged.
    """
    folders = [run / "clients", *([Path(state_dir)] if state_dir else [])]
    files = [path for folder in folders for path in (folder / f"client-{client:03d}").glob("state-*.npz")]
    return read_state(max(files, key=lambda path: path.name)) if files else None


def open_dataset(config: Config, data_dir: Path | None = None) -> Dataset:
    """The data set of a run, where its files are on this machine.

    Raises
    ------
    FedkaceError
        They are not.
    """
    settings = config.data if data_dir is None else replace(config.data, data_dir=str(data_dir))
    if settings.dataset == "cifar100" and not (Path(settings.data_dir).expanduser() / "cifar-100-python").is_dir():
        raise DataError(f"{settings.data_dir} holds no cifar-100-python; name its folder by --data-dir")
    return load_dataset(settings)


def held(state: ClientState, classes: int, rounds: int, dataset: Dataset | None, budget: Budget) -> Held:
    """A stored buffer as counts, and as images as far as the budget goes."""
    arrivals = np.zeros((classes, rounds), dtype=int)
    labels, came = state.buffer.labels.numpy(), state.buffer.rounds.numpy()
    np.add.at(arrivals, (labels, np.clip(came, 1, rounds) - 1), 1)
    return Held(state.round, arrivals.tolist(), _strips(state.buffer, dataset, budget))


def _strips(buffer: Samples, dataset: Dataset | None, budget: Budget) -> list[Strip]:
    by_pixel = not buffer.by_id
    if not len(buffer) or (dataset is None and not by_pixel):
        return []
    strips = []
    for label in sorted(set(buffer.labels.tolist())):
        positions = (buffer.labels == label).nonzero().flatten()
        positions = positions[buffer.rounds[positions].argsort(stable=True)]
        chosen = buffer.take(positions[_spread(len(positions), PER_CLASS)])
        pixels = chosen.content if by_pixel or dataset is None else _fetch(dataset, chosen.content)
        source = png_strip(pixels.numpy()) if pixels is not None else ""
        if not source or not budget.take(len(source)):
            return []
        strips.append(Strip(label, len(positions), chosen.rounds.tolist(), source))
    return strips


def _fetch(dataset: Dataset, ids: torch.Tensor) -> torch.Tensor | None:
    fits = bool(((ids >= 0) & (ids < len(dataset.labels))).all())
    return dataset.fetch(ids) if fits else None


def _spread(count: int, wanted: int) -> torch.Tensor:
    """Up to ``wanted`` positions of ``count``, from the first to the last, evenly."""
    return torch.linspace(0, count - 1, min(count, wanted)).round().long()


def png_strip(images: npt.NDArray[np.uint8]) -> str:
    """Images (n, 3, H, W) side by side, as the data URI of a PNG of few colours."""
    tiles = [Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))) for image in images]
    strip = Image.new("RGB", (_EDGE * len(tiles), _EDGE))
    for index, tile in enumerate(tiles):
        way = Image.Resampling.NEAREST if tile.width < _EDGE else Image.Resampling.LANCZOS
        strip.paste(tile.resize((_EDGE, _EDGE), way), (_EDGE * index, 0))
    content = io.BytesIO()
    strip.quantize(_COLOURS).save(content, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()


def try_dataset(config: Config, data_dir: Path | None) -> tuple[Dataset | None, str]:
    """The data set, or why there is none, in words for a reader."""
    try:
        return open_dataset(config, data_dir), ""
    except (FedkaceError, OSError) as error:
        return None, str(error)
