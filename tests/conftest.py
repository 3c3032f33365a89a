"""Fixtures of the tests that run the command line."""

from __future__ import annotations

import pytest
from cli_runner import environment


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the user's folders are empty and no model is named."""
    return environment(tmp_path_factory.mktemp("home"))
