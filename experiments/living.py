"""Commands for a run that goes on: who takes part in it, and its end."""

from pathlib import Path
from typing import Any

from rich.table import Table

from fedkace_flwr.errors import ConfigError, ResultsError
from fedkace_flwr.results.orders import Orders
from fedkace_flwr.results.run_folder import is_run, read_json
from fedkace_flwr.storage.names import printable

_COLUMNS = ("seat", "name", "status", "joined", "last", "node", "note")
_TITLES = {"joined": "since round", "last": "last seen"}


def stop(run: Path, *, undo: bool = False) -> str:
    """Order a run to end after its present round, or take that back; say what will happen.

    Raises
    ------
    ConfigError
        The folder holds no run.
    ResultsError
        It cannot be written.
    """
    orders = _orders(run)
    try:
        if undo:
            orders.go_on()
            return f"{run}: may go on; start it again with the command that began it"
        orders.stop()
    except OSError as error:
        raise ResultsError(f"{run}: cannot be written ({error.strerror}); run this as the user of the run") from error
    return f"{run}: ends after its present round"


def remove(run: Path, client: int) -> str:
    """Remove a client from a run for good; say what will happen.

    Raises
    ------
    ConfigError
        The folder holds no run, or the run no such client.
    ResultsError
        It cannot be written.
    """
    orders = _orders(run)
    known = [each["seat"] for each in _members(run)]
    if client not in known:
        raise ConfigError(f"--remove {client}: the run has clients {', '.join(map(str, known))}")
    try:
        orders.remove(client)
    except OSError as error:
        raise ResultsError(f"{run}: cannot be written ({error.strerror}); run this as the user of the run") from error
    return f"{run}: client {client} takes part no longer, from the next round on"


def members_table(run: Path) -> Table:
    """List the seats of a run, as they were after its last round, and what was ordered since.

    Raises
    ------
    ConfigError
        The folder holds no run, or one without seats.
    """
    removed = _orders(run).removed()
    table = Table(box=None)
    for column in _COLUMNS:
        table.add_column(_TITLES.get(column, column))
    for each in _members(run):
        told = {**each, "status": "removed"} if each["seat"] in removed else each
        table.add_row(*("" if told.get(column) is None else printable(str(told[column])) for column in _COLUMNS))
    return table


def _orders(run: Path) -> Orders:
    if not is_run(run):
        raise ConfigError(f"{run}: holds no run; name the run's folder, in results-dir")
    return Orders(run)


def _members(run: Path) -> list[dict[str, Any]]:
    if not (run / "members.json").exists():
        raise ConfigError(
            f"{run}: has no seats; only runs over inboxes or nodes with keys have, from their first round on"
        )
    members = read_json(run / "members.json").get("members")
    if not isinstance(members, list) or not all(
        isinstance(each, dict) and type(each.get("seat")) is int for each in members
    ):
        raise ConfigError(f"{run / 'members.json'}: lists no seats")
    return members
