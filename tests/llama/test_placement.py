"""Placement of weights on devices: fit, parameters for llama.cpp, errors and keys, with GPUs that do not exist."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from architectures.files import architecture
from support.cli_runner import DEMO, run
from support.machines import CARD, CPU, OTHER

import ngramspec
from ngramspec.data import ModelError
from ngramspec.llama import bindings, devices, placement, weights
from ngramspec.llama.devices import Device
from ngramspec.llama.placement import EXPERTS, Plan, Sizes, expert_pattern, fit, make_plan, model_sizes
from ngramspec.llama.target import Target
from ngramspec.loading.settings import LoadSettings
from ngramspec.model_settings import ALL, AUTO, ModelSettings
from ngramspec.models.gguf import GGUFHeader, read_header

MIB = 2**20
BUFFERS = {"CUDA0": 110, "CUDA1": 120, "Vulkan1": 130, "CPU": 140}

SMALL = {"ctx_size": 64, "threads": 1, "exact": "off"}

SetDevices = Callable[..., None]


@pytest.fixture
def set_gpus(set_devices: SetDevices, monkeypatch: pytest.MonkeyPatch) -> SetDevices:
    """Return `set_devices` for GPUs whose memory is counted to the byte, and used by nothing but tensors and cache."""
    monkeypatch.setattr(placement, "STEP", 1)
    sizes = placement.model_sizes
    monkeypatch.setattr(placement, "model_sizes", lambda *given: sizes(*given)._replace(compute=0))
    return lambda *made: set_devices(*made, CPU)


@pytest.fixture
def moe() -> Path:
    return architecture("qwen3moe")


def with_room(size: float, device: Device = CARD) -> Device:
    """Return a device with this free memory in addition to the margin."""
    return replace(device, free=placement.MARGIN + int(size))


def plan(path: Path = DEMO, reserved: int = 0, **settings: Any) -> Plan:
    return make_plan(path, ModelSettings(**{"ctx_size": 64, **settings}), reserved=reserved)


def parameters(made: Plan) -> Mapping[str, Any]:
    """Return the parameters that llama.cpp would get."""
    params = weights.llama.llama_model_default_params()
    with mock.patch.object(devices, "buffer_types", return_value=BUFFERS):
        buffers = made.apply(params)
    found: dict[str, Any] = {name: getattr(params, name) for name in ("n_gpu_layers", "split_mode", "main_gpu")}
    if params.devices:
        handles = ctypes.cast(params.devices, ctypes.POINTER(ctypes.c_void_p))
        found["devices"] = [*takewhile(bool, map(handles.__getitem__, count()))]
    if params.tensor_split:
        found["tensor_split"] = params.tensor_split[:3]
    if params.tensor_buft_overrides:
        array = ctypes.cast(params.tensor_buft_overrides, ctypes.POINTER(placement._Override))
        items = takewhile(lambda item: item.pattern, map(array.__getitem__, count()))
        found["overrides"] = [(item.pattern, item.buffer) for item in items]
    assert bool(buffers) == any(name in found for name in ("devices", "tensor_split", "overrides"))
    return found


DEFAULT = {"n_gpu_layers": -1, "split_mode": 1, "main_gpu": 0}


def dense(layers: int = 4, size: int = 10, output: int = 5, **more: int) -> Sizes:
    return Sizes([size - 2] * layers, [0] * layers, [2] * layers, output, **more)


def mixture(layers: int = 4, size: int = 10, experts: int = 8, **more: int) -> Sizes:
    return Sizes([size - experts] * layers, [experts] * layers, [0] * layers, 5, **more)


@pytest.mark.parametrize(
    ("model", "rooms", "shares", "experts", "found"),
    [
        (dense(), [45], [1], None, (5, 0, ())),
        (dense(), [44], [1], None, (4, 0, ())),
        (dense(), [28], [1], None, (3, 0, ())),
        (dense(), [5], [1], None, (1, 0, ())),
        (dense(), [4], [1], None, (0, 0, ())),
        (dense(compute=10), [45], [1], None, (4, 0, ())),
        (dense(largest=4), [45], [1], None, (5, 0, ())),
        (dense(largest=5), [44], [1], None, (3, 0, ())),  # 10 for copies of tensors in RAM
        (mixture(), [45], [1], None, (5, 0, ())),
        (mixture(), [44], [1], None, (5, 1, ())),
        (mixture(), [28], [1], None, (5, 3, ())),
        (mixture(), [13], [1], None, (5, 4, ())),
        (mixture(), [12], [1], None, (4, 4, ())),
        (mixture(), [4], [1], None, (0, 4, ())),
        (mixture(largest=1), [44], [1], None, (5, 1, ())),
        (mixture(largest=5), [44], [1], None, (5, 2, ())),
        (dense(), [25, 25], [1, 1], None, (5, 0, (2, 3))),  # llama.cpp's own split would be 3 and 2
        (dense(), [30, 15], [2, 1], None, (5, 0, (3, 2))),
        (dense(), [35, 15], [3, 2], None, (5, 0, ())),
        (dense(), [100, 4], [24, 1], None, (5, 0, ())),
        (dense(), [20, 15], [1, 1], None, (4, 0, ())),
        (dense(), [9, 30], [1, 1], None, (3, 0, (0, 3))),
        (mixture(), [100], [1], 2, (5, 2, ())),
        (mixture(), [28], [1], 2, (4, 2, ())),
        (mixture(), [28], [1], 0, (3, 0, ())),
    ],
)
def test_fit_places_experts_before_layers_in_ram(
    model: Sizes, rooms: list[int], shares: list[int], experts: int | None, found: Any
) -> None:
    assert fit(model, rooms, shares, experts) == found


def sizes(path: Path, texts: int = 1, **settings: Any) -> Sizes:
    return model_sizes([read_header(path)], ModelSettings(**settings), texts)


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek2", "gemma2", "phi3", "falcon-h1", "qwen35", "mamba"])
def test_cache_of_other_architectures_is_that_of_llama_cpp(name: str) -> None:
    lines, path = list[str](), architecture(name)
    with bindings.log_listener(lines.append), Target(path, ctx_size=1024 - 64, threads=1, exact="off", n_seq=1):
        found = [re.search(r"llama_kv_cache: size = +([\d.]+) MiB \( *1024 cells", line) for line in lines]
    allocated = sum(float(match[1]) for match in found if match)
    assert sum(sizes(path, ctx_size=1024 - 64).caches) / 2**20 == allocated


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_sizes_of_a_model_are_those_of_llama_cpp(kind: str) -> None:
    given: dict[str, Any] = {"ctx_size": 1024 - 64, "cache_type_k": kind, "cache_type_v": kind}
    found = sizes(DEMO, 2, **given)
    with Target(DEMO, texts=2, threads=1, exact="off", **given) as target:
        assert sum(found.caches) == target.weights.token_bytes * 1024
        embeddings = read_header(DEMO).sizes["token_embd.weight"]
        assert found.output + sum(found.dense) - target.weights.size_bytes in (0, -embeddings)
    assert not any(found.experts)


def test_sizes_leave_out_tensors_that_are_in_ram() -> None:
    whole = sizes(DEMO)
    without = sizes(DEMO, override_tensor=((r"^blk\.0\.ffn", "CPU"),))
    assert without.dense[0] < whole.dense[0]
    assert whole.output > read_header(DEMO).sizes["token_embd.weight"]  # also the output matrix
    assert without.dense[1:] == whole.dense[1:]
    nothing = sizes(DEMO, override_tensor=((".", "CPU"),))
    assert (nothing.dense, nothing.output, nothing.caches) == ([0] * 8, 0, whole.caches)


@pytest.mark.parametrize(
    ("shapes", "width"),
    [
        ({"attn_k": (64, 32), "attn_v": (64, 16)}, 48),
        ({"attn_k": (64, 32)}, 64),
        ({"attn_kv_a_mqa": (64, 576)}, 576),
        ({"attn_qkv": (64, 96)}, 32),  # 4 heads and 1 KV head of 16
        ({"attn_qkv": (64, 96), "ssm_in": (64, 64)}, 0),
    ],
)
def test_width_of_the_cache_follows_from_the_tensors(shapes: Mapping[str, tuple[int, ...]], width: int) -> None:
    metadata = {
        **{"general.architecture": "x", "x.block_count": 1, "x.attention.head_count": 4},
        **{"x.attention.head_count_kv": 1, "x.context_length": 192},
    }
    made = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    header = GGUFHeader(len(made), metadata, b"", 0, made, dict.fromkeys(made, (24, 0)))
    assert model_sizes([header], ModelSettings()).caches[0] == 256 * width * 2


def test_buffers_grow_without_flash_attention() -> None:
    assert sizes(DEMO, ctx_size=8192).compute * 4 < sizes(DEMO, ctx_size=8192, flash_attn="off").compute


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, {}),
        ({"gpu_layers": ALL}, {"n_gpu_layers": -2}),
        ({"gpu_layers": 3}, {"n_gpu_layers": 3}),
        ({"device": "CUDA1"}, {"devices": [12]}),
        ({"device": "CUDA1,CUDA0"}, {"devices": [12, 11]}),
        ({"device": "none"}, {"devices": []}),
        ({"split_mode": "row"}, {"split_mode": 2}),
        ({"split_mode": "none", "main_gpu": 1}, {"split_mode": 0, "main_gpu": 1}),
        ({"tensor_split": "3,1"}, {"tensor_split": [3, 1, 0]}),
        ({"tensor_split": "3/1"}, {"tensor_split": [3, 1, 0]}),
        (
            {"override_tensor": (("attn", "CUDA1"), ("ffn", "CPU"))},
            {"overrides": [(b"attn", 120), (b"ffn", 140)]},
        ),
        ({"cpu_moe": True}, {"overrides": [(expert_pattern(8).encode(), 140)]}),
        ({"n_cpu_moe": 99}, {"overrides": [(expert_pattern(8).encode(), 140)]}),
        ({"n_cpu_moe": 1, "gpu_layers": ALL}, {"n_gpu_layers": -2, "overrides": [(expert_pattern(1).encode(), 140)]}),
        (
            {"n_cpu_moe": 1, "override_tensor": (("a", "CUDA0"),)},
            {"overrides": [(b"a", 110), (expert_pattern(1).encode(), 140)]},
        ),
    ],
)
def test_options_are_passed_to_llama_cpp(asked: dict[str, Any], expected: dict[str, Any], set_gpus: SetDevices) -> None:
    set_gpus(CARD, OTHER)
    assert parameters(plan(**asked)) == DEFAULT | expected


def test_expert_pattern_matches_the_experts_of_the_first_layers(moe: Path) -> None:
    names = [name for name in read_header(moe).shapes if "_exps" in name]
    layers = {int(name.split(".")[1]) for name in names}
    assert len(layers) > 1
    for first in (1, len(layers)):
        found = {name for name in read_header(moe).shapes if re.search(expert_pattern(first), name)}
        assert found == {name for name in names if int(name.split(".")[1]) < first}
    assert not re.search(expert_pattern(2), "blk.11.ffn_up_exps.weight")
    for name in ("blk.0.ffn_gate_up_exps.weight", "blk.0.ffn_down_chexps.weight"):
        assert re.search(EXPERTS, name)
    assert not re.search(EXPERTS, "blk.0.ffn_up_shexp.weight")


def test_op_offload_is_set_in_contexts() -> None:
    for wanted in (True, False):
        with Target(DEMO, no_op_offload=not wanted, **SMALL) as target:
            assert target._params(target.settings, 64).op_offload == wanted


def test_a_model_that_fits_is_not_changed(set_gpus: SetDevices) -> None:
    set_gpus(CARD)
    made = plan()
    assert parameters(made) == DEFAULT
    assert (made.notes, made.on_gpu, made.all_on_gpu) == ((), True, True)


def test_layers_that_do_not_fit_stay_in_ram(set_gpus: SetDevices) -> None:
    found = []
    for room in range(0, 20, 2):
        set_gpus(with_room(room * MIB))
        made = plan()
        found.append(made.gpu_layers)
        if made.gpu_layers == AUTO:
            assert made.notes == ()
        else:
            assert parameters(made) == DEFAULT | {"n_gpu_layers": made.gpu_layers}
            line = f"to fit the memory, {made.gpu_layers} of 9 layers are on CUDA0 (-ngl changes it)"
            assert made.notes == (line,)
            assert made.on_gpu == (made.gpu_layers > 0)
    assert found[0] == 0
    assert found[-1] == AUTO
    assert len(set(found)) > 4
    set_gpus(with_room(8 * MIB))
    shorter, longer = plan(), plan(ctx_size=4096)
    assert longer.gpu_layers < shorter.gpu_layers
    assert plan(reserved=4 * MIB).gpu_layers < shorter.gpu_layers
    assert plan(gpu_layers=ALL).gpu_layers == ALL
    in_ram = plan(override_tensor=(("ffn", "CPU"),))
    assert not in_ram.all_on_gpu
    assert in_ram.gpu_layers in (AUTO, *range(shorter.gpu_layers + 1, 10))


@pytest.mark.parametrize(
    ("free", "room"), [(2**30 - 1, 0), (2**30 + 2**28 - 1, 0), (2**30 + 2**28, 2**28), (2**31 - 1, 3 * 2**28)]
)
def test_small_changes_of_free_memory_change_nothing(free: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(devices, "devices", lambda: [replace(CARD, free=free)])
    monkeypatch.setattr(placement, "fit", lambda _sizes, rooms, *_: asked.append(rooms) or (9, 0, ()))
    plan()
    assert asked == [[room]]


def test_experts_are_in_ram_before_layers(moe: Path, set_gpus: SetDevices) -> None:
    layers = len({name.split(".")[1] for name in read_header(moe).shapes if name.startswith("blk.")})
    found, keys = [], set()
    for room in range(0, 4000, 40):
        set_gpus(with_room(room * 1024))
        made = plan(moe)
        found.append((made.gpu_layers, made.cpu_experts))
        keys.add((made.gpu_layers, made.key))
        if made.gpu_layers == AUTO and made.cpu_experts:
            note = (
                f"to fit the memory of CUDA0, the experts of the first {made.cpu_experts} of {layers} layers are in RAM"
            )
            assert made.notes == (f"{note} (--n-cpu-moe changes it)",)
            assert parameters(made)["overrides"] == [(expert_pattern(made.cpu_experts).encode(), 140)]
            assert not made.all_on_gpu
    kinds = dict.fromkeys(found)
    assert len(keys) == len(kinds)
    assert (AUTO, 0) in kinds
    assert {(AUTO, experts) for experts in range(1, layers + 1)} <= kinds.keys()
    assert not any(0 < number <= layers and experts == 0 for number, experts in kinds)
    set_gpus(with_room(0))
    without = f"to fit the memory, 0 of {layers + 1} layers are on CUDA0 without their experts (-ngl changes it)"
    assert plan(moe).notes == (without,)


def test_layers_are_split_over_gpus(set_gpus: SetDevices) -> None:
    set_gpus(with_room(3 * MIB), with_room(13 * MIB, OTHER))
    made = plan()
    first, second, rest = parameters(made)["tensor_split"]
    assert (first > 0, second > 0, rest) == (True, True, 0)
    assert made.fixed["tensor_split"] == f"{first:g},{second:g}"
    assert first + second == (9 if made.gpu_layers == AUTO else made.gpu_layers)
    # The margin is that of each GPU, and the GPUs share what is reserved.
    half = plan(reserved=2 * MIB)
    set_gpus(with_room(2 * MIB), with_room(12 * MIB, OTHER))
    assert plan().split == half.split


@pytest.mark.parametrize(
    "asked", [{"tensor_split": "1,1"}, {"split_mode": "row"}, {"override_tensor": (("attn", "CUDA1"),)}]
)
def test_placements_that_cannot_be_predicted_are_not_fitted(asked: dict[str, Any], set_gpus: SetDevices) -> None:
    set_gpus(with_room(0), with_room(0, OTHER))
    assert plan(**asked).gpu_layers == AUTO
    for total in (0, CARD.total):  # the driver does not report the memory
        set_gpus(replace(CARD, free=0, total=total))
        assert plan().gpu_layers == AUTO


def test_a_copy_has_the_same_placement_in_less_memory(moe: Path, set_gpus: SetDevices) -> None:
    for room in range(0, 4000, 200):
        set_gpus(with_room(room * 1024))
        made = plan(moe)
        set_gpus(with_room(0))
        copy = plan(moe, **made.fixed)
        assert (max(AUTO, copy.gpu_layers), copy.cpu_experts) == (made.gpu_layers, made.cpu_experts)


def test_a_copy_on_the_cpu_has_the_same_key(set_gpus: SetDevices) -> None:
    set_gpus()
    assert plan(**plan().fixed).key == plan().key


@pytest.mark.parametrize(
    ("made", "asked", "words"),
    [
        ((CARD, OTHER), {"device": "CUDA2"}, "--device CUDA2 does not exist; available: CUDA0 (RTX 3090), CUDA1"),
        ((CARD,), {"device": "CPU"}, "--device CPU does not exist; available: CUDA0 (RTX 3090)"),
        ((), {"device": "CUDA0"}, "--device CUDA0 does not exist; this build of llama.cpp finds no GPU"),
        ((CARD,), {"tensor_split": "1,1"}, "--tensor-split has 2 values for 1 devices; available: CUDA0 (RTX"),
        ((CARD,), {"split_mode": "none", "main_gpu": 1}, "--main-gpu 1 does not exist; available: 0 (CUDA0)"),
        ((CARD,), {"override_tensor": (("ffn", "GPU"),)}, "ffn=GPU: unknown buffer type GPU; available: CUDA0, CUDA1"),
    ],
)
def test_devices_that_do_not_exist_are_rejected(
    made: Sequence[Device], asked: dict[str, Any], words: str, set_gpus: SetDevices
) -> None:
    set_gpus(*made)
    with pytest.raises(ModelError, match=re.escape(words)):
        parameters(plan(**asked))


def test_a_load_without_memory_names_settings_that_need_less(
    set_gpus: SetDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaint = b"unable to allocate CUDA0 buffer"

    def load(*_: Any) -> None:
        weights.bindings._collect_log(4, b"llama_model_load: error loading model: " + complaint, None)

    monkeypatch.setattr(weights.llama, "llama_model_load_from_file", load)
    set_gpus(CARD)
    advice = "set a smaller -ngl or a larger --n-cpu-moe to use less GPU memory"
    for layers, text, advised in ((99, complaint, True), (0, complaint, False), (99, b"unknown architecture", False)):
        complaint = text
        with pytest.raises(ModelError, match=re.escape(text.decode())) as raised:
            Target(DEMO, gpu_layers=layers, **SMALL)
        assert str(raised.value).endswith(advice) == advised


def test_a_fit_is_part_of_the_keys_of_measurements(set_gpus: SetDevices, moe: Path) -> None:
    def fingerprint() -> str:
        with Target(moe, **SMALL) as target:
            return target.sequences[0].fingerprint

    set_gpus(CARD)
    found = {fingerprint()}
    set_gpus(replace(CARD, free=CARD.free - 2**30))
    assert found == {fingerprint()}
    for room in (900, 1400):
        set_gpus(with_room(room * 1024))
        found.add(fingerprint())
    assert len(found) == 3


def test_the_default_context_leaves_memory_for_a_draft_model_on_the_gpu(
    set_gpus: SetDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "cache_room", lambda *_: 16 * MIB)
    for made, is_smaller in (((), False), ((CARD,), True)):
        set_gpus(*made)
        sizes = []
        for reserved in (0, 12 * MIB):
            with Target(DEMO, threads=1, exact="off", reserved=reserved) as target:
                sizes.append(target.n_ctx)
        assert (sizes[1] < sizes[0]) == is_smaller


def test_overrides_to_ram_give_the_same_text_on_a_cpu(moe: Path) -> None:
    def text(**settings: Any) -> str:
        given = {"ctx_size": 128, "threads": 1, "no_memory": True, "no_draft": True, **settings}
        with ngramspec.load(moe, **given) as model:
            steps = [*model.decoder.generate(model.target.vocabulary.tokenize("def f(n):"), max_tokens=8)]
        return "".join(step.text for step in steps)

    plain = text()
    for settings in ({"n_cpu_moe": 1}, {"cpu_moe": True}, {"override_tensor": (("ffn_.*_exps", "CPU"),)}):
        assert text(**settings) == plain


def test_command_line_options_reach_the_model(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ModelSettings] = []

    def note(path: Path, settings: ModelSettings, *more: Any) -> Plan:
        seen.append(settings)
        return make_plan(path, settings, *more)

    monkeypatch.setattr(weights, "make_plan", note)
    monkeypatch.setattr(devices, "gpu_backends", list)
    options = ["-ts", "3,1", "-sm", "row", "-ncmoe", "2", "-ot", "attn=CPU,ffn=CPU", "-ot", "norm=CPU"]
    small = ["complete", DEMO, "-t", "1", "-c", "64", "-n", "1", "--exact", "off", "--no-draft"]
    expected = ModelSettings(
        split_mode="row",
        tensor_split="3,1",
        n_cpu_moe=2,
        override_tensor=(("attn", "CPU"), ("ffn", "CPU"), ("norm", "CPU")),
        no_op_offload=True,
    )
    run(env, *small, *options, "--no-op-offload", stdin=b"one").ok()
    given = {"ctx_size": 64, "threads": 1, "threads_batch": 1, "exact": "off", "draft_max": 1, "flash_attn": "auto"}
    assert seen[-1] == replace(expected, **given)
    run(env, *small, "-dev", "none", stdin=b"one").ok()
    assert seen[-1] == ModelSettings(device="none", **given)


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, {}),
        ({"gpu_layers": 20}, {}),
        ({"gpu_layers": 0}, {"gpu_layers": 0}),
        ({"gpu_layers": 0, "gpu_layers_draft": 5}, {"gpu_layers": 5}),
        ({"lora": (("large-lora.gguf", 1.0),), "threads": 3, "no_mmap": True}, {}),
        ({"threads_draft": 3}, {"threads": 3}),
        ({"device": "CUDA1,CUDA0", "tensor_split": "3/1"}, {"device": "CUDA1,CUDA0", "tensor_split": "3/1"}),
        ({"device": "CUDA1", "device_draft": "none"}, {"device": "none"}),
        ({"n_cpu_moe": 2, "override_tensor": (("a", "CPU"),)}, {}),
        (
            {"no_op_offload": True, "split_mode": "none", "main_gpu": 1},
            {"no_op_offload": True, "split_mode": "none", "main_gpu": 1},
        ),
        ({"tensor_split": "3,1", "device_draft": "CUDA1"}, {"device": "CUDA1"}),
    ],
)
def test_a_draft_model_uses_the_devices_of_the_target_unless_it_has_its_own(
    settings: dict[str, Any], asked: dict[str, Any]
) -> None:
    made = LoadSettings(draft_model="small.gguf", **settings).of_draft_model(64, 2)
    assert made == ModelSettings(**{"ctx_size": 64, "threads": 2, "exact": "off", **asked})
