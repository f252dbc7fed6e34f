"""A run on Flower's simulation engine, in a process of its own: the apps and Ray, without a SuperLink.

``flwr run`` starts the same engine through a SuperLink, which several people can share, and its SuperExec. A runner has
its runs to itself, and is spared the seconds that these take to start, to find the run and to notice its end.

Run as ``python -m experiments.running.simulation``. The process makes its imports, which take seconds, and meanwhile
waits for one line of JSON: ``log``, the file for its output; ``environment``, variables to set; ``run``, the parameters
of :func:`run_simulation`. It leaves without a run if its input ends.
"""

import importlib
import json
import logging
import os
import secrets
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import psutil

from fedkace_flwr.flower.lean_ray import make_ray_lean
from fedkace_flwr.keys import Scalar

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid

CLUSTER = "RAY_ADDRESS"
"""The environment variable that names a Ray cluster to run on."""

_NEEDED = ("fedkace_flwr.server_app", "fedkace_flwr.apps", "flwr.simulation")
_IMPORTED_BY_WORKERS = "RAY_preload_python_modules"


class Imports(threading.Thread):
    """Imports what a simulation needs, while Ray starts."""

    def __init__(self) -> None:
        super().__init__(daemon=True)  # a process that gets no run need not wait for them
        self.start()

    def run(self) -> None:
        """Make the imports; a failure is left to those of :func:`run_simulation`."""
        with suppress(Exception):
            for name in _NEEDED:
                importlib.import_module(name)


def run_simulation(
    imports: Imports, config: Mapping[str, Scalar], supernodes: int, workers: int, gpu_fraction: float, gpus: int
) -> None:
    """Run a configuration to completion, and end this process.

    Parameters
    ----------
    imports : Imports
        The imports, begun.
    config : mapping
        Every key with its value.
    supernodes : int
        Number of virtual SuperNodes.
    workers : int
        Number of Ray workers, one CPU each; ignored on a cluster, whose CPUs set the number.
    gpu_fraction : float
        Fraction of a GPU for each worker.
    gpus : int
        Number of GPUs that the workers share; ignored on a cluster.

    Raises
    ------
    Exception
        What the server's app raises.
    """
    if CLUSTER not in os.environ:
        # On a cluster Flower connects, because workers on other machines need this process's search path.
        _start_ray(workers, gpus)
    imports.join()
    from flwr.serverapp import ServerApp

    from fedkace_flwr import apps, server_app
    from fedkace_flwr.flower.internals import simulate

    app = ServerApp()

    @app.main()
    def run_and_leave(grid: "Grid", context: "Context") -> None:
        server_app.app(grid=grid, context=context)
        # All is written. Flower's threads would wait a second for further messages, and Ray as long for its processes.
        _leave(0)

    backend: dict[str, dict[str, float]] = {
        "client_resources": {"num_cpus": 1, "num_gpus": gpu_fraction},
        "init_args": {"logging_level": logging.WARNING},
    }
    simulate(app, apps.client, secrets.randbits(62), config, supernodes, backend)


def _start_ray(workers: int, gpus: int) -> None:
    import ray

    make_ray_lean()
    # Ray starts a worker for each CPU at once; they import the client's app while this process imports the server's.
    os.environ.setdefault(_IMPORTED_BY_WORKERS, "fedkace_flwr.client_app")
    ray.init(
        num_cpus=workers, num_gpus=gpus, include_dashboard=False, logging_level=logging.WARNING, log_to_driver=True
    )


def _leave(status: int) -> NoReturn:
    """End this process and those that Ray has started for it; some of them would notice only after a minute."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            process.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _main() -> NoReturn:
    imports = Imports()
    importlib.import_module("ray")
    line = sys.stdin.readline()
    if not line:
        _leave(0)
    what = json.loads(line)
    os.environ.update(what["environment"])
    with Path(what["log"]).open("ab") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    try:
        run_simulation(imports, **what["run"])
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}")
    _leave(1)


if __name__ == "__main__":
    _main()
