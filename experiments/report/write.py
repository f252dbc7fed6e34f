"""``fedkace report``: write tables, figures, data frames and the page to one folder."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from fedkace_flwr.errors import ResultsError
from fedkace_flwr.experiments.report.figures import draw_figures
from fedkace_flwr.experiments.report.markup import Table, html_notes, in_html, latex_notes, markdown_notes
from fedkace_flwr.experiments.report.page import Section, charts, page, set_up
from fedkace_flwr.experiments.report.paired import difference_table, paired_differences
from fedkace_flwr.experiments.report.single_runs import only_run_table, unfinished_table
from fedkace_flwr.experiments.report.tables import ResultTable, long_frame, study_notes, study_tables
from fedkace_flwr.experiments.results.classes import write_classes
from fedkace_flwr.experiments.results.loading import Results, load_results
from fedkace_flwr.keys import LONGEST_NAME, is_plain_name
from fedkace_flwr.storage.files import write_text
from fedkace_flwr.storage.folders import make_folder
from fedkace_flwr.storage.names import fitted, in_markdown
from fedkace_flwr.storage.targets import renewed


def write_report(folders: Sequence[Path], output: Path | None = None) -> list[Path]:
    """Read results folders and write tables, figures, data frames and the page; return the files written.

    Parameters
    ----------
    folders : sequence of Path
        Folders of studies or of single runs.
    output : Path, optional
        Output folder: new, empty, or that of an earlier report, which is replaced; by default ``report/`` in the first
        folder. It is created for this user only.

    Raises
    ------
    ConfigError
        The output folder holds something else, or cannot be written.
    ResultsError
        The folders cannot be read, or the disk is full.
    """
    results = load_results(*folders)
    target = output or folders[0] / "report"
    try:
        with renewed(target, "a report") as new:
            written = _write(results, new, target)
    except OSError as error:
        raise ResultsError(f"{target}: cannot be written ({error}); choose another folder with --output") from error
    return [target / path.relative_to(new) for path in written]


def _write(results: Results, target: Path, seen_from: Path) -> list[Path]:
    written = [*results.write(target, seen_from), *write_classes(results, target)]
    recorded = target / "classes.parquet"
    classes = pd.read_parquet(recorded) if recorded in written else None
    every: list[ResultTable] = []
    differences: list[pd.DataFrame] = []
    sections: list[Section] = []
    for study in results.studies:
        own = target if len(results.studies) == 1 else target / _file_name(study.name)
        make_folder(own)
        tables = study_tables(results, study)
        every += tables
        differences.append(paired_differences(results, study))
        only = only_run_table(results, study, tables)
        paired = None if differences[-1].empty else difference_table(differences[-1])
        together = [table.text() for table in tables] if only is None else [only]
        texts: list[Table] = [*together, *filter(None, (unfinished_table(results, study), paired))]
        notes = study_notes(study, tables)
        top = f"## {in_markdown(study.title)}\n\n{markdown_notes(notes)}"
        write_text(own / "tables.md", top + "\n".join(table.markdown() for table in texts))
        write_text(own / "tables.tex", latex_notes(notes) + "\n".join(table.latex() for table in texts))
        written += [own / "tables.md", own / "tables.tex", *draw_figures(results, study, own)]
        heading = f"<h2>{in_html(study.title)}</h2>\n{html_notes(notes)}"
        sections += [heading, *(table.html() for table in texts), *charts(results, study, classes)]
    write_text(target / "tables.csv", long_frame(every).to_csv(index=False))
    write_text(target / "paired.csv", pd.concat(differences).to_csv(index=False))
    write_text(target / "index.html", page(results, [*sections, set_up(results)]))
    return [*written, target / "tables.csv", target / "paired.csv", target / "index.html"]


def _file_name(name: str) -> str:
    """A folder's name for a study; its own name comes from a file."""
    plain = "".join(sign if sign.isalnum() or sign in "-_." else "-" for sign in name)
    return fitted(plain if is_plain_name(plain) else f"study-{plain}", LONGEST_NAME)
