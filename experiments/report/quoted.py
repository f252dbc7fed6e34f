"""Tables of results quoted in Markdown documents: each stands between markers that name its folder and key.

Run as ``python -m fedkace_flwr.experiments.report.quoted FILE...`` (``make docs``) to bring the tables of documents up to date::

    <!-- table docs/results/reduced aa -->
    <!-- end of table -->

The folder is relative to the document. The keys are:

- the columns of ``runs.csv`` that a report has tables of: ``aa``, ``ar``, ``early``, ``late`` and so on;
- ``stages``: ``aa``, ``early`` and ``late`` in one table, without a title;
- ``differences``: the paired differences from the study's first line, or from ``FedFrame`` with ``differences:FedFrame``.
"""

import re
import stat
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from fedkace_flwr.errors import ResultsError, closest
from fedkace_flwr.experiments.report.markup import Table
from fedkace_flwr.experiments.report.paired import difference_table, paired_differences
from fedkace_flwr.experiments.report.tables import CHANCE, DASH, NO_CHANCE, ResultTable, spread, study_tables
from fedkace_flwr.experiments.results.loading import load_results
from fedkace_flwr.storage.files import write_text

_STAGES = {"aa": "AA", "early": "first quarter", "late": "second half"}
_OPENING = "<!-- table "
_QUOTED = re.compile(rf"({_OPENING}(\S+) (\S+) -->\n)(?:(?!{_OPENING}).)*?(?=<!-- end of table -->)", re.DOTALL)


def with_tables(document: str, base: Path) -> str:
    """Return a document with the tables between its markers as the records have them now.

    Parameters
    ----------
    document : str
        Markdown.
    base : Path
        What the folders in the markers are relative to.

    Raises
    ------
    ResultsError
        A marker has no counterpart; or a folder cannot be read, holds more than one study, or has no such table.
    """
    tables = cache(tables_of)
    if document.count(_OPENING) != len(_QUOTED.findall(document)):
        raise ResultsError(
            "a marker of a table is not as <!-- table FOLDER KEY -->, or has no <!-- end of table --> before the next one"
        )

    def quoted(found: re.Match[str]) -> str:
        marker, folder, key = found.group(1), base / found[2], found[3]
        if key not in tables(folder):
            known = [name for name in tables(folder) if ":" not in name]
            hint = closest(key, tables(folder)) or f"; it has {', '.join(known)}"
            raise ResultsError(f"{folder}: no table {key!r:.100}{hint}")
        return f"{marker}\n{tables(folder)[key].strip()}\n\n"

    return _QUOTED.sub(quoted, document)


def tables_of(folder: Path) -> dict[str, str]:
    """Return the tables of a study's folder as Markdown, by their keys.

    Raises
    ------
    ResultsError
        The folder cannot be read, or holds more than one study.
    """
    results = load_results(folder)
    if len(results.studies) != 1:
        raise ResultsError(f"{folder}: holds {len(results.studies)} studies; name the folder of one of them")
    (study,) = results.studies
    every = study_tables(results, study)
    tables: dict[str, Table | None] = {table.key: table.text() for table in every}
    tables["stages"] = _stages({table.key: table for table in every})
    baselines = {"differences": "", **{f"differences:{line}": line for line in every[0].rows}}
    for key, baseline in baselines.items():
        differences = paired_differences(results, study, baseline)
        tables[key] = None if differences.empty else difference_table(differences)
    return {key: table.markdown() for key, table in tables.items() if table is not None}


def _stages(tables: Mapping[str, ResultTable]) -> Table:
    """Put average accuracy and the means over the first and the later rounds side by side, without a title."""
    average = tables["aa"]
    stages = {key: stage for key, stage in _STAGES.items() if key in tables}
    rows = []
    for row in average.rows:
        cells = [tables[key].cells.get((row, column)) for column in average.columns for key in stages]
        seeds = dict.fromkeys(str(cell.n) for cell in cells if cell)
        rows.append([row, ", ".join(seeds), *(spread(cell) if cell else DASH for cell in cells)])
    over = [
        f"{column}: {stage}" if key == "aa" else stage for column in average.columns for key, stage in stages.items()
    ]
    notes = [note for note in average.notes if note != NO_CHANCE]
    return Table("", [average.head, "seeds", *over], [row for row in rows if row[0] != CHANCE], notes)


def main(arguments: Sequence[str]) -> str | None:
    """Bring the tables of documents up to date; return what went wrong."""
    for path in map(Path, arguments):
        try:
            text = with_tables(path.read_text(encoding="utf-8"), path.parent)
        except (OSError, ResultsError) as error:
            return f"{path}: {error}"
        write_text(path.resolve(), text, mode=stat.S_IMODE(path.stat().st_mode))
        print(path)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
