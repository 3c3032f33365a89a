"""`Watchdog`: runs calls of llama.cpp that wait for other machines, so that a lost machine cannot block the caller.

ggml's RPC backend reports no errors. If a connection breaks, it ends the process (`GGML_ABORT`). If a machine does not
respond, it waits forever. Such a call cannot be unwound, but its thread can be abandoned. So watched calls run on a
separate thread, and callers wait for the result. All run on the same thread, because OpenMP has workers per thread.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from ngramspec.data import TargetError

SOURCE = "ggml-rpc"  # name of the RPC backend's source file, which ggml's message contains if that backend failed

LOOK = 0.1
"""Seconds between two checks of a call, because a signal that arrives right before a wait does not end that wait."""


class _Call:
    """A call and its outcome, a return value or an error; the first outcome counts."""

    __slots__ = ("args", "begun", "function", "outcomes", "wake")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args
        self.begun = False
        self.outcomes: list[tuple[Any, BaseException | None]] = []
        self.wake: SimpleQueue[None] = SimpleQueue()

    def end(self, result: Any, error: BaseException | None) -> None:
        self.outcomes.append((result, error))
        self.wake.put(None)


class Watchdog:
    """Runner of calls that may never return; after one is abandoned, all waiting and later calls raise TargetError.

    Args:
        patience: Seconds after which a call is abandoned, counted from its start or from the last `alive`. It may be
            changed between calls.
        explain: Returns the message for the user, given ggml's message or `None` if there was no response. It may be
            changed between calls.
    """

    def __init__(self, patience: float, explain: Callable[[str | None], str]) -> None:
        self.patience = patience
        self.lost = threading.Event()  # event that is set when a call has been abandoned
        self.reason = ""  # reason for the user; "" until then
        self.explain = explain
        self._last_alive = 0.0
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._waiting: set[_Call] = set()
        self._thread = threading.Thread(target=self._work, name="llama.cpp", daemon=True)
        self._thread.start()
        # The caller passes this callback to `ggml_set_abort_callback`.
        self.on_abort = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._aborting)

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function on the watchdog's thread, and return or raise what it does.

        An exception of a signal handler is raised after the end of the call, as in a call of C. A second one abandons
        the call.

        Raises:
            TargetError: This call or one before was abandoned.
        """
        if threading.current_thread() is self._thread:
            return function(*args)
        call = _Call(function, args)
        self._waiting.add(call)
        try:
            if self.lost.is_set():
                raise TargetError(self.reason)
            self._await(call)
        except BaseException:
            if not call.outcomes:
                self._lose("a call of llama.cpp was abandoned; restart the program")
            raise
        finally:
            self._waiting.discard(call)
        result, error = call.outcomes[0]
        if error is not None:
            raise error
        return result

    def free(self, function: Callable[..., None], *args: Any) -> None:
        """Run a function that frees something, unless a call was abandoned or the process ends."""
        if not self.lost.is_set() and not sys.is_finalizing():
            self(function, *args)

    def alive(self) -> None:
        """Report that the running call makes progress."""
        self._last_alive = time.monotonic()

    def watch(self, module: Any, calls: Sequence[str], frees: Sequence[str]) -> None:
        """Replace functions of a module by watched ones, which run with `__call__`, or with `free`."""
        for run, names in ((self.__call__, calls), (self.free, frees)):
            for name in names:
                setattr(module, name, partial(run, getattr(module, name)))

    def _await(self, call: _Call) -> None:
        """Queue a call and wait for its end or its timeout; raise the exception of a signal handler afterwards."""
        interruption: BaseException | None = None
        is_queued = False
        while True:
            try:
                if not is_queued:
                    self.alive()
                    self._calls.put(call)  # a signal right after this queues it twice, but it runs once
                    is_queued = True
                while not call.outcomes:
                    seconds_left = self._last_alive + self.patience - time.monotonic()
                    with suppress(Empty):
                        call.wake.get(timeout=min(LOOK, max(0.01, seconds_left)))
                    if not call.outcomes and time.monotonic() - self._last_alive >= self.patience:
                        self._lose(self.explain(None))
                break
            except BaseException as raised:
                if interruption is not None:
                    raise
                interruption = raised
        if interruption is not None:
            raise interruption

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            if call.begun:
                continue
            call.begun = True
            self.alive()
            try:
                call.end(call.function(*call.args), None)
            except BaseException as error:
                call.end(None, error)

    def _lose(self, reason: str) -> None:
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()
        for call in tuple(self._waiting):
            call.end(None, TargetError(self.reason))

    def _aborting(self, message: bytes) -> None:
        """Handle an abort of ggml, which cannot continue in this thread and ends the process if this returns."""
        text = message.decode("utf-8", "replace")
        if SOURCE in text:
            self._lose(self.explain(text))
            threading.Event().wait()  # never returns; no caller waits for this thread any more
        os.write(2, message + b"\n")
