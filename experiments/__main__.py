"""Command line, ``fedkace COMMAND`` or ``python -m experiments COMMAND``.

It runs, reports and keeps studies, draws streams, feeds inboxes, answers with the models that clients keep, and runs the benchmarks.
What imports PyTorch is imported by the command that needs it, so that help and mistakes take no seconds.
"""

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from fedkace_flwr.errors import ConfigError, FedkaceError, closest
from fedkace_flwr.experiments.arguments import RESULTS, make_parser
from fedkace_flwr.experiments.outputs import check_output, needing_report, writing
from fedkace_flwr.experiments.studies.names import find_study
from fedkace_flwr.experiments.studies.yaml_file import parse_setting, parse_settings
from fedkace_flwr.storage.names import printable

if TYPE_CHECKING:
    from fedkace_flwr.experiments.results.summary_table import FinishedRun
    from fedkace_flwr.experiments.studies.study import Study

_PROGRAM = "fedkace"
_PREDICTION = ("predict", "serve")
_FAILED, _USER_ERROR, _INTERRUPTED, _TERMINATED = 1, 2, 130, 143
_PLAIN_WIDTH = 120  # in a file or a pipe, wide enough for one line per table row


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] and given[0] in _PREDICTION:
        from fedkace_flwr.inference.predict import main as predict

        return predict(given if given[0] == "serve" else given[1:], program=_program())
    parser = make_parser(_program())
    if not given:
        parser.print_help()
        return 0
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    try:
        options = parser.parse_args(given)
        return _COMMANDS[options.command](options, console) or 0
    except FedkaceError as error:
        return _refused(error)
    except KeyboardInterrupt as stopped:
        on = "; run the same command to continue" if given[0] == "run" else ""
        Console(stderr=True).print(f"interrupted{on}", style="red")
        return _TERMINATED if isinstance(stopped, _Terminated) else _INTERRUPTED


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
        _say(Console(stderr=True), f"note: {note}")
    _print_summaries(runs, columns, options.runs, console)


def _print_summaries(runs: "list[FinishedRun]", columns: list[str], folders: Sequence[Path], console: Console) -> None:
    """Print the table of runs, which are in these folders, and what explains it."""
    from fedkace_flwr.experiments.results.summary_table import (
        COLUMNS,
        hidden_columns,
        legend,
        run_notes,
        shown_columns,
        summary_table,
    )

    console.print(summary_table(runs, console.width, columns))
    lines = [*legend(shown_columns(runs, console.width, columns)), *run_notes(runs)]
    if hidden := hidden_columns(runs, console.width, columns):
        how, option = "the terminal is too narrow", f"--columns {' '.join(hidden)}"
        if len(columns) == len(COLUMNS):
            command = f"{_program()} table {shlex.quote(str(folders[0]))} {option}"
            how = f"to print them: {command}" if len(folders) == 1 else f"to print them, add {option}"
        lines.append(f"not shown: {', '.join(hidden)}; {how}")
    for line in lines:
        _say(console, line)


def _run(options: argparse.Namespace, console: Console) -> int:
    path = find_study(options.study)
    if options.dry_run:
        from fedkace_flwr.experiments.running.plan import show_plan

        show_plan(_study(options, path, options.results), console)
        return 0
    from fedkace_flwr.experiments.running.jobs import Job

    signal.signal(signal.SIGTERM, _terminate)
    # It makes its imports while this process makes its own and checks the study.
    waiting = Job("simulation") if options.engine != "inline" else None
    try:
        from fedkace_flwr.experiments.report.comparison import draw_comparisons
        from fedkace_flwr.experiments.results.summary_table import chosen_columns, find_runs
        from fedkace_flwr.experiments.running.runner import run_study, show_missing
        from fedkace_flwr.inference.kept_models import MODEL

        study = _study(options, path, options.results)
        outcome = run_study(study, console, waiting)
    finally:
        if waiting:
            waiting.stop()
    if outcome.summaries:
        runs, _ = find_runs([study.folder / name for name in outcome.summaries])
        _print_summaries(runs, chosen_columns([]), [_shown(study.folder)], console)
        if study.note:
            console.print(study.note, highlight=False, markup=False)
    pictures = [study.folder / name / "accuracy.png" for name in outcome.summaries]
    for picture in draw_comparisons(study) or pictures:
        _say(console, f"picture: {_shown(picture)}")
    models = [path for name in outcome.summaries if (path := study.folder / name / MODEL).exists()]
    if models:
        several = study.folder / "*" / MODEL
        _say(console, f"model: {_shown(models[0])}" if len(models) == 1 else f"models: {_shown(several)}")
    for error in outcome.failures.values():
        _refused(error)
    show_missing(outcome.missing, Console(stderr=True))
    return _USER_ERROR if outcome.failures or outcome.missing else 0


def _shown(path: Path) -> Path:
    """Return a path relative to the working directory if it is below that."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _robustness(options: argparse.Namespace, console: Console) -> None:
    from fedkace_flwr.experiments.report.robustness import honest_accuracies, robustness_tables
    from fedkace_flwr.storage.files import write_text

    check_output(options.output)
    runs = honest_accuracies(*options.sources)
    print(robustness_tables(runs))
    if options.output:
        with writing(options.output):
            write_text(options.output, runs.to_csv(index=False))


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
    with writing(options.output):
        draw_streams(streams, options.output)
    _say(console, f"written: {options.output}")


@contextmanager
def _in_checkout(command: str) -> Iterator[None]:
    """Say that a command which the installed package lacks needs a checkout."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not str(error.name).startswith(f"fedkace_flwr.experiments.{command}"):
            raise
        raise ConfigError(f"{command}: is not in the installed package; run it in a checkout of the project") from error


def _bench(options: argparse.Namespace, console: Console) -> None:
    with _in_checkout("bench"):
        from fedkace_flwr.experiments.bench.measure import kept
        from fedkace_flwr.experiments.bench.suite import bench
    for path in options.show:
        print(kept(path), end="\n\n")
    if not options.show:
        told = {"repeats": options.repeats, "processes": options.processes, "output": options.output}
        bench(console, parts=options.parts, **told)


def _soak(options: argparse.Namespace, console: Console) -> int:
    with _in_checkout("soak"):
        from fedkace_flwr.experiments.soak.run import soak
    signal.signal(signal.SIGTERM, _terminate)
    told = {"seed": options.seed, "output": options.output, "only_plan": options.dry_run}
    return 0 if soak(console, rounds=options.rounds, **told) else _FAILED


def _report(options: argparse.Namespace, console: Console) -> None:
    from fedkace_flwr.experiments.results.folders import check_folders

    check_folders(options.folders)
    with needing_report("report"):
        from fedkace_flwr.experiments.report.write import write_report
    for path in write_report(options.folders, options.output):
        _say(console, f"written: {path}")


def _keys(options: argparse.Namespace, console: Console) -> None:
    from fedkace_flwr.config_docs import described_keys

    found = described_keys(options.word)
    if not found:
        names = [name for name, *_ in described_keys("")]
        raise ConfigError(f"keys {options.word}: no key has it in its name or meaning{closest(options.word, names)}")
    for name, default, values, meaning in found:
        line = f"[bold]{name}[/] = {escape(default)}" + (f"  ({escape(values)})" if values else "")
        console.print(line, highlight=False, soft_wrap=True)
        console.print(Padding(Text(meaning), (0, 0, 0, 4)))


def _keep(options: argparse.Namespace, console: Console) -> None:
    from fedkace_flwr.experiments.results.keep import keep

    keep(options.run, options.target)
    _say(console, f"written: {options.target}")


def _export(options: argparse.Namespace, console: Console) -> None:
    from fedkace_flwr.experiments.export import export

    for line in export(options.source, options.target, onnx=options.onnx, data_dir=options.data_dir):
        _say(console, line)


def _feed(options: argparse.Namespace, console: Console) -> None:
    from fedkace_flwr.config import Config
    from fedkace_flwr.experiments.feed import feed

    config = Config.parse(dict(parse_setting(text) for text in options.set))
    feed(config, options.folder, every=options.every, tell=partial(_say, console))


def _members(options: argparse.Namespace, console: Console) -> None:
    from fedkace_flwr.experiments.living import members_table, remove

    if options.remove is not None:
        _say(console, remove(options.run, options.remove))
    console.print(members_table(options.run))


def _status(options: argparse.Namespace, console: Console) -> None:
    from fedkace_flwr.experiments.living import show_status

    show_status(options.run, console, watch=options.watch, as_json=options.json)


def _stop(options: argparse.Namespace, console: Console) -> None:
    from fedkace_flwr.experiments.living import stop

    _say(console, stop(options.run, undo=options.undo))


def _rollback(options: argparse.Namespace, console: Console) -> None:
    from fedkace_flwr.experiments.living import past_models_table, roll_back

    if options.to is None:
        console.print(past_models_table(options.run))
    else:
        _say(console, roll_back(options.run, options.to))


def _app(options: argparse.Namespace, console: Console) -> None:
    from fedkace_flwr.experiments.running.processes import staged_app

    print(staged_app(options.folder))


_COMMANDS: dict[str, Callable[[argparse.Namespace, Console], int | None]] = {
    "run": _run,
    "keys": _keys,
    "table": _table,
    "report": _report,
    "keep": _keep,
    "export": _export,
    "stream": _stream,
    "feed": _feed,
    "status": _status,
    "members": _members,
    "stop": _stop,
    "rollback": _rollback,
    "app": _app,
    "robustness": _robustness,
    "bench": _bench,
    "soak": _soak,
}


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _program() -> str:
    """Return the words with which this program was called."""
    return _PROGRAM if Path(sys.argv[0]).name == _PROGRAM else "python -m experiments"


if __name__ == "__main__":
    sys.exit(main())
