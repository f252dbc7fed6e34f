"""Every part of Flower that this project uses although Flower does not declare it public, in one place.

Other modules import only Flower's public packages (``flwr.app``, ``flwr.clientapp``, ``flwr.serverapp`` and so on);
``tests/flower/test_internals.py`` holds the list and checks it. Because any minor release of Flower may change what
is used here, ``pyproject.toml`` admits only those that the tests pass with.

``clientapp.typing``
    Types of handlers and modifiers.
``compat.common.recorddict_compat``
    A client's update in the form that SecAgg+ masks.
``supercore.differential_privacy``
    The name of the clipping norm; the server's noise.
``common.secure_aggregation.secaggplus_constants``, ``server.workflow.secure_aggregation.secaggplus_workflow``
    The constants and the state of SecAgg+, whose stages are run one by one inside a round.
``server.compat.legacy_context``, ``server.workflow.constant``
    The context that those stages expect.
``supercore.run``, ``supercore.task_identity``
    What the inline engine's grid must tell Flower; the read-only id of a message.
``simulation.run_simulation``, ``supercore.constant``, ``supercore.telemetry``
    A run on Ray without a SuperLink.
``simulation.app``, and the class name ``InMemoryGrid``
    Telling whether a process or a grid belongs to a simulation.

Programs in ``deploy/``, which are no part of the package, use more of it. Two are started instead of Flower's own and
change it before it starts; each program says in its docstring what it changes or uses:

``deploy/superlink.py``
    ``supercore``, ``supercore.sql_mixin``, ``superlink.cli``, ``superlink.servicer.control``
``deploy/supernode.py``
    ``supercore.error``, ``supernode.cli``, ``supernode.fleet_http_client``
``deploy/register.py``
    ``cli.flower_config``, ``cli.utils``, ``proto.control_pb2``, ``supercore.primitives.asymmetric``
``deploy/run.py``
    ``cli.flower_config``, ``cli.utils``, ``proto.control_pb2``, ``supercore.control``
``deploy/sign-app.py``
    ``cli.build``, ``supercore.primitives.asymmetric_ed25519``

``experiments/soak/compressed/sitecustomize.py`` shortens waiting times in ``supernode`` and ``common.constant``, in the
processes of a soak alone.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM, add_gaussian_noise_inplace, compute_stdv
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

__all__ = [
    "KEY_CLIPPING_NORM",
    "MAIN_CONFIGS_RECORD",
    "MAIN_PARAMS_RECORD",
    "RECORD_KEY_CONFIGS",
    "ClientAppCallable",
    "Key",
    "LegacyContext",
    "Mod",
    "Run",
    "Stage",
    "WorkflowKey",
    "WorkflowState",
    "add_gaussian_noise_inplace",
    "compute_stdv",
    "fitres_to_recorddict",
    "identify_process",
    "is_simulation",
    "is_simulation_process",
    "number_message",
    "simulate",
]

_SERVER_NODE = 1
_APP = """\
[project]
name = "fedkace-flwr"
version = "0"
[tool.flwr.app]
publisher = "fedkace"
[tool.flwr.app.components]
serverapp = "fedkace_flwr.apps:server"
clientapp = "fedkace_flwr.apps:client"
"""


def is_simulation(grid: "Grid") -> bool:
    """Whether a grid is the one of Flower's simulation, whose messages stay on this machine."""
    return type(grid).__name__ == "InMemoryGrid"


def is_simulation_process() -> bool:
    """Whether this is the process that a SuperLink has started for a simulation."""
    return "flwr.simulation.app" in sys.modules


def identify_process(run: int, task: int) -> None:
    """Tell Flower which run this process serves; its ``Message`` reads the sender from here."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, _SERVER_NODE, task


def number_message(message: Any, number: str) -> None:
    """Give a message the id that Flower's own grids give it, which is read-only."""
    message.metadata.__dict__["_message_id"] = number


def simulate(
    server_app: "ServerApp",
    client_app: "ClientApp",
    run: int,
    config: Mapping[str, bool | int | float | str],
    supernodes: int,
    backend: Mapping[str, Mapping[str, float]],
) -> None:
    """Run two apps on Flower's simulation engine in this process, and wait for their end.

    This is what ``flwr run`` makes the SuperLink start. Flower's public ``run_simulation`` does the same, but passes no
    run configuration to the apps, and is to be removed.

    Parameters
    ----------
    server_app, client_app : ServerApp, ClientApp
        The apps.
    run : int
        The run's number.
    config : mapping
        The run configuration that both apps find in their context.
    supernodes : int
        Number of virtual SuperNodes.
    backend : mapping
        ``client_resources`` and ``init_args`` of the Ray backend; the latter are ignored if Ray is already running.

    Raises
    ------
    Exception
        What the server's app raises.
    """
    from flwr.app import Context, RecordDict
    from flwr.simulation.run_simulation import _run_simulation
    from flwr.supercore.constant import NOOP_FEDERATION_ID
    from flwr.supercore.telemetry import EventType

    described = replace(Run.create_empty(run), primary_task_id=1, federation_id=NOOP_FEDERATION_ID)
    identify_process(run, 1)
    # Clients read their configuration from the description of an app.
    with tempfile.TemporaryDirectory(prefix="fedkace-app-") as folder:
        values = "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in config.items())
        (Path(folder) / "pyproject.toml").write_text(f"{_APP}[tool.flwr.app.config]\n{values}", encoding="utf-8")
        _run_simulation(
            num_supernodes=supernodes,
            exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
            client_app=client_app,
            server_app=server_app,
            server_app_context=Context(run, _SERVER_NODE, {}, RecordDict(), dict(config)),
            backend_config=cast(Any, {part: dict(values) for part, values in backend.items()}),
            run=described,
            app_dir=folder,
            is_app=True,
        )
