"""Ray without what serves clusters and spectators, for the simulations of one machine.

``ray.init`` starts an autoscaler and waits for the dashboard's server, even if no dashboard is wanted, and has no
arguments for these. Without them, three starts of a simulation of one round took 11.1 to 11.5 seconds instead of 13.0 to
13.5 (in turn, on two cores, Ray 2.55); the median of the differences is 2.2 seconds.
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


def make_ray_lean() -> None:
    """Let a Ray that this process will start leave out what a simulation does not use.

    A Ray that is running, here or elsewhere (``RAY_ADDRESS``), is not affected.
    """
    from ray._private.node import Node

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in _UNUSED:
        if hasattr(Node, name):
            setattr(Node, name, lambda *_, **__: None)
