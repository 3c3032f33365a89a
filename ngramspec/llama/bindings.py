"""Access to llama.cpp: initialisation, its log, owned memory, and the differences between versions of llama-cpp-python.

Only this file distinguishes versions: the rest of this folder is written for 0.3.35 and later. The fork also prints on
stdout when it is imported, which `__init__.py` handles. These are the other differences:

| | 0.3.34, which conda-forge has | JamePeng's fork, 0.3.48 |
|---|---|---|
| reading of weights | `use_mmap` instead of `load_mode` | |
| a model's forbidden tokens | not available | |
| the constructor of the penalties | takes no size of the vocabulary | |
| the constructor of DRY | takes the size of the context | |
| the type of a log function | | `ggml_log_callback` |
| the modes of loading and the quantisations | | members of an enumeration |
| kernels | | in separate files, which must be loaded first |

Code may set a field that a version lacks, such as `n_outputs_max_per_seq`, because ctypes accepts it.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, Self

import llama_cpp.llama_cpp as llama


def log_callback() -> Any:
    """Return the type of a function that llama.cpp calls with lines of its log."""
    return llama.llama_log_callback if hasattr(llama, "llama_log_callback") else llama.ggml_log_callback


_listeners: list[Callable[[str], object]] = []  # called with every line of the log

log_tail: deque[tuple[int, str]] = deque(maxlen=60)  # last lines (level, text) of the log, which is not printed


@log_callback()  # type: ignore[untyped-decorator]
def _collect_log(level: int, text: bytes, _data: Any) -> None:
    line = text.decode("utf-8", "replace").strip()
    log_tail.append((level, line))
    for on_line in _listeners:
        on_line(line)


def last_complaint() -> str:
    """Return llama.cpp's error message from its log: the first one, because later errors only follow from it."""
    errors = [text for level, text in log_tail if level == 4 and text]  # enum ggml_log_level
    return errors[0] if errors else "no reason given"


@contextmanager
def log_given_back() -> Iterator[None]:
    """Return the log to llama-cpp-python's own classes, which print it, after the block."""
    from llama_cpp import _logger

    try:
        yield
    finally:
        name = "llama_log_callback" if hasattr(_logger, "llama_log_callback") else "ggml_log_callback"
        llama.llama_log_set(getattr(_logger, name), ctypes.c_void_p(0))


@contextmanager
def log_listener(on_line: Callable[[str], object]) -> Iterator[None]:
    _listeners.append(on_line)
    try:
        yield
    finally:
        _listeners.remove(on_line)


def init_backend() -> None:
    """Initialise llama.cpp, redirect its log to `log_tail`, and load its kernels if they are separate files."""
    from llama_cpp._ggml import libggml

    llama.llama_log_set(_collect_log, ctypes.c_void_p(0))
    llama.llama_backend_init()
    if hasattr(libggml, "ggml_backend_load_all_from_path") and libggml.ggml_backend_dev_count() == 0:
        load = libggml.ggml_backend_load_all_from_path
        load.restype, load.argtypes = None, [ctypes.c_char_p]
        load(os.fsencode(os.path.dirname(libggml._name)))


def ggml() -> Any:
    """Return the ggml library whose devices llama.cpp uses.

    Wheels contain copies of files that are links in the build. So `libggml.so` may be loaded twice, by libllama and by
    llama-cpp-python. Each of them has separate registrations.
    """
    from llama_cpp._ggml import libggml

    own = getattr(llama, "_lib", None)
    # On Windows, a library does not give access to functions of the libraries that it uses, but ggml is loaded once.
    return own if hasattr(own, "ggml_backend_dev_count") else libggml


def ggml_function(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(ggml(), name)
    function.restype, function.argtypes = result, list(arguments)
    return function


def set_mapped(params: Any, mapped: bool) -> None:
    if not hasattr(params, "load_mode"):
        params.use_mmap = mapped
        return
    modes = _constants("llama_load_mode")
    params.load_mode = modes["LLAMA_LOAD_MODE_AUTO" if mapped else "LLAMA_LOAD_MODE_NONE"]


def head_functions() -> Any:
    """Return the module with llama.cpp's functions for a model's own head (NextN); `None` if the build lacks them."""
    if not hasattr(llama, "LLAMA_CONTEXT_TYPE_MTP") or not hasattr(llama.llama_model_default_params(), "load_mtp"):
        return None
    try:
        from llama_cpp import llama_cpp_ext
    except (ImportError, AttributeError):  # AttributeError: a function is not in the library
        return None
    return llama_cpp_ext


def file_types() -> Mapping[str, int]:
    """Return the numbers of quantisations by their names in llama.cpp's header."""
    return {name: value for name, value in _constants("llama_ftype").items() if name.startswith("LLAMA_FTYPE_")}


def _constants(enumeration: str) -> Mapping[str, Any]:
    """Return a mapping that contains the values of one of llama.cpp's enumerations by name."""
    is_enum = hasattr(llama, enumeration)
    members: Mapping[str, Any] = getattr(llama, enumeration).__members__ if is_enum else vars(llama)
    return members


def width_out(model: Any) -> int:
    """Return the width of a model's last output; the width of its layers if the version lacks that function."""
    return int(getattr(llama, "llama_model_n_embd_out", llama.llama_model_n_embd)(model))


def find_suppress_tokens(vocab: Any) -> tuple[int, ...]:
    """Return the token ids that a model's file forbids; none if the version lacks that function."""
    if not hasattr(llama, "llama_vocab_get_suppress_tokens"):
        return ()
    count = ctypes.c_int32()
    tokens = llama.llama_vocab_get_suppress_tokens(vocab, ctypes.byref(count))
    return tuple(tokens[i] for i in range(count.value))


def penalties(n_vocab: int, last_n: int, repeat: float, frequency: float, presence: float) -> Any:
    make = llama.llama_sampler_init_penalties
    size_arguments = (n_vocab,) if len(make.argtypes) == 5 else ()
    return make(*size_arguments, last_n, repeat, frequency, presence)


def dry(vocab: Any, multiplier: float, base: float, allowed_length: int, last_n: int, breakers: Any) -> Any:
    """Return llama.cpp's DRY sampler over the last `last_n` tokens, at least 1; `breakers` is an array of C strings."""
    make = llama.llama_sampler_init_dry
    # llama.cpp uses the size of the context only if `last_n` is -1.
    size_arguments = () if len(make.argtypes) == 7 else (last_n,)
    return make(vocab, *size_arguments, multiplier, base, allowed_length, last_n, breakers, len(breakers))


class NativeObject:
    """Base class with a context manager that closes the object, which cannot be copied."""

    def close(self) -> None:
        """Free llama.cpp's objects; this object and what it returned cannot be used afterwards."""
        raise NotImplementedError

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: it owns memory of llama.cpp")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
