"""Choose the number of workers of a study, and their GPUs, from the machine's resources and the needs of one worker."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedkace_flwr.config import Config
from fedkace_flwr.configured import configured
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.experiments.running.machine import Gpu, Machine
from fedkace_flwr.experiments.running.need import Need, largest_need
from fedkace_flwr.experiments.studies.study import Study

_SHARE = 0.9  # of the free memory; the rest is for the server, the object store and the page cache
_EPSILON = 1e-9  # 1 / 0.1 is 10, whatever its last bits


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
        machine = self.machine
        text = f"{_several(self.count, 'worker')} of {_several(self.threads, 'thread')} on {_several(machine.cores, 'core')}"
        text += f", about {_gib(self.count * self.need.memory)} of {_gib(machine.memory)} free memory"
        if not machine.gpus:
            return text
        if not self.gpus:
            return f"{text}; on the CPU, {_several(len(machine.gpus), 'GPU')} not used"
        used = self.used_gpus
        places = " + ".join(str(sum(place == gpu for place in self.gpus)) for gpu in used)
        text += f"; {places} on {_several(len(used), 'GPU')}, {self.gpu_fraction:.3g} of a GPU each"
        return f"{text}, about {_gib(self.need.gpu)} of {_gib(min(map(self._room, used)))}"

    @property
    def warnings(self) -> list[str]:
        """The resources that the plan needs but the machine lacks, and GPUs that it leaves idle without being told to."""
        found = []
        if self.count * self.threads > self.machine.cores:
            found.append(
                f"{self.count} workers of {_several(self.threads, 'thread')} share "
                f"{_several(self.machine.cores, 'core')}, so they wait for each other"
            )
        if self.count * self.need.memory > self.machine.memory:
            most = fitting(_SHARE * self.machine.memory, self.need.memory) or 1
            found.append(f"{self.count} workers need more memory than is free: --workers {most} fits")
        small = [gpu.name for gpu in self.used_gpus if self.need.gpu > self._room(gpu)]
        if small:
            found.append(
                f"gpu-fraction = {self.gpu_fraction:.3g}: leaves a client less of the free memory of GPU "
                f"{', '.join(small)} than the {_gib(self.need.gpu)} that it may need"
            )
        if self.gpus and len(self.used_gpus) * max(1.0, self.gpu_fraction) < len(self.machine.gpus) and self.told:
            found.append(
                f"gpu-fraction = {self.gpu_fraction:.3g}: {len(self.used_gpus)} of {len(self.machine.gpus)} GPUs hold "
                "all workers, the others stay idle"
            )
        if self.machine.gpus and not self.gpus and not self.told:
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
        shares = (min(self.gpu_fraction, self._room(gpu) / gpu.memory) for gpu in self.gpus)
        return tuple(zip((gpu.name for gpu in self.gpus), shares, strict=True))

    def _room(self, gpu: Gpu) -> int:
        """A worker's part of a GPU's free memory."""
        return int(gpu.free / max(1, sum(place == gpu for place in self.gpus)))


def plan_workers(study: Study, machine: Machine | None = None) -> Workers:
    """Choose the number of workers and their GPUs, unless the command line sets them.

    By default each GPU takes as many workers as its free memory holds. The inline engine's are spread over the GPUs by
    what is free; Ray gives all its workers equal fractions, so that the fullest of the GPUs in use decides.

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
    asked = study.gpu_fraction
    if (asked or 0) > len(machine.gpus):
        raise ConfigError(f"gpu-fraction = {asked:g}: this machine has {len(machine.gpus)} GPUs")
    configs = [configured(config)[1] for config in study.runs.values()]
    need = largest_need(configs)
    threads = max((config.run.threads or machine.cores for config in configs), default=1)
    useful = len(configs) if study.engine == "inline" else max((c.stream.clients for c in configs), default=1)
    by_memory = fitting(_SHARE * machine.memory, need.memory) or 1
    count = study.workers or max(1, min(machine.cores // threads, by_memory, useful))
    if asked == 0 or not _compute_on_gpus(configs):
        return Workers(count, threads, 0.0, need, machine, told=True)
    places, fraction = _on_gpus(study, machine, need, count)
    if not places:
        return Workers(count, threads, 0.0, need, machine)
    count = study.workers or min(count, len(places))
    return Workers(count, threads, fraction, need, machine, places, told=asked is not None)


def _on_gpus(study: Study, machine: Machine, need: Need, count: int) -> tuple[tuple[Gpu, ...], float]:
    """The GPU of each worker and the fraction of it; no GPUs if none has room.

    As many workers as are asked for have a place; by default as many as fit.
    """
    asked, gpus = study.gpu_fraction, machine.gpus
    if asked and study.engine == "flower":
        return packed(gpus, count, asked), asked
    most = max(1, math.floor(1 / asked + _EPSILON)) if asked else 0
    room = {gpu: most or fitting(_SHARE * gpu.free, need.gpu) for gpu in gpus}
    count = study.workers or min(count, sum(room.values()))
    if not any(room.values()):
        return (), 0.0
    if study.engine == "inline":
        places = spread(room, count)
        return places, asked or 1 / max(map(places.count, places))
    # Ray's fractions are equal: leave out the fullest GPUs, one after the other, as long as more workers fit then.
    usable = sorted((gpu for gpu in gpus if room[gpu]), key=lambda gpu: room[gpu])
    fits = [min(count, room[gpu] * (len(usable) - start)) for start, gpu in enumerate(usable)]
    kept = usable[fits.index(max(fits)) :]
    used = [gpu for gpu in gpus if gpu in kept]
    fraction = 1 / math.ceil((study.workers or max(fits)) / len(used))
    return packed(used, study.workers or max(fits), fraction), fraction


def packed(gpus: Sequence[Gpu], count: int, fraction: float) -> tuple[Gpu, ...]:
    """The GPU of each of ``count`` workers as Ray places them: one GPU is filled before the next.

    If a worker asks for several GPUs, the first of them stands for all. Workers without a place do not start.
    """
    on_one, apart = max(1, math.floor(1 / fraction + _EPSILON)), max(1, math.ceil(fraction))
    whole = len(gpus) - len(gpus) % apart
    return tuple(gpu for gpu in gpus[:whole:apart] for _ in range(on_one))[:count]


def spread(room: Mapping[Gpu, int], count: int) -> tuple[Gpu, ...]:
    """The GPU of each of ``count`` workers: each in turn goes where the workers have the most free memory each.

    Parameters
    ----------
    room : mapping of Gpu to int
        How many workers each GPU takes; if there are more workers, they all go where there is any room.
    count : int
        Number of workers.
    """
    places: list[Gpu] = []
    open_to = [gpu for gpu, most in room.items() if most > 0]
    while open_to and len(places) < count:
        left = [gpu for gpu in open_to if places.count(gpu) < room[gpu]] or open_to
        places.append(max(left, key=lambda gpu: gpu.free / (places.count(gpu) + 1)))
    return tuple(places)


def _compute_on_gpus(configs: Sequence[Config]) -> bool:
    return any(config.run.device != "cpu" for config in configs)


def fitting(memory: float, each: int) -> int:
    """How many parts of a size a memory holds."""
    return int(memory // each)


def _several(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
