"""Ray without what serves clusters and spectators, for the simulations of one machine.

``ray.init`` starts an autoscaler and waits for the dashboard's server, even if no dashboard is wanted, and has no
arguments for these. They take 2.4 to 2.9 and 1.9 seconds of processor time at each start (four starts on two cores,
Ray 2.55), while the run's own processes import what they need. Other hooks saved less than a second and are not here.
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
