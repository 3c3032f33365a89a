"""Tests of `Worker`: results and errors of calls in the child process, and its limits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from ngramspec import worker as module
from ngramspec.data import GrammarError, ShutdownError
from ngramspec.grammars.json_schema import json_rule
from ngramspec.worker import Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker("the grammar", "prepare", GrammarError, memory=2**31)
    yield made
    made.close()


def test_worker_call_returns_result_or_raises_error_of_function(worker: Worker) -> None:
    schema = {"type": "string", "maxLength": 3}
    assert worker.call(json_rule, schema, strict=True) == json_rule(schema)
    with pytest.raises(GrammarError, match="unsupported keywords: not"):
        worker.call(json_rule, {"not": {}})
    with pytest.raises(ZeroDivisionError):
        worker.call(divmod, 1, 0)
    assert worker.call(os.getpid) != os.getpid()


def test_worker_call_when_repeated_returns_cached_result() -> None:
    cached = Worker("the grammar", "prepare", GrammarError, cache=1000)
    first = cached.call(time.perf_counter_ns)
    assert cached.call(time.perf_counter_ns) == first
    cached.call(str, "x" * 1000)  # This exceeds the cache, which drops the oldest result.
    assert cached.call(time.perf_counter_ns) != first
    cached.close()


def test_worker_call_over_limit_or_with_dead_child_raises(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.1)
    with pytest.raises(GrammarError, match=r"^the grammar takes more than 0.1 s to prepare$"):
        worker.call(sum, range(10**12))
    monkeypatch.undo()
    for function, size in ((bytearray, 2**32), (os._exit, 3)):
        with pytest.raises(GrammarError, match=r"^the grammar takes too much memory to prepare$"):
            worker.call(function, size)
    assert worker.call(json_rule, {}) == json_rule({})


def test_worker_call_after_interrupt_returns_its_own_result(worker: Worker) -> None:
    """Ctrl-C during a call must not leave its result for the next call."""
    child = worker.call(os.getpid)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        worker.call(time.sleep, 30)
    assert worker.call(os.getpid) not in (child, os.getpid())


def test_worker_close_during_start_of_child_ends_the_call(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.call(os.getpid)
    start = worker._ensure_running

    def close_and_start() -> object:
        worker.close()
        return start()

    monkeypatch.setattr(worker, "_ensure_running", close_and_start)
    with worker.session(), pytest.raises(ShutdownError, match="shutting down"):
        worker.call(os.getppid)


def test_worker_close_ends_running_call(worker: Worker) -> None:
    worker.call(os.getpid)
    errors: list[str] = []

    def call() -> None:
        try:
            worker.call(time.sleep, 30)
        except ShutdownError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    while not worker._lock.locked():
        time.sleep(0.01)
    with worker.session():
        worker.close()
        thread.join()
        assert errors == ["the server is shutting down"]
        with pytest.raises(ShutdownError, match="shutting down"):
            worker.call(os.getppid)
    assert worker.call(os.getppid) == os.getpid()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_worker_call_in_forked_process_uses_separate_child(worker: Worker) -> None:
    child = worker.call(os.getpid)
    read, write = os.pipe()
    if (forked := os.fork()) == 0:
        os.write(write, str(worker.call(os.getpid)).encode())
        worker.close()
        os._exit(0)
    os.waitpid(forked, 0)
    assert int(os.read(read, 20)) != child
    assert worker.call(os.getpid) == child
    os.close(read)
    os.close(write)
