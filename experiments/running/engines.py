"""Two engines that run a configuration in a process of its own: Flower's simulation on Ray, and the inline engine."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from experiments.running.guard import end_all_of
from experiments.running.machine import VISIBLE
from experiments.running.processes import CHECKOUT, flower_environment, staged_app
from fedkace_flwr.compute.devices import GPU_SHARE
from fedkace_flwr.config import Config
from fedkace_flwr.errors import RunError
from fedkace_flwr.keys import Scalar

_START_SECONDS = 60
_STOP_SECONDS = 20
_LINK = "study"
CLUSTER = "RAY_ADDRESS"
"""The environment variable that names a Ray cluster to run on."""


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
            command = [sys.executable, "-m", "experiments.running.inline", json.dumps(config.flat())]
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
    """Flower's simulation: a private SuperLink, and ``flwr run`` for each run.

    The SuperLink listens on a free loopback port, keeps its files in a temporary folder, and ends with this object,
    so neither another checkout nor the user's Flower settings affect it. If the environment names a Ray cluster
    (``RAY_ADDRESS``), the clients run there.

    Parameters
    ----------
    workers : int
        Number of clients trained in parallel, one CPU each; ignored on a cluster, whose CPUs set the number.
    gpu_fraction : float
        Fraction of a GPU for each client.
    environment : mapping, optional
        Environment variables of the processes; by default those of this process.
    home : Path, optional
        Where to create the SuperLink's folder; by default in the system's temporary folder.
    visible : sequence of str, optional
        The GPUs that Ray shares out; empty: no process sees one. None: GPUs are left as they are.

    Raises
    ------
    RunError
        The SuperLink does not start.
    """

    def __init__(
        self,
        workers: int,
        gpu_fraction: float,
        environment: Mapping[str, str] | None = None,
        home: Path | None = None,
        visible: Sequence[str] | None = None,
    ) -> None:
        self._visible = visible
        self._workers = workers
        self._gpu_fraction = gpu_fraction
        self._outside = dict(environment or os.environ)
        self._place = home
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedkace-flower-", dir=self._place)))
            # Flower and Ray detach the processes that they start for this SuperLink, but all of them inherit its home.
            stack.callback(end_all_of, "FLWR_HOME", str(home))
            port, control = _free_port(), _free_port()
            self._environment = _environment(self._outside, home, self._visible)
            settings = f'[superlink]\ndefault = "{_LINK}"\n\n[superlink.{_LINK}]\n'
            settings += f'address = "127.0.0.1:{port}"\ninsecure = true\n'
            (home / "config.toml").write_text(settings)
            self._app = staged_app(home / "app")
            self._link_log = home / "superlink.log"
            command = [_tool("flower-superlink"), "--insecure", "--simulation", "--isolation", "subprocess"]
            command += ["--host", "127.0.0.1", "--port", str(port)]
            command += ["--control-api-address", f"127.0.0.1:{control}"]
            output = stack.enter_context(self._link_log.open("w"))
            link = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, cwd=CHECKOUT, env=self._environment
            )
            stack.callback(_end, link)
            self._wait_until_up(link, port)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def start(self, config: Config, log: Path) -> Job:
        """Submit a run whose output goes to ``log``."""
        federation = {"num-supernodes": config.stream.clients, **self.resources()}
        return _FlowerJob(self._app, config, federation, log, self._environment)

    def resources(self) -> dict[str, float]:
        """What Flower's simulation is told of the workers: CPUs, and GPUs if they share any."""
        found = {"client-resources-num-cpus": 1, "client-resources-num-gpus": self._gpu_fraction}
        if CLUSTER not in self._outside:  # the size of an existing cluster is fixed
            found["init-args-num-cpus"] = self._workers
            if self._visible:
                found["init-args-num-gpus"] = len(self._visible)
        return found

    def _wait_until_up(self, link: "subprocess.Popen[bytes]", port: int) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and link.poll() is None:
            try:
                # The SuperLink runs on this machine, so any proxy in the environment is ignored.
                opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
                with opener.open(f"http://127.0.0.1:{port}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.2)
        raise RunError(f"Flower's SuperLink did not start: {last_error(self._link_log)}")


class _FlowerJob:
    def __init__(
        self, app: Path, config: Config, federation: Mapping[str, float], log: Path, environment: Mapping[str, str]
    ) -> None:
        self._summary = Path(config.run.results_dir) / config.run.run_name / "summary.json"
        self._log = log
        self._environment = environment
        settings = log.with_name("run-config.toml")
        settings.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in config.flat().items()))
        command = [_tool("flwr"), "run", str(app), _LINK, "--stream", "--run-config", str(settings)]
        command += ["--federation-config", " ".join(f"{key}={value}" for key, value in federation.items())]
        with log.open("w") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=dict(environment))

    def running(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None:
        self._process.wait()
        if self._summary.exists():
            return
        raise RunError(f"{self._details() or last_error(self._log)} (log: {self._log})")

    def stop(self) -> None:
        number = self._number()
        if number and self.running():
            command = [_tool("flwr"), "stop", number, _LINK]
            subprocess.run(command, env=dict(self._environment), capture_output=True, timeout=60, check=False)
        _end(self._process)

    def _number(self) -> str | None:
        found = re.search(r"Successfully started run (\d+)", self._log.read_text(errors="replace"))
        return found[1] if found else None

    def _details(self) -> str | None:
        """Return the app's error as Flower reports it; ``flwr run`` exits with 0 even if the app fails."""
        number = self._number()
        if number is None:
            return None
        command = [_tool("flwr"), "list", _LINK, "--run-id", number, "--format", "json"]
        listed = subprocess.run(command, env=dict(self._environment), capture_output=True, text=True, check=False)
        try:
            run: dict[str, Any] = json.loads(listed.stdout)["runs"][0]
        except (json.JSONDecodeError, KeyError, IndexError):
            return None
        return str(run["status-details"]).removeprefix("Simulation failed with exception: ")


def _environment(outside: Mapping[str, str], home: Path, visible: Sequence[str] | None) -> dict[str, str]:
    return {
        **flower_environment(home, outside),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray would record every task and collect metrics of its own processes, which nobody reads; with 200 clients the
        # memory of these processes grew from round to round.
        "RAY_task_events_report_interval_ms": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # clients that request no GPU see none
        **({} if visible is None else {VISIBLE: ",".join(visible)}),
    }


def _tool(name: str) -> str:
    """Find a command of the environment that this program runs in, whether it is activated or not."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RunError(f"{name} is not installed; run `make setup`, or use --engine inline")
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _toml(value: Scalar) -> str:
    return json.dumps(value)


def last_error(log: Path) -> str:
    """The last line of a log that names an error, or else its last line; frames of Flower's messages do not count."""
    text = log.read_text(errors="replace").splitlines()
    lines = [line.strip("│ \t") for line in text if not line.lstrip().startswith(("╭", "╰"))]
    lines = [line for line in lines if line]
    named = [line for line in lines if "Error" in line]
    return (named or lines or ["it left no output"])[-1]


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
