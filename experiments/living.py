"""Commands for a run that goes on: how it goes, who takes part in it, its past models, and its end."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedkace_flwr.errors import ConfigError, ResultsError
from fedkace_flwr.experiments.results.reading import read_lines
from fedkace_flwr.results.orders import Orders
from fedkace_flwr.results.run_folder import is_run, read_json
from fedkace_flwr.results.status import MEMBERS, alarms, facts, table
from fedkace_flwr.storage.client_store import is_locked
from fedkace_flwr.storage.files import LARGEST_LOG, read_text
from fedkace_flwr.storage.names import printable
from fedkace_flwr.storage.past_models import PastModel, PastModels

_COLUMNS = ("seat", "name", "status", "joined", "last", "node", "note")
_NAMED = 20  # rounds in an error
_LOOK = 2.0  # seconds between two looks at a run that is watched
_TITLES = {"joined": "since round", "last": "last seen"}


def stop(run: Path, *, undo: bool = False) -> str:
    """Order a run to end after its present round, or take that back; say what will happen.

    Raises
    ------
    ConfigError
        The folder holds no run, or one that is finished.
    ResultsError
        It cannot be written.
    """
    orders = _orders(run)
    if not undo:
        _check_unfinished(run)
    with _written(run):
        if undo:
            orders.go_on()
            return f"{run}: may go on; start it again with the command that began it, or federation.sh start FOLDER run"
        orders.stop()
    ended = (run / "summary.json").exists()
    return f"{run}: has ended, and stays so until stop --undo" if ended else f"{run}: ends after its present round"


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


def show_status(run: Path, console: Console, *, watch: bool = False, as_json: bool = False) -> None:
    """Print how a run goes and what is known of each client; with ``watch`` again and again, until Ctrl-C.

    Raises
    ------
    ConfigError
        The folder holds no run.
    RunError
        A file of the run is damaged.
    """
    status = status_of(run)
    if as_json:
        print(json.dumps(status, indent=2))
        return
    if not watch:
        console.print(_shown(status))
        return
    with Live(_shown(status), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(_LOOK)
                live.update(_shown(status_of(run)), refresh=True)
        except KeyboardInterrupt:
            return


def status_of(run: Path) -> dict[str, Any]:
    """Read how a run goes, as its server wrote it last; of a run without such a file, what its records tell.

    Raises
    ------
    ConfigError
        The folder holds no run.
    ResultsError, RunError
        A file of the run is damaged.
    """
    _orders(run)
    status = _told(run) if (run / MEMBERS).exists() else {}
    if "waits_for" not in status:  # no seats, or written by an earlier version
        status = {**_from_records(run), **status}
    if (run / "summary.json").exists():
        status["waits_for"] = "nothing: the run has ended"
    else:
        with suppress(OSError):  # another user's run
            if not is_locked(run):
                status["waits_for"] = "its server, which is not running"
    return status


def _from_records(run: Path) -> dict[str, Any]:
    """What ``config.json`` and the last file of records tell."""
    path, config = run / "rounds.jsonl", read_json(run / "config.json")
    records = read_lines(path)
    raised = [alarm for record in records for alarm in record.get("alarms", [])]
    clients = max([config["clients"], *(len(record["client_accuracy"]) for record in records)])
    members = []
    for client in range(clients):
        own = [alarm["text"] for alarm in raised if alarm["client"] == client]
        trained = [record["round"] for record in records if _has_trained(client, record)]
        known = {"trained": trained[-1] if trained else None, "alarms": len(own)}
        for name, column in (("accuracy", "client_accuracy"), ("prequential_accuracy", "prequential_accuracy")):
            values = [record[column][client] for record in records if client < len(record.get(column, ()))]
            known[name] = next((value for value in reversed(values) if value is not None), None)
        members.append({"seat": client, "name": "", **known, "alarm": own[-1] if own else ""})
    return {
        "run": run.resolve().name,
        "method": config["method"],
        "version": read_json(run / "environment.json").get("fedkace_flwr"),
        "round": records[-1]["round"] if records else 0,
        "accuracy": records[-1]["accuracy"] if records else None,
        "alarms": raised[-10:],
        "members": members,
    }


def _has_trained(client: int, record: dict[str, Any]) -> bool:
    """Whether a client has trained in a round; who was asked is told unless all were who are not away."""
    away = [*record.get("away", ()), *record.get("sat_out", ())]
    failed = [each["client"] for each in record["failures"] if each["phase"] == "training"]
    asked = record.get("asked", range(len(record["client_accuracy"])))
    return client in asked and client not in away and client not in failed


def _shown(status: dict[str, Any]) -> Group:
    head = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    head.add_column(no_wrap=True)
    head.add_column(overflow="fold")
    for word, value in facts(status):
        head.add_row(Text(word, "dim"), Text(value))
    for line in alarms(status):
        head.add_row(Text("alarm", "red"), Text(line))
    columns, rows = table(status["members"], narrow=True)
    clients = Table(box=None, padding=(0, 1, 0, 0))
    for column in columns:
        words = column.is_text
        clients.add_column(
            column.short, justify="left" if words else "right", no_wrap=True, max_width=16 if words else None
        )
    for row in rows:
        clients.add_row(*map(Text, row))
    return Group(head, "", clients)


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
    _check_unfinished(run)
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


def _check_unfinished(run: Path) -> None:
    """Refuse a run that has ended by itself."""
    if (run / "summary.json").exists() and not read_json(run / "summary.json").get("stopped"):
        raise ConfigError(f"{run}: is finished; its rounds can only be gone on with, by resume = true and more rounds")


def _members(run: Path) -> list[dict[str, Any]]:
    if not (run / MEMBERS).exists():
        raise ConfigError(
            f"{run}: has no seats; only runs over inboxes or nodes with keys have, from their first round on"
        )
    return list(_told(run)["members"])


def _told(run: Path) -> dict[str, Any]:
    """What the server has written of a run and its seats."""
    told = read_json(run / MEMBERS)
    members = told.get("members")
    if not isinstance(members, list) or not all(
        isinstance(each, dict) and type(each.get("seat")) is int for each in members
    ):
        raise ConfigError(f"{run / MEMBERS}: lists no seats")
    return told
