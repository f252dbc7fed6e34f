"""Where a run keeps its files, worked out alike by server and clients."""

import re
from collections.abc import Mapping
from pathlib import Path

from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError
from fedkace_flwr.keys import Scalar

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def run_folder(config: Config, run_id: int) -> Path:
    """The run's folder below ``results-dir``, absolute."""
    return Path(config.run.results_dir).expanduser().resolve() / (config.run.run_name or f"run-{run_id}")


def client_folder(config: Config, run_id: int, client: int, node_config: Mapping[str, Scalar]) -> Path:
    """A client's state folder: the node's ``state-dir``, else the run's, else below the run's folder.

    In it the client has the node's ``client-name`` if there is one, with its number behind it where several clients
    live at a node; else ``client-<number>``.

    Raises
    ------
    ConfigError
        The name is no name for a folder.
    """
    named = str(node_config.get("state-dir", "")) or config.run.state_dir
    root = Path(named).expanduser().resolve() if named else run_folder(config, run_id) / "clients"
    name = node_config.get("client-name", "")
    if name == "":
        return root / f"client-{client:03d}"
    if not isinstance(name, str) or not _NAME.fullmatch(name) or set(name) == {"."}:
        raise ConfigError(
            f"--node-config: client-name = {name!r:.100}: must be a text of 1 to 64 letters, digits, dots, underscores "
            "and hyphens, and not of dots alone"
        )
    partitions = node_config.get("num-partitions")
    alone = isinstance(partitions, int) and config.stream.clients <= partitions
    return root / (name if alone else f"{name}-{client:03d}")
