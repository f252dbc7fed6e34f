"""Ray without what serves clusters and spectators, for the simulations of one machine.

A simulation of a few rounds otherwise waits longer for Ray than for its clients: for the autoscaler, for the
dashboard's server, which starts even if no dashboard is wanted, and for its agent on each machine; for workers that are
started ahead of time, without the environment that Flower then asks for, and never used; and for workers that start
twice, in order to set that environment. ``ray.init`` has no arguments for these.
"""

import importlib
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would record every task and collect metrics of its own processes, which nobody reads; with 200 clients the
    # memory of these processes grew from round to round.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # clients that request no GPU see none
    # Ray's processes look for each other for ten seconds, by default only once a second.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
}
"""Environment variables with which Ray does less; those that are set otherwise stay."""

PRELOADED = "RAY_preload_python_modules"
"""The environment variable that lists the modules that Ray's workers import while they start."""

_WORKER = "fedkace_flwr.flower.ray_worker"
_CLUSTER = "RAY_ADDRESS"
_PATH = "PYTHONPATH"
_REGISTERS_SECONDS = 30
_POLL_SECONDS = 0.02
_UNUSED = ("start_monitor", "start_api_server")


def make_ray_lean(*, prestart: bool) -> None:
    """Let a Ray that this process will start leave out what a simulation does not use.

    A Ray that is running, here or elsewhere (``RAY_ADDRESS``), is not affected.

    Parameters
    ----------
    prestart : bool
        Whether to start a worker for each CPU at once, which then also imports the client's app. Otherwise, workers
        start when they are needed.
    """
    import ray
    from ray._private import services, utils
    from ray._private.node import Node

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault(PRELOADED, f"{_WORKER},fedkace_flwr.client_app" if prestart else _WORKER)
    if not prestart:
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    for name in _UNUSED:
        if hasattr(Node, name):
            setattr(Node, name, lambda *_, **__: None)
    if hasattr(utils, "get_dashboard_dependency_error"):
        # Without its optional packages, Ray starts a smaller agent.
        utils.get_dashboard_dependency_error = _no_dashboard
    if _ours(ray.init):
        return
    ray.init = _inheriting(ray.init)
    services.get_node = _once_registered(services.get_node)


def _ours(function: Callable[..., Any]) -> bool:
    return function.__module__ == __name__


def _no_dashboard() -> ImportError:
    return ImportError("a simulation serves no dashboard")


def _inheriting(init: Callable[..., Any]) -> Callable[..., Any]:
    """Let workers inherit the search path from Ray where Flower asks Ray to set it for them.

    Ray sets an environment variable by starting a first Python process that imports Ray, sets it, and starts the
    worker. A Ray that this process starts has the variable already, and passes it on.
    """

    def inheriting(*args: Any, runtime_env: Mapping[str, Any] | None = None, **options: Any) -> Any:
        inherited = runtime_env == {"env_vars": {_PATH: os.environ.get(_PATH)}}
        if inherited and _CLUSTER not in os.environ and not options.get("address"):
            return init(*args, **options)
        return init(*args, runtime_env=runtime_env, **options)

    return inheriting


def _once_registered(get_node: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    """Let ``ray.init`` look its node up when that has registered; if it finds none, Ray looks again after a second."""
    services: Any = importlib.import_module("ray._private.services")
    state: Any = importlib.import_module("ray._private.state")

    def once_registered(address: str, node: str) -> Any:
        nodes = state.GlobalState()
        nodes._initialize_global_state(services._get_gcs_client_options(address))
        end = time.monotonic() + _REGISTERS_SECONDS
        while time.monotonic() < end and all(each["NodeID"] != node for each in nodes.node_table()):
            time.sleep(_POLL_SECONDS)
        return get_node(address, node)

    return once_registered
