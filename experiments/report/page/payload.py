"""The page's data as JSON: the curves of the runs, and the clients of as many runs as the size limit allows."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedkace_flwr.config import Config
from fedkace_flwr.data.datasets import Dataset
from fedkace_flwr.errors import ResultsError, StateError
from fedkace_flwr.experiments.report.names import axis_label, method_rank
from fedkace_flwr.experiments.report.page.images import Budget, held, newest_state, try_dataset
from fedkace_flwr.experiments.report.page.theorem import distances, schedules_of
from fedkace_flwr.experiments.report.tables import axis_value, place
from fedkace_flwr.experiments.results.averages import conditions
from fedkace_flwr.experiments.results.loading import Results, StudyInfo, rows_of
from fedkace_flwr.experiments.results.reading import Record
from fedkace_flwr.sections import DataConfig
from fedkace_flwr.storage.names import without_paths

CURVE_BYTES, CLIENT_BYTES, IMAGE_BYTES = 6_000_000, 3_000_000, 2_500_000
POINTS = 120
_DIGITS = 4


def payload(results: Results, data_dir: Path | None = None) -> dict[str, Any]:
    """Collect the data for the page's script.

    Parameters
    ----------
    results : Results
        The runs.
    data_dir : Path, optional
        Folder of the data sets' files; without it, images of data sets with files are not shown.

    Returns
    -------
    dict
        Ready for JSON, with a bounded size for any number of runs; ``notes`` lists omissions.
    """
    studies = {study.name: study for study in results.studies}
    every = sorted(rows_of(results.runs), key=_importance(results.runs))
    chosen = [row for row in every if row["run"] not in studies[row["study"]].repeats]
    notes: list[str] = []
    runs: list[dict[str, Any]] = []
    details: list[dict[str, Any]] = []
    detailed: list[tuple[Record, Config, int, dict[str, Any]]] = []
    streams: dict[str, dict[str, Any]] = {}
    spent = {"curves": 0, "clients": 0}
    images = _Images(data_dir)
    for row in chosen:
        records = thinned(results.records(row["folder"]))
        if not records:
            continue
        config = config_of(row)
        run = _curves(studies[row["study"]], row, records)
        run["stream"] = _stream(streams, config, records)
        size = len(json.dumps(run))
        if spent["curves"] + size > CURVE_BYTES:
            continue
        spent["curves"] += size
        detail = _clients(row, config, records)
        size = len(json.dumps(detail))
        run["detail"] = None
        if spent["clients"] + size <= CLIENT_BYTES:
            spent["clients"] += size
            run["detail"] = len(details)
            details.append(detail)
            detailed.append((row, config, int(records[-1]["round"]), detail))
        runs.append(run)
    images.fill(detailed)
    shown = len(runs)
    if shown < len(chosen):
        notes.append(
            f"{len(chosen) - shown} of {len(chosen)} runs are not drawn: they have no finished round, or the page "
            "would grow too large."
        )
    if len(details) < shown:
        notes.append(
            f"The charts of single clients cover {len(details)} of {shown} runs, to limit the size of this page."
        )
    notes += images.notes
    runs.sort(
        key=lambda run: (
            run["study"],
            run["data"],
            -int(run["overlap"]),
            run["cell"],
            method_rank(run["method"]),
            run["name"],
        )
    )
    return {"runs": runs, "details": details, "streams": list(streams.values()), "notes": notes}


def thinned(records: Sequence[Record]) -> list[Record]:
    """Return at most about :data:`POINTS` evenly spaced rounds, including the first and the last."""
    step = max(1, math.ceil(len(records) / POINTS))
    kept = list(records[::step])
    return kept if not records or kept[-1] is records[-1] else [*kept, records[-1]]


def short(value: Any) -> Any:
    """Round floats, also in nested lists, to four significant digits; return anything else unchanged."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [short(each) for each in value]
    return value


def _importance(frame: Any) -> Any:
    """Return a sort key: finished runs first, then by seed, then FedKACE before other methods."""
    lowest = frame["seed"].min()
    return lambda row: (not row["finished"], row["seed"] - lowest, method_rank(row["method"]), row["run"])


def config_of(row: Mapping[str, Any]) -> Config:
    """Return the configuration of a run."""
    return Config.parse({key: row[key] for key in Config().flat()})


def _curves(study: StudyInfo, row: Mapping[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    line, cell = place(study, row)
    pairs = [_both(record) for record in records]
    return {
        "study": study.name,
        "name": row["run"],
        "method": row["method"],
        "line": line,
        "cell": cell,
        "data": axis_label("data", axis_value(study, row, "data")),
        "overlap": int(row["overlap"]),
        "seed": int(row["seed"]),
        "clients": int(row["clients"]),
        "finished": bool(row["finished"]),
        "rounds": [record["round"] for record in records],
        "accuracy": short([record["accuracy"] for record in records]),
        "chance": short([record["chance"] for record in records]),
        "interpolated": any(record.get("interpolated") for record in records),
        "weight": _spread([_weights(record) for record in records], geometric=True),
        "gap": _spread([_known(record["gap"]) for record in records]),
        "condition": _spread(
            [list(filter(math.isfinite, conditions(record["condition_number"]))) for record in records], geometric=True
        ),
        "drift": short([record["client_drift"] for record in records]),
        "lead": short(pairs) if row["evaluate"] == "both" else None,
    }


def _both(record: Record) -> float | None:
    """Return the clients' mean lead of the local model over the global one, or None unless all tested both."""
    pairs = zip(record["local_accuracy"], record["global_accuracy"], strict=True)
    leads = [local - other for local, other in pairs if local is not None and other is not None]
    full = len(leads) == len(record["local_accuracy"])
    return sum(leads) / len(leads) if leads and full else None


def _weights(record: Record) -> list[float]:
    """Return the replay weights of all clients from the second epoch on; the first epoch's weight is always 1."""
    return [weight for column in record["replay_weights"] if column for weight in column[1:]]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _spread(values: Sequence[Sequence[float]], *, geometric: bool = False) -> dict[str, Any] | None:
    """Return mean, minimum and maximum by round; None if there are no values or all of them are 1."""
    if not any(values) or {value for each in values for value in each} == {1.0}:
        return None
    return {
        "mean": short([_mean(each, geometric) for each in values]),
        "low": short([min(each, default=None) for each in values]),
        "high": short([max(each, default=None) for each in values]),
    }


def _mean(values: Sequence[float], geometric: bool) -> float | None:
    if not values:
        return None
    if geometric:
        positive = [value for value in values if value > 0]
        return math.exp(math.fsum(math.log(value) for value in positive) / len(positive)) if positive else None
    return math.fsum(values) / len(values)


def _stream(streams: dict[str, dict[str, Any]], config: Config, records: Sequence[Record]) -> int | None:
    """Return the index of the distances of the run's stream, which runs with the same stream share."""
    classes = config.data.num_classes or _class_count(records)
    key = repr([config.data.dataset, classes, config.run.seed, config.stream])
    if key not in streams:
        found = distances(config, classes or None)
        if found is None:
            return None
        steps = thinned([{"index": index} for index in range(config.stream.rounds)])
        streams[key] = {
            "rounds": [step["index"] + 1 for step in steps],
            "largest": short([found.largest[step["index"]] for step in steps]),
            "average": short([found.average[step["index"]] for step in steps]),
            "factor": short(found.factor),
        }
    return list(streams).index(key)


def _class_count(records: Sequence[Record]) -> int:
    return max((len(each) for record in records for each in record["buffer_classes"] if each), default=0)


def _clients(row: Mapping[str, Any], config: Config, records: Sequence[Record]) -> dict[str, Any]:
    """Return each client's two accuracies and its switch; its accuracy and buffer by class, in order of arrival."""
    clients = range(int(row["clients"]))
    classes = _class_count(records)
    schedules = schedules_of(config, classes or None)
    orders = []
    for client in clients:
        met = [label for window in schedules[client].windows for label in window] if schedules else range(classes)
        orders.append([label for label in dict.fromkeys(met) if label < classes])
    return {
        "local": [short([record["local_accuracy"][client] for record in records]) for client in clients],
        "global": [short([record["global_accuracy"][client] for record in records]) for client in clients],
        "switched": records[-1]["switched_at"],
        "both": config.answers.evaluate == "both",
        "orders": orders,
        "matrix": [
            [short([_entry(record.get("class_accuracy"), client, label) for record in records]) for label in order]
            for client, order in zip(clients, orders, strict=True)
        ],
        "buffers": [
            [[(record["buffer_classes"][client] or [0] * classes)[label] for record in records] for label in order]
            for client, order in zip(clients, orders, strict=True)
        ],
    }


def _entry(column: Sequence[Sequence[float | None] | None] | None, client: int, label: int) -> float | None:
    values = column[client] if column else None
    return values[label] if values else None


class _Images:
    """The buffered images of the runs within the budget; each data set is opened once."""

    def __init__(self, data_dir: Path | None) -> None:
        self.notes: list[str] = []
        self._data_dir = data_dir
        self._budget = Budget(IMAGE_BYTES)
        self._opened: dict[DataConfig, Dataset | None] = {}

    def fill(self, detailed: Sequence[tuple[Record, Config, int, dict[str, Any]]]) -> None:
        """Add the clients' buffers to all runs; the first clients of all runs come before any second client."""
        for _, config, _, detail in detailed:
            detail["held"] = [None] * config.stream.clients
        for client in range(max((config.stream.clients for _, config, *_ in detailed), default=0)):
            for row, config, rounds, detail in detailed:
                if client < config.stream.clients:
                    detail["held"][client] = self._held(Path(row["folder"]), config, rounds, client)
        for _, config, _, detail in detailed:
            detail["names"] = list(self._names(config)) if any(detail["held"]) else []
        if self._budget.left == 0:
            self._note("Buffered images are shown for some clients only, to limit the size of this page.")

    def _held(self, folder: Path, config: Config, rounds: int, client: int) -> dict[str, Any] | None:
        try:
            state = newest_state(folder, client)
        except (ResultsError, StateError) as error:
            self._note(f"A stored buffer cannot be shown: {without_paths(str(error))}")
            return None
        if state is None or state.round == 0:
            return None
        each = held(state, len(state.seen), max(rounds, state.round), self._dataset(config), self._budget)
        strips = [
            {"label": strip.label, "kept": strip.kept, "rounds": list(strip.rounds), "source": strip.source}
            for strip in each.strips
        ]
        return {"round": each.round, "arrivals": each.arrivals, "strips": strips}

    def _names(self, config: Config) -> Sequence[str]:
        dataset = self._dataset(config)
        if dataset is None:
            self._note(  # without the reason, which names folders of this machine: the page may be passed on
                f"Buffered images of {config.data.name} are not shown; --data-dir names the folder that holds the "
                "data set's files."
            )
            return ()
        return dataset.class_names

    def _dataset(self, config: Config) -> Dataset | None:
        if config.data not in self._opened:
            self._opened[config.data] = try_dataset(config, self._data_dir)
        return self._opened[config.data]

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
