"""Command line, ``fedkace COMMAND`` or ``python -m experiments COMMAND``.

It runs, reports and keeps studies, draws streams, feeds inboxes, answers with the models that clients keep, and runs the benchmarks.
What imports PyTorch is imported by the command that needs it, so that help and mistakes take no seconds.
"""

import argparse
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fedkace_flwr.errors import ConfigError, FedkaceError, ResultsError
from fedkace_flwr.experiments.arguments import RESULTS, commands_of, make_parser
from fedkace_flwr.experiments.outputs import check_output
from fedkace_flwr.experiments.overview import check_command, overview, study_first
from fedkace_flwr.experiments.studies.names import find_study
from fedkace_flwr.experiments.studies.yaml_file import parse_setting, parse_settings
from fedkace_flwr.flower.imports import without_collection
from fedkace_flwr.storage.names import printable

if TYPE_CHECKING:
    from fedkace_flwr.experiments.results.summary_table import FinishedRun
    from fedkace_flwr.experiments.running.guard import Guard
    from fedkace_flwr.experiments.running.waiting import Simulation
    from fedkace_flwr.experiments.studies.study import Study

_PROGRAM = "fedkace"
_PREDICTION = ("predict", "serve")
_USER_ERROR, _INTERRUPTED, _TERMINATED = 2, 130, 143
_PLAIN_WIDTH = 120  # in a file or a pipe, wide enough for one line per table row


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] and given[0] in _PREDICTION:
        from fedkace_flwr.inference.predict import main as predict

        return predict(given if given[0] == "serve" else given[1:], program=_program())
    if not given:
        print(overview(_program()))
        return 0
    parser = make_parser(_program())
    try:
        check_command(given, commands_of(parser))
        options = parser.parse_args(study_first(given))
    except ConfigError as error:
        return _refused(error)
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    try:
        if options.command == "bench":
            _bench(options, console)
        elif options.command == "table":
            _table(options, console)
        elif options.command == "robustness":
            _robustness(options)
        elif options.command == "keep":
            from fedkace_flwr.experiments.results.keep import keep

            keep(options.run, options.target, resumable=options.resumable)
            console.print(f"written: {options.target}", highlight=False, soft_wrap=True)
        elif options.command == "export":
            from fedkace_flwr.experiments.export import export

            for line in export(options.source, options.target, onnx=options.onnx, data_dir=options.data_dir):
                console.print(line, highlight=False, markup=False, soft_wrap=True)
        elif options.command == "feed":
            from fedkace_flwr.config import Config
            from fedkace_flwr.experiments.feed import feed

            config = Config.parse(dict(parse_setting(text) for text in options.set))
            feed(config, options.folder, every=options.every)
            clients, rounds = config.stream.clients, config.stream.rounds
            console.print(
                f"written: {rounds} chunks for each of {clients} clients, in {options.folder}", soft_wrap=True
            )
        elif options.command == "report":
            _report(options, console)
        elif options.command == "stream":
            _stream(options, console)
        elif options.command == "app":
            from fedkace_flwr.experiments.running.processes import staged_app

            print(staged_app(options.folder))
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
    Console(stderr=True).print(
        f"error: {printable(str(error))}", style="red", highlight=False, markup=False, soft_wrap=True
    )
    return _USER_ERROR


class _Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C."""


def _terminate(*_: object) -> None:
    raise _Terminated


def _study(options: argparse.Namespace, path: Path, results: Path) -> "Study":
    """Load the study that the options of ``run`` describe."""
    from fedkace_flwr.experiments.studies.study import load_study

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
        mps=options.mps,
    )


def _seeds(texts: list[str]) -> list[int]:
    words = [word for text in texts for word in text.split(",")]
    for word in words:
        if not word.isdecimal():
            raise ConfigError(f"--seeds {' '.join(texts)}: must be whole numbers >= 0, for example --seeds 0 1 2")
    return [int(word) for word in words]


def _table(options: argparse.Namespace, console: Console) -> None:
    from fedkace_flwr.experiments.results.summary_table import chosen_columns, find_runs

    columns = chosen_columns(options.columns)
    runs, notes = find_runs(options.runs)
    for note in notes:
        Console(stderr=True).print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    _print_summaries(runs, columns, options.runs, console)


def _print_summaries(runs: "list[FinishedRun]", columns: list[str], folders: Sequence[Path], console: Console) -> None:
    """Print the table of runs, which are in these folders, and what explains it."""
    from fedkace_flwr.experiments.results.summary_table import (
        COLUMNS,
        defence_notes,
        hidden_columns,
        legend,
        shown_columns,
        summary_table,
    )

    console.print(summary_table(runs, console.width, columns))
    lines = [*legend(shown_columns(runs, console.width, columns)), *defence_notes(runs)]
    if hidden := hidden_columns(runs, console.width, columns):
        how, option = "the terminal is too narrow", f"--columns {' '.join(hidden)}"
        if len(columns) == len(COLUMNS):
            command = f"{_program()} table {shlex.quote(str(folders[0]))} {option}"
            how = f"to print them: {command}" if len(folders) == 1 else f"to print them, add {option}"
        lines.append(f"not shown: {', '.join(hidden)}; {how}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _started_early(simulates: bool) -> "Iterator[tuple[Guard, Simulation | None]]":
    """Start a process for the first run, which makes its imports while this one makes its own and checks the study."""
    from fedkace_flwr.experiments.running.guard import Guard
    from fedkace_flwr.experiments.running.waiting import Simulation

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
        from fedkace_flwr.experiments.running.plan import show_plan

        show_plan(_study(options, path, options.results), console)
        return 0
    signal.signal(signal.SIGTERM, _terminate)
    with _started_early(options.engine != "inline") as (guard, waiting):
        with without_collection():
            from fedkace_flwr.experiments.report.comparison import draw_comparisons
            from fedkace_flwr.experiments.results.summary_table import chosen_columns, find_runs
            from fedkace_flwr.experiments.running.runner import run_study
            from fedkace_flwr.inference.kept_models import MODEL

        study = _study(options, path, options.results)
        outcome = run_study(study, console, guard, waiting)
        if outcome.summaries:
            runs, _ = find_runs([study.folder / name for name in outcome.summaries])
            _print_summaries(runs, chosen_columns([]), [_shown(study.folder)], console)
            if study.note:
                console.print(study.note, highlight=False, markup=False)
        pictures = [study.folder / name / "accuracy.png" for name in outcome.summaries]
        for picture in draw_comparisons(study) or pictures:
            console.print(f"picture: {_shown(picture)}", highlight=False, soft_wrap=True)
        models = [path for name in outcome.summaries if (path := study.folder / name / MODEL).exists()]
        if models:
            several = study.folder / "*" / MODEL
            told = f"model: {_shown(models[0])}" if len(models) == 1 else f"models: {_shown(several)}"
            console.print(told, highlight=False, markup=False, soft_wrap=True)
        for error in outcome.failures.values():
            _refused(error)
        return _USER_ERROR if outcome.failures else 0


def _shown(path: Path) -> Path:
    """Return a path relative to the working directory if it is below that."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _robustness(options: argparse.Namespace) -> None:
    from fedkace_flwr.experiments.report.robustness import honest_accuracies, robustness_tables
    from fedkace_flwr.storage.files import write_text

    check_output(options.output)
    runs = honest_accuracies(*options.sources)
    print(robustness_tables(runs))
    if options.output:
        try:
            write_text(options.output, runs.to_csv(index=False))
        except OSError as fault:
            raise ResultsError(f"--output {options.output}: cannot be written ({fault.strerror})") from fault


def _stream(options: argparse.Namespace, console: Console) -> None:
    from fedkace_flwr.experiments.report.streams import MOST, DrawnStream, draw_streams

    check_output(options.output)
    study = _study(options, find_study(options.study), RESULTS)
    streams = list(dict.fromkeys(DrawnStream.of(config) for config in study.runs.values()))
    if len(streams) > MOST:
        raise ConfigError(
            f"{options.study}: its runs have {len(streams)} streams, at most {MOST} are drawn; choose runs with --only, "
            "or set seed and overlap"
        )
    try:
        draw_streams(streams, options.output)
    except OSError as fault:
        raise ResultsError(f"--output {options.output}: cannot be written ({fault.strerror})") from fault
    console.print(f"written: {options.output}", highlight=False, soft_wrap=True)


def _bench(options: argparse.Namespace, console: Console) -> None:
    try:
        from fedkace_flwr.experiments.bench.measure import kept
        from fedkace_flwr.experiments.bench.suite import bench
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("fedkace_flwr.experiments.bench"):
            raise
        raise ConfigError(
            "bench: the installed package has no benchmarks; run it in a checkout of the project"
        ) from error
    for path in options.show:
        print(kept(path), end="\n\n")
    if not options.show:
        told = {"repeats": options.repeats, "processes": options.processes, "output": options.output}
        bench(console, parts=options.parts, **told)


def _report(options: argparse.Namespace, console: Console) -> None:
    from fedkace_flwr.experiments.results.folders import check_folders

    check_folders(options.folders)
    try:
        from fedkace_flwr.experiments.report.write import write_report
    except ModuleNotFoundError as error:
        raise ResultsError(
            f"report needs {str(error.name).partition('.')[0]}: pip install 'fedkace-flwr[report]'"
        ) from error
    for path in write_report(options.folders, options.output):
        console.print(f"written: {path}", highlight=False, soft_wrap=True)


def _program() -> str:
    """Return the words with which this program was called."""
    return _PROGRAM if Path(sys.argv[0]).name == _PROGRAM else "python -m experiments"


if __name__ == "__main__":
    sys.exit(main())
