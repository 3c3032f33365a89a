"""AMX: test this build's kernels for Intel's matrix unit before they run in this process.

Older gcc, such as 12.2, assumes that `_tile_loadconfig` reads 8 bytes although it reads 64. It drops the rest of the
tile configuration as unused (gcc's bug 114098, fixed in 14). A llama.cpp built with it dies (SIGSEGV, SIGILL) in every
pass of two and more tokens. So a child process tries the kernels on the demo model. If they are broken, "AMX" is
removed from the list of buffer types that llama.cpp searches when it places weights: it then uses the next one.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import partial
from itertools import count, takewhile
from pathlib import Path

import llama_cpp.llama_cpp as llama
import numpy as np
from numpy.typing import NDArray

from ngramspec import machine
from ngramspec.llama import bindings, crash_check
from ngramspec.models.find import demo_model

NOTE = (
    "warning: this build's AMX kernels are broken (miscompiled by an older gcc, such as 12.2) and not used; built with"
    " gcc 14, passes of many tokens are up to twice as fast (cli/guide/first-gain.md: Build flags)"
)

TOLERANCE = 0.1
"""Maximum relative difference of the logits from other kernels' in the 2-norm; that of working kernels is 0.008."""

_WORKS, _BROKEN = "works", "broken"
_DIFFERS = 3
_PATIENCE = 60.0


def works(library: Path) -> bool:
    """Return True if the AMX kernels work of ggml's `library` and the files next to it; False without a verdict."""
    parts = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in library.parent.glob("*ggml*") if f.is_file()]
    about = f"{machine.name()} {sorted(parts)}".encode()
    return crash_check.verdict("amx", about, [__name__], _PATIENCE, _judge) == _WORKS


def _judge(end: crash_check.ChildEnd) -> str | None:
    code, _ = end
    if code == 0:
        return _WORKS
    return _BROKEN if crash_check.died(code) or code in (None, _DIFFERS) else None


def hide() -> bool:
    """Remove AMX from ggml's buffer types for all further models.

    Returns:
        True if AMX was removed; False if the library does not export the functions for that.
    """
    function, pointer = partial(bindings.ggml_function, llama), ctypes.c_void_p
    try:
        cpu = function("ggml_backend_dev_by_type", pointer, ctypes.c_int)(0)  # enum ggml_backend_dev_type
        registry = function("ggml_backend_dev_backend_reg", pointer, pointer)
        address = function("ggml_backend_reg_get_proc_address", pointer, pointer, ctypes.c_char_p)
        name = function("ggml_backend_buft_name", ctypes.c_char_p, pointer)
    except AttributeError:
        return False
    getter = address(registry(cpu), b"ggml_backend_dev_get_extra_bufts") if cpu else None
    if not getter:
        return False
    # llama.cpp reads this same list, which a null pointer ends, at each load.
    types = ctypes.CFUNCTYPE(ctypes.POINTER(pointer), pointer)(getter)(cpu)
    handles = list(takewhile(bool, (types[i] for i in count())))
    for i, kind in enumerate([*(t for t in handles if name(t) != b"AMX"), None]):
        types[i] = kind
    return True


# --------------------------------------------------------------------------- the child


def compare() -> int:
    """Evaluate a few batches with the AMX kernels and with plain ones, and return the exit code."""
    bindings.init_backend()
    path = demo_model().path
    plain, special = (_logits(path, extra) for extra in (False, True))
    # The comparison is False for a NaN too.
    return 0 if np.linalg.norm(special - plain) <= TOLERANCE * np.linalg.norm(plain) else _DIFFERS


def _logits(path: Path, extra: bool) -> NDArray[np.float32]:
    """Return the logits after batches of several sizes, with special kernels on two threads if `extra` is true."""
    params = llama.llama_model_default_params()
    params.n_gpu_layers, params.use_extra_bufts, params.no_host = 0, extra, extra
    model = llama.llama_model_load_from_file(os.fsencode(path), params)
    settings = llama.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = 64
    settings.n_threads = settings.n_threads_batch = 1 + extra
    context = llama.llama_init_from_model(model, settings)
    n_vocab, rows = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)), []
    for size in (2, 5, 16):
        tokens = (llama.llama_token * size)(*range(1, size + 1))
        if llama.llama_decode(context, llama.llama_batch_get_one(tokens, size)) != 0:
            raise RuntimeError(f"a batch of {size} tokens failed")
        rows.append(np.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), (n_vocab,)).copy())
    llama.llama_free(context)
    llama.llama_model_free(model)
    return np.concatenate(rows)


if __name__ == "__main__":
    crash_check.confine()
    sys.exit(compare())
