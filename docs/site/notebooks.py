"""Run the notebooks and keep what they show: ``make notebooks``."""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
_PATIENCE = 900  # seconds, for a cell


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Run a notebook's cells in a kernel whose working directory is ``folder``, and return it with what they showed.

    Raises
    ------
    CellExecutionError
        A cell raises.
    """
    notebook: nbformat.NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    client = NotebookClient(
        notebook, timeout=_PATIENCE, resources={"metadata": {"path": str(folder)}}, record_timing=False
    )
    client.execute()
    return notebook


def main() -> None:
    """Run all notebooks, and write them with what they showed."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(path, Path(folder))
        notebook.metadata.pop("language_info", None)
        nbformat.write(notebook, path)  # type: ignore[no-untyped-call]
        print(f"written: {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
