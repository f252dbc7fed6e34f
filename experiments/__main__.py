"""Command line, ``python -m experiments COMMAND``: run, report and keep studies, feed inboxes, and run the benchmarks."""

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from experiments.background.folder import LOWEST, NORMAL
from experiments.overview import check_command, overview, study_first
from experiments.studies.inheritance import FULL
from experiments.studies.names import find_study, study_names
from experiments.studies.study import ENGINES, Study, load_study
from experiments.studies.yaml_file import parse_setting, parse_settings
from fedkace_flwr import __version__
from fedkace_flwr.config import Config
from fedkace_flwr.errors import ConfigError, FedkaceError, ResultsError, closest

if TYPE_CHECKING:
    from experiments.results.summary_table import FinishedRun

_USER_ERROR, _INTERRUPTED, _TERMINATED = 2, 130, 143
_RESULTS = Path("results")
_PROGRAM = "python -m experiments"
_PLAIN_WIDTH = 120  # in a file or a pipe, wide enough for one line per table row


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    # argparse cannot pass options through to another parser, so the arguments after "--" are split off first.
    own, study = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    if not own:
        print(overview(_PROGRAM))
        return 0
    parser = _parser()
    try:
        check_command(own, _commands(parser))
    except ConfigError as error:
        return _refused(error)
    options = parser.parse_args(study_first(own))
    if study and (options.command, getattr(options, "action", "")) != ("background", "start"):
        parser.error("only `background start` takes arguments after --")
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    try:
        if options.command == "bench":
            from experiments.bench.measure import kept
            from experiments.bench.suite import PARTS, bench

            for part in set(options.parts) - set(PARTS):
                raise ConfigError(f"bench {part}: must be one of {', '.join(PARTS)}{closest(part, PARTS)}")

            for path in options.show:
                print(kept(path), end="\n\n")
            if options.show:
                return 0
            bench(console, parts=options.parts, repeats=options.repeats, output=options.output)
        elif options.command == "gradient-cost":
            from experiments.bench.gradient_cost import gradient_cost

            sizes = {"chunk": options.chunk, "buffer": options.buffer}
            gradient_cost(console, repeats=options.repeats, output=options.output, **sizes)
        elif options.command == "table":
            _table(options, console)
        elif options.command == "keep":
            from experiments.results.keep import keep

            keep(options.run, options.target)
        elif options.command == "feed":
            from experiments.feed import feed

            feed(Config.parse(dict(parse_setting(text) for text in options.set)), options.folder, every=options.every)
        elif options.command == "report":
            _report(options, console)
        elif options.command == "background":
            _background(options, study, console)
        else:
            return _run(options, console)
    except FedkaceError as error:
        return _refused(error)
    except KeyboardInterrupt as stopped:
        Console(stderr=True).print("interrupted; run the same command to continue", style="red")
        return _TERMINATED if isinstance(stopped, _Terminated) else _INTERRUPTED
    return 0


def _refused(error: Exception | str) -> int:
    """Print an error in one line and return the exit status for errors of the user."""
    Console(stderr=True).print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
    return _USER_ERROR


class _Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C."""


def _terminate(*_: object) -> None:
    raise _Terminated


def _study(options: argparse.Namespace, path: Path, results: Path) -> Study:
    """Load the study that the options of ``run`` describe."""
    settings, sweeps = parse_settings(options.set)
    return load_study(
        path,
        settings,
        results,
        sweeps=sweeps,
        scale=options.scale,
        only=[pattern for text in options.only for pattern in text.split(",")],
        seeds=_seeds(options.seeds),
        engine=options.engine,
        workers=options.workers,
        gpu_fraction=options.gpu_fraction,
    )


def _seeds(texts: list[str]) -> list[int]:
    words = [word for text in texts for word in text.split(",")]
    for word in words:
        if not word.isdecimal():
            raise ConfigError(f"--seeds {' '.join(texts)}: must be whole numbers >= 0, for example --seeds 0 1 2")
    return [int(word) for word in words]


def _table(options: argparse.Namespace, console: Console) -> None:
    from experiments.results.summary_table import chosen_columns, find_runs

    columns = chosen_columns(options.columns)
    runs, notes = find_runs(options.runs)
    for note in notes:
        Console(stderr=True).print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    _print_summaries(runs, columns, console)


def _print_summaries(runs: "list[FinishedRun]", columns: list[str], console: Console) -> None:
    from experiments.results.summary_table import legend, shown_columns, summary_table

    console.print(summary_table(runs, console.width, columns))
    for line in legend(shown_columns(runs, console.width, columns)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _run(options: argparse.Namespace, console: Console) -> int:
    from experiments.results.compare import draw_comparisons
    from experiments.results.summary_table import chosen_columns, find_runs
    from experiments.running.runner import run_study

    study = _study(options, find_study(options.study), options.results)
    if options.dry_run:
        from experiments.running.plan import show_plan

        show_plan(study, console)
        return 0
    signal.signal(signal.SIGTERM, _terminate)
    outcome = run_study(study, console)
    if outcome.summaries:
        runs, _ = find_runs([study.folder / name for name in outcome.summaries])
        _print_summaries(runs, chosen_columns([]), console)
    pictures = [study.folder / name / "accuracy.png" for name in outcome.summaries]
    for picture in draw_comparisons(study) or pictures:
        here = Path.cwd()
        shown = picture.relative_to(here) if picture.is_relative_to(here) else picture
        console.print(f"picture: {shown}", highlight=False, soft_wrap=True)
    for error in outcome.failures.values():
        _refused(error)
    return _USER_ERROR if outcome.failures else 0


def _background(options: argparse.Namespace, arguments: list[str], console: Console) -> None:
    from experiments.background import control
    from experiments.background.folder import Command, Folder
    from experiments.background.status import show_status

    def study_of(command: Command, folder: Folder) -> Study:
        asked = _parser().parse_args(study_first(["run", *command.arguments]))
        path = find_study(asked.study, folder.source / "experiments" / "studies")
        return _study(asked, Path(command.directory) / path, folder.results)

    folder = Folder(options.folder)
    if options.action == "status":
        show_status(folder, study_of, console)
    elif options.action == "pause":
        paused = control.pause(folder)
        console.print("paused; `start` continues the study" if paused else "nothing is running", highlight=False)
    else:
        if arguments:
            _check_background(arguments)
        process = control.start(folder, arguments, options.commit, options.python, options.priority)
        console.print(f"process {process}; log: {folder.log}", highlight=False, soft_wrap=True)


def _check_background(arguments: list[str]) -> None:
    """Reject arguments now that would otherwise fail in the background."""
    asked = _parser().parse_args(study_first(["run", *arguments]))
    if asked.dry_run or asked.results != _RESULTS:
        raise ConfigError("background: --results and --dry-run cannot be used; results are written below the folder")
    _study(asked, find_study(asked.study), _RESULTS)


def _report(options: argparse.Namespace, console: Console) -> None:
    try:
        from experiments.report.write import write_report
    except ModuleNotFoundError as error:
        raise ResultsError(
            f"report needs {str(error.name).partition('.')[0]}: pip install 'fedkace-flwr[report]'"
        ) from error
    for path in write_report(options.folders, options.output, options.data_dir):
        console.print(f"written: {path}", highlight=False, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_PROGRAM, description="Run studies and benchmarks.")
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
        "--results", type=Path, default=_RESULTS, help="folder in which each study gets its own (default: results)"
    )
    background = commands.add_parser("background", help="run a study in the background, see docs/long-runs.md")
    actions = background.add_subparsers(dest="action", required=True)
    for action, text in (
        ("start", "start a study or continue it"),
        ("pause", "stop its processes; `start` continues it"),
        ("status", "print its progress and the estimated time left"),
    ):
        parts = actions.add_parser(action, help=text)
        parts.add_argument(
            "folder", type=Path, help="folder for checkout, environment and results; must lie outside any checkout"
        )
        if action == "start":
            parts.add_argument("--commit", help="commit to run (default: HEAD)")
            parts.add_argument(
                "--python",
                type=Path,
                help="Python interpreter that has the dependencies (default: create a new environment)",
            )
            parts.add_argument(
                "--priority",
                choices=(LOWEST, NORMAL),
                help="lowest: yield to all other work (default: lowest, or the previous choice)",
            )
            parts.usage = f"{parts.prog} [--commit COMMIT] [--python PYTHON] [--priority PRIORITY] folder [-- STUDY [OPTIONS of run]]"
    bench = commands.add_parser("bench", help="measure training, selection, evaluation, state and whole rounds")
    bench.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help="training, compiled, optimiser, passes, parts, selection, evaluation, state, rounds, paper-round, memory, "
        "machines, plain, gpu or gpu-run (default: all)",
    )
    bench.add_argument("--repeats", type=int, default=5, help="number of measurements per figure (default: 5)")
    bench.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    bench.add_argument(
        "--show",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="measure nothing; print files written by --output as Markdown",
    )
    cost = commands.add_parser(
        "gradient-cost",
        help="compare the cost of the replay weight computed from the output layer's gradient and from the full model's",
    )
    cost.add_argument("--repeats", type=int, default=5, help="number of measurements per figure (default: 5)")
    cost.add_argument("--chunk", type=int, default=500, help="new samples in the timed epoch (default: 500)")
    cost.add_argument("--buffer", type=int, default=1000, help="buffered samples in the timed epoch (default: 1000)")
    cost.add_argument("--output", type=Path, help="also write counts and figures to this JSON file")
    table = commands.add_parser("table", help="print the summaries of finished runs")
    table.add_argument("runs", type=Path, nargs="+", help="folders of studies or of runs; unfinished runs are left out")
    table.add_argument(
        "--columns", action="extend", nargs="+", default=[], metavar="NAME", help="print only these columns, such as aa"
    )
    keep = commands.add_parser(
        "keep", help="copy the records of a run or a study for publication, without the paths of this machine"
    )
    keep.add_argument("run", type=Path, help="folder of a finished run or of a study")
    keep.add_argument("target", type=Path, help="folder to copy to")
    report = commands.add_parser("report", help="write tables, figures and a page with charts from finished runs")
    report.add_argument("folders", type=Path, nargs="+", help="results folders of studies or of single runs")
    report.add_argument("--output", type=Path, help="output folder (default: report/ in the first folder)")
    report.add_argument(
        "--data-dir", type=Path, help="folder of the data set's files, to show the images in the clients' buffers"
    )
    fed = commands.add_parser("feed", help="write a data set's streams to inboxes, see docs/edge-data.md")
    fed.add_argument("folder", type=Path, help="folder in which client-0/new, client-0/test and so on are created")
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
    return parser


def _commands(parser: argparse.ArgumentParser) -> list[str]:
    """Return the names of all commands."""
    return next(list(action.choices) for action in parser._actions if isinstance(action, argparse._SubParsersAction))


if __name__ == "__main__":
    sys.exit(main())
