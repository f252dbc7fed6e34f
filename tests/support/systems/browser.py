"""A real browser for the tests of pages."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.tools import need_tools


@contextmanager
def headless_browser(profile: Path) -> Iterator[Any]:
    """Open headless Chromium, or Chrome, which logs its requests; ``profile`` is an empty folder."""
    chrome = shutil.which("google-chrome")
    need_tools("chromedriver", *([] if chrome else ["chromium"]))
    binary, driver = shutil.which("chromium") or chrome, shutil.which("chromedriver")
    assert binary is not None
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
        *("--disable-dev-shm-usage", "--window-size=1280,900", f"--user-data-dir={profile}"),
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    opened = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield opened
    finally:
        opened.quit()


def requested(browser: Any) -> list[str]:
    """The addresses asked for since the log was last read, but for what the browser's own pages ask for.

    Chromium may load its start page at any time, even while a test's page is open.
    """
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [each["request"]["url"] for each in asked if not each["documentURL"].startswith("chrome")]
