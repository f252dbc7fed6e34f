"""Starting, continuing and pausing a study in the background."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.background.checkout import commit_of, prepare_environment, prepare_source
from experiments.background.folder import LOWEST, MARK, Command, Folder, now, shown
from experiments.running.guard import end_all_of
from experiments.running.processes import CHECKOUT
from fedkace_flwr.errors import RunError

_PAUSE_SECONDS = 180.0
_POLL_SECONDS = 0.1


def start(
    folder: Folder,
    arguments: Sequence[str],
    commit: str | None = None,
    python: Path | None = None,
    priority: str | None = None,
    tell: Callable[[str], object] = print,
) -> int:
    """Start a study, or continue it.

    Parameters
    ----------
    folder : Folder
        Gets the checkout, the virtual environment and the results.
    arguments : sequence of str
        The arguments of ``run``; may be empty where the folder knows them.
    commit : str, optional
        Which commit to pin the checkout to; by default HEAD.
    python : Path, optional
        An interpreter that has the dependencies; by default one in a new virtual environment.
    priority : {"lowest", "normal"}, optional
        By default as at the last start; ``lowest`` at the first.
    tell : callable
        Gets a line of text before what takes minutes.

    Returns
    -------
    int
        The process number of the supervisor.

    Raises
    ------
    RunError
        The study runs already, the folder belongs to another one or cannot be written, or something cannot be prepared.
    """
    if not folder.locked and folder.command() is None:  # checked again below; here, before anything is written
        _commit_of_first(folder, arguments, commit)
    lock = folder.lock()
    if lock is None:
        raise RunError(f"{folder.path}: is running already{_since(folder)}; see background status")
    try:
        command = _command(folder, arguments, commit, python, tell)
        if priority not in (None, command.priority):
            command = replace(command, priority=priority or LOWEST)
            folder.keep(command)
        if not Path(command.directory).is_dir():
            raise RunError(f"{folder.path}: the working directory {command.directory} is gone")
        return _launch(folder, command, lock)
    except OSError as error:
        raise folder.unwritable(error) from error
    finally:
        os.close(lock)


def pause(folder: Folder) -> bool:
    """End the study's processes and wait for all of them; false where none runs.

    Raises
    ------
    RunError
        The folder holds no study, or one that is being prepared and not running yet.
    """
    if not folder.locked and not folder.processes():
        folder.known_command()
        return False
    told = folder.read("running.json") or {}
    supervisor = next((process for process in folder.processes() if process.pid == told.get("pid")), None)
    if supervisor is not None:
        supervisor.send_signal(signal.SIGTERM)
    elif folder.processes():  # the supervisor was killed and what it started lives on
        end_all_of(MARK, str(folder.path))
    else:
        raise RunError(f"{folder.path}: is still being prepared; interrupt the start instead")
    end = time.monotonic() + _PAUSE_SECONDS
    while folder.locked or folder.processes():
        if time.monotonic() > end:
            end_all_of(MARK, str(folder.path))
        time.sleep(_POLL_SECONDS)
    return True


def _command(
    folder: Folder, arguments: Sequence[str], commit: str | None, python: Path | None, tell: Callable[[str], object]
) -> Command:
    """The command that the folder knows, or a new one with everything prepared for it."""
    known = folder.command()
    if known is not None:
        if arguments and list(arguments) != known.arguments:
            raise RunError(
                f"{folder.path}: is the folder of {shown(known.arguments)!r}; start it without arguments, or choose "
                "another folder"
            )
        if commit is not None and commit_of(commit) != known.commit:
            raise RunError(f"{folder.path}: is pinned at commit {known.commit}; choose another folder for {commit}")
        return known
    number = _commit_of_first(folder, arguments, commit)
    prepare_source(folder, number)
    interpreter = prepare_environment(folder, tell) if python is None else python
    command = Command(number, os.path.abspath(interpreter), list(arguments), str(Path.cwd()))  # noqa: PTH100
    folder.keep(command)
    return command


def _commit_of_first(folder: Folder, arguments: Sequence[str], commit: str | None) -> str:
    """The full number of the commit that the first start of a folder would pin."""
    if not arguments:
        raise RunError(f"{folder.path}: has no command yet; name a study, for example: start {folder.path} -- table1")
    return commit_of(commit or "HEAD")


def _launch(folder: Folder, command: Command, lock: int) -> int:
    # -P: the working directory, which may be another checkout, is not searched for modules.
    runner = [command.python, "-P", "-u", "-m", "experiments", "run", *command.arguments]
    runner += ["--results", str(folder.results)]
    told = {"folder": str(folder.path), "command": runner, "directory": command.directory, "lock": lock}
    told["lowest"] = command.priority == LOWEST
    environment = {**os.environ, "PYTHONPATH": str(folder.source), MARK: str(folder.path)}
    (folder.path / "ended.json").unlink(missing_ok=True)
    with folder.log.open("ab") as log:
        log.write(f"--- {now()}: {shown(command.arguments)} at commit {command.commit}\n".encode())
        log.flush()
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "experiments.background.supervisor", json.dumps(told)],
            cwd=CHECKOUT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(lock,),
        )
    folder.write("running.json", {"pid": supervisor.pid, "started": now()})
    return supervisor.pid


def _since(folder: Folder) -> str:
    told = folder.read("running.json")
    return f" since {told['started']} (process {told['pid']})" if told else ""
