"""`choose_smollm`: a Q4_0 copy of the installed SmolLM2, if llama.cpp multiplies Q4_0 fastest on this CPU.

The package contains Q4_1, whose tokens llama.cpp computes one by one on a CPU. It reorders Q4_0 weights when it loads
them (`ggml-cpu/repack.cpp`), for kernels that compute several tokens at once. Kernels of GPUs and AMX support both
types alike, and layers in RAM next to a GPU are not reordered, so the installed file is better: it is more precise.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import llama_cpp.llama_cpp as llama

from ngramspec.cpu.cores import usable_cores
from ngramspec.data import ModelError, get_reason
from ngramspec.llama import bindings, devices
from ngramspec.llama.placement import select_gpus
from ngramspec.llama.weights import HAS_AMX, has_broken_amx
from ngramspec.model_settings import ModelSettings
from ngramspec.models.check import check_complete
from ngramspec.models.find import QUANTISATION, SMOLLM, converted_path
from ngramspec.storage import atomic_path

NOTE = f"converting {SMOLLM} to {QUANTISATION}, which is faster on this CPU; this takes about a second, once"


def reorders_q4_0(system_info: str) -> bool:
    """Return True if llama.cpp reorders Q4_0 weights for a CPU, according to its description of the system."""
    features = set(re.findall(r"(\w+) = [1-9]", system_info))
    has_kernels = features & {"AVX2", "VXE"} or ("NEON" in features and features & {"MATMUL_INT8", "DOTPROD"})
    return "REPACK" in features and bool(has_kernels)


def prefers_q4_0(settings: ModelSettings) -> bool:
    """Return True if passes over several tokens are fastest with Q4_0 here."""
    bindings.init_backend()
    if settings.no_repack or select_gpus(settings) or not reorders_q4_0(devices.build()):
        return False
    return HAS_AMX not in devices.build() or has_broken_amx(all_on_gpu=False)


def choose_smollm(path: Path, settings: ModelSettings, on_note: Callable[[str], object]) -> Path:
    """Return the file to load for the installed SmolLM2: its Q4_0 copy, which is made if it is missing, or `path`."""
    if not prefers_q4_0(settings):
        return path
    copy = converted_path(path)
    if _is_complete(copy):
        return copy
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(copy) as temporary:
            on_note(NOTE)
            requantize(path, temporary)
    except (OSError, ModelError) as error:
        if _is_complete(copy):  # another process was faster, and Windows does not replace a file that is in use
            return copy
        why = f"cannot write {copy.parent.parent} ({get_reason(error)})"
        on_note(f"note: {SMOLLM} is not converted, which is slower: {why}")
        return path
    for folder in copy.parent.parent.iterdir():
        if folder != copy.parent:  # a copy of another version
            shutil.rmtree(folder, ignore_errors=True)
    return copy


def _is_complete(path: Path) -> bool:
    try:
        check_complete(path)
    except ModelError:
        return False
    return True


def requantize(source: Path, target: Path) -> None:
    is_done = quantize(source, target, QUANTISATION)
    if not _is_complete(target):  # llama.cpp does not report every failed write
        raise OSError("the disk may be full")
    if not is_done:
        raise ModelError(bindings.last_complaint())
    with target.open("rb+") as file:
        os.fsync(file.fileno())


def quantize(source: Path, target: Path, name: str) -> bool:
    """Write a model file in the quantisation of this name, and return True if llama.cpp reports that it succeeded."""
    params = llama.llama_model_quantize_default_params()
    params.ftype = bindings.file_types()[f"LLAMA_FTYPE_MOSTLY_{name}"]
    params.allow_requantize = True
    params.nthread = usable_cores()
    bindings.log_tail.clear()
    return bool(llama.llama_model_quantize(os.fsencode(source), os.fsencode(target), params) == 0)
