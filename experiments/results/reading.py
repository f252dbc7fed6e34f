"""Reading the files of results folders, which may be anyone's: bounded, checked, and with texts fit to be shown."""

import json
from pathlib import Path
from typing import Any

from fedkace_flwr.errors import ResultsError
from fedkace_flwr.keys import Scalar
from fedkace_flwr.storage.files import LARGEST_LOG, LARGEST_TEXT, read_text
from fedkace_flwr.storage.names import printable

SCHEMA = 1
"""Version of ``runs.csv``, ``rounds.csv`` and their Parquet versions, and of the ``study.json`` files that are read."""

Record = dict[str, Any]


def read_study(path: Path) -> Record | None:
    """Read a ``study.json``; None if there is none.

    Raises
    ------
    ResultsError
        It cannot be read, is damaged, or has a newer schema.
    """
    if not path.exists():
        return None
    told = read_object(path)
    check_schema(path, told)
    if not _is_study(told):
        raise ResultsError(f"{path}: is damaged; must have study, axes, and the values of each run on the axes")
    return {
        **{name: _shown(told.get(name)) for name in ("study", "title", "note", "paper", "scale")},
        "axes": [printable(axis) for axis in told["axes"]],
        "runs": {
            run: {printable(axis): _shown(value) for axis, value in labels.items()}
            for run, labels in told["runs"].items()
        },
        "keys": {printable(axis): [printable(key) for key in keys] for axis, keys in told.get("keys", {}).items()},
    }


def read_rounds(path: Path) -> list[Record]:
    """Read the complete lines of a run's ``rounds.jsonl``; while it is in progress, the last may be incomplete.

    Raises
    ------
    ResultsError
        The file cannot be read, is damaged, or has a newer schema.
    """
    file = path / "rounds.jsonl"
    if not file.exists():
        return []
    records = []
    for number, line in enumerate(_text(file, LARGEST_LOG).splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        record = _parse(file, line, f", line {number}")
        check_schema(file, record)
        records.append(record)
    return records


def read_object(path: Path) -> Record:
    """Read a JSON object.

    Raises
    ------
    ResultsError
        The file cannot be read or is damaged.
    """
    return _parse(path, _text(path, LARGEST_TEXT), "")


def check_schema(path: Path, content: Record) -> None:
    """Raise :class:`ResultsError` if a file has a schema that this program does not know."""
    schema = content.get("schema", SCHEMA)
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        raise ResultsError(
            f"{path}: schema = {schema!r:.40}: this program reads up to {SCHEMA}; use the program that wrote it, or a newer one"
        )


def _text(path: Path, most: int) -> str:
    try:
        return read_text(path, most)
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path}: cannot be read ({error})") from error


def _parse(path: Path, text: str, where: str) -> Record:
    try:
        content = json.loads(text)
        if r"\ud" in text.casefold():  # perhaps half a character, which no file can hold
            content = json.loads(json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"))
    except (RecursionError, ValueError) as error:
        raise ResultsError(f"{path}{where}: is damaged; not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ResultsError(f"{path}{where}: is damaged; must be a JSON object")
    return content


def _is_study(told: Record) -> bool:
    runs, axes, keys = told.get("runs"), told.get("axes"), told.get("keys", {})
    return (
        isinstance(told.get("study"), str)
        and all(isinstance(told.get(name), str | None) for name in ("title", "note", "paper", "scale"))
        and isinstance(axes, list)
        and all(isinstance(axis, str) for axis in axes)
        and isinstance(runs, dict)
        and all(isinstance(labels, dict) for labels in runs.values())
        and all(isinstance(value, Scalar | None) for labels in runs.values() for value in labels.values())
        and isinstance(keys, dict)
        and all(isinstance(own, list) and all(isinstance(key, str) for key in own) for own in keys.values())
    )


def _shown(value: Scalar | None) -> Scalar | None:
    return printable(value) if isinstance(value, str) else value
