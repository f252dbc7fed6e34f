"""Recorded runs: those in folders of their own, and those of kept studies, through the same objects.

A results folder is that of a study with a folder for each run (``results/<study>/``), that of a single run, or that of
a kept study, which has three files. ``study.json`` describes the study and holds the configuration, the environment and
the summary of each run. ``rounds.parquet`` has a row for each run and round, with the fields of ``rounds.jsonl``; those
with values by class are in ``classes.parquet``, in a row for each run, round and client. What a round lacks is null.

Whatever is read may be anyone's and is checked (:mod:`fedkace_flwr.experiments.results.reading`).
"""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ResultsError
from fedkace_flwr.experiments.results import unpack
from fedkace_flwr.experiments.results.folders import CLASSES, ROUNDS, STUDY, is_kept, runs_of_study, within
from fedkace_flwr.experiments.results.reading import (
    Record,
    check_config,
    check_digests,
    check_environment,
    check_kept,
    check_resumptions,
    check_rounds,
    check_summary,
    lines_of,
    parse_record,
    read_object,
    read_rounds,
    read_study,
)
from fedkace_flwr.results.record import defended
from fedkace_flwr.storage.files import open_regular


class Run:
    """A recorded run.

    Each method raises a :class:`~fedkace_flwr.errors.ResultsError` if what it reads is damaged.

    Parameters
    ----------
    folder : Path
        The run's folder; of a run of a kept study, which has none, the path that it would have.
    kept : _Kept, optional
        The kept study that the run is a part of.
    """

    def __init__(self, folder: Path, kept: "_Kept | None" = None) -> None:
        self.folder = folder
        self._kept = kept

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def finished(self) -> bool:
        """Whether it is finished."""
        if self._kept is not None:
            return "summary" in self._kept.runs[self.name]
        return (self.folder / "summary.json").exists()

    def is_complete(self, rounds: int) -> bool:
        """Whether it is finished and has so many rounds; one that was stopped early lacks some."""
        return self.finished and self.summary()["rounds"] >= rounds

    def part(self, name: str) -> tuple[str, Record]:
        """Return where ``config``, ``environment`` or ``summary`` is, and what it says; nothing if there is none."""
        if self._kept is not None:
            return f"{self._kept.path}, {self.name}, {name}", dict(self._kept.runs[self.name].get(name, {}))
        path = self.folder / f"{name}.json"
        return str(path), read_object(path) if path.exists() else {}

    def config(self) -> Config:
        """Return its configuration, with today's defaults for missing keys.

        Earlier versions bounded updates in every run; where there was no attack and the bounds changed no update,
        ``defence`` is off.
        """
        place, told = self.part("config")
        config = check_config(place, told)
        bounded = config.aggregation.defence == "on" and "defence" not in told
        if bounded and config.attack.attack == "none" and defended(self.rounds()) == (0, 0):
            return check_config(place, {**told, "defence": "off"})
        return config

    def environment(self) -> Record:
        """Return the single values of its environment."""
        return check_environment(*self.part("environment"))

    def digests(self) -> dict[str, str]:
        """Return the digests of its data and of the files that its configuration names, by key, as far as it has them."""
        return check_digests(*self.part("environment"))

    def earlier_values(self) -> list[str]:
        """Return what affected the numbers of its first rounds and was changed later: ``learning-rate 0.1 before round 3``."""
        return check_resumptions(*self.part("environment"))

    def summary(self) -> Record:
        """Return its summary, once it is finished."""
        return check_summary(*self.part("summary"))

    def lines(self) -> list[Record]:
        """Return its complete rounds as they were recorded; those of a folder's run are checked for their schema only."""
        if self._kept is not None:
            return self._kept.lines(self.name)
        return lines_of(self.folder)

    def rounds(self, clients: int | None = None) -> list[Record]:
        """Return its complete rounds, checked; see :func:`fedkace_flwr.experiments.results.reading.check_rounds`."""
        if self._kept is None:
            return read_rounds(self.folder, clients)
        place = f"{self._kept.path.with_name(ROUNDS)}, {self.name}, round"
        records, first = self.lines(), 1
        if self.part("config")[1].get("rounds") == 0 and records and isinstance(begun := records[0].get("round"), int):
            first = max(1, begun)  # a run without end keeps its last rounds
        return check_rounds(lambda number: f"{place} {number}", records, clients, first=first)


class Recorded:
    """What a results folder holds.

    Parameters
    ----------
    folder : Path
        The folder.

    Attributes
    ----------
    runs : tuple of Run
        Its runs by name, finished or not, without those set aside.

    Raises
    ------
    ResultsError
        A kept study cannot be read, or a run's folder is a link out of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept: _Kept | None = None
        if (folder / "config.json").exists():
            self.runs: tuple[Run, ...] = (Run(folder),)
        elif is_kept(folder):
            kept = self._kept = _Kept(folder)
            self.runs = tuple(Run(folder / name, kept) for name in sorted(kept.runs) if "config" in kept.runs[name])
        else:
            self.runs = tuple(map(Run, runs_of_study(folder)))

    @cached_property
    def told(self) -> Record | None:
        """The description of the study, if there is one.

        Raises
        ------
        ResultsError
            It is damaged.
        """
        if self._kept is not None:
            return self._kept.told
        return None if (self.folder / "config.json").exists() else read_study(self.folder / STUDY)


def need_arrow() -> None:
    """Check that pyarrow is installed, without which no kept study is written or read.

    Raises
    ------
    ResultsError
        It is not installed.
    """
    if find_spec("pyarrow") is None:
        raise ResultsError("kept records need pyarrow: pip install 'fedkace-flwr[report]'")


class _Kept:
    """The files of a kept study."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / STUDY
        self.told, self.runs = check_kept(str(self.path), read_object(self.path))
        for name in self.runs:
            within(folder, folder / name)  # where a page looks for buffers

    def lines(self, run: str) -> list[Record]:
        """Return the rounds of a run as ``rounds.jsonl`` has them."""
        place = f"{self.path.with_name(ROUNDS)}, {run}, round"
        return [parse_record(f"{place} {number}", text) for number, text in enumerate(self._texts.get(run, ()), 1)]

    @cached_property
    def _texts(self) -> dict[str, list[str]]:
        """The records of each run, in JSON."""
        texts: dict[str, list[str]] = {}
        for line in _unpacked(self.path.parent).split("\n")[:-1]:
            name, _, record = line.partition("\t")
            texts.setdefault(name, []).append(record)
        return {str(json.loads(name)): records for name, records in texts.items()}


def _unpacked(folder: Path) -> str:
    """Return what :mod:`fedkace_flwr.experiments.results.unpack` prints of the tables in a folder."""
    need_arrow()
    paths = [path for name in (ROUNDS, CLASSES) if (path := folder / name).exists()]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FEDKACE_")}
    try:
        with ExitStack() as stack, tempfile.TemporaryFile() as printed:
            files = [open_regular(within(folder, path)) for path in paths]
            for file in files:
                stack.callback(os.close, file)
            done = subprocess.run(
                [sys.executable, "-P", unpack.__file__, *map(str, files)],
                env=environment,
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.PIPE,
                check=False,
            )
            printed.seek(0)
            text = printed.read().decode()
    except OSError as error:
        raise ResultsError(f"{folder / ROUNDS}: cannot be read ({error})") from error
    if done.returncode:
        told = done.stderr.decode(errors="replace").splitlines() if done.returncode > 0 else ()
        reason = told[-1] if told else "it takes too much time or memory, or makes its reader crash"
        raise ResultsError(f"{' or '.join(map(str, paths))}: cannot be read ({reason:.300})")
    return text
