"""`Watchdog`: calls of llama.cpp that wait for other machines, made so that a lost machine cannot keep the caller.

ggml's RPC backend has no errors. Where a connection breaks it ends the process (`GGML_ABORT`); where a machine is
silent it waits for good. Nothing can be unwound there, but the thread can be left behind: watched calls run on a thread
of their own, all on the same one (OpenMP has its workers by thread), and callers wait for the answer.
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

from ngramspec.errors import TargetError

SOURCE = "ggml-rpc"  # what stands in ggml's message if it was the RPC backend that failed: the name of its source file

LOOK = 0.1
"""Seconds between two looks at a call. A signal that comes right before a wait begins does not end that wait."""


class _Call:
    """A call, and its end: what was returned, or the error; the first one counts."""

    __slots__ = ("args", "begun", "ended", "function", "wake")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args
        self.begun = False
        self.ended: list[tuple[Any, BaseException | None]] = []
        self.wake: SimpleQueue[None] = SimpleQueue()

    def end(self, found: Any, error: BaseException | None) -> None:
        self.ended.append((found, error))
        self.wake.put(None)


class Watchdog:
    """Runs calls that may never return. When one is given up, all that wait and all later calls raise TargetError.

    It is given up after `patience` seconds without a sign of life: its beginning, or `alive`. `explain` makes the line
    for the user out of ggml's message, or of None if nothing was heard. Both may be changed between calls.
    """

    def __init__(self, patience: float, explain: Callable[[str | None], str]) -> None:
        self.patience = patience
        self.lost = threading.Event()  # set once a call was given up
        self.reason = ""  # why, for the user; "" until then
        self.explain = explain
        self._heard = 0.0
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._waiting: set[_Call] = set()
        self._thread = threading.Thread(target=self._work, name="llama.cpp", daemon=True)
        self._thread.start()
        # what `ggml_set_abort_callback` is to be given
        self.on_abort = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(self._aborting)

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function returns or raises on the watchdog's thread; TargetError, if it or one before was given up.

        An exception of a signal's handler waits for the end of the call, as it does in a call of C; a second one gives
        the call up.
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
            if not call.ended:
                self._lose("a call of llama.cpp was abandoned; restart the program")
            raise
        finally:
            self._waiting.discard(call)
        found, error = call.ended[0]
        if error is not None:
            raise error
        return found

    def free(self, function: Callable[..., None], *args: Any) -> None:
        """The same for what frees something: nothing, once a call was given up or the process ends."""
        if not self.lost.is_set() and not sys.is_finalizing():
            self(function, *args)

    def alive(self) -> None:
        """Say that the call at work gets on."""
        self._heard = time.monotonic()

    def watch(self, module: Any, calls: Sequence[str], frees: Sequence[str]) -> None:
        """Replace functions of a module by guarded ones; `frees` are those that free something."""
        for way, names in ((self.__call__, calls), (self.free, frees)):
            for name in names:
                setattr(module, name, partial(way, getattr(module, name)))

    def _await(self, call: _Call) -> None:
        """Have a call made, and wait for its end or for too long; a signal's exception is raised then."""
        interruption: BaseException | None = None
        queued = False
        while True:
            try:
                if not queued:
                    self.alive()
                    self._calls.put(call)  # once more, if a signal comes right behind this; it is made once
                    queued = True
                while not call.ended:
                    left = self._heard + self.patience - time.monotonic()
                    with suppress(Empty):
                        call.wake.get(timeout=min(LOOK, max(0.01, left)))
                    if not call.ended and time.monotonic() - self._heard >= self.patience:
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
        """ggml cannot continue in this thread, and ends the process if this returns."""
        said = message.decode("utf-8", "replace")
        if SOURCE in said:
            self._lose(self.explain(said))
            threading.Event().wait()  # for good; nobody waits for this thread any more
        os.write(2, message + b"\n")
