"""Environment of every test: the option `--exhaustive`, the limit on processor time, and common fixtures."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

# Before llama.cpp is loaded: tests run on as many processes as there are cores, and a thread of OpenMP that waits for
# its like by spinning would take a core from another test.
os.environ["OMP_WAIT_POLICY"] = "passive"

import psutil
import pytest
from hypothesis import HealthCheck, settings
from support.cli_runner import DEMO, environment
from support.vocabulary_files import WORDS, write_words

from ngramspec.exactness import decision

if TYPE_CHECKING:
    from ngramspec.llama.vocabulary import Vocabulary

SECONDS = 2.0
"""Processor time that a test which is not marked as exhaustive may use, and what it is the first to set up."""
YARDSTICK = 0.05
"""Processor time of `yardstick` on a desktop: on a slower machine tests get more."""

# By default neither chance nor what else the machine does decides whether a property holds.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
# Not what hypothesis itself chooses where the variable CI is set: that draws the same examples in every run.
_DEFAULT = settings.get_profile("default")
settings.register_profile("fast", _DEFAULT, max_examples=25, derandomize=True, **_COMMON)
settings.register_profile("exhaustive", _DEFAULT, max_examples=200, print_blob=True, **_COMMON)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run all tests, and more examples of each property")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("exhaustive" if config.getoption("--exhaustive") else "fast")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `--exhaustive` runs, unless it is asked for by its name."""
    named = any("::" in argument for argument in config.args)
    if config.getoption("--exhaustive") or named:
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


def processor_seconds() -> float:
    """Processor time so far: this process's, and where the system counts them its ended children's."""
    return sum(psutil.Process().cpu_times()[:4])


def yardstick() -> float:
    """Processor time of a calculation that is always the same: longer on a slow machine, and beside another worker."""
    before = time.process_time()
    mixed = 0
    for number in range(1_500_000):
        mixed = (mixed * 31 + number) & 0xFFFFFF
    return time.process_time() - before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from within_the_limit(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from within_the_limit(item))


def within_the_limit(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test, or what it is the first to set up, that is too slow for the command that everybody runs."""
    before = processor_seconds()
    result = yield
    taken = processor_seconds() - before
    limited = not (item.get_closest_marker("exhaustive") or item.config.getoption("--exhaustive"))
    if limited and taken > SECONDS and taken > SECONDS * yardstick() / YARDSTICK:
        pytest.fail(f"it took {taken:.1f} s of processor time: make it faster, or mark it as exhaustive", pytrace=False)
    return result


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
def _undecided() -> Iterator[None]:
    """Measurements on a busy machine must not choose the settings of tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decision, "BUDGET", 0.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> Iterator[None]:
    """Where tests run in the background SIGINT may be ignored, which a child would inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
