"""Trials of operations that may crash, in a child process, so that a crash ends the child and not this process.

AMX kernels and each new model file are tried in this way. llama.cpp checks much of a file and asserts the rest, such as
a vocabulary that contains a token twice, which ends the process. Almost all assertions fail while llama.cpp reads the
hyperparameters, places the tensors and builds the graph. This requires no weights: the child loads the file with
`no_alloc`, in the time that Python takes to start. The few that fail only in computations are found by two passes if
the file is small (`MAX_COMPUTED`), and values that are known to cause them are rejected in every file (`check_values`).
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np
from numpy.typing import NDArray

from ngramspec.cpu.cores import machine_name
from ngramspec.data import ModelError
from ngramspec.llama import bindings
from ngramspec.models.check import check_values, has_gguf_magic, read_edges
from ngramspec.models.find import demo_model
from ngramspec.models.gguf import GGUFHeader, read_header
from ngramspec.storage import FOLDERS, read_cache, write_cache

_CPU_SECONDS = 60


ChildEnd = tuple[int | None, str]
"""End of a child: its exit code and its output on stderr.

The code is negative for a signal (on Windows a crash has a code above 255 instead); `None` means that the child hung.
"""


def died(code: int | None) -> bool:
    """Return True if a child crashed by itself."""
    # SIGINT, SIGKILL (also for lack of RAM) and SIGTERM come from outside.
    return code is not None and ((code < 0 and code not in (-2, -9, -15)) or code > 255)


def verdict(
    kind: str, about: bytes, command: list[str], patience: float, judge: Callable[[ChildEnd], str | None]
) -> str:
    """Return the verdict of a child, perhaps from the cache of what was asked `about` before; "" without a verdict."""
    path = FOLDERS.user_cache_path / kind / _digest(about)
    checksum, _, cached_verdict = (read_cache(path) or "").partition(" ")
    if cached_verdict and checksum == _digest(about + cached_verdict.encode()):
        return cached_verdict
    end = run([sys.executable, "-P", "-m", *command], patience)
    result = judge(end) if end is not None else None
    if result:
        write_cache(path, f"{_digest(about + result.encode())} {result}")
    return result or ""


def _digest(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=12).hexdigest()


def run(command: list[str], patience: float) -> ChildEnd | None:
    """Run a child for at most `patience` seconds and return its end; `None` if it cannot be started."""
    # The executable of a frozen application is not Python: it would start the application again.
    if not command[0] or getattr(sys, "frozen", False):
        return None
    # The child must import from the same folders as this process, and not from the working directory.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or "." for entry in sys.path)}
    none = subprocess.DEVNULL
    try:
        result = subprocess.run(
            command, stdin=none, stdout=none, stderr=subprocess.PIPE, env=env, timeout=patience, check=False
        )
    except subprocess.TimeoutExpired:
        return None, ""
    except OSError:
        return None
    return result.returncode, result.stderr.decode("utf-8", "replace")


def confine() -> None:
    """Limit the child: it writes no core file to the user's folder and dies (SIGXCPU) of too much processor time."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    _limit(_CPU_SECONDS)


def _limit(seconds: int) -> None:
    """Let the kernel end this process when it has used `seconds` of processor time since its start."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (seconds, _CPU_SECONDS + 1))


# --------------------------------------------------------------------------- model files

MAX_COMPUTED = 1 << 30
"""Maximum size in bytes of a file whose weights the child reads and computes with: a few seconds on a slow disk."""

_GOOD = "good"
_TEXT = "".join(map(chr, [*range(1, 0x250), *range(0x2010, 0x2030), 0x4E2D, 0x1F600])).encode() + b"  two\n\n\t 1234"
_MAX_TOKENIZED = 20_000  # maximum bytes to tokenize; some vocabularies take time quadratic in the length


def check(path: Path, build: str) -> GGUFHeader | None:
    """Return the header of a file, `None` if it is not GGUF; a ModelError means that llama.cpp would crash with it."""
    if not has_gguf_magic(path):
        return None
    header = read_header(path)
    check_values(path, header)
    # The header may be longer than the edges of the file, so the key contains the time of modification too.
    stat = path.stat()
    about = f"{stat.st_size} {stat.st_mtime_ns} {build}".encode() + read_edges(path, stat.st_size)
    result = verdict("trial", about, [__name__, str(path)], 300.0, _judge)
    if result not in ("", _GOOD):
        raise ModelError(f"{path} is damaged: llama.cpp crashes when loading it ({result}); download it again")
    return header


def _judge(end: ChildEnd) -> str | None:
    code, output = end
    if code == 0:
        return _GOOD
    assertions = re.findall(r"GGML_ASSERT\(.*\) failed|GGML_ABORT.*|fatal error.*", output)
    lacks_memory = not assertions and re.search("alloc|memory", output, re.IGNORECASE)  # says nothing about the file
    if code is None or not died(code) or lacks_memory:
        return None
    return assertions[-1] if assertions else f"signal {-code}" if code < 0 else f"exit code {code}"


def attempt(path: Path) -> None:
    """Run every step that may crash, cheapest first, in the child; an error that llama.cpp reports is not a crash."""
    bindings.init_backend()
    params = llama.llama_model_default_params()
    params.vocab_only = True
    model = llama.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        return
    _limit(math.ceil(time.process_time()) + 10)  # 250,000 tokens take 0.7 s, but some vocabularies take forever
    _tokenize(llama.llama_model_get_vocab(model))
    _limit(_CPU_SECONDS)
    llama.llama_model_free(model)
    if not read_header(path).tensors:
        return
    computes = path.stat().st_size <= MAX_COMPUTED
    for weights in (False, True)[: 1 + computes]:
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = False  # extra buffer types would make another copy of the weights
        params.no_alloc = not weights
        bindings.set_mapped(params, weights)
        model = llama.llama_model_load_from_file(os.fsencode(path), params)
        if not model:
            return
        settings = llama.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = 256
        settings.n_threads = settings.n_threads_batch = 1
        context = llama.llama_init_from_model(model, settings)
        if not context:
            return
        if weights and llama.llama_model_has_decoder(model) and not llama.llama_model_has_encoder(model):
            for size in (2, 1):
                tokens = (llama.llama_token * size)()
                llama.llama_decode(context, llama.llama_batch_get_one(tokens, size))
        llama.llama_free(context)
        llama.llama_model_free(model)


def _tokenize(vocab: Any) -> None:
    """Convert all tokens to text, and texts to tokens, so that llama.cpp checks the merges and types of tokens."""
    texts, size = [_TEXT], 256
    for token in range(llama.llama_vocab_n_tokens(vocab)):
        buffer = ctypes.create_string_buffer(size)
        length = llama.llama_token_to_piece(vocab, token, buffer, size, 0, True)
        texts.append(buffer.raw[: max(0, length)])
        llama.llama_vocab_is_eog(vocab, token)
    for raw in (b"", _TEXT, b"".join(texts)[:_MAX_TOKENIZED], b" ".join(texts)[-_MAX_TOKENIZED:]):
        ids = (llama.llama_token * (len(raw) + 8))()
        llama.llama_tokenize(vocab, raw, len(raw), ids, len(ids), True, len(raw) < len(_TEXT) + 1)


# --------------------------------------------------------------------------- AMX
# Older gcc, such as 12.2, assumes that `_tile_loadconfig` reads 8 bytes although it reads 64. It drops the rest of the
# tile configuration as unused (gcc's bug 114098, fixed in 14). A llama.cpp built with it dies (SIGSEGV, SIGILL) in
# every pass of two and more tokens. So a child process tries the kernels on the demo model. If they are broken, "AMX"
# is removed from the list of buffer types that llama.cpp searches when it places weights: it then uses the next one.

AMX_NOTE = (
    "warning: this build's AMX kernels are broken (miscompiled by an older gcc, such as 12.2) and not used; built with"
    " gcc 14, passes of many tokens are up to twice as fast (cli/guide/first-gain.md: Build flags)"
)

_DIFFERS = 3  # exit code of the child


def amx_works(library: Path) -> bool:
    """Return True if the AMX kernels work of ggml's `library` and the files next to it; False without a verdict."""
    parts = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in library.parent.glob("*ggml*") if f.is_file()]
    about = f"{machine_name()} {sorted(parts)}".encode()
    return verdict("amx", about, [__name__, "--amx"], 60.0, _judge_amx) == "works"


def _judge_amx(end: ChildEnd) -> str | None:
    code, _ = end
    if code == 0:
        return "works"
    return "broken" if died(code) or code in (None, _DIFFERS) else None


def hide_amx() -> bool:
    """Remove AMX from ggml's buffer types for all further models; False if the library lacks the functions for that."""
    function, pointer = bindings.ggml_function, ctypes.c_void_p
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


def compare_amx() -> int:
    """Evaluate a few batches with the AMX kernels and with plain ones, and return the exit code."""
    bindings.init_backend()
    path = demo_model().path
    plain, special = (_logits(path, extra) for extra in (False, True))
    # The relative difference of working kernels is 0.008. The comparison is False for a NaN too.
    return 0 if np.linalg.norm(special - plain) <= 0.1 * np.linalg.norm(plain) else _DIFFERS


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
    confine()
    if sys.argv[1] == "--amx":
        sys.exit(compare_amx())
    # A child in which Python runs out of RAM says nothing about the file.
    with suppress(Exception):
        attempt(Path(sys.argv[1]))
        os._exit(0)
    os._exit(1)
