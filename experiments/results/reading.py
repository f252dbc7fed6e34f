"""Checks of records, which may be anyone's: what is returned has the types that it should have.

A file is read in its folder alone, no link leads out of it, and its size is bounded. No path of the machine that wrote
it is returned: the keys that name folders have their defaults, and a path in a text is cut to its last name. Each check
is told ``where`` its content comes from, such as the path of a file. What cannot be read, is damaged, has a newer schema
or is a link out of its folder is refused with a :class:`ResultsError` that names the place and what is wrong.
"""

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from fedkace_flwr import registry as registry  # declares the methods' keys and metrics
from fedkace_flwr.config import Config, folder_keys, keys_affecting, path_keys
from fedkace_flwr.errors import ConfigError, MissingDataError, ResultsError
from fedkace_flwr.experiments.results.folders import within
from fedkace_flwr.former_keys import NAMES, renewed
from fedkace_flwr.keys import Scalar
from fedkace_flwr.messaging.metrics import SHARE, Metric, known_metrics
from fedkace_flwr.storage.files import LARGEST_LOG, LARGEST_TEXT, read_text
from fedkace_flwr.storage.names import printable, without_paths

SCHEMA = 1
"""Version of ``runs.csv``, ``rounds.csv`` and their Parquet versions, and of the files of runs and studies."""

KEPT_SCHEMA = 2
"""Version of a kept study's ``study.json``, which holds its runs as well."""

Record = dict[str, Any]

_PACKAGED = "digits"
"""The data set that comes with a package and has no files of its own."""

_EARLIER = "rounds-earlier.jsonl"
_MOST = 2**53  # up to here, each whole number is a float as well
_LARGEST = 2**63 - 1  # of a column in Parquet
_MOST_NAMES = 32  # of a path that are shown
_MISSING = object()


@dataclass(frozen=True)
class _Kind:
    """What a value must be, in words, and whether one is."""

    wanted: str
    fits: Callable[[Any], bool]


def _number(low: float = -_MOST, high: float = _MOST, *, whole: bool = False) -> _Kind:
    types = (int,) if whole else (int, float)
    span = f"a {'whole ' if whole else ''}number from {low:g} to {high:g}"
    return _Kind(span, lambda value: type(value) in types and low <= value <= high)


def _or_null(kind: _Kind) -> _Kind:
    return _Kind(f"{kind.wanted}, or null", lambda value: value is None or kind.fits(value))


def _optional(kind: _Kind) -> _Kind:
    return _Kind(f"{kind.wanted}, if it is there", lambda value: value is _MISSING or kind.fits(value))


def _list(kind: _Kind) -> _Kind:
    return _Kind(f"a list of: {kind.wanted}", lambda value: isinstance(value, list) and all(map(kind.fits, value)))


def _by_name(kind: _Kind) -> _Kind:
    wanted = f"an object with values of: {kind.wanted}"
    return _Kind(wanted, lambda value: isinstance(value, dict) and all(map(kind.fits, value.values())))


_COUNT = _number(0, whole=True)
_SHARE = _or_null(_number(-1, SHARE))
_TEXT = _Kind("a string", lambda value: isinstance(value, str))
_SCALAR = _Kind(
    f"a string, a number up to {_LARGEST:g}, true, false or null",
    lambda value: isinstance(value, str | bool | None) or _number(-_LARGEST, _LARGEST).fits(value),
)
_SECONDS = _by_name(_number())
_TOTALS = {"bytes.down": _COUNT, "bytes.up": _COUNT, "seconds": _SECONDS, "seconds.round": _number()}

_STUDY = {
    "study": _TEXT,
    **{name: _optional(_or_null(_TEXT)) for name in ("title", "note", "paper", "scale")},
    "axes": _list(_TEXT),
    "runs": _by_name(_by_name(_SCALAR)),
    "keys": _optional(_by_name(_list(_TEXT))),
}
_OBJECT = _Kind("an object", lambda value: isinstance(value, dict))
_KEPT_RUN = dict.fromkeys(("axes", "config", "environment", "summary"), _optional(_OBJECT))
_PAIR = _Kind("two values", lambda value: isinstance(value, list) and len(value) == 2 and all(map(_SCALAR.fits, value)))
_RESUMPTION = {"round": _COUNT, "changed": _by_name(_PAIR)}
_SUMMARY = {
    "method": _TEXT,
    "clients": _number(1, whole=True),
    "rounds": _COUNT,
    "failures": _COUNT,
    "alarms": _optional(_COUNT),
    "switched_at": _list(_or_null(_COUNT)),
    **dict.fromkeys(("average_accuracy", "final_accuracy", "average_chance"), _SHARE),
    **{name: _optional(_SHARE) for name in ("forgetting", "backward_transfer", "forward_transfer")},
    **_TOTALS,
}
_ROUND = {
    "accuracy": _SHARE,
    "chance": _SHARE,
    "client_drift": _or_null(_number(0)),
    "failures": _list(_OBJECT),
    "alarms": _optional(_list(_OBJECT)),
    **_TOTALS,
    **{f"seconds.{part}": _number() for part in ("training", "selection")},
    **{name: _optional(_or_null(_number())) for name in ("epsilon", "delta")},
}
_FAILURE = {"client": _COUNT, "phase": _TEXT, "reason": _TEXT, "kind": _optional(_TEXT)}


def check_config(where: str, told: Record) -> Config:
    """Return a run's configuration; folders that it names are forgotten, and of files the name is kept."""
    check_schema(where, told)
    told = {key: value for key, value in told.items() if key != "schema"}
    try:
        config = Config.parse(published(renewed(told)))
    except ConfigError as error:
        raise ResultsError(f"{where}: {error}") from error
    values = config.flat()
    _check(where, values, dict.fromkeys(values, _SCALAR))
    return config


def published(config: Record) -> Record:
    """Return the values of a configuration without its folders and commands, and with the mere names of files."""
    folders, paths = folder_keys() | {"on-alarm"}, path_keys()
    named = {key: Path(value).name for key, value in config.items() if key in paths and isinstance(value, str)}
    return {key: value for key, value in (config | named).items() if key not in folders}


def with_data_dir(config: Config, data_dir: Path | None) -> Config:
    """Return a record's configuration with the folder of its data set's files, which the record does not choose.

    Raises
    ------
    MissingDataError
        The data set has files, and no folder is given.
    """
    data = config.data
    if data_dir is None and not data.arrives and data.dataset != _PACKAGED:
        raise MissingDataError(f"dataset = {data.dataset!r}: no record decides in which folder its files are opened")
    here = data.dataset.replace(f":{data.hub_name}", "", 1) if data.hub_name else data.dataset
    return replace(config, data=replace(data, data_dir=str(data_dir or data.data_dir), dataset=here))


def check_environment(where: str, told: Record) -> Record:
    """Return the single values of a run's environment."""
    single = {name: value for name, value in told.items() if not isinstance(value, dict | list)}
    _check(where, single, dict.fromkeys(single, _SCALAR))
    return single


def check_digests(where: str, told: Record) -> dict[str, str]:
    """Return the digests of a run's data and files, by key; earlier versions recorded none."""
    _check(where, told, {"files": _optional(_by_name(_TEXT))})
    return {_name(key): printable(digest) for key, digest in told.get("files", {}).items()}


def check_resumptions(where: str, told: Record) -> list[str]:
    """Return the values of keys that a run began with and was resumed without; a run only grows by more rounds."""
    _check(where, told, {"resumptions": _optional(_list(_OBJECT))})
    found = []
    for note in told.get("resumptions", []):
        _check(f"{where}, resumptions", note, _RESUMPTION)
        changed = {_name(key): old for key, (old, _) in note["changed"].items()}
        keys = keys_affecting("numbers") - {"rounds"}
        found += [f"{key} {_shown(old)} before round {note['round']}" for key, old in changed.items() if key in keys]
    return found


def check_summary(where: str, told: Record) -> Record:
    """Return a finished run's summary."""
    _check(where, told, _SUMMARY)
    return told


def check_study(where: str, told: Record) -> Record:
    """Return the description of a study, with texts as they can be shown."""
    _check(where, told, _STUDY)
    return {
        **{name: _shown(told.get(name)) for name in ("study", "title", "note", "paper", "scale")},
        "axes": [_name(axis) for axis in told["axes"]],
        "runs": {
            run: {_name(axis): _shown(value) for axis, value in labels.items()} for run, labels in told["runs"].items()
        },
        "keys": {_name(axis): [_name(key) for key in keys] for axis, keys in told.get("keys", {}).items()},
    }


def read_study(path: Path) -> Record | None:
    """Read the ``study.json`` of a study with folders of runs; None if there is none."""
    if not path.exists():
        return None
    told = _parse(str(path), _text(path, LARGEST_TEXT), _study_without_paths)
    check_schema(str(path), told)
    return check_study(str(path), told)


def merged(before: Record, told: Record) -> Record:
    """Return the description of a study that has runs of an earlier description too."""
    keys = {axis: sorted({*before["keys"].get(axis, ()), *own}) for axis, own in told["keys"].items()}
    return {
        **told,
        "axes": list(dict.fromkeys([*before["axes"], *told["axes"]])),
        "keys": {**before["keys"], **keys},
        "runs": {**before["runs"], **told["runs"]},
    }


def check_kept(where: str, told: Record) -> tuple[Record | None, dict[str, Record]]:
    """Return the description of a kept study, if it has one, and what it says of each run by the run's name."""
    check_schema(where, told, KEPT_SCHEMA)
    _check(where, told, {"runs": _by_name(_OBJECT)})
    runs: dict[str, Record] = told["runs"]
    for name, run in runs.items():
        if PurePosixPath(name).parts != (name,) or name in ("..", "/") or not name.isprintable():
            raise ResultsError(f"{where}: has a run named {name!r}; must be the name of a folder, of printable letters")
        _check(f"{where}, {name}", run, _KEPT_RUN)
    labels = {name: run["axes"] for name, run in runs.items() if "axes" in run}
    return check_study(where, {**told, "runs": labels}) if "axes" in told else None, runs


def check_rounds(
    where: Callable[[int], str], records: list[Record], clients: int | None = None, *, first: int = 1
) -> list[Record]:
    """Return the rounds of a run; columns of clients that an earlier version did not record are null for each client.

    All rounds have the same classes where they have values by class. Clients that join later are null before.

    Parameters
    ----------
    where : callable
        Says where the record of a round is, by the round's number.
    records : list of dict
        The rounds, to which the missing columns are added.
    clients : int, optional
        The number of clients in the first round; by default as many as it has.
    first : int
        The number of the first of these rounds.

    Raises
    ------
    ResultsError
        A record is damaged.
    """
    columns = [metric for metric in known_metrics().values() if metric.column and not metric.is_timed]
    classes = None
    for number, record in enumerate(records, start=first):
        _check(where(number), record, {"round": _number(number, number, whole=True)} | _ROUND)
        for failure in record["failures"]:
            _check(f"{where(number)}, failures", failure, _FAILURE)
        accuracies = record.get("client_accuracy")
        if isinstance(accuracies, list):
            clients = max(len(accuracies), clients or 0)
        for metric in columns:
            value = record.setdefault(metric.column, False if metric.any_client else [None] * (clients or 0))
            classes = _check_column(where(number), metric, value, clients or 0, classes)
    for record in records:
        for metric in columns:
            if isinstance(column := record[metric.column], list):
                column += [None] * ((clients or 0) - len(column))
    return records


def read_rounds(run: Path, clients: int | None = None) -> list[Record]:
    """Read the complete rounds of a run in a folder, and return them as :func:`check_rounds` does.

    Of a run without end, they are those that it still keeps.
    """
    path, records, first = run / "rounds.jsonl", lines_of(run), 1
    if (run / _EARLIER).exists() and records and isinstance(begun := records[0].get("round"), int):
        first = max(1, begun)
    unit = "line" if first == 1 else "round"
    return check_rounds(lambda number: f"{path}, {unit} {number}", records, clients, first=first)


def lines_of(run: Path) -> list[Record]:
    """Return the complete rounds of a run in a folder as they were recorded, in its one or two files."""
    return [*read_lines(run / _EARLIER), *read_lines(run / "rounds.jsonl")]


def _check_column(where: str, metric: Metric, value: Any, clients: int, classes: int | None) -> int | None:
    """Check what a round has recorded of a metric, and return the number of classes, once it is known."""
    low = metric.low if isinstance(metric.low, int | float) else 0
    high = metric.high if isinstance(metric.high, int | float) else _MOST
    types = {int} if metric.whole else {int, float}

    def are_numbers(values: Sequence[Any]) -> bool:
        known = [each for each in values if each is not None]
        return set(map(type, known)) <= types and (not known or (low <= min(known) and max(known) <= high))

    span = f"{'whole numbers' if metric.whole else 'numbers'} from {low:g} to {high:g}"
    if metric.any_client:
        kind = _Kind("true or false", lambda found: isinstance(found, bool))
    elif metric.length is None:
        wanted = f"{span}, or null, of each of the {clients} clients"
        kind = _Kind(wanted, lambda found: isinstance(found, list) and len(found) == clients and are_numbers(found))
    else:
        if metric.length == "classes" and classes is None and isinstance(value, list):
            classes = next((len(each) for each in value if isinstance(each, list)), None)
        length = classes if metric.length == "classes" else None

        def fits(each: Any) -> bool:
            if each is None:
                return True
            as_long = isinstance(each, list) and (length is None or len(each) == length)
            return as_long and (metric.unknown is not None or None not in each) and are_numbers(each)

        entry = f"a list of {span}" if length is None else f"a list of {length} {span}"
        kind = _Kind(
            f"{entry}, or null, of each of the {clients} clients",
            lambda found: isinstance(found, list) and len(found) == clients and all(map(fits, found)),
        )
    if not kind.fits(value):
        raise _wrong(where, metric.column, value, kind)
    return classes


def read_lines(path: Path) -> list[Record]:
    """Read a file of JSON objects, one a line; the last is left out while it is incomplete.."""
    records: list[Record] = []
    if not path.exists():
        return records
    for number, line in enumerate(_text(path, LARGEST_LOG).splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        records.append(parse_record(f"{path}, line {number}", line))
    return records


def parse_record(where: str, text: str) -> Record:
    """Return the record of a round from a line of JSON."""
    record = _parse(where, text)
    check_schema(where, record)
    return record


def read_object(path: Path) -> Record:
    """Read a JSON object."""
    return _parse(str(path), _text(path, LARGEST_TEXT))


def check_schema(where: str, content: Record, known: int = SCHEMA) -> None:
    """Raise :class:`ResultsError` if a content has a schema that this program does not know."""
    schema = content.get("schema", known)
    if type(schema) is not int or not 1 <= schema <= known:
        raise ResultsError(
            f"{where}: schema = {schema!r:.40}: this program reads up to {known}; use the program that wrote it, or a newer one"
        )


def _check(where: str, content: Record, kinds: Mapping[str, _Kind]) -> None:
    """Check the fields of an object; a dot in a name leads into an object in it."""
    for name, kind in kinds.items():
        value: Any = content
        for part in [name] if name in content else name.split("."):
            value = value.get(part, _MISSING) if isinstance(value, dict) else _MISSING
        if not kind.fits(value):
            raise _wrong(where, name, value, kind)


def _wrong(where: str, name: str, value: object, kind: _Kind) -> ResultsError:
    found = "is missing" if value is _MISSING else f"= {reprlib.repr(value)}"
    return ResultsError(f"{where}: is damaged; {printable(name)} {found}; must be {kind.wanted}")


def _text(path: Path, most: int) -> str:
    try:
        return read_text(within(path.parent, path), most)
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path}: cannot be read ({error})") from error


def _parse(where: str, text: str, cut: Callable[[Any], Any] | None = None) -> Record:
    try:
        content = json.loads(text, parse_constant=_refuse)
        if r"\ud" in text.casefold():  # perhaps half a character, which no file can hold
            content = json.loads(json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"))
        if "/" in text or r"\u" in text.casefold():
            content = (cut or _without_paths)(content)
    except (RecursionError, ValueError) as error:
        raise ResultsError(f"{where}: is damaged; not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ResultsError(f"{where}: is damaged; must be a JSON object")
    return content


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


def _without_paths(value: Any) -> Any:
    if isinstance(value, str):
        return without_paths(value)
    if isinstance(value, list):
        return [_without_paths(each) for each in value]
    return {name: _without_paths(each) for name, each in value.items()} if isinstance(value, dict) else value


def _study_without_paths(told: Any) -> Any:
    """Cut paths as elsewhere, but let those of an axis keep so many names that they still differ: ``a/data``, ``b/data``."""
    runs = told.get("runs") if isinstance(told, dict) else None
    if isinstance(runs, dict) and all(isinstance(labels, dict) for labels in runs.values()):
        for axis in {axis for labels in runs.values() for axis in labels}:
            texts = {value for labels in runs.values() if isinstance(value := labels.get(axis), str)}
            paths = {text: PurePosixPath(text).parts[1:] for text in texts if text.startswith("/")}
            if len({without_paths(text) for text in paths}) == len(paths):
                continue
            most = min(max(map(len, paths.values())), _MOST_NAMES)
            fewest = next(
                (n for n in range(2, most) if len({each[-n:] for each in paths.values()}) == len(paths)), most
            )
            for labels in runs.values():
                if isinstance(value := labels.get(axis), str) and value in paths:
                    labels[axis] = "/".join(paths[value][-fewest:]) or "/"
    return _without_paths(told)


def _name(axis: str) -> str:
    """The present name of an axis that is a key, or of a key."""
    return NAMES.get(axis) or printable(axis)


def _shown(value: Scalar | None) -> Scalar | None:
    return printable(value) if isinstance(value, str) else value
