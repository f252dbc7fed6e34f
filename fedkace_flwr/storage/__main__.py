"""Command line, ``python -m fedkace_flwr.storage COMMAND``: earlier runs of a client, and keys of stored files."""

import argparse
import sys
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from fedkace_flwr.errors import ConfigError, StateError
from fedkace_flwr.storage import atomic, encryption
from fedkace_flwr.storage.earlier_runs import ANSWER, MODELS, STATE, EarlierRuns
from fedkace_flwr.storage.names import printable, token
from fedkace_flwr.storage.resealing import reseal

_SOME_FAILED, _USER_ERROR = 1, 2


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status: 1 if some files were left as they are, 2 if nothing was done."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "earlier":
            return _earlier(options.folder, options.take_back)
        if options.command == "rotate-key" and encryption.key(variable=encryption.FORMER) is None:
            raise ConfigError(f"{encryption.FORMER}: is not set; set it to the key that files have now")
        result = reseal(options.folders, migrate=options.command == "migrate")
    except (ConfigError, StateError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _USER_ERROR
    print(f"{result.done} files encrypted, {result.before} already were, {len(result.faults)} left as they are")
    if result.aside:
        print(f"{result.aside} damaged files that were set aside (*.corrupt) were not touched; delete them if the key is no longer secret")  # fmt: skip
    for fault in result.faults:
        print(f"error: {fault}", file=sys.stderr)
    return _SOME_FAILED if result.faults else 0


def _earlier(folder: Path, run: str | None) -> int:
    """List the runs of a client's folder; before, put an earlier one in the place of the present one."""
    earlier = EarlierRuns(folder)
    if run is not None:
        if earlier.place_of(run) not in earlier.places():
            raise StateError(f"{folder}: holds no earlier run {run!r:.100}; the command without --take-back lists them")
        lock = FileLock(folder / ".lock", mode=0o600)
        try:
            with lock.acquire(timeout=0):
                earlier.take_back(run)
        except Timeout as error:
            raise StateError(f"{folder}: the client is at work; stop its SuperNode first") from error
        except OSError as error:
            raise StateError(f"{folder}: cannot be written ({error.strerror or error})") from error
    present = {token(name) for kind in (STATE, MODELS) for name in earlier.runs(kind).values()}
    for name, place in [
        *((name, folder) for name in sorted(present)),
        *((each.name, each) for each in earlier.places()),
    ]:
        newest = {kind: atomic.numbered(place, kind)[:1] for kind in (STATE, MODELS, ANSWER)}
        rounds = ", ".join(f"{kind} of round {number}" for kind, numbers in newest.items() for number in numbers)
        when = max(path.stat().st_mtime for path in place.glob("*-*.npz"))
        print(f"{printable(name)}  {datetime.fromtimestamp(when):%Y-%m-%d %H:%M}  {rounds}  {printable(str(place))}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fedkace_flwr.storage", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    earlier = commands.add_parser("earlier", help="list the runs that a client has kept, and take an earlier one back")
    earlier.add_argument("folder", type=Path, metavar="FOLDER", help="a client's folder of state, or of models")
    earlier.add_argument("--take-back", metavar="RUN", help="put this run's files in the place of the present run's")
    rotate = commands.add_parser(
        "rotate-key",
        help=f"encrypt files with the key in {encryption.VARIABLE} that have the one in {encryption.FORMER}",
    )
    migrate = commands.add_parser(
        "migrate", help=f"encrypt plain files, and those of version 1, with the key in {encryption.VARIABLE}"
    )
    for command in (rotate, migrate):
        command.add_argument(
            "folders", type=Path, nargs="+", metavar="FOLDER", help="the state of clients or of runs, or a folder above"
        )
    return parser


if __name__ == "__main__":
    sys.exit(main())
