"""Devices: GPUs as llama.cpp selects them, their part in keys, and the warning about a missing GPU."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support.cli_runner import DEMO

from ngramspec.llama import bindings, devices, weights
from ngramspec.llama.devices import Device, free_bytes, gpu_backends, missing_gpu, select_gpus, total_bytes
from ngramspec.llama.target import Target
from ngramspec.llama.weights import tuning_key
from ngramspec.model_settings import ModelSettings

GIB = 2**30
CPU = Device("CPU", "EPYC", False, 8 * GIB, 16 * GIB, backend="CPU")
CARD = Device("CUDA0", "RTX 3090", True, 20 * GIB, 24 * GIB, backend="CUDA", id="0000:01:00.0")
OTHER = Device("CUDA1", "RTX 4090", True, 21 * GIB, 24 * GIB, backend="CUDA", id="0000:02:00.0")
AGAIN = replace(CARD, name="Vulkan0", backend="Vulkan")
SHARED = Device("Vulkan1", "Iris", True, 12 * GIB, 14 * GIB, True, "Vulkan")
SHARED_AGAIN = Device("SYCL0", "Iris", True, 12 * GIB, 14 * GIB, True, "SYCL")
WORKER = Device("RPC0", "10.0.0.2:50052", True, 30 * GIB, 32 * GIB, backend="RPC")

SetDevices = Callable[[Sequence[Device]], None]


@pytest.fixture
def set_devices(monkeypatch: pytest.MonkeyPatch) -> SetDevices:
    return lambda made: monkeypatch.setattr(devices, "devices", lambda: list(made))


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


# ---------------------------------------------------------------------- selection and memory


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
    ("layers", "free", "total"),
    [
        ({"CPU": 8}, 8, 16),
        ({"CUDA0": 8}, 20, 24),
        ({"CUDA0": 4, "CUDA1": 4}, 40, 48),
        ({"CUDA0": 6, "CPU": 2}, 20 * 8 / 6, 32),
        ({"CUDA0": 2, "CPU": 6}, 8 * 8 / 6, 16 * 8 / 6),
        ({"CUDA0": 4, "BLAS": 2, "CPU": 2}, 16, 32),
        ({"ET0": 8}, 8, 16),  # a GPU whose memory is unknown
    ],
)
def test_free_and_total_bytes_follow_devices_with_layers(
    layers: dict[str, int], free: float, total: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(available=8 * GIB, total=16 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    registered = [SHARED, CARD, OTHER, Device("ET0", "ET", True, 0, 0), CPU]
    assert free_bytes(registered, Counter(layers)) == int(free * GIB)
    assert total_bytes(registered, Counter(layers)) == int(total * GIB)


def test_free_bytes_with_mapped_weights_subtracts_share_in_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    found = [free_bytes([CARD, CPU], Counter(CPU=8 - n, CUDA0=n), 6 * GIB) for n in (0, 4, 8)]
    assert found == [2 * GIB, 10 * GIB, 20 * GIB]
    assert free_bytes([CPU], Counter(CPU=8), 9 * GIB) == 0


def test_target_computes_free_memory_from_layers_of_each_device(
    set_devices: SetDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Counter[str], int]] = []

    def free(_devices: object, layers: Counter[str], mapped: int = 0) -> int:
        asked.append((layers, mapped))
        return 0

    monkeypatch.setattr(devices, "free_bytes", free)
    set_devices([SHARED, CARD, CPU])
    for lines, layers in ((["CPU", "CUDA0", "CUDA0", "CUDA0"], {"CPU": 1, "CUDA0": 2}), ([], {"CUDA0": 1})):
        log_layers(monkeypatch, lines)
        for no_mmap in (False, True):
            with Target(DEMO, threads=1, exact="off", no_mmap=no_mmap) as target:
                assert asked == [(layers, 0 if no_mmap else target.weights.size_bytes)]
                asked.clear()


def test_devices_returns_properties_that_ggml_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties(ctypes.Structure):
        _fields_ = (
            *(("name", ctypes.c_char_p), ("description", ctypes.c_char_p)),
            *(("free", ctypes.c_size_t), ("total", ctypes.c_size_t)),
            *(("kind", ctypes.c_int), ("id", ctypes.c_char_p), ("capabilities", ctypes.c_bool * 5)),
        )

    # Handles are numbers: a device 1 to 3, and the backend of a device 10 times that.
    made = {
        1: (b"CUDA0", b"RTX 3090", 20 * GIB, 24 * GIB, 1, b"0000:01:00.0"),
        2: (b"Vulkan1", b"Iris", 12 * GIB, 14 * GIB, 2, None),
        3: (b"CPU", b"EPYC", 8 * GIB, 16 * GIB, 0, None),
    }

    def describe(handle: int, out: Any) -> None:
        ctypes.memmove(out, ctypes.byref(Properties(*made[handle])), ctypes.sizeof(Properties))

    functions = {
        "ggml_backend_dev_count": lambda: len(made),
        "ggml_backend_dev_get": lambda number: number + 1,
        "ggml_backend_dev_get_props": describe,
        "ggml_backend_dev_backend_reg": lambda handle: handle * 10,
        "ggml_backend_reg_name": {10: b"CUDA", 20: b"Vulkan", 30: b"CPU"}.get,
    }
    monkeypatch.setattr(bindings, "ggml_function", lambda _api, name, *_types: functions[name])
    assert devices.devices() == [CARD, SHARED, CPU]


# ---------------------------------------------------------------------- keys of measurements


def keys() -> tuple[str, str, str]:
    with Target(DEMO, ctx_size=64, threads=1, exact="off") as target:
        return target.sequences[0].fingerprint, target.trials.identity, tuning_key(DEMO, ModelSettings())


def test_keys_change_with_gpus_that_the_model_uses(set_devices: SetDevices, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_devices(*made: Device) -> tuple[str, str, str]:
        set_devices(made)
        return keys()

    first = with_devices(CARD, OTHER, CPU)
    assert with_devices(replace(CARD, free=9 * GIB), OTHER, CPU) == first
    found = [
        first,
        with_devices(CPU),
        with_devices(CARD, CPU),
        with_devices(OTHER, CARD, CPU),
        with_devices(replace(CARD, description="RTX 3080"), OTHER, CPU),
        with_devices(replace(CARD, total=12 * GIB), OTHER, CPU),
        with_devices(replace(CARD, backend="Vulkan"), OTHER, CPU),
    ]
    for version in ("_version", "driver_version"):
        monkeypatch.setattr(devices, version, lambda *name: f"another {name}")
        found.append(with_devices(CARD, OTHER, CPU))
    for of_one_kind in zip(*found, strict=True):
        assert len(set(of_one_kind)) == len(found)


def test_tuning_key_ignores_gpus_that_llama_cpp_skips(set_devices: SetDevices) -> None:
    set_devices([CARD, CPU])
    one = tuning_key(DEMO, ModelSettings())
    set_devices([SHARED, CARD, AGAIN, CPU])
    assert tuning_key(DEMO, ModelSettings()) == one


def test_keys_without_gpu_ignore_cpu_and_package_versions(
    set_devices: SetDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_devices([CPU])
    before = keys()
    set_devices([replace(CPU, description="Xeon", total=GIB)])
    for version in ("_version", "driver_version"):
        monkeypatch.setattr(devices, version, lambda *name: f"another {name}")
    assert keys() == before
    assert devices.gpu_identity() == ""


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


def test_handles_of_devices_and_buffers_are_those_of_ggml() -> None:
    bindings.init_backend()
    assert devices.device_handles().keys() == {device.name for device in devices.devices()}
    assert (
        devices.buffer_types()["CPU"]
        == bindings.ggml_function(devices.llama, "ggml_backend_cpu_buffer_type", ctypes.c_void_p)()
    )


# ---------------------------------------------------------------------- missing GPUs


def test_gpu_backends_returns_library_files_and_registered_backends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("libggml-base.so", "libggml-cpu-haswell.so", "libggml-rpc.so", "libggml.so.0", "libggml-vulkan.so.0"):
        (tmp_path / name).touch()
    monkeypatch.setattr(bindings, "ggml", lambda _api: SimpleNamespace(_name=str(tmp_path / "libggml.so")))
    assert gpu_backends() == ["Vulkan"]
    functions = {
        "ggml_backend_reg_count": lambda: 3,
        "ggml_backend_reg_get": lambda number: number,
        "ggml_backend_reg_name": [b"CUDA", b"RPC", b"CPU"].__getitem__,
    }
    monkeypatch.setattr(bindings, "ggml_function", lambda _api, name, *_types: functions[name])
    assert gpu_backends() == ["CUDA", "Vulkan"]


@pytest.mark.parametrize(
    ("backends", "registered", "n_gpu_layers", "warning"),
    [
        ([], [CPU], -1, None),
        ([], [CPU], 0, None),
        ([], [CPU], 1, "built with a GPU backend"),
        ([], [CPU], -2, "built with a GPU backend"),
        (["Vulkan"], [CPU], -1, "Vulkan found no usable GPU"),
        (["CUDA", "Vulkan"], [CPU], 99, "CUDA and Vulkan found no usable GPU"),
        (["Vulkan"], [CPU], 0, None),
        (["CUDA"], [CARD, CPU], 99, None),
        ([], [WORKER, CPU], 99, None),
    ],
)
def test_missing_gpu_warns_only_if_gpu_was_expected(
    backends: list[str],
    registered: list[Device],
    n_gpu_layers: int,
    warning: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "gpu_backends", lambda: backends)
    line = missing_gpu(select_gpus(registered), n_gpu_layers)
    assert (line is None) == (warning is None)
    assert line is None or (warning in line and line.startswith("warning: running on the CPU") and "\n" not in line)


# ---------------------------------------------------------------------- layers


def test_target_layers_counts_layers_per_device_from_log(monkeypatch: pytest.MonkeyPatch) -> None:
    with Target(DEMO, ctx_size=64, threads=1, exact="off") as target:
        assert target.weights.layers == {"CPU": 9}  # 8, and the output layer
    log_layers(monkeypatch, ["CPU", "CPU", "CUDA0", "CUDA0", "CUDA0"])
    with Target(DEMO, ctx_size=64, threads=1, exact="off") as target:
        assert target.weights.layers == {"CPU": 2, "CUDA0": 3}
    assert bindings._listeners == []
