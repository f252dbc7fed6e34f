"""The folder of one run of a study: which runner has claimed it, and whether the run is finished."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedkace_flwr.config import Config
from fedkace_flwr.configured import check_rounds, configured
from fedkace_flwr.data.datasets import load_dataset
from fedkace_flwr.errors import ConfigError, DataError, FedkaceError, RunError
from fedkace_flwr.experiments.results.recorded import Run
from fedkace_flwr.results.orders import Orders
from fedkace_flwr.results.run_folder import HOLDS, changes, compare
from fedkace_flwr.storage.files import LARGEST_LOG, read_bytes
from fedkace_flwr.storage.targets import check, claim

_RECORDS = ("config.json", "rounds.jsonl", "summary.json", "server", "clients")  # of a run that has begun


class Cell:
    """One run of a study.

    Parameters
    ----------
    name : str
        The name of the run's folder.
    config : Config
        The run's configuration.
    data : str
        Digest of its data set; if it is empty, an earlier run's data count as the same.

    Attributes
    ----------
    set_aside : str
        After :meth:`prepare`: what became of an earlier run of the same name with another configuration, if any.
    """

    def __init__(self, name: str, config: Config, data: str = "") -> None:
        self.name = name
        self._data = data
        self.config = config
        self.folder = Path(config.run.results_dir) / name
        self.set_aside = ""
        self._claim = FileLock(self.folder.parent / ".claims" / f"{name}.lock")

    def check(self) -> None:
        """Check that a run that is to be resumed by its key ``resume`` goes on with this configuration.

        Raises
        ------
        FedkaceError
            It does not, or its files cannot be read.
        """
        if self.config.run.resume and (self.folder / "config.json").exists():
            with naming(self):
                self._check_going_on()

    def claim(self) -> bool:
        """Claim the run for this process; return False if another runner has it. The claim ends with the process."""
        Path(self._claim.lock_file).parent.mkdir(parents=True, exist_ok=True)
        try:
            self._claim.acquire(timeout=0)
        except Timeout:
            return False
        return True

    def release(self) -> None:
        """Release the claim."""
        self._claim.release()

    @property
    def finished(self) -> bool:
        """Whether the folder holds a complete run with this configuration, or one that was stopped and stays so."""
        if not (self.folder / "summary.json").exists() or not self._matches():
            return False
        return Orders(self.folder).stopped or not self.summary().get("stopped")

    @property
    def rounds(self) -> int:
        """The number of rounds on record.

        Raises
        ------
        RunError
            The record cannot be read.
        """
        path = self.folder / "rounds.jsonl"
        try:
            return read_bytes(path, LARGEST_LOG).count(b"\n") if path.exists() else 0
        except OSError as error:
            raise RunError(f"{path}: cannot be read ({error.strerror}); move its folder away") from error

    @property
    def begun(self) -> int:
        """The number of rounds after which the run goes on; 0 if it starts anew."""
        return self.rounds if (self.folder / "config.json").exists() and self._goes_on() else 0

    def prepare(self) -> Config:
        """Prepare the folder and return the configuration to start with.

        A run with the same configuration, apart from fewer rounds, is resumed, and a folder in which no run has begun
        is used; anything else is moved aside.

        Raises
        ------
        DataError
            The data set is no longer that with which the study began.
        """
        if self._data and load_dataset(configured(self.config)[1].data).digest != self._data:
            raise DataError(
                f"dataset = {self.config.data.dataset!r}: has changed since the study began; begin the study again"
            )
        self.set_aside = ""
        resume = (self.folder / "config.json").exists() and self._goes_on()
        if not resume and not self._unused():
            self._set_aside()
        claim(self.folder, HOLDS, known=True)
        self._keep_log()
        return replace(self.config, run=replace(self.config.run, resume=resume))

    def summary(self) -> dict[str, Any]:
        """Read the finished run's ``summary.json``.

        Raises
        ------
        ResultsError
            The file cannot be read.
        """
        return Run(self.folder).summary()

    def _matches(self) -> bool:
        try:
            compare(self.folder, configured(self.config)[1], self._data)
        except FedkaceError:
            return False
        return True

    def _goes_on(self) -> bool:
        try:
            self._check_going_on()
        except FedkaceError:
            return False
        return True

    def _check_going_on(self) -> None:
        """Check that the earlier run has this configuration, or that it lacks nothing but further rounds."""
        method, config = configured(self.config)
        asked = config.stream.rounds
        planned, _ = compare(self.folder, config, self._data, {"rounds"}).get("rounds", (asked, asked))
        if asked == planned:
            return
        if asked and not 0 < planned < asked:
            compare(self.folder, config, self._data)
        check_rounds(config, planned, self.rounds)
        kept = "answer" if method.strategy.train_action else "state"  # earlier versions kept no answers at the end
        if self.rounds and not config.run.state_dir and not any(self.folder.glob(f"clients/client-*/{kept}-*.npz")):
            raise RunError(f"rounds = {asked}: {self.folder} no longer has what its clients need for further rounds")

    def _changes(self) -> str:
        """Return what distinguishes the earlier run from this one, such as ``rounds 4, now 5``."""
        try:
            return changes(self.folder, configured(self.config)[1], self._data)
        except RunError:
            return ""

    def _keep_log(self) -> None:
        """Keep the log of an earlier attempt, which may say why it ended."""
        log = self.folder / "app.log"
        if log.exists():
            log.rename(self.folder / f"app.{1 + len(list(self.folder.glob('app.*.log')))}.log")

    def _unused(self) -> bool:
        """Whether the folder is new or empty, or its run was stopped before it began."""
        try:
            check(self.folder, HOLDS, known=(self.folder / ".lock").exists())
        except ConfigError:
            return False
        return not any((self.folder / name).exists() for name in _RECORDS)

    def _set_aside(self) -> None:
        """Rename the folder of an earlier run with the same name."""
        if not self.folder.exists():
            return
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self.folder.stat().st_mtime))
        target, number = self.folder.with_name(f"{self.folder.name}.{stamp}"), 1
        while target.exists():
            number += 1
            target = self.folder.with_name(f"{self.folder.name}.{stamp}-{number}")
        changes = self._changes()
        self.folder.rename(target)
        self.set_aside = f"{self.name}: earlier run{f' ({changes})' if changes else ''} kept as {target.name}"


@contextmanager
def naming(cell: Cell) -> Iterator[None]:
    """Prefix the messages of errors with the run's name."""
    try:
        yield
    except FedkaceError as error:
        raise type(error)(f"{cell.name}: {error}") from error
