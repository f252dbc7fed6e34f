"""The report's page in a real browser: it draws, answers hover and filters, and asks no network for anything."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.made.results import made_round, write_run, write_study
from support.systems.browser import headless_browser, requested

from fedkace_flwr.experiments.report.write import write_report
from fedkace_flwr.samples import Samples
from fedkace_flwr.storage.client_state import Answer, ClientState
from fedkace_flwr.storage.client_store import ClientStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
_PATIENCE = 30


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two methods, two overlaps and two seeds, one of its runs unfinished, one with stored buffers."""
    study = tmp_path_factory.mktemp("results") / "compare"
    runs = {}
    for method, level in (("fedkace", 0.6), ("er", 0.4), ("centralized", 0.8)):
        for overlap in (1, 0):
            for seed in (0, 1):
                name = f"{method}_overlap-{overlap}_seed-{seed}"
                accuracies = [level + 0.01 * seed + 0.02 * number for number in range(5)]
                write_run(study, name, accuracies, method=method, overlap=overlap, seed=seed)
                runs[name] = {"data": "digits", "overlap": overlap, "method": method, "seed": seed}
    folder = study / "fedkace_overlap-1_seed-0"
    flat = json.loads((folder / "config.json").read_text()) | {"evaluate": "both"}
    (folder / "config.json").write_text(json.dumps(flat))
    both: dict[str, Any] = {"local_accuracy": [0.7, 0.6], "global_accuracy": [0.5, 0.55]}
    lines = [json.dumps(made_round(number, 0.58 + 0.02 * number, **both)) for number in range(1, 6)]
    (folder / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    pixels = torch.randint(0, 256, (20, 3, 8, 8), dtype=torch.uint8)
    samples = Samples(pixels, torch.arange(20) % 3, torch.arange(20) % 5 + 1)
    state = ClientState(torch.ones(10, dtype=torch.bool), samples, run="x", round=5)
    ClientStore(folder / "clients" / "client-000", state).save_trained(state, Answer({}, 1, {}))
    (study / "er_overlap-0_seed-1" / "summary.json").unlink()
    write_study(study, runs, paper=None)
    write_report([study], study / "report")
    return study / "report" / "index.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with headless_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def opened(browser: Any, page: Path, width: int = 1280, height: int = 900) -> Any:
    """The page, drawn, in a window of this size."""
    mobile = width < 600
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get_log("performance")  # what an earlier page did is not this one's
    browser.get_log("browser")
    browser.get(page.as_uri())
    waited(browser, lambda: browser.execute_script("return document.body.dataset.drawn") == "1")
    return browser


def waited(browser: Any, condition: Callable[[], Any]) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, _PATIENCE).until(lambda _: condition())


def names_drawn(browser: Any, chart: str) -> list[str]:
    """The names of a chart's visible lines."""
    script = "return document.getElementById(arguments[0]).data.filter(t => t.name).map(t => t.name)"
    names: list[str] = browser.execute_script(script, chart)
    return names


def chip(browser: Any, name: str, value: str) -> Any:
    return browser.find_element("css selector", f'.chip[data-filter="{name}"][data-value="{value}"]')


def test_it_draws_every_section_without_an_error_or_a_request(browser: Any, page: Path) -> None:
    opened(browser, page)
    charts = [
        "accuracy-0",
        "accuracy-1",
        "matrix-chart",
        "models-chart",
        "weight-chart",
        "gap-chart",
        "condition-chart",
        "drift-chart",
    ]
    charts += ["tv-chart", "second-chart", "mu-chart", "lead-chart", "classes-chart", "arrivals-chart"]
    script = "return document.querySelectorAll('#' + arguments[0] + ' .main-svg').length"
    for chart in charts:
        assert browser.execute_script(script, chart) > 0, chart
    assert sorted(names_drawn(browser, "accuracy-0")) == ["Centralized", "ER", "FedKACE", "chance"]
    assert names_drawn(browser, "models-chart") == ["local", "global"] * 2
    images = browser.find_elements("css selector", "#kept img")
    assert len(images) == 3 and all(image.get_property("naturalWidth") > 0 for image in images)
    (ones,) = [image for image in images if " of class 1," in image.get_attribute("alt")]
    assert ones.get_attribute("alt") == "7 buffered images of class 1, from rounds 1, 2, 2, 3, 4, 5, 5"
    captions = [each.text for each in browser.find_elements("css selector", "#kept figcaption")]
    assert "class 1: 7 images" in captions
    titles = "return document.getElementById(arguments[0]).layout.yaxis.title.text"
    assert browser.execute_script(titles, "gap-chart") == "GAP"
    assert "11 of 12 runs finished" in browser.find_element("css selector", ".lead").text
    overflow = "return [...document.querySelectorAll('.js-plotly-plot')].filter(p => p.querySelector('.main-svg').clientWidth > p.clientWidth + 1).map(p => p.id)"
    waited(browser, lambda: browser.execute_script(overflow) == [])
    aids = browser.find_elements("css selector", "figure .chart ~ .aid, section > .aid")
    assert len(aids) >= 12 and all(aid.text.endswith(".") for aid in aids if aid.is_displayed())
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    asked = requested(browser)
    assert page.as_uri() in asked  # so that requests are seen at all
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def test_hovering_shows_values(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    opened(browser, page)
    chart = browser.find_element("id", "accuracy-0")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", chart)
    assert not browser.find_elements("css selector", "#accuracy-0 .hoverlayer text")
    area = chart.find_element("css selector", ".nsewdrag")
    ActionChains(browser).move_to_element(area).perform()

    def told() -> str:
        texts = browser.find_elements("css selector", "#accuracy-0 .hoverlayer text")
        return " ".join(text.text for text in texts)

    waited(browser, lambda: "FedKACE" in told())
    assert "64.5%, 2 seeds" in told()  # round 3 of 5: 0.64 and 0.65
    assert "chance" in told() and "round 3" in told()


def test_the_matrix_shows_a_client_s_accuracies_by_class(browser: Any, page: Path) -> None:
    opened(browser, page)
    script = "const [map] = document.getElementById('matrix-chart').data; return [map.x, map.y, map.z]"
    rounds, classes, accuracies = browser.execute_script(script)
    made = [0.6, 0.62, 0.64, 0.66, 0.68]
    assert rounds == [1, 2, 3, 4, 5]
    assert len(classes) > 3
    for name, row in zip(classes, accuracies, strict=True):  # the made client met class c in round c
        met = int(name.removeprefix("class "))
        assert row == [value if number >= met else None for number, value in zip(rounds, made, strict=True)]
    said = browser.find_element("css selector", "#forgetting .aid").text
    assert "Forgetting is the best accuracy on a class in an earlier round minus that of the last round" in said


def test_markers_stand_on_every_round(browser: Any, page: Path) -> None:
    opened(browser, page)
    script = "return document.getElementById('accuracy-0').data.filter(t => t.marker).map(t => t.marker.maxdisplayed)"
    assert set(browser.execute_script(script)) == {0}


def test_filters_change_what_is_drawn(browser: Any, page: Path) -> None:
    opened(browser, page)
    chip(browser, "Method", "ER").click()
    assert chip(browser, "Method", "ER").get_attribute("aria-pressed") == "false"
    assert "ER" not in names_drawn(browser, "accuracy-0") and "ER, digits, O=1" not in names_drawn(
        browser, "drift-chart"
    )
    chip(browser, "Overlap", "O=0").click()
    assert len(browser.find_elements("css selector", "#accuracy-charts figure")) == 1
    assert names_drawn(browser, "drift-chart") == ["Centralized", "FedKACE"]
    means = "return document.getElementById('accuracy-0').data.find(t => t.name === 'FedKACE').y[0]"
    assert browser.execute_script(means) == pytest.approx(0.605)
    chip(browser, "Seed", "1").click()
    assert browser.execute_script(means) == pytest.approx(0.6)
    chip(browser, "Method", "FedKACE").click()
    assert "FedKACE" not in names_drawn(browser, "accuracy-0")
    chip(browser, "Method", "Centralized").click()
    assert "No run matches" in browser.find_element("id", "accuracy-charts").text
    chip(browser, "Method", "FedKACE").click()
    assert "FedKACE" in names_drawn(browser, "accuracy-0")
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def test_unfinished_runs_appear_when_asked_for(browser: Any, page: Path) -> None:
    opened(browser, page)
    assert "ER (unfinished)" not in names_drawn(browser, "accuracy-1")
    chip(browser, "Runs", "unfinished").click()
    assert {"ER", "ER (unfinished)"} <= set(names_drawn(browser, "accuracy-1"))


def test_a_client_and_a_run_can_be_chosen(browser: Any, page: Path) -> None:
    from selenium.webdriver.support.ui import Select

    opened(browser, page)
    Select(browser.find_element("id", "buffers-client")).select_by_visible_text("1")
    assert not browser.find_element("id", "arrivals-figure").is_displayed()  # only client 0 left its state
    assert "stored state is not available" in browser.find_element("id", "buffers-note").text
    Select(browser.find_element("id", "models-run")).select_by_visible_text("FedKACE, digits, O=0, seed 1")
    assert "evaluate=both" in browser.find_element("id", "models-note").text


def test_it_fits_a_phone_and_follows_light_and_dark(browser: Any, page: Path) -> None:
    opened(browser, page, 390, 844)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    background = "return getComputedStyle(document.body).backgroundColor"
    before = browser.execute_script(background)
    browser.find_element("id", "theme").click()
    assert browser.execute_script(background) != before
    line = "return document.getElementById('accuracy-0').data.at(-2).line.color"
    dark = browser.execute_script(line)
    browser.find_element("id", "theme").click()
    assert browser.execute_script(line) != dark
