"""The resources of this machine: cores, free memory, and GPUs with their free memory.

GPUs are measured in a process of its own, because a process that asks a GPU for its free memory creates a CUDA context
there, which takes some hundred megabytes until the process ends.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from fedkace_flwr.errors import RunError
from fedkace_flwr.experiments.running.processes import CHECKOUT

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The environment variable that names the GPUs of a process."""

_MEMORY = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # versions 2 and 1
_MEASURING_SECONDS = 120


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes
    ----------
    name : str
        As ``CUDA_VISIBLE_DEVICES`` names it for processes that this one starts.
    memory, free : int
        Bytes in all, and bytes that nobody has taken.
    """

    name: str
    memory: int
    free: int


@dataclass(frozen=True)
class Machine:
    """The resources of a machine.

    Attributes
    ----------
    cores : int
        CPUs that this process may use.
    memory : int
        Free memory in bytes.
    gpus : tuple of Gpu
        The GPUs that this process may use.
    """

    cores: int
    memory: int
    gpus: tuple[Gpu, ...] = ()

    @classmethod
    def here(cls, root: Path = Path("/")) -> "Machine":
        """Measure this machine, within the limits of control groups, ``taskset`` or ``CUDA_VISIBLE_DEVICES``.

        ``root`` holds ``proc/self/cgroup`` and ``sys/fs/cgroup``.

        Raises
        ------
        RunError
            There are GPUs, but they cannot be measured.
        """
        cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        memory = psutil.virtual_memory().available
        for group in _groups(root):
            for quota, period in _pairs(group, ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
                cores = min(cores, quota / period)
            for limit, used in _pairs(group, *_MEMORY):
                memory = min(memory, max(0, limit - used + _reclaimable(group)))
        return cls(max(1, int(cores)), memory, measured_gpus(os.environ))


def measured_gpus(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that a process with this environment sees, measured in such a process.

    Raises
    ------
    RunError
        There are GPUs, but they cannot be measured.
    """
    if not torch.version.cuda or environment.get(VISIBLE) == "":
        return ()
    if torch.cuda.device_count() == 0:  # asks the driver's library and creates no context
        return ()
    command = [sys.executable, "-m", "fedkace_flwr.experiments.running.machine"]
    try:
        done = subprocess.run(
            command, cwd=CHECKOUT, env=dict(environment), capture_output=True, text=True, timeout=_MEASURING_SECONDS
        )
        if done.returncode:
            raise ValueError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
        return named(json.loads(done.stdout), environment.get(VISIBLE))
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise RunError(
            f"the GPUs cannot be measured ({error}); look at nvidia-smi, or set {VISIBLE} to use only some or none"
        ) from error


def named(found: list[list[int]], visible: str | None) -> tuple[Gpu, ...]:
    """Name the GPUs that a process has found.

    Parameters
    ----------
    found : list of [int, int]
        Free bytes and all bytes of each, in the order in which the process sees them.
    visible : str, optional
        ``CUDA_VISIBLE_DEVICES`` of that process; None if it is not set. CUDA ignores what follows the first entry that
        names no GPU.
    """
    names = [str(number) for number in range(len(found))] if visible is None else visible.split(",")
    return tuple(Gpu(name.strip(), total, free) for name, (free, total) in zip(names, found, strict=False))


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control groups and of those around them, of both versions.

    In a container the path may be that outside it; then the folder of the controller is the container's own group.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        tops = controllers.split(",") if controllers else ("", "unified")
        for top in (root / "sys/fs/cgroup" / name for name in tops):
            inner = top / path.strip("/")
            yield from (group for group in (inner, *inner.parents) if group.is_relative_to(top))


def _pairs(group: Path, *files: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """The two numbers that each choice of files holds, where there are two: no limit is a word, or below 0."""
    for names in files:
        words = " ".join(_text(group / name) for name in names).split()
        if len(words) == 2 and all(word.isdecimal() for word in words):
            yield int(words[0]), int(words[1])


def _reclaimable(group: Path) -> int:
    """Bytes of a group that are copies of files and would be given up first."""
    words = _text(group / "memory.stat").split()
    stat = dict(zip(words[::2], words[1::2], strict=False))
    return int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)  # of version 1, or 2


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


if __name__ == "__main__":  # this process's own context counts as taken, so that a little less is planned than is free
    print(json.dumps([torch.cuda.mem_get_info(number) for number in range(torch.cuda.device_count())]))
