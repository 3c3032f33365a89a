"""Tests of calls that may never return: all waiting threads get the same error, and no further call is made."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace

import pytest

from ngramspec.data import TargetError
from ngramspec.llama.watchdog import LOOK, Watchdog


def explain_error(said: str | None) -> str:
    return f"lost: {said}"


def test_watchdog_runs_every_call_on_the_same_thread() -> None:
    guard = Watchdog(60, explain_error)
    assert guard(divmod, 7, 3) == (2, 1)
    with pytest.raises(ZeroDivisionError):
        guard(divmod, 7, 0)
    threads = {guard(threading.get_ident) for _ in range(3)}
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert guard(lambda: guard(threading.get_ident)) in threads  # as in a callback of llama.cpp
    assert not guard.lost.is_set()


def test_watchdog_after_timeout_raises_for_all_later_calls() -> None:
    guard = Watchdog(0.2, explain_error)
    freed: list[int] = []
    with pytest.raises(TargetError, match="lost: None"):
        guard(threading.Event().wait)
    with pytest.raises(TargetError, match="lost: None"):
        guard(freed.append, 1)
    guard.free(freed.append, 2)
    assert freed == []
    assert guard.lost.is_set()


def test_watchdog_waits_for_call_that_reports_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pause = [0.0], threading.Event()
    monkeypatch.setattr("ngramspec.llama.watchdog.time", SimpleNamespace(monotonic=lambda: now[0]))
    guard = Watchdog(60, explain_error)

    def slow() -> str:
        for _ in range(8):
            now[0] += 50
            pause.wait(LOOK)
            guard.alive()
        return "done"

    assert guard(slow) == "done"


def test_watchdog_on_rpc_abort_raises_in_the_caller() -> None:
    guard = Watchdog(60, explain_error)
    said = b"ggml-rpc.cpp:1: crashed"
    failing = threading.Thread(target=guard.on_abort, args=(said,), daemon=True)

    def answer() -> None:
        failing.start()
        threading.Event().wait()

    with pytest.raises(TargetError, match=f"lost: {said.decode()}"):
        guard(answer)
    assert failing.is_alive()  # The thread must not return into ggml.


def test_watchdog_on_other_abort_lets_ggml_end_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    guard = Watchdog(60, explain_error)
    guard.on_abort(b"ggml.c:1: GGML_ASSERT(x) failed")
    assert "GGML_ASSERT(x) failed" in capfd.readouterr().err
    assert guard(abs, -1) == 1


def test_watchdog_defers_first_signal_and_second_ends_the_call() -> None:
    guard = Watchdog(600, explain_error)
    ended: list[int] = []
    handled = threading.Semaphore(0)

    def interrupt(number: int, frame: object) -> None:
        handled.release()
        raise KeyboardInterrupt

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        handled.acquire()

    def interrupted() -> None:
        press()
        ended.append(1)

    def stuck() -> None:
        press()
        press()
        threading.Event().wait()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            guard(interrupted)
        assert ended == [1]
        assert not guard.lost.is_set()
        with pytest.raises(KeyboardInterrupt):
            guard(stuck)
        assert guard.lost.is_set()
    finally:
        signal.signal(signal.SIGINT, before)


def test_watchdog_watch_guards_functions_of_a_module() -> None:
    guard = Watchdog(60, explain_error)
    module = SimpleNamespace(where=threading.get_ident, free=lambda kept: kept.append(threading.get_ident()))
    guard.watch(module, ("where",), ("free",))
    kept: list[int] = []
    module.free(kept)
    assert kept == [module.where()] != [threading.get_ident()]
