"""What the documents refer to exists: files, anchors, modules, studies and tests."""

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
def test_every_link_leads_to_a_file_and_a_heading(page: str) -> None:
    path = ROOT / page
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", path.read_text()):
        if target.startswith("http"):
            continue
        linked = path.parent / target if target else path
        assert linked.exists(), f"{page} links to {target}"
        assert not anchor or anchor in _anchors(linked), f"{page} links to {target}#{anchor}"


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


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_is_named_exists(page: str) -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", (ROOT / page).read_text()))
    assert named <= set(re.findall(r"^(?:async )?def (test_\w+)", tests, re.MULTILINE))


def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
