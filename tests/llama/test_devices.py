"""Devices: GPUs as llama.cpp selects them, their memory, keys, the warning about a missing GPU, and huge pages."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support.cli_runner import DEMO
from support.machines import AGAIN, CARD, CPU, GIB, OTHER, SHARED, SHARED_AGAIN, WORKER

from ngramspec.llama import bindings, devices, weights
from ngramspec.llama.devices import (
    LARGE,
    Device,
    Range,
    advise_huge_pages,
    anonymous_memory,
    cache_room,
    gpu_backends,
    missing_gpu,
    select_gpus,
)
from ngramspec.llama.target import Target
from ngramspec.llama.weights import tuning_key
from ngramspec.model_settings import ALL, ModelSettings

SetDevices = Callable[..., None]


@pytest.mark.parametrize(
    ("registered", "selected"),
    [
        ([CPU], []),
        ([CARD, OTHER, CPU], [CARD, OTHER]),
        ([CARD, AGAIN, CPU], [CARD]),
        ([replace(CARD, id=None), replace(AGAIN, id=None)], [replace(CARD, id=None), replace(AGAIN, id=None)]),
        ([SHARED, CARD, CPU], [CARD]),
        ([SHARED, SHARED_AGAIN, CPU], [SHARED]),
        ([SHARED, replace(SHARED, name="Vulkan2")], [SHARED, replace(SHARED, name="Vulkan2")]),
        ([SHARED, CPU, WORKER], [WORKER, SHARED]),
        ([SHARED, CARD, WORKER], [WORKER, CARD]),
    ],
)
def test_select_gpus_follows_the_rules_of_llama_cpp(registered: list[Device], selected: list[Device]) -> None:
    assert select_gpus(registered) == selected


@pytest.mark.parametrize(
    ("layers", "mapped", "free", "total"),
    [
        ({"CPU": 8}, 0, 8, 16),
        ({"CUDA0": 8}, 0, 20, 24),
        ({"CUDA0": 4, "CUDA1": 4}, 0, 40, 48),
        ({"CUDA0": 6, "CPU": 2}, 0, 20 * 8 / 6, 32),
        ({"CUDA0": 2, "CPU": 6}, 0, 8 * 8 / 6, 16 * 8 / 6),
        ({"CUDA0": 4, "BLAS": 2, "CPU": 2}, 0, 16, 32),
        ({"ET0": 8}, 0, 8, 16),  # a GPU whose memory is unknown
        ({"CPU": 8}, 6, 2, 10),
        ({"CPU": 8}, 9, 0, 7),
        ({"CUDA0": 4, "CPU": 4}, 6, 10, 26),  # half of the weights are in RAM
        ({"CUDA0": 8}, 6, 20, 24),
    ],
)
def test_cache_room_follows_devices_with_layers(
    layers: dict[str, int], mapped: int, free: float, total: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(available=8 * GIB, total=16 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    registered = [SHARED, CARD, OTHER, Device("ET0", "ET", True, 0, 0), CPU]
    assert cache_room(registered, Counter(layers), mapped * GIB) == int(free * GIB)
    assert cache_room(registered, Counter(layers), mapped * GIB, if_empty=True) == int(total * GIB)


def test_devices_returns_properties_that_ggml_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties(ctypes.Structure):
        _fields_ = (
            *(("name", ctypes.c_char_p), ("description", ctypes.c_char_p)),
            *(("free", ctypes.c_size_t), ("total", ctypes.c_size_t)),
            *(("kind", ctypes.c_int), ("id", ctypes.c_char_p), ("capabilities", ctypes.c_bool * 5)),
        )

    kinds = {CARD: 1, SHARED: 2, CPU: 0}
    made = {
        device.handle: (
            *(device.name.encode(), device.description.encode(), device.free, device.total),
            *(kind, device.id and device.id.encode()),
        )
        for device, kind in kinds.items()
    }

    def describe(handle: int, out: Any) -> None:
        ctypes.memmove(out, ctypes.byref(Properties(*made[handle])), ctypes.sizeof(Properties))

    # The backend of a device has its handle times 10.
    functions = {
        "ggml_backend_dev_count": lambda: len(made),
        "ggml_backend_dev_get": [*made].__getitem__,
        "ggml_backend_dev_get_props": describe,
        "ggml_backend_dev_backend_reg": lambda handle: handle * 10,
        "ggml_backend_reg_name": {110: b"CUDA", 130: b"Vulkan", 140: b"CPU"}.get,
    }
    monkeypatch.setattr(devices, "ggml_function", lambda name, *_types: functions[name])
    assert [(device, device.handle) for device in devices.devices()] == [(CARD, 11), (SHARED, 13), (CPU, 14)]


def test_buffer_types_are_those_of_ggml() -> None:
    bindings.init_backend()
    assert devices.buffer_types()["CPU"] == bindings.ggml_function("ggml_backend_cpu_buffer_type", ctypes.c_void_p)()


LOAD = weights.llama.llama_model_load_from_file


def log_layers(monkeypatch: pytest.MonkeyPatch, names: Sequence[str]) -> None:
    """Let llama.cpp log these devices for the layers of a model, instead of the real ones."""

    def load(*arguments: Any) -> Any:
        for layer, name in enumerate(names):
            line = f"load_tensors: layer {layer:3d} assigned to device {name}, is_swa = 0\n"
            bindings._collect_log(1, line.encode(), None)
        with monkeypatch.context() as quiet:
            quiet.setattr(bindings, "_listeners", [])
            return LOAD(*arguments)

    monkeypatch.setattr(weights.llama, "llama_model_load_from_file", load)


def test_target_counts_layers_of_each_device_from_log_for_its_memory(
    set_devices: SetDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Target(DEMO, ctx_size=64, threads=1, exact="off") as target:
        assert target.weights.layers == {"CPU": 9}  # 8, and the output layer
    asked: list[tuple[Counter[str], int]] = []
    monkeypatch.setattr(devices, "cache_room", lambda _, layers, mapped=0: asked.append((layers, mapped)) or 0)
    set_devices(SHARED, CARD, CPU)
    for lines, of_cache in ((["CPU", "CUDA0", "CUDA0", "CUDA0"], {"CPU": 1, "CUDA0": 2}), ([], {"CUDA0": 1})):
        log_layers(monkeypatch, lines)
        for no_mmap in (False, True):
            with Target(DEMO, threads=1, exact="off", no_mmap=no_mmap) as target:
                assert target.weights.layers == Counter(lines)
                assert asked == [(of_cache, 0 if no_mmap else target.weights.size_bytes)]
                asked.clear()
    assert bindings._listeners == []


def keys(*made: Device, set_devices: SetDevices) -> tuple[str, str, str]:
    set_devices(*made)
    with Target(DEMO, ctx_size=64, threads=1, exact="off") as target:
        return target.sequences[0].fingerprint, target.trials.identity, tuning_key(DEMO, ModelSettings())


def change_versions(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setattr(devices, name, lambda *of: f"another {of}")


def test_keys_change_with_gpus_that_the_model_uses(set_devices: SetDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    first = keys(CARD, OTHER, CPU, set_devices=set_devices)
    assert keys(replace(CARD, free=9 * GIB), OTHER, CPU, set_devices=set_devices) == first
    found = [
        first,
        keys(CPU, set_devices=set_devices),
        keys(CARD, CPU, set_devices=set_devices),
        keys(OTHER, CARD, CPU, set_devices=set_devices),
        *(
            keys(replace(CARD, **change), OTHER, CPU, set_devices=set_devices)  # type: ignore[arg-type]
            for change in ({"description": "RTX 3080"}, {"total": 12 * GIB}, {"backend": "Vulkan"})
        ),
    ]
    for version in ("_version", "driver_version"):
        change_versions(monkeypatch, version)
        found.append(keys(CARD, OTHER, CPU, set_devices=set_devices))
    for of_one_kind in zip(*found, strict=True):
        assert len(set(of_one_kind)) == len(found)


def test_keys_ignore_unused_devices_and_without_a_gpu_all_versions(
    set_devices: SetDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = keys(CPU, set_devices=set_devices)
    set_devices(CARD, CPU)
    one = tuning_key(DEMO, ModelSettings())
    set_devices(SHARED, CARD, AGAIN, CPU)
    assert tuning_key(DEMO, ModelSettings()) == one
    change_versions(monkeypatch, "_version", "driver_version")
    assert keys(replace(CPU, description="Xeon", total=GIB), set_devices=set_devices) == before


def test_tuning_key_changes_with_the_placement(set_devices: SetDevices) -> None:
    set_devices(CARD, OTHER, SHARED, CPU)
    asked: list[dict[str, Any]] = [
        *({}, {"device": "CUDA0"}, {"device": "Vulkan1"}, {"device": "none"}, {"split_mode": "row"}),
        *({"split_mode": "none", "main_gpu": 1}, {"tensor_split": "3,1"}, {"n_cpu_moe": 1}, {"gpu_layers": 0}),
        *({"override_tensor": (("ffn", "CPU"),)}, {"no_op_offload": True}, {"cache_type_k": "q8_0"}),
    ]
    found = [tuning_key(DEMO, ModelSettings(**one)) for one in asked]
    assert found[0] == tuning_key(DEMO, ModelSettings(gpu_layers=ALL))
    set_devices(CARD, OTHER, replace(SHARED, description="Arc"), CPU)
    found.append(tuning_key(DEMO, ModelSettings(device="Vulkan1")))
    assert len(set(found)) == len(found)


NVIDIA = (
    "NVRM version: NVIDIA UNIX{} Kernel Module{}  550.54.14  Thu Feb 22 01:44:30 UTC 2024\nGCC version:  gcc 12.2.0"
)


@pytest.mark.parametrize(
    ("system", "text", "version"),
    [
        ("Linux", NVIDIA.format(" x86_64", ""), "NVIDIA 550.54.14"),
        ("Linux", NVIDIA.format(" Open", " for x86_64"), "NVIDIA 550.54.14"),
        ("Linux", "something else", ""),
        ("Linux", None, ""),
        ("Darwin", None, "macOS 15.1"),
    ],
)
def test_driver_version_is_that_of_the_system(
    system: str, text: str | None, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "version"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(devices, "_NVIDIA", path)
    monkeypatch.setattr(devices.platform, "system", lambda: system)
    monkeypatch.setattr(devices.platform, "mac_ver", lambda: ("15.1", ("", "", ""), "arm64"))
    assert devices.driver_version() == version


def test_gpu_backends_returns_library_files_and_registered_backends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("libggml-base.so", "libggml-cpu-haswell.so", "libggml-rpc.so", "libggml.so.0", "libggml-vulkan.so.0"):
        (tmp_path / name).touch()
    monkeypatch.setattr(bindings, "ggml", lambda: SimpleNamespace(_name=str(tmp_path / "libggml.so")))
    assert gpu_backends() == ["Vulkan"]
    functions = {
        "ggml_backend_reg_count": lambda: 3,
        "ggml_backend_reg_get": lambda number: number,
        "ggml_backend_reg_name": [b"CUDA", b"RPC", b"CPU"].__getitem__,
    }
    monkeypatch.setattr(devices, "ggml_function", lambda name, *_types: functions[name])
    assert gpu_backends() == ["CUDA", "Vulkan"]


@pytest.mark.parametrize(
    ("backends", "gpus", "n_gpu_layers", "warning"),
    [
        ([], [], -1, None),
        ([], [], 0, None),
        ([], [], 1, "built with a GPU backend"),
        ([], [], -2, "built with a GPU backend"),
        (["Vulkan"], [], -1, "Vulkan found no usable GPU"),
        (["CUDA", "Vulkan"], [], 99, "CUDA and Vulkan found no usable GPU"),
        (["Vulkan"], [], 0, None),
        (["CUDA"], [CARD], 99, None),
    ],
)
def test_missing_gpu_warns_only_if_gpu_was_expected(
    backends: list[str], gpus: list[Device], n_gpu_layers: int, warning: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "gpu_backends", lambda: backends)
    line = missing_gpu(gpus, n_gpu_layers)
    assert (line is None) == (warning is None)
    assert line is None or (warning in line and line.startswith("warning: running on the CPU") and "\n" not in line)


on_linux = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without transparent huge pages"
)


def place(memory: mmap.mmap) -> Range:
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return start, start + len(memory)


def holds(ranges: list[Range], part: Range) -> bool:
    return any(start <= part[0] and part[1] <= end for start, end in ranges)


def asked_for(part: Range) -> bool:
    """Return True if the kernel reports the flag "hg" (huge pages advised) for the memory; see proc_pid_smaps(5)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        key, *values = line.split()
        if not key.endswith(":"):
            start, end = (int(x, 16) for x in key.split("-"))
            inside = start <= part[0] and part[1] <= end
        elif inside and key == "VmFlags:":
            return "hg" in values
    raise AssertionError("the memory is not mapped")


@on_linux
def test_advise_huge_pages_applies_only_to_new_large_memory() -> None:
    old = mmap.mmap(-1, 2 * LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    old.madvise(mmap.MADV_DONTDUMP)  # The kernel merges neighbours with equal flags.
    before = anonymous_memory()
    assert holds(before, place(old))
    new = mmap.mmap(-1, 2 * LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    small = mmap.mmap(-1, LARGE // 64, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert advise_huge_pages(before) >= 2 * LARGE
    assert asked_for(place(new))
    assert not asked_for(place(old))
    assert holds(anonymous_memory(), place(small))
    new[:4] = b"kept"
    assert advise_huge_pages(before) >= 2 * LARGE  # The second call repeats the advice.
    assert new[:4] == b"kept"
    assert advise_huge_pages(anonymous_memory()) == 0  # There is no new memory.


@on_linux
def test_anonymous_memory_excludes_mapped_files(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"\0" * 4096)
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    assert not holds(anonymous_memory(), place(mapped))


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(devices, "_MAPS", Path("/missing")),
        lambda patch: patch.delattr(mmap, "MADV_HUGEPAGE", raising=False),
        pytest.param(lambda patch: patch.setattr(mmap, "MADV_HUGEPAGE", 12345), marks=on_linux),  # the kernel refuses
    ],
)
def test_advise_huge_pages_without_system_support_returns_zero(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    before = anonymous_memory()
    keep = mmap.mmap(-1, 2 * LARGE) if sys.platform == "win32" else mmap.mmap(-1, 2 * LARGE, mmap.MAP_PRIVATE)
    assert advise_huge_pages(before) == 0
    keep.close()


SUMS = "55d0-7ffd ---p 00000000 00:00 0 [rollup]\nRss: 9000 kB\nAnonHugePages:   96256 kB\nSwap: 0 kB\n"


def told(given: str | None, sums: str | None, folder: Path, patch: pytest.MonkeyPatch, *, mapped: bool) -> str | None:
    """Return the message for these contents of the kernel's files; `None` means that a file does not exist."""
    for name, text in (("_GIVEN_TO", given), ("_SUMS", sums)):
        (folder / name).unlink(missing_ok=True)
        if text is not None:
            (folder / name).write_text(text)
        patch.setattr(devices, name, folder / name)
    return devices.describe_huge_pages(mapped)


def test_huge_pages_note_reports_system_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, mapped, words in (
        ("always [madvise] never\n", False, "94 MiB of this process, available to programs that request them"),
        ("[always] madvise never\n", True, "94 MiB of this process, available to all; mapped weights do not use them"),
        ("always madvise [never]\n", True, "not available; to enable them, run as root: echo madvise > "),
    ):
        line = told(given, SUMS, tmp_path, monkeypatch, mapped=mapped)
        assert line is not None
        assert line.startswith(words)
        assert ("--no-mmap" in line) == (mapped and "[never]" not in given)
    for unclear, sums in ((None, SUMS), ("", SUMS), ("[madvise] never", None), ("[x]", "Rss")):
        assert told(unclear, sums, tmp_path, monkeypatch, mapped=False) is None
