"""The two Flower apps as Flower loads them; what does their work is imported when they are first called.

A device answers questions without PyTorch, whose import would take most of the time.

In a simulation, Flower loads both apps in the process that then starts Ray. The client's app is only called in Ray's
workers, so Ray starts while the server's app imports PyTorch. On devices Flower calls an app as soon as it has loaded
it.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedkace_flwr.flower.internals import is_simulation_process
from fedkace_flwr.flower.lean_ray import make_ray_lean
from fedkace_flwr.flower.logs import join_flower_log


class _Client(ClientApp):
    """Passes messages on to the complete app, which its pickled copies need not contain."""

    def __call__(self, message: Message, context: Context) -> Message:
        return _app_for(message.metadata.message_type, _has_policy(context))(message, context)


def _has_policy(context: Context) -> bool:
    return bool(context.node_config.get("policy") or os.environ.get("FEDKACE_POLICY"))


client = _Client()
server = ServerApp()
join_flower_log()
if is_simulation_process():
    make_ray_lean()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run the complete app."""
    _server()(grid, context)


@contextmanager
def _for_good() -> Iterator[None]:
    """Import without looking for garbage, now and at the end of the process: modules stay until then.

    A device starts a process for each message, and this saves a third of the processor time that PyTorch costs it.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@cache
def _app_for(kind: str, has_policy: bool) -> ClientApp:
    with _for_good():
        from fedkace_flwr import queries

        if kind in queries.QUESTIONS and not has_policy:  # a policy is about the whole configuration
            return queries.app
        from fedkace_flwr import client_app

    return client_app.app


@cache
def _server() -> ServerApp:
    with _for_good():
        from fedkace_flwr import server_app

    return server_app.app
