"""What a client wrote last, so that an older version of a sealed file is noticed when it is put back.

Encryption shows that a file is the client's own, not that it is the newest. The ledger, a sealed file beside the states,
lists the stamp of each file's last write. It is written before the files, with the stamps that they are to have, and
after them, when only these count: whatever the moment of a crash, what is on disk is listed. A folder that is put back
as a whole, with its ledger, is not noticed; only a counter that its owner cannot turn back could do that.

Without a key there is no ledger: anyone could write one.
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from fedkace_flwr.errors import StateError, UnreadableStateError
from fedkace_flwr.storage import atomic, encryption
from fedkace_flwr.storage.files import open_regular
from fedkace_flwr.storage.places import EARLIER

NAME = "ledger.npz"
_KINDS = ("answer", "state")


class _Page(NamedTuple):
    """A ledger's content: the stamps by file, and the run and the round of the last state trained, if known."""

    stamps: dict[str, set[str]]
    newest: tuple[str, int] | None


class Ledger:
    """The ledger of a client's folder.

    Parameters
    ----------
    folder : Path
        The client's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self, name: str, stamp: bytes | None) -> None:
        """Check that a sealed file that was read is what this client wrote last.

        Parameters
        ----------
        name : str
            The file.
        stamp : bytes or None
            The stamp in it; None where there is nothing to check.

        Raises
        ------
        UnreadableStateError
            It is not, or there is no ledger that could say so.
        """
        if stamp is None or encryption.migrating():
            return
        if stamp.hex() not in self._page().stamps.get(name, ()):
            raise UnreadableStateError(
                "it is not what this client wrote last: an older version of it, or of the ledger, was put back; "
                f"{_advice()}"
            )

    def newest(self) -> tuple[str, int] | None:
        """The run and the round of the last state trained; None if it is not known."""
        return None if encryption.key() is None else self._page().newest

    def intend(self, names: Collection[str], trained: int | None = None) -> dict[str, bytes]:
        """Note that files are about to be written.

        Parameters
        ----------
        names : collection of str
            The files.
        trained : int, optional
            The round of the new state, if one was trained: states of later rounds are given up.

        Returns
        -------
        dict of str to bytes
            The stamps that the files must be written with; empty without a key.
        """
        if encryption.key() is None:
            return {}
        page, stamps = self._page(), {name: encryption.new_stamp() for name in names}
        newest = page.newest if trained is None or page.newest is None or page.newest[1] <= trained else None
        listed = {name: page.stamps.get(name, set()) | {stamp.hex()} for name, stamp in stamps.items()}
        self._write(_Page({**page.stamps, **listed}, newest))
        return stamps

    def settle(self, stamps: Mapping[str, bytes], newest: tuple[str, int] | None = None) -> None:
        """Note that files have been written; forget the versions before, and files that are gone.

        Parameters
        ----------
        stamps : mapping
            What :meth:`intend` returned.
        newest : tuple of str and int, optional
            The run and the round of the state, if one was trained.
        """
        if encryption.key() is None:
            return
        page = self._page()
        here, earlier = self._on_disk(self._folder), self._on_disk_of_earlier_runs()
        kept: dict[str, set[str]] = {}
        for name, listed in page.stamps.items():
            own = {stamps[name].hex()} if name in stamps else listed & here.get(name, set())
            if both := own | (listed & earlier.get(name, set())):
                kept[name] = both
        self._write(_Page(kept, newest or page.newest))

    def adopt(self) -> None:
        """List the sealed files as they are; a damaged ledger is replaced."""
        self._write(self._with_all(self._read(damaged_too=True) or _Page({}, None)))

    def _page(self) -> _Page:
        page = self._read(damaged_too=encryption.migrating())
        if page is None:
            page = _Page({}, None)
            if not encryption.migrating() and self._with_all(page).stamps:
                raise UnreadableStateError(
                    f"{self._folder / NAME} is missing: without it nobody can say whether the files are the last ones "
                    f"that were written; {_advice()}"
                )
        return self._with_all(page) if encryption.migrating() else page

    def _with_all(self, page: _Page) -> _Page:
        stamps = dict(page.stamps)
        for found in (self._on_disk(self._folder), self._on_disk_of_earlier_runs()):
            for name, listed in found.items():
                stamps[name] = stamps.get(name, set()) | listed
        return _Page(stamps, page.newest)

    def _read(self, *, damaged_too: bool) -> _Page | None:
        """The ledger's content; None if there is none or, where that is to be accepted, if it is damaged."""
        path = self._folder / NAME
        try:
            stored = atomic.read(path)
            return None if stored is None else _parsed(stored[1])
        except StateError as error:
            if damaged_too and not isinstance(error, UnreadableStateError):
                return None
            # Nor is a damaged one set aside: without it, older files could be put back.
            raise UnreadableStateError(f"{path}: {error}; {_advice()}") from error

    def _write(self, page: _Page) -> None:
        stamps = {name: sorted(listed) for name, listed in sorted(page.stamps.items())}
        newest = list(page.newest) if page.newest else None
        atomic.write(self._folder / NAME, {}, {"stamps": stamps, "newest": newest})

    def _on_disk(self, folder: Path) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for kind in _KINDS:
            for path in folder.glob(f"{kind}-*.npz"):
                stamp = _stamp_in(path)
                if stamp is not None:
                    found[path.name] = {stamp.hex()}
        return found

    def _on_disk_of_earlier_runs(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for place in (self._folder / EARLIER).glob("*"):
            for name, stamps in self._on_disk(place).items():
                found.setdefault(name, set()).update(stamps)
        return found


def _parsed(record: Mapping[str, object]) -> _Page:
    stamps, newest = record.get("stamps"), record.get("newest")
    if not isinstance(stamps, dict) or not all(
        isinstance(listed, list) and all(isinstance(stamp, str) for stamp in listed) for listed in stamps.values()
    ):
        raise StateError("it does not list stamps")
    if newest is None:
        return _Page({name: set(listed) for name, listed in stamps.items()}, None)
    if not isinstance(newest, list) or [type(part) for part in newest] != [str, int]:
        raise StateError(f"it holds newest = {newest!r:.40}")
    return _Page({name: set(listed) for name, listed in stamps.items()}, (newest[0], newest[1]))


def _stamp_in(path: Path) -> bytes | None:
    """The stamp in a file's head, which may be anyone's; None if it has none."""
    try:
        descriptor = open_regular(path)
    except OSError:
        return None
    try:
        return encryption.stamp_in(os.read(descriptor, encryption.LONGEST_HEAD))
    finally:
        os.close(descriptor)


def _advice() -> str:
    return f"put back the whole folder as it was, or set {encryption.MIGRATE}=1 once to go on from what is there"
