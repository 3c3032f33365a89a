"""Environment of every test: the option `--exhaustive`, the limit on processor time, and common fixtures."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

# This must be set before llama.cpp is loaded. The tests run in as many processes as there are cores. An OpenMP thread
# that waits for others by spinning would take a core from another test.
os.environ["OMP_WAIT_POLICY"] = "passive"

import pytest
from hypothesis import HealthCheck, settings
from support.cli_runner import DEMO, environment
from support.model_files import WORDS, write_words

from ngramspec.cost import bits, store
from ngramspec.cost.bits import ExactnessSelector
from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.llama import crash_check
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.policies.cost import CostPolicy

COMPARE, COMPARE_THREADS = ExactnessSelector.compare, ExactnessSelector.threads_agree
VERDICT = crash_check.verdict

SECONDS = 2.0
"""Maximum processor time of a test that is not exhaustive, including the fixtures that it is the first to set up."""
CLIENTS = "test_official_clients.py"
YARDSTICK = 0.05
"""Processor time of `yardstick` on a desktop; tests get more time on a slower machine."""

# By default, neither chance nor the load of the machine decides whether a property holds.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
# If the variable CI is set, hypothesis itself would choose a profile that draws the same examples in every run.
_DEFAULT = settings.get_profile("default")
settings.register_profile("fast", _DEFAULT, max_examples=25, derandomize=True, **_COMMON)
settings.register_profile("exhaustive", _DEFAULT, max_examples=200, print_blob=True, **_COMMON)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run all tests, and more examples of each property")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("exhaustive" if config.getoption("--exhaustive") else "fast")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spare the default run the import of the official clients, unless the user names the file."""
    is_wanted = config.getoption("--exhaustive") or any(CLIENTS in argument for argument in config.args)
    return True if collection_path.name == CLIENTS and not is_wanted else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests that only `--exhaustive` runs, unless the user names one."""
    named = any("::" in argument for argument in config.args)
    if config.getoption("--exhaustive") or named:
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """After Ctrl-C, list failed tests without their tracebacks."""
    if exitstatus == pytest.ExitCode.INTERRUPTED:
        session.config.option.tbstyle = "no"


def pytest_collectstart() -> None:
    """Search for no garbage while tests are collected: imports create many objects, and hardly any garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exempt all imported modules from garbage collections, which would search them again and again."""
    gc.freeze()
    gc.enable()


def processor_seconds(*, of_children: bool) -> float:
    """Return the processor time of this process and, on request and if the system counts it, of its ended children."""
    return sum(os.times()[: 4 if of_children else 2])


def yardstick() -> float:
    """Return the processor time of a fixed calculation; it is longer on a slow machine or next to another worker."""
    before = time.process_time()
    mixed = 0
    for number in range(1_500_000):
        mixed = (mixed * 31 + number) & 0xFFFFFF
    return time.process_time() - before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    # A fixture may end a child process that worked for earlier tests.
    return (yield from within_the_limit(item, of_children=False))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from within_the_limit(item, of_children=True))


def within_the_limit(item: pytest.Item, *, of_children: bool) -> Generator[None, object, object]:
    """Fail a test or a fixture that it is the first to set up if it is too slow for the default run."""
    before = processor_seconds(of_children=of_children)
    result = yield
    taken = processor_seconds(of_children=of_children) - before
    is_slow = "MUTATION_SOURCES" in os.environ  # the sources of compiled modules
    limited = not (is_slow or item.get_closest_marker("exhaustive") or item.config.getoption("--exhaustive"))
    if limited and taken > SECONDS and taken > SECONDS * yardstick() / YARDSTICK:
        pytest.fail(f"it took {taken:.1f} s of processor time: make it faster, or mark it as exhaustive", pytrace=False)
    return result


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment with empty user folders and no configured model."""
    return environment(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def new_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield the variables of a new user, which this process has; drafts always pay, and few sizes are compared."""
    variables = environment(tmp_path_factory.mktemp("home"))
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("CONFIG", "DATA", "STATE"):
            patch.delenv(f"XDG_{kind}_HOME", raising=False)
        for name in ("HOME", "XDG_CACHE_HOME"):
            patch.setenv(name, variables[name])
        patch.setattr(store, "_read", lambda _: make_fixed_curve({1: 1.0, 64: 1.2}))
        for sizes in ("SIZES", "SHARED_SIZES"):
            patch.setattr(bits, sizes, getattr(bits, sizes)[:7])
        patch.setattr(CostPolicy, "record", lambda *_: None)  # no updates of the loss budget
        yield variables


@pytest.fixture(scope="session")
def word_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Return a vocabulary of all bytes, some overlapping short words and an end of text; see `model_files`."""
    return Vocabulary(write_words(tmp_path_factory.mktemp("vocabulary") / "words.gguf", WORDS))


@pytest.fixture(scope="session")
def demo_vocabulary() -> Vocabulary:
    """Return the demo model's vocabulary: byte-level BPE with 4,096 tokens."""
    return Vocabulary(DEMO)


@pytest.fixture(scope="session", autouse=True)
def _undecided() -> Iterator[None]:
    """Let no batch sizes agree, and all numbers of threads, without the seconds that comparisons take."""

    def disagree(selector: ExactnessSelector, *_: object) -> None:
        selector.comparisons.sizes = {"fast": (1,), "exact": (1,)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExactnessSelector, "compare", disagree)
        patch.setattr(ExactnessSelector, "threads_agree", lambda *_: True)
        yield


@pytest.fixture
def _comparing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the comparisons that `_undecided` disables."""
    monkeypatch.setattr(ExactnessSelector, "compare", COMPARE)
    monkeypatch.setattr(ExactnessSelector, "threads_agree", COMPARE_THREADS)


@pytest.fixture(scope="session", autouse=True)
def _untried() -> Iterator[None]:
    """Load model files without a child process that tries them first: nearly all files of the tests are valid."""

    def verdict(kind: str, *arguments: Any) -> str:
        return "" if kind == "trial" else VERDICT(kind, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crash_check, "verdict", verdict)
        yield


@pytest.fixture(scope="module")
def _trying() -> Iterator[None]:
    """Try model files in a child process, which `_untried` disables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crash_check, "verdict", VERDICT)
        yield


@pytest.fixture
def _new_workers() -> None:
    """End the children that worked for earlier tests; a server would end them in a test, which then paid for them."""
    from ngramspec_cli.serve import WORKERS

    for worker in WORKERS:
        with worker.session():
            worker.close()


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> Iterator[None]:
    """Enable SIGINT, which may be ignored if tests run in the background, and which child processes would inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
