"""Two engines that run a configuration in a process of its own: Flower's simulation on Ray, and the inline engine."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from fedkace_flwr.compute.devices import GPU_SHARE
from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.experiments.running.jobs import Job
from fedkace_flwr.experiments.running.simulation import CLUSTER
from fedkace_flwr.experiments.running.workers import VISIBLE

_ANSWER_SECONDS = 5
_LONGEST_PLACE = 107 - len("/ray/session_2026-11-27_21-00-00_123456_4194304/sockets/plasma_store")
_BLAS_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def check_ray() -> None:
    """Check that Ray can start on this machine, or that the cluster that ``RAY_ADDRESS`` names answers.

    Ray itself waits for minutes before it says what is wrong, or does not say it.

    Raises
    ------
    RunError
        It cannot.
    """
    if address := os.environ.get(CLUSTER):
        host, _, port = address.rpartition("://")[2].rpartition(":")
        if not port.isdecimal():
            return  # "auto", for example, which Ray looks up
        try:
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise RunError(
                f"{CLUSTER} = {address!r:.200}: no Ray cluster answers ({error}); start it, or unset {CLUSTER} to use "
                "this machine alone"
            ) from error
        return
    inline = "or run with --engine inline, which needs no Ray"
    variable = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
    if len(os.fsencode(os.environ.get(variable, ""))) > _LONGEST_PLACE:
        raise RunError(
            f"{variable} = {os.environ[variable]}: is too long for the sockets that Ray makes there, at most "
            f"{_LONGEST_PLACE} bytes; set RAY_TMPDIR=/tmp, {inline}"
        )
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), _ANSWER_SECONDS).close()
    except OSError as error:
        raise RunError(
            f"127.0.0.1: does not answer ({error}), and Ray needs it; switch the loopback on (ip link set lo up), {inline}"
        ) from error


class Engine(Protocol):
    """Starts runs."""

    def start(self, config: Config, log: Path) -> Job:
        """Start a run whose output goes to ``log``."""


class InlineEngine:
    """One process per run, with the clients one after another; needs neither Ray nor a SuperLink.

    Parameters
    ----------
    places : sequence of (str, float), optional
        For each run at a time the GPU that it sees, and its share of that GPU's memory; empty: the runs see no GPU.
        None: GPUs are left as they are.
    """

    def __init__(self, places: Sequence[tuple[str, float]] | None = None) -> None:
        self._places = None if places is None else list(places)

    def start(self, config: Config, log: Path) -> Job:
        """Start a run whose output goes to ``log``, on a GPU that no other run has taken."""
        given, taken = dict[str, str](), list[tuple[str, float]]()
        if self._places is not None:
            taken = [self._places.pop(0)] if self._places else []
            name, share = taken[0] if taken else ("", 0.0)
            given |= {VISIBLE: name, GPU_SHARE: repr(share)}
        if config.run.threads:  # NumPy reads them as it is imported; by default it takes a thread for each core
            given |= {name: str(config.run.threads) for name in _BLAS_THREADS if name not in os.environ}
        job = Job("inline", given)
        job.begin(config.flat(), log, ended=lambda: self._places.extend(taken) if self._places is not None else None)
        return job


class FlowerEngine:
    """Flower's simulation: one process per run, with the clients on workers of a Ray that this process starts.

    If the environment names a Ray cluster (``RAY_ADDRESS``), the clients run there.

    Parameters
    ----------
    workers : int
        Number of clients trained in parallel, one CPU each; ignored on a cluster, whose CPUs set the number.
    gpu_fraction : float
        Fraction of a GPU for each client.
    waiting : Job, optional
        A process that waits for the first run.
    visible : sequence of str, optional
        The GPUs that Ray shares out; empty: no process sees one. None: GPUs are left as they are.
    """

    def __init__(
        self, workers: int, gpu_fraction: float, waiting: Job | None = None, visible: Sequence[str] | None = None
    ) -> None:
        self._resources = {"workers": workers, "gpu_fraction": gpu_fraction, "gpus": len(visible or ())}
        self.environment = {} if visible is None else {VISIBLE: ",".join(visible)}
        self._waiting = waiting

    def start(self, config: Config, log: Path) -> Job:
        """Start a run whose output goes to ``log``."""
        job, self._waiting = self._waiting or Job("simulation"), None
        run = {"config": config.flat(), "supernodes": config.stream.clients, **self._resources}
        job.begin(run, log, self.environment)
        return job
