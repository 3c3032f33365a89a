"""`GovernedContext`: decode calls of a context, each with as many CPU threads as a `ThreadGovernor` chooses."""

from __future__ import annotations

import time
from typing import Any

import llama_cpp.llama_cpp as llama

from ngramspec.cpu.thread_governor import ThreadGovernor


class GovernedContext:
    """The decode calls of one context.

    Args:
        context: llama.cpp's context.
        governor: Chooses the number of threads; `None` leaves the context's number unchanged.
        is_timed: Whether the governor learns from these calls. It must do so from one context only, whose calls take
            equally long. In addition, `llama_decode` must return when the work is done, as on a CPU.
    """

    def __init__(self, context: Any, governor: ThreadGovernor | None, *, is_timed: bool = False) -> None:
        self._context, self._governor, self._is_timed = context, governor, is_timed
        self._threads = 0  # number of threads that was set last

    def decode(self, batch: Any) -> int:
        """Call `llama_decode` and return its status."""
        governor = self._governor
        if governor is None:
            return int(llama.llama_decode(self._context, batch))
        size: int = batch.n_tokens
        threads = governor.begin_call(size)
        if threads != self._threads:
            llama.llama_set_n_threads(self._context, threads, threads)
            self._threads = threads
        began = time.perf_counter()
        status: int = llama.llama_decode(self._context, batch)
        if self._is_timed:
            governor.end_call(size, threads, time.perf_counter() - began)
        else:
            governor.end_call()
        return status

    def set_threads(self, size: int) -> None:
        """Set the number of threads for a call over `size` tokens that the owner of the context makes."""
        if self._governor is not None:
            threads = self._governor.begin_call(size)
            if threads != self._threads:
                llama.llama_set_n_threads(self._context, threads, threads)
                self._threads = threads
