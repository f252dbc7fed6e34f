"""Folders of models: the one in which a client keeps those that it predicts with, and the one of an exported model.

A client keeps ``models-ROUND.safetensors`` for its last two evaluated rounds, in its state folder or in one that a group
may read; an exported model's folder holds ``model.safetensors``. Both have one format
and one reader (:mod:`fedkace_flwr.inference.tensor_file`). Other processes read while a client writes: a file is either
complete or absent, a new one is in place before an old one is removed, and readers use the newest one that can be used
and change nothing.
"""

import logging
import os
from pathlib import Path

from fedkace_flwr.errors import FedkaceError, ModelError, StateError
from fedkace_flwr.inference.kept_models import MODEL, TENSORS, KeptModels, Predictor
from fedkace_flwr.inference.tensor_file import pack, unpack
from fedkace_flwr.storage import atomic
from fedkace_flwr.storage.atomic import MODELS
from fedkace_flwr.storage.earlier_runs import EarlierRuns
from fedkace_flwr.storage.encryption import MODEL_FILES
from fedkace_flwr.storage.files import remove_partials

logger = logging.getLogger(__name__)

_GENERATIONS, _ATTEMPTS = 2, 20
_FORMER = f"{MODELS}-*.npz"  # of earlier versions

_WRITTEN_WHEN = "clients keep one after each round if their node has a state-dir, if dataset = 'inbox', or if keep-models = 'always'"
_WANTED = "must be the state folder of a client, or the folder of a model"


def write(folder: Path, kept: KeptModels, group: int | None = None) -> None:
    """Write a generation; then remove the run's later ones and all but its newest older one, and move other runs' aside.

    Parameters
    ----------
    folder : Path
        Made if necessary.
    kept : KeptModels
        The generation; of its networks, those that predict are written.
    group : int, optional
        Number of a group that may read folder and file. They are then encrypted with the key of models, if there is
        one.

    Raises
    ------
    StateError
        The folder cannot be given to the group, the file would be larger than is read, or the disk refuses it; the
        generations before are still there.
    """
    try:
        _write(folder, kept, group)
    except OSError as error:
        raise StateError(
            f"{folder}: the models of round {kept.round} cannot be kept ({error.strerror or error}); those before are: "
            "make room, or give this user the right to write there"
        ) from error


def _write(folder: Path, kept: KeptModels, group: int | None) -> None:
    if group is not None:
        _open_to(group, folder)
        remove_partials(folder, f"{MODELS}-")  # in the state folder, the store does so
    earlier = EarlierRuns(folder)
    others = {number: run for number, run in earlier.runs(MODELS).items() if run != kept.run}
    if kept.round in others:
        earlier.move_out(kept.round, others.pop(kept.round), (MODELS,))
    atomic.write_body(_path(folder, kept.round), pack(kept, stored=True), group=group)
    for number, run in others.items():
        earlier.move_out(number, run, (MODELS,))
    numbers = _rounds(folder)
    stay = [number for number in numbers if number <= kept.round][:_GENERATIONS]
    for path in [*(_path(folder, number) for number in set(numbers) - set(stay)), *folder.glob(_FORMER)]:
        path.unlink(missing_ok=True)
    for path in earlier.place_of(kept.run).glob(f"{MODELS}-*"):  # the run goes on, and these are older
        path.unlink()
    if group is not None:  # in the state folder, the store makes room
        earlier.keep_newest(MODELS)


def _open_to(group: int, folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chown(folder, -1, group)
        folder.chmod(0o750)
    except OSError as error:
        raise StateError(
            f"{folder}: cannot be opened to group {group}, that of models-dir ({error.strerror or error}); must belong "
            "to the SuperNode's user, who must be in the group"
        ) from error


def check(folder: Path) -> None:
    """Raise :class:`StateError` unless this user may read the folder."""
    try:
        os.scandir(folder).close()
    except PermissionError as error:
        raise StateError(
            f"{folder}: this user may not read it; must be a folder in the SuperNode's models-dir, or be read by the "
            "SuperNode's user"
        ) from error
    except OSError as error:
        raise StateError(f"{folder}: there is no such folder; {_WANTED}") from error


def listing(folder: Path) -> tuple[tuple[str, int, int, int, int], ...]:
    """Name, inode, times and size of each file, newest first; differs whenever one comes, goes or is changed."""
    found = []
    for path in _files(folder):
        try:
            facts = path.stat()
        except FileNotFoundError:
            continue
        found.append((path.name, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_size))
    return tuple(found)


def load_newest(folder: Path) -> Predictor:
    """The model alone that :func:`newest` loads."""
    return newest(folder)[0]


def newest(folder: Path) -> tuple[Predictor, str]:
    """Load the exported model of a folder, or the newest one that a client keeps there and that predicts.

    Parameters
    ----------
    folder : Path
        A client may write to it at the same time.

    Returns
    -------
    predictor, fault
        Why there is a newer file that cannot be used, in one line that is also logged; empty if there is none.

    Raises
    ------
    StateError
        The folder does not exist, or holds no model yet, or none that can be used.
    """
    check(folder)
    faults: dict[Path, FedkaceError] = {}
    for _ in range(_ATTEMPTS):  # a listed file may be gone before it is read; then there is a newer one
        vanished = False
        for path in _files(folder):
            try:
                predictor: Predictor | None = atomic.read_body(path, _ready)
            except FedkaceError as error:
                faults[path] = error
                continue
            if predictor is None:
                vanished = True
                continue
            fault = "; ".join(map(str, faults.values()))
            if fault:
                logger.warning("%s; using the model of round %d instead", fault, predictor.kept.round)
            return predictor, fault
        if not vanished:
            break
    if faults:
        raise StateError(str(next(iter(faults.values()))))
    raise StateError(f"{folder}: there is no model yet; {_advice(folder)}")


def read_model(path: Path) -> KeptModels:
    """Read an exported model, or a file that a client keeps.

    Parameters
    ----------
    path : Path
        A model's folder, in which no link is followed, or the file.

    Raises
    ------
    ModelError
        There is no model, or it is damaged.
    """
    try:
        kept: KeptModels | None = atomic.read_body(
            path / TENSORS if path.is_dir() else Path(os.path.realpath(path)), unpack
        )
    except StateError as error:
        raise ModelError(str(error)) from error
    if kept is None:
        inside = f"; did you mean {path / MODEL}?" if (path / MODEL / TENSORS).exists() else ""
        raise ModelError(f"{path}: there is no {TENSORS}; must be a folder that holds one, or the file{inside}")
    return kept


def _ready(content: bytes) -> Predictor:
    predictor = Predictor(unpack(content))
    predictor.check()
    return predictor


def _files(folder: Path) -> list[Path]:
    kept = [_path(folder, number) for number in _rounds(folder)]
    return kept or ([folder / TENSORS] if (folder / TENSORS).exists() else [])


def _advice(folder: Path) -> str:
    if any(folder.glob(_FORMER)):
        return f"{_FORMER} is of an older version; the client keeps a new one after its next round"
    inside = {
        path.parent.relative_to(folder).as_posix()
        for below in ("*", "clients/*")  # of a node's folder, and of a run's
        for name in (f"{MODELS}-*{MODEL_FILES}", TENSORS)
        for path in folder.glob(f"{below}/{name}")
    }
    return f"name one of the folders in it: {', '.join(sorted(inside))}" if inside else _WRITTEN_WHEN


def _path(folder: Path, number: int) -> Path:
    return atomic.path_of(folder, MODELS, number)


def _rounds(folder: Path) -> list[int]:
    return atomic.numbered(folder, MODELS)
