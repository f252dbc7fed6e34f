"""Folders that commands write to: each is new, empty, or bears the mark of the same kind of content.

The mark, ``.fedkace``, says what the folder holds, and has the digests of those files that are replaced together. What
is not listed there belongs to somebody else: it is neither overwritten nor deleted.
"""

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.storage.files import open_regular, read_text, remove_partials, write_text
from fedkace_flwr.storage.folders import make_folder, sync_folder

MARK = ".fedkace"

_Files = dict[str, list[str]]  # SHA-256 by path in the folder; two while a file is being replaced


def check(folder: Path, holds: str, *, known: bool = False) -> None:
    """Check that :func:`claim` would accept a folder; touch nothing.

    Raises
    ------
    ConfigError
        It would not.
    """
    _listed(folder, holds, known=known)


def claim(folder: Path, holds: str, *, private: bool = True, known: bool = False) -> None:
    """Make a folder if there is none, and mark it.

    Parameters
    ----------
    folder : Path
        Must be new, empty, or marked with the same ``holds``.
    holds : str
        What is to be written there, with its article, such as ``a model``.
    private : bool
        Whether a new folder is for this user only.
    known : bool
        Whether the caller knows the folder as its own although it may bear no mark: versions before 1.1 set none.

    Raises
    ------
    ConfigError
        The folder holds something else, files of it were changed by others, or it cannot be written.
    """
    _claimed(folder, holds, private=private, known=() if known else None)


@contextlib.contextmanager
def renewed(folder: Path, holds: str, *, private: bool = True, known: Collection[str] = ()) -> Iterator[Path]:
    """Claim a folder, and yield an empty one in it; what that holds in the end replaces what was listed before.

    The files are moved once all of them are written. If that fails or is interrupted earlier, the folder is as before.

    Parameters
    ----------
    folder, holds, private
        As of :func:`claim`.
    known : collection of str
        The names of files that the caller knows as its own although the folder may bear no mark, as in a checkout.

    Raises
    ------
    ConfigError
        As of :func:`claim`; or somebody else's file is in the way of a new one.
    """
    is_new = not os.path.lexists(folder)
    before = _claimed(folder, holds, private=private, known=known or None)
    try:
        with _writing(folder):
            for left in folder.glob(f"{MARK}-*"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            remove_partials(folder, MARK)
            stage = Path(tempfile.mkdtemp(prefix=f"{MARK}-", dir=folder))
        try:
            yield stage
            _replace(folder, holds, before, stage)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    except BaseException:
        with contextlib.suppress(OSError):
            if not before and [path.name for path in folder.iterdir()] == [MARK]:
                (folder / MARK).unlink()
                if is_new:
                    folder.rmdir()
        raise


def _claimed(folder: Path, holds: str, *, private: bool, known: Collection[str] | None) -> _Files:
    files = _listed(folder, holds, known=known is not None)
    with _writing(folder):
        if private:
            make_folder(folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)
        if files is None:
            files = {name: [digest] for name in known or () if (digest := _digest(folder / name))}
            _mark(folder, holds, files)
        else:
            with tempfile.TemporaryFile(dir=folder):  # a folder in which nothing is to do is left as it is
                pass
    return files


def _listed(folder: Path, holds: str, *, known: bool) -> _Files | None:
    """The files that a folder's mark lists; None if the folder is new, empty, or known without that mark."""
    if not os.path.lexists(folder):
        return None
    with _writing(folder):
        half_written = f"{MARK}.", f"{MARK}-"  # perhaps by another process, at this moment
        if all(path.name.startswith(half_written) for path in folder.iterdir()):
            return None
        found, files = _told(folder / MARK)
        if found != holds:
            if known:
                return None
            what = f"{found}, not {holds}" if found else f"files, and no {MARK} of {holds}"
            raise ConfigError(
                f"{folder}: holds {what}; name a new or an empty folder (or remove one of version 1.0 first)"
            )
        for name, digests in files.items():
            path = folder / name
            if os.path.lexists(path) and _digest(path) not in digests:
                raise ConfigError(f"{path}: was changed after it had been written; move it away first")
    return files


def _told(path: Path) -> tuple[str, _Files]:
    """What a mark says; nothing if there is none, or it is not one of ours."""
    try:
        content = json.loads(read_text(path))
        files = {str(name): [str(digest) for digest in digests] for name, digests in content["files"].items()}
        if all(PurePosixPath(name).parts and _stays(PurePosixPath(name)) for name in files):
            return str(content["holds"]), files
    except (OSError, RecursionError, ValueError, TypeError, KeyError, AttributeError):
        pass
    return "", {}


def _stays(path: PurePosixPath) -> bool:
    return not path.is_absolute() and ".." not in path.parts and path.parts[0] != MARK


def _digest(path: Path) -> str:
    """SHA-256 of a regular file; empty for anything else."""
    try:
        with os.fdopen(open_regular(path, follow=False), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _replace(folder: Path, holds: str, before: _Files, stage: Path) -> None:
    made = {
        path.relative_to(stage).as_posix(): [_digest(path)] for path in sorted(stage.rglob("*")) if not path.is_dir()
    }
    for name in {**before, **made}:
        _check_way(folder, PurePosixPath(name), before)
    with _writing(folder):
        _mark(folder, holds, {name: before.get(name, []) + made.get(name, []) for name in {**before, **made}})
        for name in before.keys() - made.keys():
            (folder / name).unlink(missing_ok=True)
            for above in PurePosixPath(name).parents[:-1]:
                with contextlib.suppress(OSError):
                    (folder / above).rmdir()
        for name in made:
            for above in reversed(PurePosixPath(name).parents[:-1]):
                if not (folder / above).is_dir():
                    (folder / above).mkdir(mode=stat.S_IMODE((stage / above).stat().st_mode))
            os.replace(stage / name, folder / name)
        for place in {(folder / name).parent for name in made}:
            sync_folder(place)
        _mark(folder, holds, made)


def _check_way(folder: Path, name: PurePosixPath, listed: Collection[str]) -> None:
    """Check that nothing of others is where a file is to be, and that no link or file leads elsewhere."""
    blocked = [folder / above for above in name.parents[:-1] if _is_no_folder(folder / above)]
    if str(name) not in listed and os.path.lexists(folder / name):
        blocked.append(folder / name)
    if blocked:
        raise ConfigError(f"{blocked[-1]}: is in the way, and was not written by this command; move it away first")


def _is_no_folder(path: Path) -> bool:
    return os.path.lexists(path) and (path.is_symlink() or not path.is_dir())


def _mark(folder: Path, holds: str, files: Mapping[str, list[str]]) -> None:
    write_text(folder / MARK, json.dumps({"holds": holds, "files": files}, indent=1) + "\n")


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written ({error.strerror or error}); choose a writable folder"
        ) from error
