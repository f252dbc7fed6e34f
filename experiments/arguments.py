"""The commands and options of the command line."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from fedkace_flwr import __version__
from fedkace_flwr.errors import ConfigError, closest
from fedkace_flwr.experiments.studies.inheritance import FULL
from fedkace_flwr.experiments.studies.names import ENGINES, study_names

RESULTS = Path("results")
"""The folder in which each study gets its own."""


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
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = commands_of(self)[options.command]
            word = next((word for word in unknown if word.startswith("-")), unknown[0])
            what = "unknown option" if word.startswith("-") else "unexpected argument"
            hint = closest(word, list(command._option_string_actions)) or f"; see {command.prog} --help"
            raise ConfigError(f"{options.command}: {what} {word}{hint}")
        return options

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [str(choice) for choice in action.choices or ()]
        if choices and value not in choices:
            name = " ".join([*action.option_strings[:1], str(value)])
            words = f"{self.prog.split()[-1]} {name}: must be one of {', '.join(choices)}"
            raise ConfigError(f"{words}{closest(str(value), choices)}")


def make_parser(program: str) -> Parser:
    """Return the parser of the whole command line; ``program`` is how the program was called."""
    parser = Parser(prog=program, description="Run studies and benchmarks.")
    parser.add_argument("--version", action="version", version=f"fedkace_flwr {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a study")
    run.add_argument("study", help=f"a YAML file, or one of the studies included: {', '.join(study_names())}")
    run.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="a configuration key, see docs/configuration.md; several values, as in epochs=5,10,20, make one run each",
    )
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
    run.add_argument(
        "--mps",
        action="store_true",
        help="start NVIDIA's Multi-Process Service for this study, so that the clients on a GPU compute at the same time",
    )
    run.add_argument("--scale", default=FULL, help="a scale defined in the study's file (default: full, no changes)")
    run.add_argument(
        "--only",
        action="extend",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="run only these: names of runs, or parts of names such as fedkace or overlap-4; * matches anything",
    )
    run.add_argument(
        "--seeds", action="extend", nargs="+", default=[], metavar="SEED", help="use these seeds instead of the file's"
    )
    run.add_argument("--dry-run", action="store_true", help="print the plan and a time estimate, but run nothing")
    run.add_argument(
        "--results", type=Path, default=RESULTS, help="folder in which each study gets its own (default: results)"
    )
    bench = commands.add_parser("bench", help="in a checkout: measure training, selection, rounds and starts")
    bench.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help="training, parts, selection, gradient-cost, rounds, plain, start or gpu (default: all)",
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
    table = commands.add_parser("table", help="print the summaries of finished runs")
    table.add_argument(
        "runs",
        type=Path,
        nargs="+",
        help="folders of runs, of studies or of several studies; unfinished runs are left out",
    )
    table.add_argument(
        "--columns", action="extend", nargs="+", default=[], metavar="NAME", help="print only these columns, such as aa"
    )
    robustness = commands.add_parser(
        "robustness", help="print the tables of the study poisoning, see docs/robustness.md"
    )
    robustness.add_argument(
        "sources", type=Path, nargs="+", help="results folders of the study, or files written with --output"
    )
    robustness.add_argument("--output", type=Path, help="also write the accuracies of all runs to this CSV file")
    keep = commands.add_parser(
        "keep", help="copy the records of a run or a study for publication, without the paths of this machine"
    )
    keep.add_argument("run", type=Path, help="folder of a finished run or of a study")
    keep.add_argument(
        "target", type=Path, help="folder to copy to: new, empty, or that of an earlier copy, which is replaced"
    )
    keep.add_argument(
        "--resumable",
        action="store_true",
        help="also copy what `run` needs to continue unfinished runs on another machine, see docs/running.md",
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
    report = commands.add_parser("report", help="write tables, figures and a page with charts from finished runs")
    report.add_argument("folders", type=Path, nargs="+", help="results folders of studies or of single runs")
    report.add_argument(
        "--output",
        type=Path,
        help="output folder: new, empty, or that of an earlier report, which is replaced (default: report/ in the first folder)",
    )
    fed = commands.add_parser("feed", help="write a data set's streams to inboxes, see docs/edge-data.md")
    fed.add_argument(
        "folder",
        type=Path,
        help="folder in which client-0/new, client-0/test and so on are created: new, empty, or that of an earlier feed",
    )
    fed.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="a configuration key, see docs/configuration.md",
    )
    fed.add_argument(
        "--every", type=float, default=0.0, help="seconds between the files of two rounds (default: 0, all at once)"
    )
    drawn = commands.add_parser("stream", help="draw which classes clients receive in each round, see docs/streams.md")
    drawn.add_argument(
        "study", nargs="?", default="quickstart", help="a study, whose streams are drawn (default: quickstart)"
    )
    drawn.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="a configuration key, see docs/configuration.md; several values, as in overlap=0,1, draw one stream each",
    )
    drawn.add_argument("--scale", default=FULL, help="a scale defined in the study's file (default: full, no changes)")
    drawn.add_argument(
        "--only", action="extend", nargs="+", default=[], metavar="PATTERN", help="draw only these runs, as with run"
    )
    drawn.add_argument("--output", type=Path, default=Path("stream.png"), help="PNG file (default: stream.png)")
    drawn.set_defaults(seeds=[], engine=None, workers=None, gpu_fraction=None, mps=False)
    app = commands.add_parser("app", help="write the Flower app to a folder, for `flwr run FOLDER` and `flwr build`")
    app.add_argument("folder", type=Path, help="the folder: new, empty, or that of an earlier app, which is replaced")
    predict = commands.add_parser("predict", help="classify pictures with the model that a client predicts with")
    serve = commands.add_parser("serve", help="serve a client's predictions over HTTP")
    for parts in (predict, serve):  # parsed by fedkace_flwr.inference.predict
        parts.add_argument("arguments", nargs="*", help=f"see {program} {parts.prog.split()[-1]} --help")
    return parser


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of all commands by name."""
    return next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
