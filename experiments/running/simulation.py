"""A run on Flower's simulation engine, in a process of its own: the apps and Ray, without a SuperLink.

``flwr run`` starts the same engine through a SuperLink, which several people can share, and its SuperExec. A runner has
its runs to itself, and is spared the seconds that these take to start, to find the run and to notice its end.

Run as a :class:`fedkace_flwr.experiments.running.jobs.Job`. The process makes its imports, which take seconds, before it is told the
parameters of :func:`run_simulation`.
"""

import importlib
import logging
import os
import secrets
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from fedkace_flwr.experiments.running.jobs import Orders, leave
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
    workers, gpus : int
        Number of Ray workers, one CPU each, and of the GPUs that they share; ignored on a cluster, which has its own.
    gpu_fraction : float
        Fraction of a GPU for each worker.
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
        leave(0)

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


def main() -> NoReturn:
    """Run what the runner orders."""
    orders, imports = Orders(), Imports()
    importlib.import_module("ray")
    try:
        run_simulation(imports, **orders.wait())
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}")
    leave(1)


if __name__ == "__main__":
    main()
