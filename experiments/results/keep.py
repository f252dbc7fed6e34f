"""Archive the record of a run or of a study for the documentation, without the folder names of the original machine."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fedkace_flwr.errors import RunError
from fedkace_flwr.experiments.results.folders import all_within, within
from fedkace_flwr.experiments.results.reading import Record, published, read_config, read_lines, read_object
from fedkace_flwr.storage import atomic
from fedkace_flwr.storage.checkpoint import LARGEST_CHECKPOINT, Checkpoints
from fedkace_flwr.storage.files import LARGEST_LOG, read_bytes, write_bytes, write_text
from fedkace_flwr.storage.folders import make_folder
from fedkace_flwr.storage.names import closest_path
from fedkace_flwr.storage.targets import check, renewed

_REQUIRED = ("config.json", "environment.json", "rounds.jsonl")
_SUMMARY, _PICTURE = "summary.json", "accuracy.png"
_SERVER, _CLIENTS = "server", "clients"
_RUN, _STUDY = "a kept run", "a kept study"


def keep(source: Path, target: Path, *, resumable: bool = False) -> None:
    """Copy the record of a run, or of every run of a study that has a round, to ``target``.

    Of an unfinished run the completed rounds are copied. A single run's plot is copied too. The copy of a study is
    itself a results folder: the report can read it, and the runner skips the finished runs in it.

    Parameters
    ----------
    source : Path
        A run's folder or a study's.
    target : Path
        The folder to copy to: new, empty, or that of an earlier copy. Each run in it is replaced as a whole.
    resumable : bool
        Also copy the last checkpoint and the clients' states of unfinished runs, so that the runner can resume them
        in a copy of ``target``.

    Raises
    ------
    ConfigError
        The target holds something else, or cannot be written.
    RunError
        No run has completed a round, a file cannot be read, or a run that should be resumable is running or has no
        checkpoint.
    ResultsError
        A file is damaged, or is a link out of the folder.
    """
    try:
        _keep(source, target, resumable)
    except (OSError, RecursionError, ValueError) as error:
        raise RunError(f"{source}: cannot be copied to {target} ({error})") from error


def _keep(source: Path, target: Path, resumable: bool) -> None:
    if not source.is_dir():
        raise RunError(f"{source}: is not a folder; must be that of a run or of a study{closest_path(source)}")
    if not (source / "study.json").exists():
        _keep_run(source, target, resumable, picture=True)
        return
    runs = sorted(path.parent for path in source.glob("*/rounds.jsonl") if path.stat().st_size)
    if not runs:
        raise RunError(f"{source}: no run has completed a round; keep it later")
    check(target, _STUDY)
    for run in runs:
        within(source, run)
        check(target / run.name, _RUN)
    with renewed(target, _STUDY, private=False) as new:
        for run in runs:
            _keep_run(run, target / run.name, resumable, picture=False)
        _write(new / "study.json", read_object(source / "study.json"), indent=1)


def _keep_run(run: Path, target: Path, resumable: bool, *, picture: bool) -> None:
    missing = [name for name in _REQUIRED if not (run / name).exists()]
    if missing:
        raise RunError(f"{run}: has no {missing[0]}; must be the folder of a run that has completed a round")
    is_finished = (run / _SUMMARY).exists()
    with (
        _state_to_resume(run, wanted=resumable and not is_finished) as state,
        renewed(target, _RUN, private=False) as new,
    ):
        _write(new / "config.json", published(read_object(run / "config.json")))
        _write(new / "environment.json", read_object(run / "environment.json"))
        rounds = [json.dumps(record) + "\n" for record in read_lines(run / "rounds.jsonl")]
        write_text(new / "rounds.jsonl", "".join(rounds))
        if is_finished:
            _write(new / _SUMMARY, read_object(run / _SUMMARY))
        if picture and (run / _PICTURE).exists():
            write_bytes(new / _PICTURE, read_bytes(within(run, run / _PICTURE), LARGEST_LOG))
        for path in state:
            make_folder((new / path).parent)
            write_bytes(new / path, read_bytes(run / path, LARGEST_CHECKPOINT), mode=0o600)


@contextmanager
def _state_to_resume(run: Path, *, wanted: bool) -> Iterator[list[Path]]:
    """Keep a run from going on, and name the files in its folder that it would go on from; none if not wanted."""
    if not wanted:
        yield []
        return
    lock = FileLock(run / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RunError(f"{run}: is running; interrupt it first, or leave out --resumable") from None
    try:
        newest = Checkpoints(all_within(run, run / _SERVER)).newest()
        if newest is None:
            raise RunError(f"{run}: has no checkpoint, so it cannot be resumed; leave out --resumable")
        checkpoint = atomic.path_of(Path(_SERVER), "checkpoint", newest.round)
        patterns = ["state-*.npz"] + (["answer-*.npz"] if _reads_answers(run) else [])
        folders = all_within(run, run / _CLIENTS).glob("client-*")
        files = (path for folder in folders for path in all_within(run, folder).glob("*"))
        states = [path for path in files if path.is_file() and any(path.match(pattern) for pattern in patterns)]
        yield [checkpoint, *(path.relative_to(run) for path in states)]
    finally:
        lock.release()


def _reads_answers(run: Path) -> bool:
    """Whether clients need their last answers, which hold their local models, in the next round.

    They do if they may sit it out and then predict with the local model, or if each keeps its own batch-norm
    statistics. Otherwise answers only serve repeated messages. Each has the size of the model.
    """
    config = read_config(run)
    everyone = config.stream.participants_per_round == config.stream.clients
    return not everyone or config.data.arrives or config.privacy.batchnorm_statistics == "local"


def _write(path: Path, content: Record, indent: int = 2) -> None:
    write_text(path, json.dumps(content, indent=indent) + "\n")
