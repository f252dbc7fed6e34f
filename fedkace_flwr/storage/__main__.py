"""Command line, ``python -m fedkace_flwr.storage earlier``: the earlier runs of a client."""

import argparse
import sys
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from fedkace_flwr.errors import ConfigError, StateError
from fedkace_flwr.storage import atomic
from fedkace_flwr.storage.atomic import ANSWER, MODELS, STATE
from fedkace_flwr.storage.earlier_runs import STATES, EarlierRuns
from fedkace_flwr.storage.names import printable, token

_USER_ERROR = 2


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status: 2 if nothing was done."""
    options = _parser().parse_args(arguments)
    try:
        _earlier(options.folder, options.take_back)
    except (ConfigError, StateError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _USER_ERROR
    return 0


def _earlier(folder: Path, run: str | None) -> None:
    """List the runs of a client's folder; before, put an earlier one in the place of the present one."""
    earlier = EarlierRuns(folder)
    if run is not None:
        if earlier.place_of(run) not in earlier.places():
            raise StateError(f"{folder}: holds no earlier run {run!r:.100}; the command without --take-back lists them")
        lock = FileLock(folder / ".lock", mode=0o600)
        try:
            with lock.acquire(timeout=0):
                for kinds in (STATES, (MODELS,)):
                    earlier.settle(run, kinds)
        except Timeout as error:
            raise StateError(f"{folder}: the client is at work; stop its SuperNode first") from error
        except OSError as error:
            raise StateError(f"{folder}: cannot be written ({error.strerror or error})") from error
    present = {token(name) for kind in (STATE, MODELS) for name in earlier.runs(kind).values()}
    found = [*((name, folder) for name in sorted(present)), *((each.name, each) for each in earlier.places())]
    if not found:
        raise StateError(f"{folder}: holds no run of a client; must be a client's own folder, such as STATE/NAME")
    for name, place in found:
        newest = {kind: atomic.numbered(place, kind)[:1] for kind in (STATE, MODELS, ANSWER)}
        rounds = ", ".join(f"{kind} of round {number}" for kind, numbers in newest.items() for number in numbers)
        when = max(path.stat().st_mtime for path in place.glob("*-*"))
        print(f"{printable(name)}  {datetime.fromtimestamp(when):%Y-%m-%d %H:%M}  {rounds}  {printable(str(place))}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fedkace_flwr.storage", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    earlier = commands.add_parser("earlier", help="list the runs that a client has kept, and take an earlier one back")
    earlier.add_argument("folder", type=Path, metavar="FOLDER", help="a client's folder of state, or of models")
    earlier.add_argument("--take-back", metavar="RUN", help="put this run's files in the place of the present run's")
    return parser


if __name__ == "__main__":
    sys.exit(main())
