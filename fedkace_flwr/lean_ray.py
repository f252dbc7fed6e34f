"""Ray without what serves clusters and spectators, for the simulations of one machine.

A simulation of a few rounds otherwise waits longer for Ray than for its clients: for the autoscaler and for the
dashboard's server, which starts even if no dashboard is wanted, and for workers that are started ahead of time, without
the environment that Flower then asks for, and never used. ``ray.init`` has no arguments for these.
"""

import os

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would record every task and collect metrics of its own processes, which nobody reads; with 200 clients the
    # memory of these processes grew from round to round.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # clients that request no GPU see none
}
"""Environment variables with which Ray does less; those that are set otherwise stay."""

_UNUSED = ("start_monitor", "start_api_server")


def make_ray_lean(*, prestart: bool) -> None:
    """Let a Ray that this process will start leave out what a simulation does not use.

    A Ray that is running, here or elsewhere (``RAY_ADDRESS``), is not affected.

    Parameters
    ----------
    prestart : bool
        Whether to start workers at once, for tasks without an environment of their own.
    """
    from ray._private.node import Node

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not prestart:
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    for name in _UNUSED:
        if hasattr(Node, name):
            setattr(Node, name, lambda *_, **__: None)
