"""``python -m experiments report``: write tables, figures, data frames and the page to one folder."""

from collections.abc import Sequence
from pathlib import Path

from experiments.report.figures import draw_figures
from experiments.report.page import write_page
from experiments.report.tables import latex, long_frame, markdown, study_tables
from experiments.results.loading import load_results
from fedkace_flwr.errors import ResultsError


def write_report(folders: Sequence[Path], output: Path | None = None, data_dir: Path | None = None) -> list[Path]:
    """Read results folders and write tables, figures, data frames and the page.

    Parameters
    ----------
    folders : sequence of Path
        Folders of studies or of single runs.
    output : Path, optional
        Output folder; by default ``report/`` in the first folder.
    data_dir : Path, optional
        Folder of the data sets' files; by default the one in each run's configuration.

    Returns
    -------
    list of Path
        The files written.

    Raises
    ------
    ResultsError
        The folders cannot be read, or the output cannot be written.
    """
    results = load_results(*folders)
    target = output or folders[0] / "report"
    tables = {study.name: study_tables(results, study) for study in results.studies}
    every = [table for study in results.studies for table in tables[study.name]]
    try:
        written = results.write(target)
        for study in results.studies:
            own = target if len(results.studies) == 1 else target / _file_name(study.name)
            own.mkdir(parents=True, exist_ok=True)
            (own / "tables.md").write_text(
                f"## {study.title}\n\n" + "\n".join(markdown(table) for table in tables[study.name]), encoding="utf-8"
            )
            (own / "tables.tex").write_text("\n".join(latex(table) for table in tables[study.name]), encoding="utf-8")
            written += [own / "tables.md", own / "tables.tex", *draw_figures(results, study, own)]
        long_frame(every).to_csv(target / "tables.csv", index=False)
        write_page(results, tables, target / "index.html", data_dir)
    except OSError as error:
        raise ResultsError(f"{target}: cannot be written ({error}); choose another folder with --output") from error
    return [*written, target / "tables.csv", target / "index.html"]


def _file_name(name: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "-_." else "-" for sign in name)
