"""``python -m experiments report``: write tables, figures, data frames and the page to one folder."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fedkace_flwr.errors import ResultsError
from fedkace_flwr.experiments.report.escaping import in_markdown
from fedkace_flwr.experiments.report.figures import draw_figures
from fedkace_flwr.experiments.report.markup import latex_notes, latex_table, markdown_notes, markdown_table
from fedkace_flwr.experiments.report.page.document import write_page
from fedkace_flwr.experiments.report.paired import Difference, difference_frame, difference_table, paired_differences
from fedkace_flwr.experiments.report.single_runs import Table, only_run_table, unfinished_table
from fedkace_flwr.experiments.report.tables import latex, long_frame, markdown, study_notes, study_tables
from fedkace_flwr.experiments.results.classes import write_classes
from fedkace_flwr.experiments.results.loading import Results, load_results
from fedkace_flwr.keys import LONGEST_NAME, is_plain_name
from fedkace_flwr.storage.files import write_text
from fedkace_flwr.storage.folders import make_folder
from fedkace_flwr.storage.names import fitted
from fedkace_flwr.storage.targets import renewed


def write_report(folders: Sequence[Path], output: Path | None = None, data_dir: Path | None = None) -> list[Path]:
    """Read results folders and write tables, figures, data frames and the page.

    Parameters
    ----------
    folders : sequence of Path
        Folders of studies or of single runs.
    output : Path, optional
        Output folder: new, empty, or that of an earlier report, which is replaced; by default ``report/`` in the first
        folder. It is created for this user only, because the page may show buffered images.
    data_dir : Path, optional
        Folder of the data sets' files; without it, images of data sets with files are not shown.

    Returns
    -------
    list of Path
        The files written.

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
            written = _write(results, new, target, data_dir)
    except OSError as error:
        raise ResultsError(f"{target}: cannot be written ({error}); choose another folder with --output") from error
    return [target / path.relative_to(new) for path in written]


def _write(results: Results, target: Path, seen_from: Path, data_dir: Path | None) -> list[Path]:
    tables = {study.name: study_tables(results, study) for study in results.studies}
    differences: list[Difference] = []
    every = [table for study in results.studies for table in tables[study.name]]
    written = [*results.write(target, seen_from), *write_classes(results, target)]
    for study in results.studies:
        own = target if len(results.studies) == 1 else target / _file_name(study.name)
        make_folder(own)
        compared = paired_differences(results, study)
        differences += compared
        only = only_run_table(results, study, tables[study.name])
        together = tables[study.name] if only is None else []
        more = [only, unfinished_table(results, study), difference_table(compared) if compared else None]
        in_words, in_tex = map(markdown, together), map(latex, together)
        notes = study_notes(study, tables[study.name])
        top = f"## {in_markdown(study.title)}\n\n{markdown_notes(notes)}"
        write_text(own / "tables.md", top + _joined(markdown_table, in_words, more))
        write_text(own / "tables.tex", latex_notes(notes) + _joined(latex_table, in_tex, more))
        written += [own / "tables.md", own / "tables.tex", *draw_figures(results, study, own)]
    write_text(target / "tables.csv", long_frame(every).to_csv(index=False))
    write_text(target / "paired.csv", difference_frame(differences).to_csv(index=False))
    write_page(results, tables, target / "index.html", data_dir)
    return [*written, target / "tables.csv", target / "paired.csv", target / "index.html"]


def _joined(form: Callable[..., str], tables: Iterable[str], more: Sequence[Table | None]) -> str:
    return "\n".join([*tables, *(form(*table) for table in more if table is not None)])


def _file_name(name: str) -> str:
    """A folder's name for a study; its own name comes from a file."""
    plain = "".join(sign if sign.isalnum() or sign in "-_." else "-" for sign in name)
    return fitted(plain if is_plain_name(plain) else f"study-{plain}", LONGEST_NAME)
