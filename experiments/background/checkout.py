"""A checkout pinned at one commit, with a virtual environment of its own."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.background.folder import Folder
from experiments.running.processes import CHECKOUT
from fedkace_flwr.errors import RunError


def commit_of(name: str) -> str:
    """The full number of a commit of this repository.

    Raises
    ------
    RunError
        The project does not run from a git checkout, or the commit is unknown.
    """
    if not (CHECKOUT / "pyproject.toml").exists():
        raise RunError(f"background: needs a checkout of the project, to pin a commit of it; {CHECKOUT} is none")
    return _run(
        ["git", "-C", str(CHECKOUT), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"], f"commit {name}"
    )


def prepare_source(folder: Folder, commit: str) -> None:
    """Clone this repository at a commit; an incomplete clone is replaced."""
    ready = folder.source / ".git" / "fedkace-ready"
    if ready.exists() and ready.read_text(encoding="utf-8") == commit:
        return
    shutil.rmtree(folder.source, ignore_errors=True)
    what = f"a checkout of {commit} in {folder.source}"
    _run(["git", "clone", "--quiet", "--local", "--no-checkout", str(CHECKOUT), str(folder.source)], what)
    _run(["git", "-C", str(folder.source), "checkout", "--quiet", "--detach", commit], what)
    ready.write_text(commit, encoding="utf-8")


def prepare_environment(folder: Folder, tell: Callable[[str], object]) -> Path:
    """Make a virtual environment and install the checkout into it, which is told first; return its interpreter."""
    python, ready = folder.environment / "bin" / "python", folder.environment / ".ready"
    if not ready.exists():
        tell(f"installing into {folder.environment}; this takes a minute or two")
        what = f"a virtual environment in {folder.environment}"
        _run([sys.executable, "-m", "venv", "--clear", str(folder.environment)], what)
        _run([str(python), "-m", "pip", "install", "--quiet", "--editable", f"{folder.source}[tensorboard]"], what)
        ready.touch()
    return python


def _run(command: Sequence[str], what: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RunError(f"{what}: {command[0]} cannot be run ({error.strerror})") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"{command[0]} knows of none in {CHECKOUT}"])[-1]
        raise RunError(f"{what}: {last}")
    return done.stdout.strip()
