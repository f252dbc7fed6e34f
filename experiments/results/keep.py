"""Keep the records of a run or of a study for publication, without the folder names of the original machine."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedkace_flwr.errors import ResultsError, RunError
from fedkace_flwr.experiments.results.folders import CLASSES, KEPT_FILES, ROUNDS, STUDY, check_folders, is_kept
from fedkace_flwr.experiments.results.reading import KEPT_SCHEMA, Record, merged, published
from fedkace_flwr.experiments.results.recorded import Recorded, Run, need_arrow
from fedkace_flwr.messaging.metrics import known_metrics
from fedkace_flwr.storage.files import write_bytes, write_text
from fedkace_flwr.storage.targets import renewed


def keep(source: Path, target: Path) -> None:
    """Write the records of a run, or of every run of a study that has a round, to the three files of a kept study.

    Of an unfinished run, the completed rounds are kept.

    Parameters
    ----------
    source : Path
        The folder of a run or of a study, which may be a kept one.
    target : Path
        The folder to write to: new, empty, or that of the same study, kept earlier. Runs that were kept there and are
        not in ``source`` stay.

    Raises
    ------
    ConfigError
        The target holds something else, or cannot be written.
    RunError
        No run has completed a round.
    ResultsError
        A file is damaged, or is a link out of the folder; the target keeps another study; or pyarrow is not installed.
    """
    need_arrow()
    check_folders([source])
    found, earlier = Recorded(source), Recorded(target) if is_kept(target) else None
    runs, told = {run.name: run for run in found.runs}, found.told
    if earlier is not None:
        name, other = (None if each is None else each["study"] for each in (told, earlier.told))
        if name != other:
            raise ResultsError(f"{target}: keeps the study {other!r}, not {name!r}; choose another folder")
        runs = {run.name: run for run in earlier.runs} | runs
        told = merged(earlier.told, told) if told and earlier.told else None
    rounds = {name: lines for name, run in sorted(runs.items()) if (lines := _lines(run))}
    if not rounds:
        raise RunError(f"{source}: no run has completed a round; keep it later")
    about: Record = {"schema": KEPT_SCHEMA, **(told or {}), "runs": {}}
    for name, labels in told["runs"].items() if told else ():
        about["runs"][name] = {"axes": labels}
    for name in rounds:
        about["runs"].setdefault(name, {}).update(_parts(runs[name]))
    with renewed(target, "a kept study", private=False, known=KEPT_FILES if earlier else ()) as new:
        _write_tables(new, rounds)
        write_text(new / STUDY, json.dumps(about, indent=1) + "\n")


def _lines(run: Run) -> list[Record]:
    """Return the rounds of a run as they were recorded, once all that is recorded of it has been checked."""
    clients = run.config().stream.clients
    run.environment()
    if run.finished:
        run.summary()
    run.rounds(clients)
    return run.lines()


def _parts(run: Run) -> dict[str, Record]:
    parts = {name: run.part(name)[1] for name in ("config", "environment", "summary")}
    parts["config"] = published(parts["config"])
    return {name: part for name, part in parts.items() if part}


def _write_tables(folder: Path, runs: Mapping[str, Sequence[Record]]) -> None:
    """Write the tables of a kept study to a folder, given the rounds of each run as they were recorded."""
    by_class = {metric.column for metric in known_metrics().values() if metric.length == "classes" and metric.column}
    rounds = [
        {"run": run, **{name: value for name, value in record.items() if name not in by_class}}
        for run, records in runs.items()
        for record in records
    ]
    classes = [
        {"run": run, "round": record["round"], "client": client, **dict(zip(own, values, strict=True))}
        for run, records in runs.items()
        for record in records
        if (own := [name for name in record if name in by_class])
        for client, values in enumerate(zip(*(record[name] for name in own), strict=True))
    ]
    _write(folder / ROUNDS, rounds)
    if classes:
        _write(folder / CLASSES, classes)


def _write(path: Path, rows: Sequence[Record]) -> None:
    import pyarrow.parquet

    content = io.BytesIO()
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
        pyarrow.parquet.write_table(table, content, compression="zstd", store_schema=False)
    except (pyarrow.ArrowException, OverflowError) as error:
        raise ResultsError(f"{path}: cannot be written; a field has values of different kinds ({error})") from error
    write_bytes(path, content.getvalue())
