"""A simulated power failure: record a program's file operations, and rebuild every state that a crash may leave.

POSIX promises little. Bytes that were not synced may be lost, truncated or zero. Until a folder is synced, a change to
its entries may or may not survive, regardless of later changes. A :class:`Disk` records the operations below a folder;
:meth:`Disk.crashed` rebuilds, in another folder, what a crash after any of its steps could leave.
"""

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Inode:
    """A file: the bytes written, and how many of them are synced."""

    written: list[tuple[int, bytes]] = field(default_factory=list)  # step, bytes
    synced: list[int] = field(default_factory=list)  # steps

    def at(self, step: int) -> tuple[bytes, int]:
        """Return the content after a step, and the length of its synced part."""
        safe_at = max((when for when in self.synced if when <= step), default=-1)
        content = b"".join(part for when, part in self.written if when <= step)
        return content, sum(len(part) for when, part in self.written if when <= safe_at)


@dataclass(frozen=True)
class Entry:
    """An atomic change of folder entries: names set and names removed."""

    step: int
    sets: tuple[str, "Inode | None"] | None  # None: a folder
    removes: str | None

    @property
    def folders(self) -> set[str]:
        return {str(Path(path).parent) for path in (self.sets[0] if self.sets else None, self.removes) if path}


Choice = Callable[[Entry], bool]
"""Decides whether a change that was not synced survives."""

Tail = Callable[[bytes, int], bytes]
"""Decides what remains of a file's content; arguments are the content and the length of its synced part."""

TAILS: dict[str, Tail] = {
    "all written": lambda content, safe: content,
    "nothing more": lambda content, safe: content[:safe],
    "half": lambda content, safe: content[: safe + (len(content) - safe) // 2],
    "zeros": lambda content, safe: content[:safe] + bytes(len(content) - safe),
}


class Disk:
    """Records the file operations below a folder during :meth:`watched`.

    Parameters
    ----------
    root : Path
        An existing folder; its present content counts as synced.
    """

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.step = 0
        self.entries: list[Entry] = []
        self.folder_syncs: list[tuple[int, str]] = []
        self._now: dict[str, Inode | None] = {}
        self._open: dict[int, str] = {}
        for path in sorted(root.rglob("*")):
            inode = None if path.is_dir() else Inode([(0, path.read_bytes())], [0])
            self._now[str(path)] = inode
            self.entries.append(Entry(0, (str(path), inode), None))
            self.folder_syncs.append((0, str(path.parent)))

    @contextmanager
    def watched(self, fails_at: int = 0, error: int = errno.ENOSPC) -> Iterator["Disk"]:
        """Record operations, and let one call fail, selected by its number. Calls of ``fsync`` are recorded only."""
        real = {name: getattr(os, name) for name in ("open", "close", "write", "fsync", "replace", "unlink", "mkdir")}
        real |= {name: getattr(os, name) for name in ("rmdir", "rename", "chmod")}

        def watching(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if not self._concerns(name, args):
                    return real[name](*args, **kwargs)
                if name == "close":
                    self._open.pop(args[0])
                    return real[name](*args, **kwargs)
                self.step += 1
                if self.step == fails_at:
                    if name == "write":  # a full disk stores the part that fits
                        real[name](args[0], bytes(args[1])[: len(args[1]) // 2])
                    raise OSError(error, os.strerror(error))
                result = None if name == "fsync" else real[name](*args, **kwargs)
                self._record(name, args, result)
                return result

            return call

        for name in real:
            setattr(os, name, watching(name))
        try:
            yield self
        finally:
            for name, function in real.items():
                setattr(os, name, function)
            self._open.clear()

    def _concerns(self, name: str, args: tuple[Any, ...]) -> bool:
        if isinstance(args[0], int):
            return args[0] in self._open
        path = os.fspath(args[0])
        # Locks do not matter after a crash, and reading changes nothing.
        return isinstance(path, str) and path.startswith(self.root) and not path.endswith(".lock")

    def _record(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        path = self._open[args[0]] if isinstance(args[0], int) else os.fspath(args[0])
        if name == "open":
            self._open[result] = path
            if args[1] & os.O_CREAT and path not in self._now:
                self._set(path, Inode())
        elif name == "write":
            inode = self._now[path]
            assert inode is not None
            inode.written.append((self.step, bytes(args[1])[:result]))
        elif name == "fsync":
            inode = self._now.get(path)
            if inode is None:
                self.folder_syncs.append((self.step, path))
            else:
                inode.synced.append(self.step)
        elif name in ("replace", "rename"):
            target = os.fspath(args[1])
            self._now[target] = self._now.pop(path)
            self.entries.append(Entry(self.step, (target, self._now[target]), path))
        elif name in ("unlink", "rmdir"):
            del self._now[path]
            self.entries.append(Entry(self.step, None, path))
        elif name == "mkdir":
            self._set(path, None)

    def _set(self, path: str, inode: Inode | None) -> None:
        self._now[path] = inode
        self.entries.append(Entry(self.step, (path, inode), None))

    def is_safe(self, entry: Entry, step: int) -> bool:
        """Return whether a change survives a crash after a step, because all its folders have been synced since."""
        return all(
            any(entry.step <= when <= step and folder == synced for when, synced in self.folder_syncs)
            for folder in entry.folders
        )

    def crashed(self, step: int, happened: Choice, tail: Tail) -> "Tree":
        """Return what a crash after a step may leave.

        Parameters
        ----------
        step : int
            The last call before the crash.
        happened : callable
            Decides whether a change that was not synced survives.
        tail : callable
            Decides what remains of a file's content.
        """
        there: dict[str, Inode | None] = {}
        for entry in self.entries:
            if entry.step <= step and (self.is_safe(entry, step) or happened(entry)):
                if entry.removes is not None:
                    there.pop(entry.removes, None)
                if entry.sets is not None:
                    there[entry.sets[0]] = entry.sets[1]
        tree: Tree = {}
        for path in sorted(there):
            name, inode = os.path.relpath(path, self.root), there[path]
            above = str(Path(name).parent)
            if above == "." or (above in tree and tree[above] is None):  # otherwise the folder itself is lost
                tree[name] = None if inode is None else tail(*inode.at(step))
        return tree


Tree = dict[str, bytes | None]
"""Files with their content, and folders, by their path below a root."""


def lay_out(tree: Tree, root: Path) -> None:
    """Create a folder with these files."""
    root.mkdir(mode=0o700)
    for name, content in tree.items():
        if content is None:
            (root / name).mkdir(mode=0o700)
        else:
            (root / name).write_bytes(content)


def choices(seed: int) -> dict[str, Choice]:
    """Return several choices of the unsynced changes that survive a crash."""
    chance = random.Random(seed)
    drawn: dict[int, bool] = {}
    return {
        "all": lambda entry: True,
        "none": lambda entry: False,
        "some": lambda entry: drawn.setdefault(id(entry), chance.random() < 0.5),
        "only names set": lambda entry: entry.removes is None,
        "only names taken away": lambda entry: entry.sets is None,
    }
