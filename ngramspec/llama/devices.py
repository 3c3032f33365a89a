"""Properties of the build and the machine: version, devices, those that a model uses, and huge pages."""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import llama_cpp.llama_cpp as llama
import psutil
from llama_cpp import __version__ as binding_version

from ngramspec.llama import bindings
from ngramspec.llama.bindings import ggml_function
from ngramspec.model_settings import AUTO


def build() -> str:
    """Return the version of `llama_cpp`, and llama.cpp's description of its backends."""
    info = llama.llama_print_system_info().decode("utf-8", "replace")
    return f"llama-cpp-python {binding_version}; {' '.join(info.split())}"


@cache
def quantisation(file_type: int) -> str | None:
    """Return the name of a file's `general.file_type`, such as Q4_K_M; `None` if llama.cpp does not know it."""
    for name, value in bindings.file_types().items():
        if value == file_type and name.startswith(("LLAMA_FTYPE_ALL_", "LLAMA_FTYPE_MOSTLY_")):
            return name.removeprefix("LLAMA_FTYPE_").removeprefix("ALL_").removeprefix("MOSTLY_")
    return None


@dataclass(frozen=True, slots=True)
class Device:
    """A compute device of the build; memory in bytes as its driver reports it."""

    name: str
    description: str
    is_gpu: bool
    free: int
    total: int
    is_integrated: bool = False  # True if it is a GPU that shares the machine's memory
    backend: str = ""  # ggml's name of the backend, such as CUDA
    id: str | None = None  # bus address, equal for one device of two backends; `None` if unknown
    handle: int = field(default=0, compare=False)  # ggml's handle


class _Properties(ctypes.Structure):
    """ggml-backend.h, struct ggml_backend_dev_props."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("free", ctypes.c_size_t),
        ("total", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("id", ctypes.c_char_p),
        ("capabilities", ctypes.c_bool * 64),  # room for more than ggml has now
    )


def devices() -> list[Device]:
    """Return the devices that the loaded ggml library has registered; empty if it does not export its registry."""
    pointer = ctypes.c_void_p
    try:
        handles = _handles("dev")
        describe = ggml_function("ggml_backend_dev_get_props", None, pointer, ctypes.POINTER(_Properties))
        registry = ggml_function("ggml_backend_dev_backend_reg", pointer, pointer)
        backend = ggml_function("ggml_backend_reg_name", ctypes.c_char_p, pointer)
    except AttributeError:
        return []
    result = []
    for handle in handles:
        properties = _Properties()
        describe(handle, ctypes.byref(properties))
        result.append(
            Device(
                _to_text(properties.name),
                _to_text(properties.description),
                properties.kind in (1, 2),  # a GPU, or an integrated one; enum ggml_backend_dev_type
                properties.free,
                properties.total,
                properties.kind == 2,
                _to_text(backend(registry(handle))),
                _to_text(properties.id) or None,
                handle,
            )
        )
    return result


def buffer_types() -> dict[str, int]:
    """Return ggml's handles of the types of buffers by name: one of each device, and CPU."""
    of_device = ggml_function("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)
    name = ggml_function("ggml_backend_buft_name", ctypes.c_char_p, ctypes.c_void_p)
    return {_to_text(name(handle)): handle for handle in map(of_device, _handles("dev")) if handle}


def _handles(kind: Literal["dev", "reg"]) -> list[int]:
    """Return ggml's handles of all devices, or of all backends ("reg"). Raises AttributeError if it exports none."""
    count = ggml_function(f"ggml_backend_{kind}_count", ctypes.c_size_t)
    return [*map(ggml_function(f"ggml_backend_{kind}_get", ctypes.c_void_p, ctypes.c_size_t), range(count()))]


def _to_text(text: bytes | None) -> str:
    return (text or b"").decode("utf-8", "replace")


def select_gpus(devices: Sequence[Device]) -> list[Device]:
    """Return the GPUs that llama.cpp spreads a model over by default (`llama_prepare_model_devices`), in its order.

    A discrete GPU that two backends offer counts once. Integrated GPUs are used only without a discrete one, and only
    those of one backend. The devices of RPC workers come first.
    """
    remote: list[Device] = []
    discrete: list[Device] = []
    integrated: list[Device] = []
    for device in devices:
        if not device.is_gpu:
            continue
        if device.is_integrated:
            if not integrated or device.backend == integrated[-1].backend:
                integrated.append(device)
        elif device.backend == "RPC":
            remote.append(device)
        elif device.id is None or device.id not in [gpu.id for gpu in discrete]:
            discrete.append(device)
    return remote + (discrete or integrated)


def offloads_all(n_gpu_layers: int) -> bool:
    """Return True if a negative number of GPU layers leaves no layer in RAM, because there is a GPU."""
    return n_gpu_layers < 0 and any(device.is_gpu for device in devices())


def cache_room(
    devices: Sequence[Device], layers: Counter[str], mapped_bytes: int = 0, *, if_empty: bool = False
) -> int:
    """Return the bytes of the largest KV cache for the free memory, split over the devices like the `layers`."""
    gpus = {d.name: d.total if if_empty else d.free for d in devices if d.is_gpu and d.total > 0}
    n_layers, memory = layers.total(), psutil.virtual_memory()
    in_ram = n_layers - sum(layers[name] for name in gpus)
    # RAM that mapped weights use still counts as free.
    ram: int = (memory.total if if_empty else memory.available) - mapped_bytes * in_ram // n_layers
    rooms = [(max(0, ram), in_ram), *((gpus[name], layers[name]) for name in gpus)]
    return min(room * n_layers // count for room, count in rooms if count)


def min_free_bytes() -> int:
    """Return the present free memory of the GPU that has least of it; 0 if no driver reports it."""
    return min((device.free for device in select_gpus(devices()) if device.total > 0), default=0)


def gpu_identity() -> str:
    """Return the GPUs that models use, and the versions of kernels and driver, as part of a key; "" without a GPU."""
    gpus = select_gpus(devices())
    if not gpus:
        return ""
    versions = [_version(name) for name in ("ggml_version", "ggml_commit")]
    if any(device.backend != "RPC" for device in gpus):
        versions.append(driver_version())
    return repr([describe_devices(gpus), versions])


def describe_devices(gpus: Sequence[Device]) -> list[tuple[str, str, int, str]]:
    return [(device.name, device.description, device.total, device.backend) for device in gpus]


_NVIDIA = Path("/proc/driver/nvidia/version")


def driver_version() -> str:
    """Return the version of this machine's GPU driver, which ggml does not report; "" if it is unknown."""
    if platform.system() == "Darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        # As in "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024".
        match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", _NVIDIA.read_text("utf-8", "replace"))
    except OSError:
        return ""
    return f"NVIDIA {match[1]}" if match else ""


def _version(name: str) -> str:
    try:
        return _to_text(ggml_function(name, ctypes.c_char_p)())
    except AttributeError:
        return ""


_GPU_BACKENDS = {
    **{"cuda": "CUDA", "hip": "ROCm", "rocm": "ROCm", "musa": "MUSA", "metal": "Metal", "mtl": "Metal"},
    **{"vulkan": "Vulkan", "sycl": "SYCL", "opencl": "OpenCL", "cann": "CANN", "webgpu": "WebGPU"},
}
"""Names of backends, by the names of their libraries and registries in lower case."""


def gpu_backends() -> list[str]:
    """Return the GPU backends that the build contains, with or without a device, sorted."""
    # A backend whose driver is missing may not register itself, but its library is there.
    folder = Path(bindings.ggml()._name).parent
    names = [path.name.partition("ggml-")[2].partition(".")[0] for path in folder.glob("*ggml-*")]
    try:
        name = ggml_function("ggml_backend_reg_name", ctypes.c_char_p, ctypes.c_void_p)
        names += [_to_text(name(handle)).lower() for handle in _handles("reg")]
    except AttributeError:
        pass
    return sorted({_GPU_BACKENDS[name] for name in names if name in _GPU_BACKENDS})


def missing_gpu(gpus: Sequence[Device], n_gpu_layers: int) -> str | None:
    """Return a warning if the user may expect a GPU and a model uses none; `None` if all is as expected."""
    if n_gpu_layers == 0 or gpus:
        return None
    check = "ngramspec info -v shows the build and its devices; -ngl 0 hides this warning"
    if backends := gpu_backends():
        return f"warning: running on the CPU: {' and '.join(backends)} found no usable GPU; check the driver. {check}"
    if n_gpu_layers != AUTO:
        return f"warning: running on the CPU: -ngl needs a llama-cpp-python that was built with a GPU backend. {check}"
    return None


# --------------------------------------------------------------------------- huge pages
# Every pass reads all weights. With pages of 2 MiB the processor looks up 512 times fewer addresses than with 4 KiB.
# Many distributions give huge pages only to programs that request them (`/sys/kernel/mm/` says `madvise`), and
# llama.cpp does not. They are requested when the RAM into which llama.cpp copies quantised layers is mapped and not yet
# written: nothing is copied, and loading gets no slower. The pages of the mapped file are not affected.

LARGE = 32 * 2**20  # bytes from which glibc's malloc maps every block on its own; the weights are one block

_MAPS = Path("/proc/self/maps")
_SUMS = Path("/proc/self/smaps_rollup")
_GIVEN_TO = Path("/sys/kernel/mm/transparent_hugepage/enabled")

Range = tuple[int, int]  # addresses from the first up to, and without, the second


def anonymous_memory() -> list[Range]:
    """Return the writable memory of this process without a file, ascending; empty if the system does not report it."""
    try:
        lines = _MAPS.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    blocks = []
    for line in lines:
        # start-end permissions offset device inode [name]; see proc_pid_maps(5).
        addresses, permissions, _offset, _device, inode, *name = line.split(maxsplit=5)
        if permissions == "rw-p" and inode == "0" and (not name or name[0].startswith("[anon:")):
            start, end = addresses.split("-")
            blocks.append((int(start, 16), int(end, 16)))
    return blocks


def advise_huge_pages(before: Sequence[Range]) -> int:
    """Request huge pages for the large blocks that were mapped since `before`; return the number of bytes."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # The kernel reports adjacent blocks as one, so a block that has grown is requested as a whole.
    blocks = [(start, end - start) for start, end in anonymous_memory() if (start, end) not in before]
    return sum(size for start, size in blocks if size >= LARGE and madvise(start, size, advice) == 0)


def describe_huge_pages(mapped: bool) -> str | None:
    """Return which programs get huge pages, and how to use more if weights are `mapped`; `None` if it is unknown."""
    try:
        # As in "always [madvise] never".
        mode = _GIVEN_TO.read_text("ascii").split("[")[1].split("]")[0]
        sums = dict(line.split(":", 1) for line in _SUMS.read_text("ascii").splitlines()[1:])
        used = int(sums["AnonHugePages"].split()[0]) // 1024
    except (OSError, ValueError, IndexError, KeyError):
        return None
    if mode == "never":
        return f"not available; to enable them, run as root: echo madvise > {_GIVEN_TO}"
    line = f"{used} MiB of this process, available to {'all' if mode == 'always' else 'programs that request them'}"
    return f"{line}; mapped weights do not use them, but with --no-mmap they do" if mapped else line
