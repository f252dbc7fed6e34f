"""A run's folder: its configuration, its environment, the record of each round, and a summary.

``config.json`` and ``environment.json`` are written before the first round, one line of ``rounds.jsonl`` and a
checkpoint (``server/``) after each round, and ``summary.json``, ``accuracy.png`` and ``model/`` after the last. A run
that is resumed notes in ``environment.json`` with what, and ``config.json`` then holds the keys that changed. A process
that writes to the folder holds ``.lock``. With ``tracker``, rounds are also shown in a tracker of experiments.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from fedkace_flwr.config import Config, keys_affecting, keys_of_other_methods, living_keys
from fedkace_flwr.errors import ConfigError, RunError
from fedkace_flwr.former_keys import renewed
from fedkace_flwr.results.digests import DATA, file_digests
from fedkace_flwr.results.plot import draw_accuracy
from fedkace_flwr.results.record import accuracy_so_far, environment, summarise, title
from fedkace_flwr.results.status import MEMBERS, Status
from fedkace_flwr.results.status_page import PAGE, page
from fedkace_flwr.results.trackers.catalogue import Tracking
from fedkace_flwr.storage import encryption as sealing
from fedkace_flwr.storage import files
from fedkace_flwr.storage.checkpoint import Checkpoint, Checkpoints
from fedkace_flwr.storage.folders import sync_folder
from fedkace_flwr.storage.targets import claim

logger = logging.getLogger(__name__)

SCHEMA = 1
_EARLIER = "rounds-earlier.jsonl"
HOLDS = "a run"
"""What the mark of a run's folder says."""

_LOCK_SECONDS = 10
_NAMED = 3  # keys in which a run differs
_RESUMPTIONS = 1000  # the latest, which are kept
_IN_MEMORY, _IN_FILE = 1000, 10_000  # records of a run without end
_FILE_BYTES = 2**27

Changes = Mapping[str, tuple[Any, Any]]
"""Keys, each with the value of a run so far and that of a configuration."""


class RunFolder:
    """Writer of a run's folder; only one process can write to a folder at a time.

    Parameters
    ----------
    path : Path
        The folder: new, created for this user only, as it may hold the clients' states; empty; or that of a run.
    resume : bool
        Whether the folder may already hold rounds.
    data : str
        Digest of the data set's content; empty if it has none.

    Raises
    ------
    RunError
        The folder holds something else, cannot be written, is being written by another process, or already holds rounds.
    ConfigError
        An environment variable for the checkpoints' encryption has a wrong value: the key is not a key, for example.
    """

    def __init__(self, path: Path, *, resume: bool = False, data: str = "") -> None:
        self.path = path
        self._data = data
        self.checkpoints = Checkpoints(path / "server")
        self._rounds: list[dict[str, Any]] = []
        self._lines, self._is_endless = 0, False
        self._tracking: Tracking | None = None
        sealing.keys()
        try:
            claim(path, HOLDS, known=is_run(path))
        except ConfigError as error:
            raise RunError(f"results-dir: {error}") from error
        self._lock = FileLock(path / ".lock")
        try:
            self._lock.acquire(timeout=_LOCK_SECONDS)
        except Timeout:
            raise RunError(
                f"run-name = {path.name!r}: another process is writing to {path}; wait until it ends"
            ) from None
        except OSError as error:
            raise RunError(f"results-dir: {path / '.lock'} cannot be locked ({error.strerror}); remove it") from error
        if (path / "rounds.jsonl").exists() and not resume:
            self.close()
            raise RunError(
                f"run-name = {path.name!r}: {path} already holds a run; choose another name, or set resume = true "
                "to continue it"
            )

    @property
    def begun(self) -> bool:
        """Whether an earlier process began a run here."""
        return (self.path / "config.json").exists()

    @property
    def finished(self) -> bool:
        """Whether the run has finished."""
        return (self.path / "summary.json").exists()

    @property
    def was_stopped(self) -> bool:
        """Whether the run has finished because it was ordered to stop."""
        return bool(self.finished and read_json(self.path / "summary.json").get("stopped"))

    def token(self) -> str:
        """The token of the run that an earlier process began here.

        Raises
        ------
        RunError
            ``environment.json`` is missing or cannot be read.
        """
        return str(read_json(self.path / "environment.json").get("run", ""))

    def begin(self, config: Config, device: torch.device, token: str) -> None:
        """Write the configuration and the environment, with the digests of the files that the configuration names.

        ``token`` is that by which clients recognise state of this run.

        Raises
        ------
        ConfigError
            The package of the tracker is not installed.
        RunError
            The tracker cannot be used.
        """
        self._is_endless = config.stream.rounds == 0
        self._tracking = Tracking(self.path, config, first_round=1)
        files.remove_partials(self.path)
        own = {"schema": SCHEMA, "run": token}
        self._write("environment.json", own | environment(device) | {"files": file_digests(config, self._data)})
        self._write("config.json", config.flat())

    def changed(self, config: Config) -> Changes:
        """The keys that change if the run that an earlier process began goes on with this configuration.

        Raises
        ------
        ConfigError
            A key differs that may not change.
        RunError
            The files cannot be read, or have another schema.
        """
        return compare(self.path, config, self._data, living_keys())

    def go_on(self, config: Config, device: torch.device) -> Checkpoint | None:
        """Continue an earlier process's run from its last checkpoint; drop the records of later rounds.

        Returns the checkpoint, or None if the earlier process wrote none; the run then starts from the beginning. From
        now on the run is not finished, and its configuration is this one.

        Raises
        ------
        ConfigError
            A key differs that may not change.
        RunError
            The files cannot be read, or have another schema, or cannot be written.
        """
        changed, checkpoint = self.changed(config), self.checkpoints.newest()
        done = checkpoint.round if checkpoint else 0
        rounds = self.path / "rounds.jsonl"
        lines = _read(rounds, files.LARGEST_LOG).splitlines(keepends=True) if rounds.exists() else []
        if checkpoint is None and len(lines) > 1:
            raise RunError(f"{self.path} holds {len(lines)} rounds and no checkpoint; move it away and start anew")
        first = self._first_round(lines, done)
        numbers = range(first, done + 1)
        self._is_endless, self._lines = config.stream.rounds == 0, len(numbers)
        if self._is_endless:
            numbers = numbers[-_IN_MEMORY:]
        self._rounds = [_line(rounds, number, lines, first) for number in numbers]
        try:
            # First: else a process that ends after the next steps leaves a run that counts as finished with these keys.
            if self.finished:
                (self.path / "summary.json").unlink()
                sync_folder(self.path)
            if len(lines) > self._lines:
                files.write_text(rounds, "".join(lines[: self._lines]))
            self._note(config, changed, done + 1, device)
            if changed:
                known = _known(read_json(self.path / "config.json"), config)
                self._write("config.json", known | {key: new for key, (_, new) in changed.items()})
        except OSError as error:
            raise self._full(error) from error
        if checkpoint is not None:
            self._tracking = Tracking(self.path, config, first_round=done + 1)
        return checkpoint

    def _first_round(self, lines: Sequence[str], done: int) -> int:
        """The round of the first of these lines, if it follows those that a run without end has put away; else 1."""
        if not (self.path / _EARLIER).exists():
            return 1
        try:
            return int(json.loads(lines[0])["round"]) if lines else done + 1
        except (KeyError, TypeError, ValueError):
            return 1  # which the line is not, as the caller finds

    def _note(self, config: Config, changed: Changes, number: int, device: torch.device) -> None:
        """Note in ``environment.json`` that the run goes on with a round, with what it does, and what has changed.

        There is one note for a round, however often it was begun: a process may have ended before it finished it, or
        before it wrote the changed keys to ``config.json``.
        """
        told, values, now = read_json(self.path / "environment.json"), config.flat(), environment(device)
        notes = _resumptions(told)
        earlier = notes.pop()["changed"] if notes and notes[-1]["round"] == number else {}
        before = {key: old for key, (old, _) in [*changed.items(), *earlier.items()]}
        note = {
            "round": number,
            "fedkace_flwr": now["fedkace_flwr"],
            **{name: value for name, value in now.items() if name != "started" and value != told.get(name)},
            "started": now["started"],
            "changed": {key: [old, values[key]] for key, old in before.items() if key in values and old != values[key]},
        }
        self._write("environment.json", told | {"resumptions": [*notes, note][-_RESUMPTIONS:]})

    def add_round(self, record: Mapping[str, Any]) -> None:
        """Append a round's record; it is on disk when this returns.

        A run without end begins a new file every 10,000 rounds, or when one has 128 MiB, and keeps the one before, ``rounds-earlier.jsonl``; what
        it shows and summarises are its last 1,000 rounds.

        Raises
        ------
        RunError
            It cannot be written.
        """
        self._rounds.append(dict(record))
        if self._is_endless:
            del self._rounds[:-_IN_MEMORY]
        if self._tracking is not None:
            # Before the record: if the process ends here, a resumed run repeats the round, and its tracker knows that.
            self._tracking.add(record, accuracy_so_far(self._rounds))
        rounds = self.path / "rounds.jsonl"
        try:
            if self._is_endless and self._lines and (self._lines >= _IN_FILE or rounds.stat().st_size >= _FILE_BYTES):
                rounds.replace(self.path / _EARLIER)
                self._lines = 0
            files.append_text(rounds, json.dumps(record, allow_nan=False) + "\n")
            self._lines += 1
        except OSError as error:
            raise self._full(error) from error

    def write_status(self, status: Status) -> None:
        """Write the state of the run and of its clients for people, also as a page; the run goes on if that fails."""
        try:
            self._write(MEMBERS, status)
            files.write_text(self.path / PAGE, page(status))
        except OSError as error:
            logger.warning("%s: cannot be written (%s); it shows an earlier state", self.path / MEMBERS, error.strerror)

    def save(self, checkpoint: Checkpoint) -> None:
        """Store the state from which the next round starts.

        Raises
        ------
        RunError
            It cannot be written.
        """
        try:
            self.checkpoints.save(checkpoint)
        except OSError as error:
            raise self._full(error) from error

    def finish(
        self,
        config: Config,
        leave_model: Callable[[Sequence[Mapping[str, Any]]], object] = lambda rounds: None,
        *,
        stopped: bool = False,
    ) -> dict[str, Any]:
        """Write the plot, if there is a round, and the summary, and return it; of the checkpoints, keep only the last.

        The last checkpoint holds the final weights.

        Parameters
        ----------
        config : Config
            The run's configuration.
        leave_model : callable, optional
            Writes the run's model, given the records of its rounds. It comes before the summary, which tells that the
            run is finished.
        stopped : bool
            Whether the run was ordered to stop, which the summary then says.

        Raises
        ------
        RunError
            They cannot be written.
        """
        summary = summarise(config, self._rounds) | ({"stopped": True} if stopped else {})
        try:
            if self._rounds:  # a run may have been stopped before its first one
                draw_accuracy(self._rounds, self.path / "accuracy.png", title=title(config))
            leave_model(self._rounds)
            self._write("summary.json", summary)
        except OSError as error:
            raise self._full(error) from error
        if self._tracking is not None:
            self._tracking.finish(summary)
        self.checkpoints.thin(1)
        return summary

    def close(self) -> None:
        """Release the folder for other processes."""
        if self._tracking is not None:
            self._tracking.close()
        self._lock.release()

    def _full(self, error: OSError) -> RunError:
        return RunError(
            f"{self.path} cannot be written ({error.strerror}); completed rounds are kept: free some space, then resume the run"
        )

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        files.write_text(self.path / name, json.dumps(content, indent=2, allow_nan=False) + "\n")


def compare(folder: Path, config: Config, data: str = "", living: Collection[str] = ()) -> Changes:
    """Check that the run in a folder, finished or not, has this configuration, and data of this digest.

    Parameters
    ----------
    folder : Path
        A run's folder.
    config : Config
        The configuration.
    data : str
        Digest of the data set's content; empty if it is not known.
    living : collection of str
        Keys that may differ.

    Returns
    -------
    dict
        These, if they differ, and keys of waiting times that do.

    Raises
    ------
    ConfigError
        Other keys differ, or differed in some of the run's rounds; the first of them are named, with both values.
    RunError
        The files cannot be read, or have another schema.
    """
    if refused := _changed(folder, config, data, living):
        what = {key: "that data set" if key == DATA else "that file" for key, *_ in refused}
        begun = [repr(old) if old != new else f"another content of {what[key]}" for key, old, new in refused]
        raise ConfigError(
            f"{_first([f'{key} = {new!r}' for key, _, new in refused], ', ')}: the run in {folder} was begun with "
            f"{_first(begun, ', ')}; resume it with that, or choose another run-name"
        )
    known, values = _known(read_json(folder / "config.json"), config), config.flat()
    may_differ = (keys_affecting("waiting") | set(living)) - keys_of_other_methods(config.method)
    return {key: (known[key], new) for key, new in values.items() if key in may_differ and known[key] != new}


def changes(folder: Path, config: Config, data: str = "") -> str:
    """Describe in what the run in a folder differs from this configuration, such as ``rounds 4, now 5``.

    Raises
    ------
    RunError
        The files cannot be read.
    """
    found = _changed(folder, config, data)
    return _first(
        [f"{key} {old}, now {new if new != old else 'with another content'}" for key, old, new in found], "; "
    )


def _changed(folder: Path, config: Config, data: str, living: Collection[str] = ()) -> list[tuple[str, object, object]]:
    """The keys in which a run differs or differed, with its value and the configuration's; equal ones name files."""
    before, told = read_json(folder / "config.json"), read_json(folder / "environment.json")
    if (schema := told.get("schema", 1)) != SCHEMA:  # the first version wrote none
        raise RunError(f"{folder} is of schema {schema}, this program writes {SCHEMA}; move it away and start anew")
    digests = told.get("files", {})
    known, values = _known(before, config), config.flat()
    found = differences(before, config, digests if isinstance(digests, dict) else {}, data)
    once = {  # a run that went on with more rounds equals one that was begun with them
        key: old
        for note in _resumptions(told)
        for key, (old, _) in note["changed"].items()
        if key != "rounds" and key in values and key in keys_affecting("numbers") and old != values[key]
    }
    return [
        (key, known[key] if key in found else once[key], values[key])
        for key in dict.fromkeys([*found, *once])
        if key not in living
    ]


def _resumptions(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(told.get("resumptions", []))


def _first(words: Sequence[str], between: str) -> str:
    return between.join([*words[:_NAMED], *(["..."] if len(words) > _NAMED else [])])


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that a run has written.

    Raises
    ------
    RunError
        The file is missing or damaged.
    """
    try:
        content = json.loads(_read(path, files.LARGEST_TEXT))
    except (RecursionError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); move its folder away and start anew") from error
    if not isinstance(content, dict):
        raise RunError(f"{path} holds no JSON object; move its folder away and start anew")
    return content


def _read(path: Path, most: int) -> str:
    try:
        return files.read_text(path, most)
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); move its folder away and start anew") from error


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run of this program, as its ``environment.json`` tells: of version 1.0, or a copy."""
    try:
        return "fedkace_flwr" in read_json(folder / "environment.json")
    except RunError:
        return False


def differences(
    before: Mapping[str, Any], config: Config, digests: Mapping[str, str] | None = None, data: str = ""
) -> list[str]:
    """Return the keys for which a stored ``config.json`` would give different numbers from ``config``.

    A key that is missing from the file was added later; its default is the program's earlier behaviour. Keys that only
    other methods read give the same numbers whatever their values. Files are compared by content if the stored
    ``digests`` have theirs and the present file can be read, else by path; the data set by its name, and by its content
    if the digests have it and ``data``, the present one's, is known.
    """
    known, values = _known(before, config), config.flat()
    affecting = keys_affecting("numbers") - keys_of_other_methods(config.method)
    stored = digests or {}
    present = file_digests(config, data) if stored else {}

    def differs(key: str) -> bool:
        if key in stored and key in present and (stored[key] != present[key] or key != DATA):
            return stored[key] != present[key]
        return bool(known[key] != values[key])

    return [key for key in values if key in affecting and differs(key)]


def _known(before: Mapping[str, Any], config: Config) -> dict[str, Any]:
    return {**replace(Config(), method=config.method).flat(), **renewed(before)}


def _line(path: Path, number: int, lines: Sequence[str], first: int) -> dict[str, Any]:
    """Return the record of a round that, according to the checkpoint, is complete; ``first`` is that of the first line."""
    try:
        record: dict[str, Any] = json.loads(lines[number - first])
        if record["round"] != number:
            raise ValueError(f"it is round {record['round']}")
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{path}, line {number - first + 1}: is not the record of round {number} ({error}); move the folder away and start anew"
        ) from error
    return record
