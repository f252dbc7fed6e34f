"""The folders of a run's files; server and clients derive them in the same way."""

import re
from collections.abc import Mapping
from pathlib import Path

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.keys import Scalar
from fedkace_flwr.storage.folders import EARLIER, absolute

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def run_folder(config: Config, run_id: int) -> Path:
    """Return the absolute path of the run's folder in ``results-dir``."""
    return absolute(config.run.results_dir, "results-dir") / (config.run.run_name or f"run-{run_id}")


def client_folder(config: Config, run_id: int, client: int, node_config: Mapping[str, Scalar]) -> Path:
    """Return a client's state folder.

    Its parent is the node's ``state-dir``, else the run's ``state-dir``, else ``clients`` in the run's folder. Its name
    is the node's ``client-name``, followed by the client's number if the node has a ``partition-id`` and hosts other
    clients as well; without a ``client-name`` it is ``client-<number>``. No key of the run changes the name.

    Raises
    ------
    ConfigError
        The ``client-name`` or the ``state-dir`` is not a valid folder, or the run has no client of that number.
    """
    if client < 0 or (client >= config.stream.clients and not config.data.arrives):
        raise ConfigError(f"client {client}: the run has clients 0 to {config.stream.clients - 1}")
    named = str(node_config.get("state-dir", "")) or config.run.state_dir
    root = absolute(named, "state-dir") if named else run_folder(config, run_id) / "clients"
    if root.name == EARLIER:
        raise ConfigError(f"state-dir = {named!r:.200}: must not end in {EARLIER!r}, where clients keep earlier runs")
    name = node_config.get("client-name", "")
    if name == "":
        return root / f"client-{client:03d}"
    if not isinstance(name, str) or not _NAME.fullmatch(name) or set(name) == {"."}:
        raise ConfigError(
            f"--node-config: client-name = {name!r:.100}: must be a string of 1 to 64 letters, digits, dots, "
            "underscores and hyphens, and not consist of dots only"
        )
    is_alone = config.data.arrives or node_config.get("partition-id", client) == client
    return root / (name if is_alone else f"{name}-{client:03d}")


def has_own_folder(node_config: Mapping[str, Scalar]) -> bool:
    """Whether a node names a folder for its clients' state or models, as a device does and a simulation does not."""
    return any(str(node_config.get(name, "")) for name in ("state-dir", "models-dir"))


def models_folder(
    config: Config, run_id: int, client: int, node_config: Mapping[str, Scalar]
) -> tuple[Path, int | None]:
    """Return the folder in which a client keeps its models for inference, and the group that may read it.

    By default it is the client's state folder, and no group may read it. A folder in the node's ``models-dir`` has the
    same name, and the group is that of ``models-dir``.

    Raises
    ------
    ConfigError
        The ``models-dir`` is not a folder.
    """
    state = client_folder(config, run_id, client, node_config)
    named = str(node_config.get("models-dir", ""))
    if not named:
        return state, None
    root = absolute(named, "models-dir")
    try:
        group = root.stat().st_gid
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"--node-config: models-dir = {root}: cannot be used ({reason}); must be a folder of the group that may "
            "read the models"
        ) from error
    return root / state.name, group
