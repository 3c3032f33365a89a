"""Calls of llguidance on a stack that is large enough for it.

It compiles rules that refer to each other by recursion, and a stack that is too small ends the process: on the usual
8 MiB a thousand JSON schemas in a chain of references are enough.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

STACK = 512 * 2**20
"""Bytes of address space; memory is used as far as the recursion goes. A chain in a grammar of `MAX_SIZE` fits."""

T = TypeVar("T")
_lock = threading.Lock()


def run_on_deep_stack(call: Callable[[], T]) -> T:
    """Return the result of a call that is made in a thread with a large stack; errors are those of the call."""
    with ThreadPoolExecutor(1, "grammar") as executor:
        with _lock:  # the size belongs to all threads that start meanwhile
            before = threading.stack_size(STACK)
            try:
                result = executor.submit(call)
            finally:
                threading.stack_size(before)
        return result.result()
