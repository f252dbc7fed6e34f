"""The notebooks of the documentation run, and show what they are kept with."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from support.tools import need_modules

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def shown(cell: Any) -> list[tuple[str, list[str], str]]:
    """Of each result that a cell shows: its type, its formats, and its text apart from the digits of numbers."""
    results = [output for output in cell.outputs if output.output_type in ("execute_result", "stream")]
    texts = [output.get("text") or output.data.get("text/plain", "") for output in results]
    return [
        (output.output_type, sorted(output.get("data", {})), re.sub(r"-?\d[\d.]*|NaN|-", "#", " ".join(text.split())))
        for output, text in zip(results, texts, strict=True)
    ]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_is_kept_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    need_modules("nbclient")
    import nbformat

    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "jupyter"))
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs" / "site" / "notebooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    work = tmp_path / "work"
    work.mkdir()
    kept: Any = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    executed = module.execute(path, work)
    code = [(new, old) for new, old in zip(executed.cells, kept.cells, strict=True) if new.cell_type == "code"]
    assert len(code) >= 5
    for new, old in code:
        assert shown(new) == shown(old), new.source
        images = [["image/png" in output.get("data", {}) for output in cell.outputs] for cell in (new, old)]
        assert any(images[0]) == any(images[1]), new.source


def test_the_notebooks_are_kept_with_what_they_show() -> None:
    nbformat = pytest.importorskip("nbformat")
    assert len(NOTEBOOKS) == 2
    for path in NOTEBOOKS:
        cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), path.name
        assert not [o for cell in cells for o in cell.outputs if o.output_type == "error"], path.name
        assert "/root" not in path.read_text() and "/home" not in path.read_text(), path.name
