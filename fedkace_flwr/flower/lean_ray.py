"""Ray without what serves clusters and spectators, and with patience, for the simulations of one machine.

``ray.init`` starts an autoscaler and waits for the dashboard's server, even if no dashboard is wanted, and has no
arguments for these. Without them, three starts of a simulation of one round took 11.1 to 11.5 seconds instead of 13.0 to
13.5 (in turn, on two cores, Ray 2.55); the median of the differences is 2.2 seconds.
"""

import os
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would record every task and collect metrics of its own processes, which nobody reads; with 200 clients the
    # memory of these processes grew from round to round.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # clients that request no GPU see none
}
"""Environment variables with which Ray does less; those that are set otherwise stay."""

_SECONDS = 180.0
_UNUSED = ("start_monitor", "start_api_server")


def make_ray_lean() -> None:
    """Let a Ray that this process will start leave out what a simulation does not use, and take its time to start.

    A Ray that is running, here or elsewhere (``RAY_ADDRESS``), is not affected.
    """
    from ray._private import services
    from ray._private.node import Node

    if not hasattr(services.get_node, "__wrapped__"):
        services.get_node = patient(services.get_node)

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in _UNUSED:
        if hasattr(Node, name):
            setattr(Node, name, lambda *_, **__: None)


def patient(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function by which Ray finds its own node, so that it waits for minutes until the node is there.

    ``ray.init`` itself gives up after 30 seconds, which a busy machine may need for the start.
    """

    @wraps(get_node)
    def waiting(*arguments: Any) -> Any:
        end = time.monotonic() + _SECONDS
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)

    return waiting
