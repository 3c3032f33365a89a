"""The way into llama.cpp: made ready, its log kept, and what other versions of llama-cpp-python have otherwise.

No other file tells versions apart: the rest of this room is written for 0.3.35 and later. Differences that it would
trip over, besides the fork's printing on stdout when it is imported, which `__init__.py` sees to:

| | 0.3.34, which conda-forge has | JamePeng's fork, 0.3.48 |
|---|---|---|
| how weights are read | `use_mmap` instead of `load_mode` | |
| a model's forbidden tokens | not told | |
| the constructor of the penalties | takes no size of the vocabulary | |
| that of DRY | takes the size of the context | |
| the type of a log function | | `ggml_log_callback` |
| the modes of loading and the quantisations | | members of an enumeration |
| kernels | | in files of their own, which are to be loaded first |

A field that a version lacks, such as `n_outputs_max_per_seq`, may be set all the same: ctypes lets it pass.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import llama_cpp.llama_cpp as llama


def log_callback(api: Any) -> Any:
    """The type of a function that llama.cpp calls with lines of its log."""
    return api.llama_log_callback if hasattr(api, "llama_log_callback") else api.ggml_log_callback


_listeners: list[Callable[[str], object]] = []  # called with every line of the log

_LOG_ERROR = 4  # ggml.h, enum ggml_log_level

log_tail: deque[tuple[int, str]] = deque(maxlen=60)  # the last lines of the log, which is not printed: (level, text)


@log_callback(llama)  # type: ignore[untyped-decorator]
def _collect_log(level: int, text: bytes, _data: Any) -> None:
    line = text.decode("utf-8", "replace").strip()
    log_tail.append((level, line))
    for on_line in _listeners:
        on_line(line)


def last_complaint() -> str:
    """llama.cpp's own words for what went wrong, out of its log: the first error, as later ones only follow."""
    errors = [text for level, text in log_tail if level == _LOG_ERROR and text]
    return errors[0] if errors else "no reason given"


@contextmanager
def log_given_back() -> Iterator[None]:
    """After the block, in which a model is loaded, the log goes where llama-cpp-python's own classes print it."""
    from llama_cpp import _logger

    try:
        yield
    finally:
        name = "llama_log_callback" if hasattr(_logger, "llama_log_callback") else "ggml_log_callback"
        llama.llama_log_set(getattr(_logger, name), ctypes.c_void_p(0))


@contextmanager
def log_listener(on_line: Callable[[str], object]) -> Iterator[None]:
    """Call `on_line` with every line of the log that llama.cpp writes in the block."""
    _listeners.append(on_line)
    try:
        yield
    finally:
        _listeners.remove(on_line)


def init_backend() -> None:
    """Make llama.cpp ready, and its log go to `log_tail`."""
    llama.llama_log_set(_collect_log, ctypes.c_void_p(0))
    load_backend(llama)


def ggml(api: Any) -> Any:
    """The ggml library whose devices llama.cpp uses.

    Wheels hold copies where the build had links: `libggml.so` may be loaded twice, for libllama and as
    llama-cpp-python's own. What is registered in one of them the other does not know.
    """
    from llama_cpp._ggml import libggml

    own = getattr(api, "_lib", None)
    # Windows looks for a function in no other library; but there it is loaded once.
    return own if hasattr(own, "ggml_backend_dev_count") else libggml


def ggml_function(api: Any, name: str, result: Any, *arguments: Any) -> Any:
    """A function of that library, with the types of its result and its arguments; AttributeError if it has none."""
    function = getattr(ggml(api), name)
    function.restype, function.argtypes = result, list(arguments)
    return function


def load_backend(api: Any) -> None:
    """Load llama.cpp's kernels."""
    from llama_cpp._ggml import libggml

    api.llama_backend_init()
    if hasattr(libggml, "ggml_backend_load_all_from_path") and libggml.ggml_backend_dev_count() == 0:
        load = libggml.ggml_backend_load_all_from_path
        load.restype, load.argtypes = None, [ctypes.c_char_p]
        load(os.fsencode(os.path.dirname(libggml._name)))


def set_mapped(api: Any, params: Any, mapped: bool) -> None:
    """Have a model's file mapped into memory, or read."""
    if not hasattr(params, "load_mode"):
        params.use_mmap = mapped
        return
    modes = _constants(api, "llama_load_mode")
    params.load_mode = modes["LLAMA_LOAD_MODE_AUTO" if mapped else "LLAMA_LOAD_MODE_NONE"]


def head_functions(api: Any) -> Any:
    """The module with llama.cpp's functions for a model's own head (NextN); None where the build lacks them."""
    if not hasattr(api, "LLAMA_CONTEXT_TYPE_MTP") or not hasattr(api.llama_model_default_params(), "load_mtp"):
        return None
    try:
        from llama_cpp import llama_cpp_ext
    except (ImportError, AttributeError):  # AttributeError: a function is not in the library
        return None
    return llama_cpp_ext


def file_types(api: Any) -> Mapping[str, int]:
    """Numbers of quantisations by the names that llama.cpp's header has for them."""
    return {name: value for name, value in _constants(api, "llama_ftype").items() if name.startswith("LLAMA_FTYPE_")}


def _constants(api: Any, enumeration: str) -> Mapping[str, Any]:
    """The values of one of llama.cpp's enumerations, by name, among others."""
    members: Mapping[str, Any] = getattr(api, enumeration).__members__ if hasattr(api, enumeration) else vars(api)
    return members


def width_out(api: Any, model: Any) -> int:
    """Numbers in a row of what a model's last layer makes; where the version does not tell, in a row of its layers."""
    tell = getattr(api, "llama_model_n_embd_out", api.llama_model_n_embd)
    return int(tell(model))


def suppressed(api: Any, vocab: Any) -> tuple[int, ...]:
    """Token ids that a model's file forbids; none where the version does not tell."""
    if not hasattr(api, "llama_vocab_get_suppress_tokens"):
        return ()
    count = ctypes.c_int32()
    tokens = api.llama_vocab_get_suppress_tokens(vocab, ctypes.byref(count))
    return tuple(tokens[i] for i in range(count.value))


def penalties(api: Any, n_vocab: int, last_n: int, repeat: float, frequency: float, presence: float) -> Any:
    """llama.cpp's sampler that makes tokens less likely which the last `last_n` hold."""
    make = api.llama_sampler_init_penalties
    sized = (n_vocab,) if len(make.argtypes) == 5 else ()
    return make(*sized, last_n, repeat, frequency, presence)


def dry(api: Any, vocab: Any, multiplier: float, base: float, allowed: int, last_n: int, breakers: Any) -> Any:
    """llama.cpp's DRY sampler over the last `last_n` tokens, at least 1; `breakers` is an array of C strings."""
    make = api.llama_sampler_init_dry
    # The size of the context is what a `last_n` of -1 would stand for.
    sized = () if len(make.argtypes) == 7 else (last_n,)
    return make(vocab, *sized, multiplier, base, allowed, last_n, breakers, len(breakers))
