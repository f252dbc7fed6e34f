"""The documentation as a site: it is built without a warning, and read from disk without a network."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.systems.browser import headless_browser, requested

ROOT = Path(__file__).parents[1]
_PATIENCE = 30

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with headless_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def test_a_search_from_disk_finds_a_page_and_asks_no_network(site: Path, browser: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get((site / "index.html").as_uri())
    box = browser.find_element("css selector", ".md-search__input")
    WebDriverWait(browser, _PATIENCE).until(lambda _: box.is_displayed())
    box.send_keys("gumbel")
    found = ".md-search-result__link"
    WebDriverWait(browser, _PATIENCE).until(lambda _: browser.find_elements("css selector", found))
    links = [each.get_attribute("href") for each in browser.find_elements("css selector", found)]
    assert any(link.startswith((site / "method.html").as_uri()) for link in links)
    asked = requested(browser)
    assert (site / "index.html").as_uri() in asked
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))] == []


def test_formulas_are_mathml_and_no_page_names_a_script_of_others(site: Path) -> None:
    text = (site / "method.html").read_text(encoding="utf-8")
    assert text.count("<math ") > 50
    assert "arithmatex" not in text and "\\frac" not in text
    for page in site.glob("*.html"):
        assert "unpkg.com" not in page.read_text(encoding="utf-8"), page.name


def test_documents_outside_their_folder_and_generated_ones_are_pages(site: Path) -> None:
    assert 'href="running.html"' in (site / "index.html").read_text(encoding="utf-8")  # docs/running.md in the README
    assert 'href="reproducibility.html' in (site / "fedframe.html").read_text(encoding="utf-8")
    commands = (site / "commands.html").read_text(encoding="utf-8")
    assert "--gpu-fraction" in commands
    python = (site / "interface.html").read_text(encoding="utf-8")
    assert 'id="fedkace_flwr.clients.base.ClientRule.maintain"' in python and ":meth:" not in python
