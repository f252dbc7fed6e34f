"""Where a run keeps its files, worked out alike by server and clients."""

from collections.abc import Mapping
from pathlib import Path

from fedkace_flwr.config import Config, Scalar


def run_folder(config: Config, run_id: int) -> Path:
    """The run's folder below ``results-dir``, absolute."""
    return Path(config.run.results_dir).expanduser().resolve() / (config.run.run_name or f"run-{run_id}")


def client_folder(config: Config, run_id: int, client: int, node_config: Mapping[str, Scalar]) -> Path:
    """A client's state folder: the node's ``state-dir``, else the run's, else below the run's folder."""
    named = str(node_config.get("state-dir", "")) or config.run.state_dir
    root = Path(named).expanduser().resolve() if named else run_folder(config, run_id) / "clients"
    return root / f"client-{client:03d}"
