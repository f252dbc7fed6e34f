"""Ray without what serves clusters and spectators, for the simulations of one machine.

``ray.init`` starts an autoscaler and waits for the dashboard's server, even if no dashboard is wanted, and has no
arguments for these. Without them, three starts of a simulation of one round took 11.1 to 11.5 seconds instead of 13.0 to
13.5 (in turn, on two cores, Ray 2.55); the median of the differences is 2.2 seconds.

Ray's node also ends if its two agents, which are Python programs, have not told their ports within 15 seconds, as on a
machine with more processes than cores (Ray's issue 65983). Here it knows the ports beforehand.
"""

import os
import socket
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray would record every task and collect metrics of its own processes, which nobody reads; with 200 clients the
    # memory of these processes grew from round to round.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # clients that request no GPU see none
    "RAY_agent_register_timeout_ms": "180000",
}
"""Environment variables with which Ray does less, or waits longer; those that are set otherwise stay."""

_UNUSED = ("start_monitor", "start_api_server")


def make_ray_lean() -> None:
    """Let a Ray that this process will start leave out what a simulation does not use.

    A Ray that is running, here or elsewhere (``RAY_ADDRESS``), is not affected.
    """
    from ray._private import services
    from ray._private.node import Node

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in _UNUSED:
        if hasattr(Node, name):
            setattr(Node, name, lambda *_, **__: None)
    if not hasattr(services.start_raylet, "__wrapped__"):
        services.start_raylet = _with_known_ports(services.start_raylet)


def _with_known_ports(start_raylet: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that starts Ray's node, so that the node need not wait for its agents."""
    from ray import _raylet
    from ray._private.utils import get_dashboard_dependency_error

    @wraps(start_raylet)
    def start(*arguments: Any, **named: Any) -> Any:
        told = signature(start_raylet).bind(*arguments, **named).arguments
        if get_dashboard_dependency_error() is not None and hasattr(_raylet, "persist_port"):
            # Without the extra ray[default] this agent has no port, and says so by -1.
            for service in ("METRICS_AGENT", "METRICS_EXPORT", "DASHBOARD_AGENT_LISTEN"):
                name = getattr(_raylet, f"{service}_PORT_NAME")
                _raylet.persist_port(told["session_dir"], told["node_id"], name, -1)
        with socket.socket() as free:
            free.bind(("", 0))
            named["runtime_env_agent_port"] = named.get("runtime_env_agent_port") or free.getsockname()[1]
        return start_raylet(*arguments, **named)

    return start
