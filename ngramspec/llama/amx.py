"""AMX: find out whether this build's kernels for Intel's matrix unit work, before they run in this process.

Older gcc, such as 12.2, believes that `_tile_loadconfig` reads 8 bytes where it reads 64, and drops the rest of the
tile configuration as never used (gcc's bug 114098, mended in 14). A llama.cpp built with it dies (SIGSEGV, SIGILL) in
every pass of two and more tokens. So a child process tries the kernels on the demo model, once per build; the verdict
is kept in the user's cache folder. If they are broken, "AMX" is taken out of the list of buffer types that llama.cpp
looks through when it places weights. It then takes the next one: the repacked kernels of the same weights, or plain
ones.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ngramspec import child, machine
from ngramspec.storage import cache_folder, keep, recall

NOTE = (
    "this build's AMX kernels are broken by an older gcc, such as 12.2, and left out; built with gcc 14, passes of many"
    " tokens are up to twice as fast (README: CPU with AMX)"
)

TOLERANCE = 0.1
"""Most that the logits may differ from other kernels', relative, in the 2-norm. Working ones differ by 0.008."""

_VERDICTS = {"works": True, "broken": False}
DIFFERS = 3
_CHILD = child.module("ngramspec.llama.amx_trial")


def works(
    library: Path, folder: Path | None = None, *, command: Sequence[str] = _CHILD, patience: float = 60.0
) -> bool:
    """Whether the AMX kernels of an installed llama.cpp may be used.

    Args:
        library: ggml's shared library, with the parts of ggml beside it.
        folder: where the verdict is kept; None for the user's cache folder. If it cannot be written, each call tries
            again.
        command: what tries; it exits with 0 if the kernels work.
        patience: seconds after which the child is taken to hang.

    Returns:
        False also if the child came to no verdict (it could not be started, was interrupted, or failed in its own
        code); that is not kept.
    """
    parts = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in library.parent.glob("*ggml*") if f.is_file()]
    key = hashlib.blake2b(f"{machine.name()} {sorted(parts)}".encode(), digest_size=12).hexdigest()
    known = (folder or cache_folder("amx")) / key
    with suppress(KeyError):
        return _VERDICTS[recall(known) or ""]
    verdict = _try(command, patience)
    if verdict is not None:
        keep(known, "works" if verdict else "broken")
    return verdict is True


def _try(command: Sequence[str], patience: float) -> bool | None:
    try:
        ended = child.run(command, patience)
    except subprocess.TimeoutExpired:
        return False
    if ended is None:
        return None
    return True if ended.code == 0 else False if ended.died or ended.code == DIFFERS else None


def hide(libggml: ctypes.CDLL) -> bool:
    """Take AMX out of ggml's buffer types, for all models this process loads from now on.

    Returns:
        Whether that was possible: a library may not export what it takes.
    """
    pointer = ctypes.c_void_p
    try:
        by_type, registry = libggml.ggml_backend_dev_by_type, libggml.ggml_backend_dev_backend_reg
        address, name = libggml.ggml_backend_reg_get_proc_address, libggml.ggml_backend_buft_name
    except AttributeError:
        return False
    by_type.restype, by_type.argtypes = pointer, [ctypes.c_int]
    registry.restype, registry.argtypes = pointer, [pointer]
    address.restype, address.argtypes = pointer, [pointer, ctypes.c_char_p]
    name.restype, name.argtypes = ctypes.c_char_p, [pointer]
    cpu = by_type(0)  # ggml-backend.h, enum ggml_backend_dev_type
    getter = address(registry(cpu), b"ggml_backend_dev_get_extra_bufts") if cpu else None
    if not getter:
        return False
    # The very list that llama.cpp reads at each load; a null pointer ends it.
    types = ctypes.CFUNCTYPE(ctypes.POINTER(pointer), pointer)(getter)(cpu)
    found = [types[i] for i in range(next(i for i in range(2**16) if not types[i]))]
    for i, kind in enumerate([*(t for t in found if name(t) != b"AMX"), None]):
        types[i] = kind
    return True
