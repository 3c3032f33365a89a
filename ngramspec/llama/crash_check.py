"""The trial of a model file in a child process, so that a damaged or hostile file ends the child and not this process.

llama.cpp checks much of a file and asserts the rest: a vocabulary with a token twice, a model of no layers, sizes that
contradict each other. An assertion that fails ends the process. So a file never seen before is first opened in a
child, and its verdict kept in the user's cache folder. Nearly all of those assertions stand where the hyperparameters
are read, the tensors placed and the graph built, which takes no weights: the child loads with `no_alloc`, in the time
it takes to start Python. The few that only computing meets are found by two passes where the file is small
(`COMPUTED`); the values known to cause them are checked in every file (`models.check.check_values`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ngramspec import child
from ngramspec.errors import ModelError
from ngramspec.llama import bindings
from ngramspec.models.check import check_values, has_gguf_magic
from ngramspec.models.gguf import GGUFHeader, read_header
from ngramspec.storage import cache_folder, keep, recall

COMPUTED = 1 << 30
"""Bytes of the largest file whose weights the child reads and computes with: some seconds on a slow disk."""

_GOOD = "good"
_PASSED = re.compile("alloc|memory", re.IGNORECASE)  # a lack of RAM says nothing about the file
_ASSERTION = re.compile(r"GGML_ASSERT\(.*\) failed|GGML_ABORT.*|fatal error.*")
_EDGE = 1 << 16
_CPU_SECONDS = 60
_N_CTX = 256


def check(
    path: Path,
    build: str,
    folder: Path | None = None,
    *,
    command: Sequence[str] | None = None,
    patience: float = 300.0,
) -> GGUFHeader | None:
    """Refuse a file that would end the process.

    Args:
        path: a GGUF file; of anything else, and of files that cannot be read, llama.cpp says itself what they are.
        build: names the build of llama.cpp that is to load it.
        folder: where verdicts are kept; None for the user's cache folder. If it cannot be written, each call tries
            again.
        command: what tries, called with the file's name.
        patience: seconds after which the child is given up; that, like a child that could not be started or was ended
            from outside, condemns no file.

    Returns:
        its header; None of what is no GGUF file, which llama.cpp will not load.

    Raises:
        ModelError: the file is damaged.
    """
    if not has_gguf_magic(path):
        return None
    header = read_header(path)
    check_values(path, header)
    # The header may be longer than the part read here, so the time counts too.
    stat = path.stat()
    named = f"{stat.st_size} {stat.st_mtime_ns} {build}".encode() + edges(path, stat.st_size)
    known = (folder or cache_folder("trial")) / hashlib.blake2b(named, digest_size=12).hexdigest()
    verdict = recall(known)
    if not verdict:
        verdict = _try([*(command or child.module("ngramspec.llama.crash_check")), str(path)], patience)
        if verdict:
            keep(known, verdict)
    if verdict and verdict != _GOOD:
        raise ModelError(f"{path} is damaged: llama.cpp ends the process over it ({verdict}); get it again")
    return header


def edges(path: Path, size: int) -> bytes:
    """The first and the last bytes of a file of that size, which tell it from others."""
    with path.open("rb") as file:
        first = file.read(_EDGE)
        file.seek(max(0, size - _EDGE))
        return first + file.read(_EDGE)


def _try(command: Sequence[str], patience: float) -> str | None:
    try:
        ended = child.run(command, patience)
    except subprocess.TimeoutExpired:
        return None
    if ended is None or (ended.code and not ended.died):
        return None
    if ended.code == 0:
        return _GOOD
    found = _ASSERTION.findall(ended.said)
    if not found and _PASSED.search(ended.said):
        return None
    return found[-1] if found else f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)  # type: ignore[untyped-decorator]
def _silent(_level: int, _text: bytes, _data: Any) -> None:
    pass


def attempt(api: Any, path: Path) -> None:
    """What the child does: every step that may crash, cheapest first. If llama.cpp refuses to load, all is well."""
    api.llama_log_set(_silent, ctypes.c_void_p(0))
    bindings.init_backend(api)
    params = api.llama_model_default_params()
    params.vocab_only = True
    model = api.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        return
    api.llama_model_free(model)
    if not read_header(path).tensors:
        return
    computed = path.stat().st_size <= COMPUTED
    for weights in (False, True)[: 1 + computed]:
        params = api.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = False  # what they are made into is another copy of the weights
        params.no_alloc = not weights
        bindings.set_mapped(api, params, weights)
        model = api.llama_model_load_from_file(os.fsencode(path), params)
        if not model:
            return
        settings = api.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = _N_CTX
        settings.n_threads = settings.n_threads_batch = 1
        context = api.llama_init_from_model(model, settings)
        if not context:
            return
        if weights and api.llama_model_has_decoder(model) and not api.llama_model_has_encoder(model):
            for size in (2, 1):
                tokens = (api.llama_token * size)()
                api.llama_decode(context, api.llama_batch_get_one(tokens, size))
        api.llama_free(context)
        api.llama_model_free(model)


if __name__ == "__main__":
    child.confine(_CPU_SECONDS)
    # A child that is refused more work, or RAM for Python, says nothing about the file.
    with suppress(Exception):
        import llama_cpp.llama_cpp as llama

        attempt(llama, Path(sys.argv[1]))
        os._exit(0)
    os._exit(1)
