"""The commands and options of the command line."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from fedkace_flwr import __version__
from fedkace_flwr.errors import ConfigError, closest
from fedkace_flwr.experiments.studies.inheritance import FULL
from fedkace_flwr.experiments.studies.names import ENGINES, looks_like_a_study, study_names

RESULTS = Path("results")
"""The folder in which each study gets its own."""

_EPILOG = """\
Begin with `run quickstart`: ten clients learn handwritten digits, in one to two minutes. `run STUDY --dry-run` tells what
a study would run, and for how long. COMMAND --help explains a command, docs/running.md all of them."""


class Parser(argparse.ArgumentParser):
    """A parser that answers a mistake in one line, with the nearest word."""

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments.

        Raises
        ------
        ConfigError
            Always.
        """
        raise ConfigError(f"{self.prog.split()[-1]}: {message}; see {self.prog} --help")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse the arguments.

        Raises
        ------
        ConfigError
            They are incomplete, or one of them is unknown.
        """
        options, unknown = self.parse_known_args(study_first(args or []), namespace)
        if unknown:
            command = commands_of(self)[options.command]
            word = next((word for word in unknown if word.startswith("-")), unknown[0])
            what = "unknown option" if word.startswith("-") else "unexpected argument"
            hint = closest(word, list(command._option_string_actions)) or f"; see {command.prog} --help"
            raise ConfigError(f"{options.command}: {what} {word}{hint}")
        return options

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [str(choice) for choice in action.choices or ()]
        if not choices or value in choices:
            return
        if not action.option_strings and looks_like_a_study(value):
            raise ConfigError(f"{value}: is a study, not a command; did you mean run {value}?")
        words = [self.prog.split()[-1], action.option_strings[0]] if action.option_strings else []
        raise ConfigError(f"{' '.join([*words, value])}: must be one of {', '.join(choices)}{closest(value, choices)}")


def study_first(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of ``run`` or ``stream`` with the study before the options: some take any number of values."""
    command, *words = arguments or [""]
    if command in ("run", "stream") and words and words[0].startswith("-"):
        studies = [number for number, word in enumerate(words) if looks_like_a_study(word)]
        words = [words.pop(number) for number in studies[-1:]] + words
    return [command, *words] if arguments else []


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of all commands by name."""
    return next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))


def make_parser(program: str) -> Parser:
    """Return the parser of the whole command line; ``program`` is how the program was called."""
    parser = Parser(
        prog=program,
        description="Run studies of streaming federated continual learning, and look at their results.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"fedkace_flwr {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a study")
    run.add_argument("study", help=f"a YAML file, or one of the studies included: {', '.join(study_names())}")
    _add_selection(run)
    run.add_argument(
        "--engine",
        choices=ENGINES,
        help="flower: Flower's simulation on Ray (default); inline: one process per run, without Ray",
    )
    run.add_argument(
        "--workers",
        type=int,
        help="number of clients trained in parallel; with --engine inline, number of runs (default: as many as the "
        "machine can hold, printed at the start)",
    )
    run.add_argument(
        "--gpu-fraction",
        type=float,
        help="fraction of a GPU for each client (default: as many clients per GPU as its memory holds; 0: no GPU)",
    )
    _add_several(run, "--seeds", "SEED", "use these seeds instead of the file's")
    run.add_argument("--dry-run", action="store_true", help="print the plan and a time estimate, but run nothing")
    run.add_argument(
        "--results", type=Path, default=RESULTS, help="folder in which each study gets its own (default: results)"
    )

    keys = commands.add_parser("keys", help="print configuration keys with default, values and meaning")
    keys.add_argument("word", nargs="?", default="", help="only those that have it in their name or meaning")

    table = commands.add_parser("table", help="print the summaries of finished runs")
    table.add_argument(
        "runs",
        type=Path,
        nargs="+",
        help="folders of runs, of studies or of several studies; unfinished runs are left out",
    )
    _add_several(table, "--columns", "NAME", "print only these columns, such as aa")

    report = commands.add_parser("report", help="write tables, figures and a page with charts from finished runs")
    report.add_argument("folders", type=Path, nargs="+", help="results folders of studies or of single runs")
    report.add_argument(
        "--output",
        type=Path,
        help="output folder: new, empty, or that of an earlier report, which is replaced (default: report/ in the first folder)",
    )

    keep = commands.add_parser(
        "keep", help="write the records of a run or a study for publication, without the paths of this machine"
    )
    keep.add_argument("run", type=Path, help="folder of a run or of a study")
    keep.add_argument(
        "target",
        type=Path,
        help="folder to write: new, empty, or that of the same study, kept earlier, which is extended",
    )

    export = commands.add_parser(
        "export", help="write a model for others to use, with a card and on request as ONNX, see docs/models.md"
    )
    export.add_argument(
        "source", type=Path, help="folder of a run, finished or not, of a client's state, or of a model"
    )
    export.add_argument(
        "target", type=Path, help="folder to write: new, empty, or that of an earlier export, which is replaced"
    )
    export.add_argument("--onnx", action="store_true", help="also write model.onnx, with the preprocessing inside")
    export.add_argument("--data-dir", type=Path, help="folder of the data set's files, for a run that is not finished")

    stream = commands.add_parser("stream", help="draw which classes clients receive in each round, see docs/streams.md")
    stream.add_argument(
        "study", nargs="?", default="quickstart", help="a study, whose streams are drawn (default: quickstart)"
    )
    _add_selection(stream)
    stream.add_argument("--output", type=Path, default=Path("stream.png"), help="PNG file (default: stream.png)")
    stream.set_defaults(seeds=[], engine=None, workers=None, gpu_fraction=None)

    feed = commands.add_parser("feed", help="write a data set's streams to inboxes, see docs/edge-data.md")
    feed.add_argument(
        "folder",
        type=Path,
        help="folder in which client-0/new, client-0/test and so on are created: new, empty, or that of an earlier feed",
    )
    _add_several(feed, "--set", "KEY=VALUE", "a configuration key, see the command keys")
    feed.add_argument(
        "--every", type=float, default=0.0, help="seconds between the files of two rounds (default: 0, all at once)"
    )

    status = commands.add_parser("status", help="show how a run goes, and each of its clients, see docs/living.md")
    status.add_argument("run", type=Path, help="the run's folder; on devices: on the hub")
    shown = status.add_mutually_exclusive_group()
    shown.add_argument("--watch", action="store_true", help="go on showing it until Ctrl-C")
    shown.add_argument("--json", action="store_true", help="print all that is known, as JSON")

    members = commands.add_parser("members", help="list who takes part in a run on devices, see docs/living.md")
    members.add_argument("run", type=Path, help="the run's folder, on the hub")
    members.add_argument("--remove", type=int, metavar="SEAT", help="let this client take part no longer, for good")

    stop = commands.add_parser("stop", help="end a run after its present round")
    stop.add_argument("run", type=Path, help="the run's folder; on devices: on the hub")
    stop.add_argument("--undo", action="store_true", help="let a stopped run go on when it is started again")

    back = commands.add_parser("rollback", help="list the past models of a run, or go back to one")
    back.add_argument("run", type=Path, help="the run's folder, on the hub")
    back.add_argument("--to", type=int, metavar="ROUND", help="let the next round go back to the model of this one")

    for name, meaning in (
        ("predict", "classify pictures with the model that a client predicts with"),
        ("serve", "serve a client's predictions over HTTP"),
    ):  # parsed by fedkace_flwr.inference.predict
        parts = commands.add_parser(name, help=meaning)
        parts.add_argument("arguments", nargs="*", help=f"see {program} {name} --help")

    app = commands.add_parser("app", help="write the Flower app to a folder, for `flwr run FOLDER` and `flwr build`")
    app.add_argument("folder", type=Path, help="the folder: new, empty, or that of an earlier app, which is replaced")

    robustness = commands.add_parser(
        "robustness", help="print the tables of the study poisoning, see docs/robustness.md"
    )
    robustness.add_argument(
        "sources", type=Path, nargs="+", help="results folders of the study, or files written with --output"
    )
    robustness.add_argument("--output", type=Path, help="also write the accuracies of all runs to this CSV file")

    bench = commands.add_parser("bench", help="in a checkout: measure training, selection, rounds and starts")
    bench.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help="training, parts, trainable, selection, gradient-cost, rounds, plain, start, gpu, idle or watching (default: all but these two)",
    )
    bench.add_argument("--repeats", type=int, default=5, help="number of measurements per figure (default: 5)")
    bench.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="with gpu: only the samples per second in all of N processes that train side by side",
    )
    bench.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    bench.add_argument(
        "--show",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="measure nothing; print files written by --output as Markdown",
    )

    soak = commands.add_parser(
        "soak", help="in a checkout: a simulated year of a federation on this machine, with a ledger and a verdict"
    )
    soak.add_argument("--rounds", type=int, default=200, help="rounds of the year (default: 200; 20 are a short one)")
    soak.add_argument("--seed", type=int, default=0, help="seed of all that happens (default: 0)")
    soak.add_argument(
        "--output", type=Path, default=Path("soak"), help="folder for figures and picture: new or empty (default: soak)"
    )
    soak.add_argument("--dry-run", action="store_true", help="print what would happen, and do nothing")
    return parser


def _add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that change a study or select among its runs."""
    _add_several(
        parser,
        "--set",
        "KEY=VALUE",
        "a configuration key, see the command keys; several values, as in epochs=5,10,20, make one run each",
    )
    parser.add_argument("--scale", default=FULL, help="a scale defined in the study's file (default: full, no changes)")
    _add_several(
        parser,
        "--only",
        "PATTERN",
        "only these runs: names, or parts of names such as fedkace or overlap-4; * matches anything",
    )


def _add_several(parser: argparse.ArgumentParser, option: str, metavar: str, meaning: str) -> None:
    """Add an option that takes several values and may be repeated."""
    parser.add_argument(option, action="extend", nargs="+", default=[], metavar=metavar, help=meaning)
