"""llama.cpp's log: kept, not printed, so that an error can be told in its own words."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import llama_cpp.llama_cpp as llama

from ngramspec.llama import bindings

_LOG_ERROR = 4  # ggml.h, enum ggml_log_level

tail: deque[tuple[int, str]] = deque(maxlen=60)  # the last lines of it: (level, text)


@bindings.log_callback(llama)  # type: ignore[untyped-decorator]
def _collect_log(level: int, text: bytes, _data: Any) -> None:
    tail.append((level, text.decode("utf-8", "replace").strip()))


def last_complaint() -> str:
    """llama.cpp's own words for what went wrong, out of its log: the first error, as later ones only follow."""
    errors = [text for level, text in tail if level == _LOG_ERROR and text]
    return errors[0] if errors else "no reason given"


def init_backend() -> None:
    """Make llama.cpp ready, and its log go to `tail`."""
    llama.llama_log_set(_collect_log, ctypes.c_void_p(0))
    bindings.init_backend(llama)


@contextmanager
def given_back() -> Iterator[None]:
    """After the block, in which a model is loaded, the log goes where llama-cpp-python's own classes print it."""
    from llama_cpp import _logger

    try:
        yield
    finally:
        name = "llama_log_callback" if hasattr(_logger, "llama_log_callback") else "ggml_log_callback"
        llama.llama_log_set(getattr(_logger, name), ctypes.c_void_p(0))
