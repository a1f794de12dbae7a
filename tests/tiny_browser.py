"""Chromium without a window, and what it logs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = "--disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update"


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """The browser, with a profile of its own."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.fail(
            "this test needs Chromium and its driver: apt-get install chromium chromium-driver, or `make browser`"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in [*QUIET.split(), "--headless=new", "--no-sandbox", "--disable-sync", f"--user-data-dir={profile}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield started
    finally:
        started.quit()
