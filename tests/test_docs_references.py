"""Files, modules and studies that the documents name exist; `mkdocs build --strict` checks links and anchors."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")))
TO_BE_CREATED = {  # by the reader of docs/add-a-method.md, the last by `make lock-cpu`
    "clients/recent.py",
    "strategies/recent.py",
    "experiments/studies/recent.yaml",
    "deploy/requirements-cpu.txt",
}
PATH = re.compile(r"(?<![\w./-])(?:experiments|fedkace_flwr|clients|strategies|tests|deploy)/(?!secrets/)[\w/.-]*\.\w+")


@pytest.mark.parametrize("page", PAGES)
def test_every_path_module_and_study_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    missing = {path for path in set(PATH.findall(text)) - TO_BE_CREATED if not (ROOT / path).exists()}
    modules = set(re.findall(r"python3? -m ((?:experiments|fedkace_flwr)[\w.]*)", text))
    missing |= {name for name in modules if importlib.util.find_spec(name) is None}
    studies = re.findall(r"fedkace run (\w+)(?=[\s`])", text)
    files = {f"experiments/studies/{name}.yaml" for name in studies} - TO_BE_CREATED
    missing |= {path for path in files if not (ROOT / path).exists()}
    assert not missing, f"{page} names what does not exist: {sorted(missing)}"
