"""A headless Chromium that playwright controls."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run the browser that is installed on the system; skip the test if there is no browser.

    While it is open, no test in this process can run an asyncio event loop, because playwright runs one.
    """
    executable = next((path for name in NAMES if (path := shutil.which(name))), None)
    if executable is None:
        pytest.skip("neither Chromium nor Chrome is on the PATH")
    with sync_playwright() as driver:
        # Tests in a container run as root, and Chromium has no sandbox for root.
        browser = driver.chromium.launch(executable_path=executable, chromium_sandbox=False)
        yield browser
        browser.close()
