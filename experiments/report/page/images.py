"""The clients' buffers, from their stored states: when each sample arrived, and a few of the images.

State files are only read, in the run's folder alone. A data set with files is opened only in a folder that the caller
names; nothing is downloaded.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from fedkace_flwr.config import Config
from fedkace_flwr.data.datasets import Dataset, load_dataset
from fedkace_flwr.errors import FedkaceError
from fedkace_flwr.experiments.results.folders import all_within
from fedkace_flwr.experiments.results.reading import with_data_dir
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.client_state import ClientState, read_state

PER_CLASS = 8
_EDGE = 32  # pixels of a thumbnail
_COLOURS = 96


@dataclass
class Budget:
    """The number of bytes of images that a page may still include."""

    left: int

    def take(self, size: int) -> bool:
        """Take ``size`` bytes and return True, or return False if fewer are left."""
        if size > self.left:
            self.left = 0  # from here on nothing fits, so that the images shown have no gaps
            return False
        self.left -= size
        return True


@dataclass(frozen=True)
class Strip:
    """Some of a client's buffered images of one class.

    Attributes
    ----------
    label, kept : int
        The class, and the number of its samples in the buffer.
    rounds : sequence of int
        The round in which each shown image arrived.
    source : str
        The images side by side, as a PNG in a data URI; empty if there are none.
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
        The round in which it was stored.
    arrivals : sequence of sequence of int
        The number of buffered samples by class, then by round of arrival from 1.
    strips : sequence of Strip
        One per class; empty if images are not shown.
    """

    round: int
    arrivals: Sequence[Sequence[int]]
    strips: Sequence[Strip] = field(default=())


def newest_state(run: Path, client: int) -> ClientState | None:
    """Read a client's newest stored state; return None if there is none.

    Raises
    ------
    StateError
        The state is damaged.
    ResultsError
        It is a link out of the run's folder.
    """
    files = all_within(run, run / "clients" / f"client-{client:03d}").glob("state-*.npz")
    newest = max(files, key=lambda path: path.name, default=None)
    return read_state(newest) if newest else None


def held(state: ClientState, classes: int, rounds: int, dataset: Dataset | None, budget: Budget) -> Held:
    """Describe a stored buffer by counts, and by images as far as the budget allows."""
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
    """Return up to ``wanted`` evenly spaced positions of ``count``, including the first and the last."""
    return torch.linspace(0, count - 1, min(count, wanted)).round().long()


def png_strip(images: npt.NDArray[np.uint8]) -> str:
    """Return images (n, 3, H, W) side by side, as the data URI of a PNG with few colours."""
    tiles = [Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))) for image in images]
    strip = Image.new("RGB", (_EDGE * len(tiles), _EDGE))
    for index, tile in enumerate(tiles):
        way = Image.Resampling.NEAREST if tile.width < _EDGE else Image.Resampling.LANCZOS
        strip.paste(tile.resize((_EDGE, _EDGE), way), (_EDGE * index, 0))
    content = io.BytesIO()
    strip.quantize(_COLOURS).save(content, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()


def try_dataset(config: Config, data_dir: Path | None) -> Dataset | None:
    """Return the data set of a run, or None if it cannot be opened; nothing is downloaded."""
    try:
        return load_dataset(with_data_dir(config, data_dir).data, download=False)
    except (FedkaceError, OSError):
        return None
