"""Draw streams: how many samples of each class some clients receive in each round. No sample is drawn for it."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedkace_flwr.config import Config
from fedkace_flwr.data.datasets import load_dataset
from fedkace_flwr.data.readers.catalogue import source_of
from fedkace_flwr.data.schedules import class_order, schedule_of
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.sections import StreamConfig
from fedkace_flwr.storage.files import write_bytes

MOST = 8
"""Most streams in a picture."""

_CLIENTS = 4
_PIXELS_PER_INCH = 110


@dataclass(frozen=True)
class DrawnStream:
    """A stream without its samples.

    Attributes
    ----------
    settings : StreamConfig
        Its keys.
    classes, seed : int
        Number of classes, and the experiment's seed.
    """

    settings: StreamConfig
    classes: int
    seed: int

    @classmethod
    def of(cls, config: Config) -> "DrawnStream":
        """Return the stream of a run; the data set is opened only if its files determine the number of classes.

        Raises
        ------
        ConfigError
            The run has no stream.
        """
        if config.data.arrives:
            raise ConfigError("dataset = 'inbox': has no stream to draw; must be another data set")
        classes = (
            config.data.num_classes or source_of(config.data.source).classes or load_dataset(config.data).num_classes
        )
        return cls(config.stream, classes, config.run.seed)

    @property
    def caption(self) -> str:
        """The keys that the stream depends on."""
        settings, kind = self.settings, self.settings.kind
        words = [f"stream = {kind}", *(f"{name} = {number:g}" for name, number in settings.numbers.items())]
        if kind != "dirichlet":
            words += [f"window = {settings.window}", f"overlap = {settings.overlap}"]
        if kind == "dirichlet":
            words.append(f"{settings.largest_chunk} samples a round")
        else:
            words.append(f"samples-per-class = {settings.samples_per_class}")
        return ", ".join(words)

    def tables(self) -> list[np.ndarray]:
        """Samples by class and round of the first clients, (C, T) each; classes in the order of client 0's list."""
        order = list(class_order(0, self.seed, self.classes))
        clients = range(min(_CLIENTS, self.settings.clients))
        schedules = (schedule_of(client, self.seed, self.classes, self.settings) for client in clients)
        return [schedule.table(self.classes).T[order] for schedule in schedules]


def draw_streams(streams: Sequence[DrawnStream], path: Path) -> None:
    """Write a picture with one row for each stream and one column for each of its first clients.

    Parameters
    ----------
    streams : sequence of DrawnStream
        The streams.
    path : Path
        The PNG file.

    Raises
    ------
    ConfigError
        A window does not fit the classes.
    OSError
        The file cannot be written.
    """
    rows = [stream.tables() for stream in streams]
    most = max(table.max() for tables in rows for table in tables)
    figure = Figure(figsize=(2.5 * max(map(len, rows)) + 0.8, 2.5 * len(rows) + 0.2), layout="constrained")
    bands = figure.subfigures(len(rows), 1, squeeze=False)[:, 0]
    for band, stream, tables in zip(bands, streams, rows, strict=True):
        band.suptitle(stream.caption, fontsize=9, fontweight="bold")
        grid = band.subplots(1, len(tables), squeeze=False)[0]
        extent = (0.5, stream.settings.rounds + 0.5, stream.classes, 0)
        for client, (axes, table) in enumerate(zip(grid, tables, strict=True)):
            image = axes.imshow(
                np.ma.masked_equal(table, 0),
                cmap="YlGnBu",
                vmin=0,
                vmax=most,
                aspect="auto",
                interpolation="nearest",
                extent=extent,
            )
            axes.set_title(f"client {client}", fontsize=8)
            axes.set_xlabel("round", fontsize=8)
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.tick_params(labelsize=7)
            axes.set_yticks([])
        grid[0].set_ylabel("classes, in client 0's order", fontsize=8)
        bar = band.colorbar(image, ax=list(grid), pad=0.01, aspect=15)
        bar.ax.tick_params(labelsize=7)
        bar.set_label("samples", fontsize=8)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_PIXELS_PER_INCH)
    write_bytes(path, content.getvalue())
