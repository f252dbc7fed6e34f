"""The report's page in a real browser: charts and tables, names as text, and no request to any network."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.made.results import write_run, write_study
from support.systems.browser import headless_browser, requested

from fedkace_flwr.experiments.report.write import write_report

NAME = '<a href="https://evil.example">AT&amp;T</a><img src=x onerror=alert(1)><b>bold</b>'
_PATIENCE = 30

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two seeds whose variants and title have hostile names, with an unfinished run."""
    study = tmp_path_factory.mktemp("results") / "compare"
    runs = {}
    for method, level, variant in (("fedkace", 0.6, "fedkace"), ("er", 0.4, NAME), ("centralized", 0.8, "centralized")):
        for seed in (0, 1):
            accuracies = [level + 0.01 * seed + 0.02 * number for number in range(5)]
            finished = (method, seed) != ("er", 1)
            write_run(study, f"{method}_{seed}", accuracies, method=method, seed=seed, finished=finished)
            runs[f"{method}_{seed}"] = {"method": method, "variant": variant, "seed": seed}
    write_study(study, runs, title=NAME, paper=None, axes=["method", "variant", "seed"])
    write_report([study], study / "report")
    return study / "report" / "index.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, page: Path) -> Iterator[Any]:
    from selenium.webdriver.support.ui import WebDriverWait

    with headless_browser(tmp_path_factory.mktemp("profile")) as opened:
        opened.get(page.as_uri())
        drawn = "return [...document.querySelectorAll('.plotly-graph-div')].every(d => d.querySelector('.main-svg'))"
        WebDriverWait(opened, _PATIENCE).until(lambda _: opened.execute_script(drawn))
        yield opened


def test_it_draws_every_chart_without_an_error_or_a_request(browser: Any, page: Path) -> None:
    titles = [each.text for each in browser.find_elements("css selector", "h3")]
    drawn = ["Accuracy", "Regret", "Client drift", "Switched", "Gap", "Replay weight", "Condition number"]
    assert {*drawn, "Accuracy of unfinished runs", "Accuracy by class"} <= set(titles)
    script = (
        "return [...document.querySelectorAll('.plotly-graph-div')].map(d => d.data.filter(t => t.name).map(t => t.y))"
    )
    first = browser.execute_script(script)[0]
    assert len(first) == 4  # FedKACE, ER, Centralized and chance
    assert "5 of 6 runs finished on digits" in browser.find_element("css selector", "h1 + p").text
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    asked = requested(browser)
    assert page.as_uri() in asked  # so that requests are seen at all
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def test_it_takes_names_for_text(browser: Any) -> None:
    count = "return document.querySelectorAll(arguments[0]).length"
    assert browser.execute_script(count, "a[href*='evil'], svg a, img[src='x'], b") == 0
    assert NAME in browser.find_element("css selector", "h2").text
    assert any(NAME in each.text for each in browser.find_elements("css selector", "td"))
    (accuracy, *_) = browser.find_elements("css selector", ".plotly-graph-div")
    assert any(f"ER ({NAME})" in each.text for each in accuracy.find_elements("css selector", ".legendtext"))
