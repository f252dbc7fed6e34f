"""Two engines that run a configuration in a process of its own: Flower's simulation on Ray, and the inline engine."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from fedkace_flwr.compute.devices import GPU_SHARE
from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.experiments.running.machine import VISIBLE
from fedkace_flwr.experiments.running.processes import CHECKOUT
from fedkace_flwr.experiments.running.simulation import CLUSTER
from fedkace_flwr.experiments.running.waiting import Simulation, last_error

_STOP_SECONDS = 20
_ANSWER_SECONDS = 5
_LONGEST_PLACE = 107 - len("/ray/session_2026-11-27_21-00-00_123456_4194304/sockets/plasma_store")
_LEAST_FREE = 64 * 2**20
_BLAS_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def check_ray() -> None:
    """Check that Ray can start on this machine, or that the cluster that ``RAY_ADDRESS`` names answers.

    Ray itself waits for minutes before it says what is wrong, or does not say it.

    Raises
    ------
    RunError
        It cannot.
    """
    inline = "or run with --engine inline, which needs no Ray"
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
    obeyed = ("RAY_TMPDIR", "TMPDIR") if sys.platform.startswith("linux") else ("RAY_TMPDIR",)
    variable = next((name for name in obeyed if name in os.environ), "TMPDIR")
    place = (os.environ.get(variable) if variable in obeyed else None) or "/tmp"
    if len(os.fsencode(place)) > _LONGEST_PLACE:
        raise RunError(
            f"{variable} = {place}: is too long for the sockets that Ray makes there, at most {_LONGEST_PLACE} bytes; "
            f"set RAY_TMPDIR=/tmp, {inline}"
        )
    there = next(path for path in (Path(place), *Path(place).absolute().parents) if path.exists())  # Ray makes the rest
    try:
        if shutil.disk_usage(there).free < _LEAST_FREE:
            raise RunError(
                f"{variable} = {place}: less than {_LEAST_FREE >> 20} MiB are free there; set RAY_TMPDIR, {inline}"
            )
    except OSError as error:
        raise RunError(f"{variable} = {place}: cannot be used ({error.strerror}); set RAY_TMPDIR, {inline}") from error
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), _ANSWER_SECONDS).close()
    except OSError as error:
        raise RunError(
            f"127.0.0.1: does not answer ({error}), and Ray needs it; switch the loopback on (ip link set lo up), {inline}"
        ) from error


class Job(Protocol):
    """A run that has been started."""

    def running(self) -> bool:
        """Whether it is still running."""

    def check(self) -> None:
        """Wait for its end; raise RunError with the app's error message if it failed."""

    def stop(self) -> None:
        """Stop it now."""


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
    environment : mapping, optional
        Environment variables of the processes; by default those of this process.
    """

    def __init__(
        self, places: Sequence[tuple[str, float]] | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self._environment = dict(environment or os.environ)
        self._places = None if places is None else list(places)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def start(self, config: Config, log: Path) -> Job:
        """Start a run whose output goes to ``log``, on a GPU that no other run has taken."""
        if self._places is None:
            return _InlineJob(config, log, self._environment, lambda: None)
        place = self._places.pop(0) if self._places else None
        name, share = place or ("", 0.0)
        given = {VISIBLE: name, GPU_SHARE: repr(share)}
        left = self._places
        return _InlineJob(config, log, self._environment | given, lambda: left.append(place) if place else None)


class _InlineJob:
    def __init__(self, config: Config, log: Path, environment: Mapping[str, str], leave: Callable[[], object]) -> None:
        self._log = log
        self._leave: Callable[[], object] | None = leave
        with log.open("w") as output:
            command = [sys.executable, "-m", "fedkace_flwr.experiments.running.inline", json.dumps(config.flat())]
            if config.run.threads:  # NumPy reads them as it is imported; by default it takes a thread for each core
                environment = {**dict.fromkeys(_BLAS_THREADS, str(config.run.threads)), **environment}
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, cwd=CHECKOUT, env=environment
            )

    def running(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None:
        if self._process.wait() != 0:
            raise RunError(f"{last_error(self._log)} (log: {self._log})")

    def stop(self) -> None:
        _end(self._process)
        if self._leave is not None:
            self._leave()
            self._leave = None


class FlowerEngine:
    """Flower's simulation: one process per run, with the clients on workers of a Ray that this process starts.

    If the environment names a Ray cluster (``RAY_ADDRESS``), the clients run there.

    Parameters
    ----------
    workers : int
        Number of clients trained in parallel, one CPU each; ignored on a cluster, whose CPUs set the number.
    gpu_fraction : float
        Fraction of a GPU for each client.
    environment : mapping, optional
        Environment variables of the processes; by default those of this process.
    place : Path, optional
        Where to create temporary folders; by default in the system's.
    waiting : Simulation, optional
        A process that waits for the first run.
    visible : sequence of str, optional
        The GPUs that Ray shares out; empty: no process sees one. None: GPUs are left as they are.

    Attributes
    ----------
    environment : dict of str to str
        Environment variables of the runs.
    """

    def __init__(
        self,
        workers: int,
        gpu_fraction: float,
        environment: Mapping[str, str] | None = None,
        place: Path | None = None,
        waiting: Simulation | None = None,
        visible: Sequence[str] | None = None,
    ) -> None:
        self._resources = {"workers": workers, "gpu_fraction": gpu_fraction, "gpus": len(visible or ())}
        self.environment = dict(environment or os.environ)
        if visible is not None:
            self.environment[VISIBLE] = ",".join(visible)
        self._place = place
        self._waiting = waiting
        self._started: list[Simulation] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for job in self._started:
            job.stop()

    def start(self, config: Config, log: Path) -> Job:
        """Start a run whose output goes to ``log``."""
        job = self._waiting or Simulation(self.environment, self._place)
        self._waiting = None
        self._started.append(job)
        job.begin(config, log, self._resources, self.environment)
        return job


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
