"""A disk that can lose power: what a program did to its files, and every state that a crash may leave of it.

POSIX promises little. Bytes that were not synced may be lost, cut short or be zeros; an entry of a folder that was
not synced since may or may not be there, whatever came after it. A :class:`Disk` records what goes on below a
folder; :meth:`Disk.crashed` rebuilds elsewhere what a crash after any of its steps could leave.
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
    """A file: its bytes as written, and how many of them are safe."""

    written: list[tuple[int, bytes]] = field(default_factory=list)  # step, bytes
    synced: list[int] = field(default_factory=list)  # steps

    def at(self, step: int) -> tuple[bytes, int]:
        """Content after a step, and the length of it that is safe."""
        safe_at = max((when for when in self.synced if when <= step), default=-1)
        content = b"".join(part for when, part in self.written if when <= step)
        return content, sum(len(part) for when, part in self.written if when <= safe_at)


@dataclass(frozen=True)
class Entry:
    """A change of folders' entries: names set and names taken away, all at once."""

    step: int
    sets: tuple[str, "Inode | None"] | None  # None: a folder
    removes: str | None

    @property
    def folders(self) -> set[str]:
        return {str(Path(path).parent) for path in (self.sets[0] if self.sets else None, self.removes) if path}


Choice = Callable[[Entry], bool]
"""Whether a change that need not be on the disk is there."""

Tail = Callable[[bytes, int], bytes]
"""What is left of a file's content of which only the first bytes are safe."""

TAILS: dict[str, Tail] = {
    "all written": lambda content, safe: content,
    "nothing more": lambda content, safe: content[:safe],
    "half": lambda content, safe: content[: safe + (len(content) - safe) // 2],
    "zeros": lambda content, safe: content[:safe] + bytes(len(content) - safe),
}


class Disk:
    """What is done below a folder while :meth:`watched`.

    Parameters
    ----------
    root : Path
        An existing folder; what lies in it counts as safe.
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
        """Record; let the call of a number fail, once. Nothing is really synced."""
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
                    if name == "write":  # a disk that fills up takes what fits
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
        # The lock says nothing on a disk, and reading changes nothing.
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
        """Whether a change outlives a crash after a step: every folder that it touches was synced since."""
        return all(
            any(entry.step <= when <= step and folder == synced for when, synced in self.folder_syncs)
            for folder in entry.folders
        )

    def crashed(self, step: int, happened: Choice, tail: Tail) -> "Tree":
        """What a crash after a step may leave.

        Parameters
        ----------
        step : int
            The last call that was made.
        happened : callable
            Whether a change that is not safe is on the disk.
        tail : callable
            What is left of a file's content.
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
            if above == "." or (above in tree and tree[above] is None):  # else the folder itself is lost
                tree[name] = None if inode is None else tail(*inode.at(step))
        return tree


Tree = dict[str, bytes | None]
"""Files with their content, and folders, by their path below a root."""


def lay_out(tree: Tree, root: Path) -> None:
    """Make a folder with these files in it."""
    root.mkdir(mode=0o700)
    for name, content in tree.items():
        if content is None:
            (root / name).mkdir(mode=0o700)
        else:
            (root / name).write_bytes(content)


def choices(seed: int) -> dict[str, Choice]:
    """Which changes that are not safe a crash may keep."""
    chance = random.Random(seed)
    drawn: dict[int, bool] = {}
    return {
        "all": lambda entry: True,
        "none": lambda entry: False,
        "some": lambda entry: drawn.setdefault(id(entry), chance.random() < 0.5),
        "only names set": lambda entry: entry.removes is None,
        "only names taken away": lambda entry: entry.sets is None,
    }
