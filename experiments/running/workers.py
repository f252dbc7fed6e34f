"""Choose the number of workers of a study from the machine's resources and the needs of one worker."""

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from experiments.studies.study import Study
from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiment import Experiment
from fedkace_flwr.registry import configured

_CGROUP = Path("/sys/fs/cgroup")
_PROCESS = 450 * 2**20  # Python with PyTorch, Flower and Ray, before any data
_CONTEXT = 600 * 2**20  # GPU memory that CUDA and its libraries take for each process
_SHARE = 0.9  # of the free memory; the rest is for the server, the object store and the page cache
_WEIGHT_COPIES = 8  # network, gradient, two moments, message and reply, and stored copies of the last two
_STEP = 1.5  # memory of a training step as a multiple of its activations; a test batch takes no more
_SAMPLED = 2  # images in the batch that measures activations


@dataclass(frozen=True)
class Machine:
    """The resources of a machine.

    Attributes
    ----------
    cores : int
        CPUs that this process may use.
    memory : int
        Free memory in bytes.
    gpus : tuple of int
        Memory of each GPU in bytes.
    """

    cores: int
    memory: int
    gpus: tuple[int, ...] = ()

    @classmethod
    def here(cls, cgroup: Path = _CGROUP) -> "Machine":
        """Measure this machine, within the limits of a container or ``taskset``."""
        cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        quota, *period = _words(cgroup / "cpu.max")
        if quota.isdecimal() and period:
            cores = min(cores, int(quota) / int(period[0]))
        memory = psutil.virtual_memory().available
        (limit,), (used,) = _words(cgroup / "memory.max")[:1], _words(cgroup / "memory.current")[:1]
        if limit.isdecimal() and used.isdecimal():
            memory = min(memory, max(0, int(limit) - int(used)))
        found = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
        gpus = tuple(int(torch.cuda.get_device_properties(number).total_memory) for number in found)
        return cls(max(1, int(cores)), memory, gpus)


@dataclass(frozen=True)
class Need:
    """The most that one worker takes: bytes of memory, and of GPU memory if it computes there."""

    memory: int
    gpu: int

    @classmethod
    def of(cls, config: Config) -> "Need":
        """Estimate the need from the network, the batch, and the samples that a client trains on.

        The data set itself does not count, because the workers share its pages.
        """
        experiment = Experiment(config)
        net = experiment.network(experiment.initial_weights())
        size = experiment.dataset.image_size
        image = 3 * size * size
        weights = sum(tensor.numel() * tensor.element_size() for tensor in net.state_dict().values())
        step = _STEP * activations(net, size, experiment.device) * config.training.batch_size
        samples = config.stream.window * config.stream.samples_per_class + config.buffer.capacity
        held = 2 * samples * image
        work = int(_WEIGHT_COPIES * weights + step + held)
        return cls(_PROCESS + work, _CONTEXT + work)


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
    """

    count: int
    threads: int
    gpu_fraction: float
    need: Need
    machine: Machine

    def __str__(self) -> str:
        """Describe the workers in one line."""
        machine = self.machine
        text = f"{_several(self.count, 'worker')} of {_several(self.threads, 'thread')} on {_several(machine.cores, 'core')}"
        text += f", about {_gib(self.count * self.need.memory)} of {_gib(machine.memory)} free memory"
        if not machine.gpus:
            return text
        if self.gpu_fraction == 0:
            return f"{text}; {_several(len(machine.gpus), 'GPU')} not used"
        mine = f"{self.gpu_fraction:.3g} of a GPU each"
        return f"{text}; {mine}, about {_gib(self.need.gpu)} of {_gib(int(self.gpu_fraction * min(machine.gpus)))}"

    @property
    def warnings(self) -> list[str]:
        """The resources that the plan needs but the machine lacks."""
        found = []
        if self.count * self.threads > self.machine.cores:
            found.append(
                f"{self.count} workers of {self.threads} threads share {self.machine.cores} cores: they wait for each other"
            )
        if self.count * self.need.memory > self.machine.memory:
            found.append(f"{self.count} workers need more memory than is free: --workers {self._most()} fits")
        if self.gpu_fraction and self.need.gpu > self.gpu_fraction * min(self.machine.gpus, default=0):
            found.append(f"gpu-fraction = {self.gpu_fraction:.3g} is less of a GPU's memory than a client may need")
        return found

    def _most(self) -> int:
        return _fitting(_SHARE * self.machine.memory, self.need.memory)


def plan_workers(study: Study, machine: Machine | None = None) -> Workers:
    """Choose the number of workers and the GPU fraction, unless the command line sets them.

    The number is bounded by the cores for the workers' threads, by free memory, and by the number of runs or clients.
    On a machine with GPUs it is also bounded by their memory, if Flower's engine runs the clients and ``device``
    allows a GPU.

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
    machine = machine or Machine.here()
    if (study.gpu_fraction or 0) > len(machine.gpus):
        raise ConfigError(f"gpu-fraction = {study.gpu_fraction:g}: this machine has {len(machine.gpus)} GPUs")
    configs = [configured(config)[1] for config in study.runs.values()]
    need = _largest(configs)
    threads = max((config.run.threads or machine.cores for config in configs), default=1)
    useful = len(configs) if study.engine == "inline" else max((c.stream.clients for c in configs), default=1)
    by_memory = _fitting(_SHARE * machine.memory, need.memory)
    count = study.workers or max(1, min(machine.cores // threads, by_memory, useful))
    fraction = study.gpu_fraction
    if fraction is None:
        on_gpu = study.engine == "flower" and all(config.run.device != "cpu" for config in configs)
        fraction = _fraction(machine, need, count) if on_gpu and machine.gpus else 0.0
        if fraction and not study.workers:
            count = min(count, int(len(machine.gpus) / fraction))
    return Workers(count, threads, fraction, need, machine)


def activations(net: torch.nn.Module, size: int, device: torch.device) -> int:
    """Return the bytes that the forward pass of one image keeps for the backward pass."""
    kept = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += 0 if isinstance(tensor, torch.nn.Parameter) else tensor.numel() * tensor.element_size()
        return tensor

    images = torch.zeros(_SAMPLED, 3, size, size, device=device)
    net.train()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        net(images)
    return kept // _SAMPLED


def _largest(configs: Iterable[Config]) -> Need:
    needs: dict[tuple[object, ...], Need] = {}
    for config in configs:
        key = (config.data, config.model, config.training.batch_size, config.stream, config.buffer.capacity)
        if key not in needs:
            needs[key] = Need.of(config)
    return max(needs.values(), key=lambda need: need.memory, default=Need(_PROCESS, _CONTEXT))


def _fraction(machine: Machine, need: Need, count: int) -> float:
    """Return the GPU fraction that spreads ``count`` workers, or as many as fit, evenly over the GPUs."""
    on_one = min(math.ceil(count / len(machine.gpus)), _fitting(_SHARE * min(machine.gpus), need.gpu))
    return 1 / on_one


def _fitting(memory: float, each: int) -> int:
    return max(1, int(memory // each))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split() or [""]
    except (OSError, ValueError):
        return [""]


def _several(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
