"""How many workers a study has, and on which GPUs: from the machine's resources and the needs of one worker."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from fedkace_flwr.compute.memory import PASS_BYTES
from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.errors import ConfigError, RunError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.experiments.running.processes import ROOT
from fedkace_flwr.experiments.studies.study import Study

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The environment variable that names the GPUs of a process."""

CONTEXT = 600 * 2**20
"""GPU memory that CUDA and its libraries take for each process, in bytes."""

_PROCESS = 450 * 2**20  # Python with PyTorch, Flower and Ray, before any data
_WORKSPACES = 2 * 32 * 2**20  # cuBLAS's, on the ordinary stream and on that of recordings (Hopper: 32 MiB each)
_WEIGHT_COPIES = 8  # network, gradient, two moments, message and reply, and stored copies of the last two
_STEP = 1.5  # memory of a training step as a multiple of its activations; a test batch takes no more
_SAMPLED = 2  # images in the batch that measures activations
_SHARE = 0.9  # of the free memory; the rest is for the server, the object store and the page cache
_EPSILON = 1e-9  # 1 / 0.1 is 10, whatever its last bits
_MEASURING_SECONDS = 120
_MEASURE = (
    "import json, torch; print(json.dumps([torch.cuda.mem_get_info(n) for n in range(torch.cuda.device_count())]))"
)


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
    """The resources of a machine that this process may use: CPUs, free memory in bytes, and GPUs."""

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
            quota, period = [*_numbers(group / "cpu.max"), 0, 0][:2]
            cores = min(cores, quota / period) if period else cores
            limits, used = _numbers(group / "memory.max"), _numbers(group / "memory.current")
            if limits and used:
                words = _text(group / "memory.stat").split()
                cached = int(dict(zip(words[::2], words[1::2], strict=False)).get("inactive_file", 0))
                memory = min(memory, max(0, limits[0] - used[0] + cached))  # the cache would be given up first
        return cls(max(1, int(cores)), memory, measured_gpus(os.environ))


def measured_gpus(environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that a process with this environment sees, measured in such a process.

    A process that asks a GPU for its free memory takes some hundred megabytes of it until it ends.

    Raises
    ------
    RunError
        There are GPUs, but they cannot be measured.
    """
    visible = environment.get(VISIBLE)
    if not torch.version.cuda or visible == "" or torch.cuda.device_count() == 0:
        return ()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE],
            cwd=ROOT,
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=_MEASURING_SECONDS,
        )
        if done.returncode:
            raise ValueError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
        return named(json.loads(done.stdout), visible)
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise RunError(
            f"the GPUs cannot be measured ({error}); look at nvidia-smi, or set {VISIBLE} to use only some or none"
        ) from error


def named(found: list[list[int]], visible: str | None) -> tuple[Gpu, ...]:
    """Name the GPUs that a process has found, each with its free and all bytes, in the order in which it sees them.

    ``visible`` is ``CUDA_VISIBLE_DEVICES`` of that process; CUDA ignores what follows the first entry that names no GPU.
    """
    names = [str(number) for number in range(len(found))] if visible is None else visible.split(",")
    return tuple(Gpu(name.strip(), total, free) for name, (free, total) in zip(names, found, strict=False))


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control group (version 2) and of those around it.

    In a container the path may be that outside it; then the top folder is the container's own group.
    """
    top = root / "sys/fs/cgroup"
    path = next((line[3:] for line in _text(root / "proc/self/cgroup").splitlines() if line.startswith("0::")), "/")
    inner = top / path.strip("/")
    yield from (group for group in (inner, *inner.parents) if group.is_relative_to(top))


def _numbers(path: Path) -> list[int]:
    """The numbers of a file; none if one is a word, such as ``max``."""
    words = _text(path).split()
    return [int(word) for word in words] if all(word.isdecimal() for word in words) else []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


@dataclass(frozen=True)
class Need:
    """The most that one worker takes: bytes of memory, and of GPU memory if it computes there.

    Nothing is computed on a GPU to find out: the activations are counted on the CPU.
    """

    memory: int = _PROCESS
    gpu: int = CONTEXT

    @classmethod
    def of(cls, config: Config) -> "Need":
        """Estimate the need from the network, the batch, and the samples that a client trains on.

        The data set itself does not count, because the workers share its pages. A recorded step keeps the memory of a
        step to itself, beside that of the steps taken eagerly before it is recorded.
        """
        experiment = Experiment(config)
        form = experiment.dataset.form
        weights = sum(tensor.numel() * tensor.element_size() for tensor in experiment.initial_weights().values())
        step = _STEP * activations(experiment.network_on_cpu(), form.shape) * config.training.batch_size
        samples = config.stream.largest_chunk + config.buffer.capacity
        work = int(_WEIGHT_COPIES * weights + step + 2 * samples * form.size)
        recorded = 0 if config.run.cuda_graphs == "off" else int(step)
        return cls(_PROCESS + work, CONTEXT + _WORKSPACES + work + recorded + PASS_BYTES)


def largest_need(configs: Iterable[Config]) -> Need:
    """The largest need among configurations; that of a bare process if there are none."""
    alike = {
        (c.data, c.model, c.training.batch_size, c.stream.largest_chunk, c.buffer.capacity, c.run.cuda_graphs): c
        for c in configs
    }
    needs = [Need.of(config) for config in alike.values()] or [Need()]
    return Need(max(need.memory for need in needs), max(need.gpu for need in needs))


def activations(net: torch.nn.Module, shape: tuple[int, ...]) -> int:
    """Return the bytes that the forward pass of one sample keeps for the backward pass; ``net`` is on the CPU."""
    kept = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += 0 if isinstance(tensor, torch.nn.Parameter) else tensor.numel() * tensor.element_size()
        return tensor

    net.train()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        net(torch.zeros(_SAMPLED, *shape))
    return kept // _SAMPLED


@dataclass(frozen=True)
class Workers:
    """The chosen workers.

    Attributes
    ----------
    count : int
        Clients trained in parallel; with the inline engine, runs.
    threads : int
        CPU threads of each worker.
    gpu_fraction : float
        Fraction of a GPU for each worker; 0: compute on the CPU.
    need : Need
        What one worker needs.
    machine : Machine
        The machine that the number was chosen for.
    gpus : tuple of Gpu
        The GPU of each worker; empty if they compute on the CPU.
    told : bool
        Whether the fraction was given, not chosen.
    """

    count: int
    threads: int
    gpu_fraction: float
    need: Need
    machine: Machine
    gpus: tuple[Gpu, ...] = ()
    told: bool = False

    @property
    def used_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that any worker uses, in the machine's order."""
        return tuple(gpu for gpu in self.machine.gpus if gpu in self.gpus)

    def __str__(self) -> str:
        """Describe the workers in one line."""
        machine, used = self.machine, self.used_gpus
        text = f"{_several(self.count, 'worker')} of {_several(self.threads, 'thread')} on {_several(machine.cores, 'core')}"
        text += f", about {_gib(self.count * self.need.memory)} of {_gib(machine.memory)} free memory"
        if used:
            places = " + ".join(str(self.gpus.count(gpu)) for gpu in used)
            text += f"; {places} on {_several(len(used), 'GPU')}, {self.gpu_fraction:.3g} of a GPU each"
            return f"{text}, about {_gib(self.need.gpu)} of {_gib(min(map(self._room, used)))}"
        return f"{text}; on the CPU, {_several(len(machine.gpus), 'GPU')} not used" if machine.gpus else text

    @property
    def warnings(self) -> list[str]:
        """The resources that the plan needs but the machine lacks, and GPUs that it leaves idle without being told to."""
        found, machine, used = [], self.machine, self.used_gpus
        if self.count * self.threads > machine.cores:
            found.append(
                f"{self.count} workers of {_several(self.threads, 'thread')} share "
                f"{_several(machine.cores, 'core')}, so they wait for each other"
            )
        if self.count * self.need.memory > machine.memory:
            most = int(_SHARE * machine.memory / self.need.memory) or 1
            found.append(f"{self.count} workers need more memory than is free: --workers {most} fits")
        if small := [gpu.name for gpu in used if self.need.gpu > self._room(gpu)]:
            found.append(
                f"gpu-fraction = {self.gpu_fraction:.3g}: leaves a client less of the free memory of GPU "
                f"{', '.join(small)} than the {_gib(self.need.gpu)} that it may need"
            )
        if used and self.told and len(used) * max(1.0, self.gpu_fraction) < len(machine.gpus):
            found.append(
                f"gpu-fraction = {self.gpu_fraction:.3g}: {len(used)} of {len(machine.gpus)} GPUs hold all workers, "
                "the others stay idle"
            )
        if machine.gpus and not used and not self.told:
            found.append(f"no GPU is used: {self.why_no_gpu}")
        return found

    @property
    def why_no_gpu(self) -> str:
        """What keeps a worker from a GPU if there is no place for any."""
        if not self.machine.gpus:
            return "this machine has no GPU that PyTorch can use"
        most_free = max(gpu.free for gpu in self.machine.gpus)
        return f"a client may need {_gib(self.need.gpu)}, and the most that is free is {_gib(most_free)}"

    @property
    def visible(self) -> tuple[str, ...] | None:
        """Names of the GPUs that the run may see; None if there is none to be hidden."""
        return tuple(gpu.name for gpu in self.used_gpus) if self.machine.gpus else None

    @property
    def places(self) -> tuple[tuple[str, float], ...] | None:
        """Each worker's GPU and its share of that GPU's memory; None if there is no GPU to be hidden."""
        if not self.machine.gpus:
            return None
        return tuple((gpu.name, min(self.gpu_fraction, self._room(gpu) / gpu.memory)) for gpu in self.gpus)

    def _room(self, gpu: Gpu) -> int:
        """A worker's part of a GPU's free memory."""
        return int(gpu.free / max(1, self.gpus.count(gpu)))


def plan_workers(study: Study, machine: Machine | None = None) -> Workers:
    """Choose the number of workers and their GPUs, unless the command line sets them.

    By default GPUs take as many workers as their free memory holds, each the same number: the fullest ones are left out
    if more workers fit then.

    Parameters
    ----------
    study : Study
        Its ``workers`` and ``gpu_fraction`` are None where they are to be chosen.
    machine : Machine, optional
        By default this machine.

    Raises
    ------
    ConfigError
        ``gpu_fraction`` exceeds the number of GPUs.
    """
    machine, asked = machine or Machine.here(), study.gpu_fraction
    if (asked or 0) > len(machine.gpus):
        raise ConfigError(f"gpu-fraction = {asked:g}: this machine has {len(machine.gpus)} GPUs")
    configs = [configured(config)[1] for config in study.runs.values()]
    need = largest_need(configs)
    threads = max((config.run.threads or machine.cores for config in configs), default=1)
    useful = len(configs) if study.engine == "inline" else max((c.stream.clients for c in configs), default=1)
    by_memory = int(_SHARE * machine.memory / need.memory)
    count = study.workers or max(1, min(machine.cores // threads, by_memory, useful))
    on_cpu = asked == 0 or all(config.run.device == "cpu" for config in configs)
    each_holds = {gpu: _per_gpu(asked) if asked else int(_SHARE * gpu.free / need.gpu) for gpu in machine.gpus}
    if on_cpu or not any(each_holds.values()):
        return Workers(count, threads, 0.0, need, machine, told=on_cpu)
    if asked and study.engine == "flower":
        gpus, fraction = packed(machine.gpus, count, asked), asked
    else:
        at_least = {
            most: [gpu for gpu in machine.gpus if each_holds[gpu] >= most] for most in each_holds.values() if most
        }
        most, used = max(at_least.items(), key=lambda found: (min(count, found[0] * len(found[1])), -found[0]))
        count = study.workers or min(count, most * len(used))
        fraction = asked or 1 / math.ceil(count / len(used))
        in_turn = tuple(used[number % len(used)] for number in range(count))
        gpus = in_turn if study.engine == "inline" else packed(used, count, fraction)
    return Workers(study.workers or min(count, len(gpus)), threads, fraction, need, machine, gpus, asked is not None)


def packed(gpus: Sequence[Gpu], count: int, fraction: float) -> tuple[Gpu, ...]:
    """The GPU of each of ``count`` workers as Ray places them: one GPU is filled before the next.

    If a worker asks for several GPUs, the first of them stands for all. Workers without a place do not start.
    """
    apart = max(1, math.ceil(fraction))
    whole = len(gpus) - len(gpus) % apart
    return tuple(gpu for gpu in gpus[:whole:apart] for _ in range(_per_gpu(fraction)))[:count]


def _per_gpu(fraction: float) -> int:
    return max(1, math.floor(1 / fraction + _EPSILON))


def _several(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
