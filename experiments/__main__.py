"""Command line, ``fedkace COMMAND`` or ``python -m experiments COMMAND``.

It runs, reports and keeps studies, feeds inboxes, answers with the models that clients keep, and runs the benchmarks.
What imports PyTorch is imported by the command that needs it, so that help and mistakes take no seconds.
"""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from experiments.background.folder import LOWEST, NORMAL
from experiments.studies.inheritance import FULL
from experiments.studies.names import ENGINES, find_study, study_names
from experiments.studies.yaml_file import parse_setting
from fedkace_flwr.errors import ConfigError, FedkaceError, ResultsError

if TYPE_CHECKING:
    from experiments.running.engines import Simulation
    from experiments.running.guard import Guard
    from experiments.studies.study import Study

_PROGRAM = "fedkace"
_PREDICTION = ("predict", "serve")
_USER_ERROR, _INTERRUPTED, _TERMINATED = 2, 130, 143
_RESULTS = Path("results")
_PLAIN_WIDTH = 120  # in a file or a pipe, wide enough for one line per table row


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] and given[0] in _PREDICTION:
        from fedkace_flwr.inference.predict import main as predict

        return predict(given if given[0] == "serve" else given[1:], program=_program())
    # argparse cannot pass options through to another parser, so the arguments after "--" are split off first.
    own, study = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = _parser()
    options = parser.parse_args(own)
    if study and (options.command, getattr(options, "action", "")) != ("background", "start"):
        parser.error("only `background start` takes arguments after --")
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    try:
        if options.command == "bench":
            from experiments.bench.measure import kept
            from experiments.bench.suite import PARTS, bench

            for part in set(options.parts) - set(PARTS):
                raise ConfigError(f"bench {part}: must be one of {', '.join(PARTS)}")

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
            from experiments.results.compare import finished_runs, summary_table

            console.print(summary_table(finished_runs(options.runs)))
        elif options.command == "robustness":
            from experiments.report.robustness import robustness_tables

            print(robustness_tables(options.folder))
        elif options.command == "keep":
            from experiments.results.keep import keep

            keep(options.run, options.target)
        elif options.command == "feed":
            from experiments.feed import feed
            from fedkace_flwr import registry as registry  # declares the methods' keys
            from fedkace_flwr.config import Config

            feed(Config.parse(dict(parse_setting(text) for text in options.set)), options.folder, every=options.every)
        elif options.command == "report":
            _report(options, console)
        elif options.command == "app":
            from experiments.running.processes import staged_app

            print(staged_app(options.folder))
        elif options.command == "background":
            _background(options, study, console)
        else:
            return _run(options, console)
    except FedkaceError as error:
        Console(stderr=True).print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return _USER_ERROR
    except KeyboardInterrupt as stopped:
        Console(stderr=True).print("interrupted; run the same command to continue", style="red")
        return _TERMINATED if isinstance(stopped, _Terminated) else _INTERRUPTED
    return 0


class _Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C."""


def _terminate(*_: object) -> None:
    raise _Terminated


def _study(options: argparse.Namespace, path: Path, results: Path) -> "Study":
    """Load the study that the options of ``run`` describe."""
    from experiments.studies.study import load_study

    return load_study(
        path,
        dict(parse_setting(text) for text in options.set),
        results,
        scale=options.scale,
        only=options.only,
        seeds=options.seeds,
        engine=options.engine,
        workers=options.workers,
        gpu_fraction=options.gpu_fraction,
        mps=options.mps,
    )


@contextmanager
def _started_early(simulates: bool) -> "Iterator[tuple[Guard, Simulation | None]]":
    """Start a process for the first run, which makes its imports while this one makes its own and checks the study."""
    from experiments.running.engines import Simulation
    from experiments.running.guard import Guard

    with Guard() as guard:
        waiting = Simulation(guard.environment, guard.home) if simulates else None
        try:
            yield guard, waiting
        finally:
            if waiting:
                waiting.stop()


def _run(options: argparse.Namespace, console: Console) -> int:
    path = find_study(options.study)
    if options.dry_run:
        from experiments.running.plan import show_plan

        show_plan(_study(options, path, options.results), console)
        return 0
    signal.signal(signal.SIGTERM, _terminate)
    with _started_early(options.engine != "inline") as (guard, waiting):
        from experiments.results.compare import average_regrets, draw_comparisons, summary_table
        from experiments.running.runner import run_study

        study = _study(options, path, options.results)
        outcome = run_study(study, console, guard, waiting)
        console.print(summary_table(outcome.summaries, average_regrets(study)))
        pictures = [study.folder / name / "accuracy.png" for name in outcome.summaries]
        for picture in draw_comparisons(study) or pictures:
            here = Path.cwd()
            shown = picture.relative_to(here) if picture.is_relative_to(here) else picture
            console.print(f"picture: {shown}", highlight=False, soft_wrap=True)
        for error in outcome.failures.values():
            Console(stderr=True).print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return _USER_ERROR if outcome.failures else 0


def _background(options: argparse.Namespace, arguments: list[str], console: Console) -> None:
    from experiments.background import control
    from experiments.background.folder import Command, Folder
    from experiments.background.status import show_status

    def study_of(command: Command, folder: Folder) -> "Study":
        asked = _parser().parse_args(["run", *command.arguments])
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
    asked = _parser().parse_args(["run", *arguments])
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
    parser = argparse.ArgumentParser(prog=_program(), description="Run studies and benchmarks.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a study")
    run.add_argument("study", help=f"a YAML file, or one of the studies included: {', '.join(study_names())}")
    run.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a configuration key, see docs/configuration.md"
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
        "--only", nargs="+", default=[], metavar="PATTERN", help="run only these; * matches any part of a run's name"
    )
    run.add_argument("--seeds", type=int, nargs="+", default=[], help="use these seeds instead of the file's")
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
        help="training, compiled, passes, selection, evaluation, state, rounds, paper-round, memory, machines, plain, start, "
        "gpu or gpu-run (default: all)",
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
    table.add_argument("runs", type=Path, nargs="+", help="folders of finished runs")
    robustness = commands.add_parser(
        "robustness", help="print the tables of the study poisoning, see docs/robustness.md"
    )
    robustness.add_argument("folder", type=Path, help="results folder of the study")
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
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a configuration key, see docs/configuration.md"
    )
    fed.add_argument(
        "--every", type=float, default=0.0, help="seconds between the files of two rounds (default: 0, all at once)"
    )
    app = commands.add_parser("app", help="write the Flower app to a folder, for `flwr run FOLDER` and `flwr build`")
    app.add_argument("folder", type=Path, help="the folder; must be new or empty")
    predict = commands.add_parser("predict", help="classify pictures with the model that a client predicts with")
    serve = commands.add_parser("serve", help="answer such questions over HTTP")
    for parts in (predict, serve):  # parsed by fedkace_flwr.inference.predict
        parts.add_argument("arguments", nargs="*", help=f"see {_program()} {parts.prog.split()[-1]} --help")
    return parser


def _program() -> str:
    """Return the words with which this program was called."""
    return _PROGRAM if Path(sys.argv[0]).name == _PROGRAM else "python -m experiments"


if __name__ == "__main__":
    sys.exit(main())
