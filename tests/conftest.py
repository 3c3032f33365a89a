"""Fixtures: an environment for the command line, and a small vocabulary for grammars."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from support.cli_runner import DEMO, environment
from support.vocabulary_files import WORDS, write_words

if TYPE_CHECKING:
    from ngramspec.llama.vocabulary import Vocabulary

# Neither chance nor what else the machine does decides whether a property holds.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the user's folders are empty and no model is named."""
    return environment(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def word_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """All bytes, some short words that overlap, and an end of text; see `vocabulary_files`."""
    pytest.importorskip("llama_cpp")
    from ngramspec.llama.vocabulary import Vocabulary

    return Vocabulary(write_words(tmp_path_factory.mktemp("vocabulary") / "words.gguf", WORDS))


@pytest.fixture(scope="session")
def demo_vocabulary() -> Vocabulary:
    """The demo model's: byte-level BPE, 4,096 tokens."""
    pytest.importorskip("llama_cpp")
    from ngramspec.llama.vocabulary import Vocabulary

    return Vocabulary(DEMO)


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> Iterator[None]:
    """Where tests run in the background SIGINT may be ignored, which a child would inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
