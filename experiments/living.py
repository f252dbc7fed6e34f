"""Commands for a run that goes on: who takes part in it, its past models, and its end."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from fedkace_flwr.errors import ConfigError, ResultsError
from fedkace_flwr.results.orders import Orders
from fedkace_flwr.results.run_folder import is_run, read_json
from fedkace_flwr.storage.files import LARGEST_LOG, read_text
from fedkace_flwr.storage.names import printable
from fedkace_flwr.storage.past_models import PastModel, PastModels

_COLUMNS = ("seat", "name", "status", "joined", "last", "node", "note")
_NAMED = 20  # rounds in an error
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
    with _written(run):
        if undo:
            orders.go_on()
            return f"{run}: may go on; start it again with the command that began it"
        orders.stop()
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
    with _written(run):
        orders.remove(client)
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


def roll_back(run: Path, to: int) -> str:
    """Order a run to go back to the model of an earlier round; say what will happen.

    Raises
    ------
    ConfigError
        The folder holds no run, or one that is finished or keeps no model of that round.
    ResultsError
        It cannot be written.
    """
    orders, known = _orders(run), [model.round for model in _past_models(run)]
    if (run / "summary.json").exists() and not read_json(run / "summary.json").get("stopped"):
        raise ConfigError(f"{run}: is finished; its rounds can only be gone on with, by resume = true and more rounds")
    if to not in known:
        shown = [*map(str, known[:_NAMED]), *(["..."] if len(known) > _NAMED else [])]
        raise ConfigError(f"--to {to}: the run keeps the models of rounds {', '.join(shown)}")
    with _written(run):
        orders.roll_back(to)
    return f"{run}: its next round goes back to the model of round {to}, and begins at once if the run waits"


def past_models_table(run: Path) -> Table:
    """List the past models of a run, the newest first.

    Raises
    ------
    ConfigError
        The folder holds no run, or one that keeps none.
    """
    _orders(run)
    models, records = _past_models(run), _records(run)
    table = Table(box=None)
    for column in ("round", "written", "accuracy", "note"):
        table.add_column(column)
    for model in models:
        record = records.get(model.round, {})
        accuracy, back = record.get("accuracy"), record.get("rolled_back_to")
        held = isinstance(gate := record.get("gate"), dict) and gate.get("held")
        table.add_row(
            str(model.round),
            datetime.fromtimestamp(model.written).astimezone().isoformat(timespec="seconds"),
            f"{100 * accuracy:.1f} %" if isinstance(accuracy, int | float) else "",
            "held" if held else f"back to {back}" if isinstance(back, int) else "",
        )
    return table


def _past_models(run: Path) -> list[PastModel]:
    if not (found := PastModels(run / "server").found()):
        raise ConfigError(
            f"{run}: keeps no past models; runs over inboxes or with gate = 'hold' do, if past-models allows it"
        )
    return found


def _records(run: Path) -> dict[int, dict[str, Any]]:
    """The records of a run's rounds, as far as they can be read."""
    found: dict[int, dict[str, Any]] = {}
    for name in ("rounds-earlier.jsonl", "rounds.jsonl"):
        with suppress(OSError, ValueError):
            for line in read_text(run / name, LARGEST_LOG).splitlines():
                record = json.loads(line)
                found[int(record["round"])] = record
    return found


@contextmanager
def _written(run: Path) -> Iterator[None]:
    """Say in one line why an order cannot be written."""
    try:
        yield
    except OSError as error:
        raise ResultsError(f"{run}: cannot be written ({error.strerror}); run this as the user of the run") from error


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
