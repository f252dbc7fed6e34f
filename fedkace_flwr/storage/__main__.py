"""Command line, ``python -m fedkace_flwr.storage COMMAND``: change the key of stored files, or encrypt plain ones."""

import argparse
import sys
from pathlib import Path

from fedkace_flwr.errors import ConfigError
from fedkace_flwr.storage import encryption
from fedkace_flwr.storage.resealing import reseal

_SOME_FAILED, _USER_ERROR = 1, 2


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status: 1 if some files were left as they are, 2 if nothing was done."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "rotate-key" and encryption.key(variable=encryption.FORMER) is None:
            raise ConfigError(f"{encryption.FORMER}: is not set; set it to the key that files have now")
        result = reseal(options.folders, migrate=options.command == "migrate")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return _USER_ERROR
    print(f"{result.done} files encrypted, {result.before} already were, {len(result.faults)} left as they are")
    if result.aside:
        print(f"{result.aside} damaged files that were set aside (*.corrupt) were not touched; delete them if the key is no longer secret")  # fmt: skip
    for fault in result.faults:
        print(f"error: {fault}", file=sys.stderr)
    return _SOME_FAILED if result.faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fedkace_flwr.storage", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
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
