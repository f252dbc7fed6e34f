"""Data sets in Hugging Face's format, from a folder on disk or by their names on the Hugging Face Hub.

They are opened by the package ``datasets``, which runs no code of theirs; their pictures are decoded here, with the
limits of :mod:`fedkace_flwr.data.pixels`. The package is imported only where there is no prepared copy yet.
"""

import importlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unicodedata import normalize
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import NDArray

from fedkace_flwr.data import pixels
from fedkace_flwr.data.images import Framing, read_square
from fedkace_flwr.data.readers.source import BLOCK, Content, Origin, data_dir, digest
from fedkace_flwr.errors import ConfigError, DataError, MissingDataError
from fedkace_flwr.sections import DataConfig

_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(@[\w-][\w./-]*)?", re.ASCII)
_TRAIN, _HELD_OUT = "train", ("test", "validation", "valid", "val")
_MARKS = ("dataset_dict.json", "state.json")  # of a DatasetDict, and of a single Dataset
_OPTIONS = {"subset", "image", "label", "test"}

_Row = Mapping[str, Any]


@dataclass(frozen=True)
class _Asked:
    """What the key ``dataset`` asks for: ``hub[:OWNER/NAME[@REVISION]][?subset=...&image=...&label=...&test=...]``.

    Attributes
    ----------
    text : str
        The key's value.
    name : str
        The name on the Hub, perhaps with a revision; empty for a folder on disk.
    subset, image, label, test : str
        Subset of the data set, columns of images and labels, and split for testing; if empty, whatever is unmistakable.
    """

    text: str
    name: str = ""
    subset: str = ""
    image: str = ""
    label: str = ""
    test: str = ""

    @classmethod
    def parse(cls, text: str) -> "_Asked":
        place, mark, query = text.partition("?")
        _, colon, name = place.partition(":")
        try:
            options = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(mark), max_num_fields=len(_OPTIONS))
        except ValueError:
            options = [("", "")]
        if (colon and _NAME.fullmatch(name) is None) or not {option for option, _ in options} <= _OPTIONS:
            raise ConfigError(
                f"dataset = {text!r:.200}: must be hub:OWNER/NAME or hub:OWNER/NAME@REVISION (a name on the Hugging Face "
                f"Hub), or hub (a folder on disk, see data-dir); after it, as in ?label=COLUMN, may stand "
                f"{', '.join(sorted(_OPTIONS))}"
            )
        return cls(text, name, **dict(options))


def find_hub(config: DataConfig, size: int) -> Origin:
    """Find a data set that ``save_to_disk`` wrote to ``data-dir``, or name one on the Hub.

    What is on the Hub is not looked up: the prepared copy of a name stays valid. See :class:`_Asked`.

    Raises
    ------
    ConfigError
        The key ``dataset`` is not of its form.
    DataError
        The folder holds no data set (MissingDataError), or cannot be read.
    """
    asked = _Asked.parse(config.dataset)
    choice = [asked.subset, asked.test, asked.image, asked.label]
    if asked.name:
        read = partial(_read, asked, size, None)
        return Origin(digest(pixels.READING, asked.name, *choice), read, remote=f"dataset = {config.dataset!r:.200}")
    folder = data_dir(config)
    try:
        if not any((folder / mark).is_file() for mark in _MARKS):
            raise MissingDataError(
                f"{folder}: holds no {' or '.join(_MARKS)}; data-dir should be a folder to which save_to_disk of the "
                "package datasets wrote a data set, or dataset one on the Hugging Face Hub, as hub:OWNER/NAME"
            )
        files = sorted(Path(place, name) for place, _, names in os.walk(folder) for name in names)
        facts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    except OSError as fault:
        raise DataError(f"{folder}: cannot be read ({fault.strerror})") from fault
    return Origin(digest(pixels.READING, facts, *choice), partial(_read, asked, size, folder))


def _read(asked: _Asked, size: int, folder: Path | None) -> Content:
    try:
        package = importlib.import_module("datasets")
    except ImportError as fault:
        raise ConfigError(
            f"dataset = {asked.text!r:.200}: needs the extra `hub`: pip install 'fedkace-flwr[hub]'"
        ) from fault
    where = str(folder) if folder is not None else f"dataset = {asked.text!r:.200}"
    try:
        if folder is not None:
            found = package.load_from_disk(str(folder))
        else:
            name, _, revision = asked.name.partition("@")
            found = package.load_dataset(name, asked.subset or None, revision=revision or None)
    except Exception as fault:  # its errors, and those of what it builds on, have no common class
        reason = (str(fault).splitlines() or [type(fault).__name__])[0]
        raise DataError(f"{where}: cannot be opened with the package datasets ({reason:.300})") from fault
    if isinstance(found, package.Dataset):
        found = {_TRAIN: found}
    splits = [_Split(where, found, name, asked, package) for name in _splits(where, found, asked)]
    names = splits[0].class_names
    labels = np.concatenate([split.labels(names) for split in splits])
    framing = Framing.of_files(size)
    return Content(names, labels, len(splits[0]), (block for split in splits for block in split.blocks(framing)))


def _splits(where: str, found: Mapping[str, Any], asked: _Asked) -> tuple[str, ...]:
    """The splits for training and for testing; if there is one split alone, that one."""
    if len(found) == 1 and not asked.test:
        return tuple(found)
    wanted = (asked.test,) if asked.test else _HELD_OUT
    test = next((name for name in wanted if name in found), None)
    if _TRAIN not in found or test is None:
        raise DataError(
            f"{where}: has the splits {', '.join(map(str, found))}; must have {_TRAIN}, and for testing "
            f"{' or '.join(wanted)} (?test= names another), or one split alone"
        )
    return _TRAIN, test


class _Split:
    """One split, with its columns."""

    def __init__(self, where: str, found: Mapping[str, Any], name: str, asked: _Asked, package: Any) -> None:
        self._where = f"{where}, split {name}"
        self._image = self._column(found[name], "image", asked.image, package.Image)
        self._label = self._column(found[name], "label", asked.label, package.ClassLabel)
        self._rows = found[name].select_columns([self._image, self._label])
        self._rows = self._rows.cast_column(self._image, package.Image(decode=False))

    def _column(self, rows: Any, what: str, chosen: str, kind: type) -> str:
        """The column that is asked for, or else the only one of its kind."""
        fitting: list[str] = [name for name, feature in rows.features.items() if isinstance(feature, kind)]
        if chosen in (rows.features if what == "label" else fitting):
            return chosen
        if not chosen and len(fitting) == 1:
            return fitting[0]
        listed = ", ".join(f"{name} ({type(feature).__name__})" for name, feature in rows.features.items())
        made = "of the kind Image, which cast_column of the package datasets makes of files or bytes"
        wanted = made if what == "image" else "that holds the labels"
        raise ConfigError(
            f"dataset, ?{what}={chosen:.200}: {self._where} has the columns {listed}; must name one {wanted}"
        )

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Those that the column declares, or else its values in ascending order."""
        if self._declared is not None:
            return self._declared
        values = self._values()
        if not all(isinstance(value, int | str) for value in values) or len(set(map(type, values))) > 1:
            raise DataError(f"{self._where}: labels in {self._label!r} must all be whole numbers, or all be strings")
        return tuple(map(str, sorted(set(values))))

    def labels(self, names: Sequence[str]) -> NDArray[np.int64]:
        """Positions of the labels in the names of the classes, int64 (n,)."""
        values = self._values()
        if self._declared is not None:
            if self._declared != tuple(names):
                raise DataError(
                    f"{self._where}: declares other names of classes than the training split; must be the same"
                )
            positions: Mapping[Any, int] = {label: label for label in range(len(names))}
        else:
            values, positions = [str(value) for value in values], {name: place for place, name in enumerate(names)}
        for row, value in enumerate(values):
            if value not in positions:
                raise DataError(
                    f"{self._where}, row {row}: label {value!r:.100} is none of the {len(names)} classes of the training "
                    "split; ?test= may name another split"
                )
        return np.array([positions[value] for value in values], dtype=np.int64)

    def blocks(self, framing: Framing) -> Iterator[NDArray[np.uint8]]:
        """The images, uint8 (n, 3, S, S) each."""
        done = 0
        with ThreadPoolExecutor() as pool:
            for batch in self._rows.iter(batch_size=BLOCK):
                numbers = range(done, done + len(batch[self._image]))
                yield np.stack(list(pool.map(partial(self._square, framing), numbers, batch[self._image])))
                done = numbers.stop

    def _square(self, framing: Framing, number: int, cell: _Row | None) -> NDArray[np.uint8]:
        try:
            if cell is None or (cell["bytes"] is None and not cell["path"]):
                raise DataError("it has no image")
            return read_square(cell["bytes"] if cell["bytes"] is not None else Path(cell["path"]), framing)
        except DataError as fault:
            raise DataError(
                f"{self._where}, row {number}: the image in {self._image!r} cannot be used: {fault}"
            ) from fault

    @property
    def _declared(self) -> tuple[str, ...] | None:
        names = getattr(self._rows.features[self._label], "names", None)
        return None if names is None else tuple(map(str, names))

    def _values(self) -> list[Any]:
        values = self._rows[self._label][:]
        return [normalize("NFC", value) if isinstance(value, str) else value for value in values]
