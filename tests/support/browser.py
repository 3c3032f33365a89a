"""A headless Chromium, told what to do by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser that the system has, and no other; a test skips where there is none.

    While it is open, no test of the same process can run a loop of asyncio: playwright runs one.
    """
    executable = next((path for name in NAMES if (path := shutil.which(name))), None)
    if executable is None:
        pytest.skip("neither Chromium nor Chrome is on the PATH")
    with sync_playwright() as driver:
        # Without its sandbox: a superuser, as tests in a container are, cannot have one.
        browser = driver.chromium.launch(executable_path=executable, chromium_sandbox=False)
        yield browser
        browser.close()
