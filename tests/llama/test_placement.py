"""Placement of weights on devices: parameters for llama.cpp, errors, notes and keys, with GPUs that do not exist."""

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
from architectures.files import write_model
from support.cli_runner import DEMO, run

import ngramspec
from ngramspec.data import ModelError
from ngramspec.llama import devices, fitting, placement, weights
from ngramspec.llama.devices import ALL, AUTO, Device
from ngramspec.llama.fitting import EXPERTS, Demand
from ngramspec.llama.placement import EVERY, Placement, Plan, expert_pattern, make_plan
from ngramspec.llama.target import Target
from ngramspec.llama.weights import tuning_key
from ngramspec.loading.settings import LoadSettings
from ngramspec.models.gguf import read_header

MIB = 2**20
CPU = Device("CPU", "EPYC", False, 2**33, 2**34, backend="CPU")
CARD = Device("CUDA0", "RTX 3090", True, 20 * 2**30, 24 * 2**30, backend="CUDA", id="0000:01:00.0")
OTHER = Device("CUDA1", "RTX 4090", True, 20 * 2**30, 24 * 2**30, backend="CUDA", id="0000:02:00.0")
SHARED = Device("Vulkan0", "Iris", True, 2**33, 2**34, True, "Vulkan")
HANDLES = {"CUDA0": 11, "CUDA1": 12, "Vulkan0": 13, "CPU": 14}
BUFFERS = {name: handle * 10 for name, handle in HANDLES.items()}

SMALL = {"n_ctx": 64, "threads": 1, "exact": "off"}


@pytest.fixture
def set_devices(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(placement, "STEP", 1)
    monkeypatch.setattr(fitting, "_compute_bytes", lambda *_: 0)
    return lambda *made: monkeypatch.setattr(devices, "devices", lambda: [*made, CPU])


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("moe") / "moe.gguf", "qwen3moe")


def with_room(size: float, device: Device = CARD) -> Device:
    """Return a device with this free memory in addition to the margin."""
    return replace(device, free=placement.MARGIN + int(size))


def plan(path: Path = DEMO, n_gpu_layers: int = AUTO, demand: Demand | None = None, **asked: Any) -> Plan:
    return make_plan(path, n_gpu_layers, Placement(**asked), demand or Demand(64))


def parameters(made: Plan) -> Mapping[str, Any]:
    """Return the parameters that llama.cpp would get."""
    params = weights.llama.llama_model_default_params()
    with mock.patch.multiple(devices, device_handles=lambda: HANDLES, buffer_types=lambda: BUFFERS):
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


# ---------------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, {}),
        ({"n_gpu_layers": ALL}, {"n_gpu_layers": -2}),
        ({"n_gpu_layers": 3}, {"n_gpu_layers": 3}),
        ({"devices": ("CUDA1",)}, {"devices": [12]}),
        ({"devices": ("CUDA1", "CUDA0")}, {"devices": [12, 11]}),
        ({"devices": ()}, {"devices": []}),
        ({"split_mode": "row"}, {"split_mode": 2}),
        ({"split_mode": "none", "main_gpu": 1}, {"split_mode": 0, "main_gpu": 1}),
        ({"tensor_split": (3.0, 1.0)}, {"tensor_split": [3, 1, 0]}),
        (
            {"overrides": (("attn", "CUDA1"), ("ffn", "CPU"))},
            {"overrides": [(b"attn", 120), (b"ffn", 140)]},
        ),
        ({"cpu_experts": EVERY}, {"overrides": [(expert_pattern(8).encode(), 140)]}),
        (
            {"cpu_experts": 1, "overrides": (("a", "CUDA0"),)},
            {"overrides": [(b"a", 110), (expert_pattern(1).encode(), 140)]},
        ),
    ],
)
def test_options_are_passed_to_llama_cpp(
    asked: dict[str, Any], expected: dict[str, Any], set_devices: Callable[..., None]
) -> None:
    set_devices(CARD, OTHER)
    assert parameters(plan(**asked)) == DEFAULT | expected


def test_expert_pattern_matches_the_experts_of_the_first_layers(moe: Path) -> None:
    names = [name for name in read_header(moe).shapes if "_exps" in name]
    layers = {int(name.split(".")[1]) for name in names}
    assert len(layers) > 1
    assert expert_pattern(0) == ""
    for first in (1, len(layers)):
        found = {name for name in read_header(moe).shapes if re.search(expert_pattern(first), name)}
        assert found == {name for name in names if int(name.split(".")[1]) < first}
    assert not re.search(expert_pattern(2), "blk.11.ffn_up_exps.weight")
    for name in ("blk.0.ffn_gate_up_exps.weight", "blk.0.ffn_down_chexps.weight"):
        assert re.search(EXPERTS, name)
    assert not re.search(EXPERTS, "blk.0.ffn_up_shexp.weight")


def test_op_offload_is_set_in_contexts() -> None:
    for wanted in (True, False):
        with Target(DEMO, placement=Placement(op_offload=wanted), **SMALL) as target:
            assert target._params(target.weights.present, 64).op_offload == wanted


# ---------------------------------------------------------------------- fit


def layer_bytes(path: Path) -> int:
    return sum(size for name, size in read_header(path).sizes.items() if name.startswith("blk.1."))


def test_a_model_that_fits_is_not_changed(set_devices: Callable[..., None]) -> None:
    set_devices(CARD)
    made = plan()
    assert parameters(made) == DEFAULT
    assert (made.notes, made.key, made.on_gpu, made.all_on_gpu) == ((), "", True, True)


def test_layers_that_do_not_fit_stay_in_ram(set_devices: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for room in range(0, 20, 2):
        set_devices(with_room(room * MIB))
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
    set_devices(with_room(8 * MIB))
    shorter, longer = plan(), plan(demand=Demand(4096))
    assert longer.gpu_layers < shorter.gpu_layers
    assert plan(reserved=4 * MIB).gpu_layers < shorter.gpu_layers
    assert plan(n_gpu_layers=ALL).gpu_layers == ALL
    assert not plan(overrides=(("ffn", "CPU"),)).all_on_gpu
    assert plan(overrides=(("ffn", "CPU"),)).gpu_layers in (AUTO, *range(shorter.gpu_layers + 1, 10))


def test_small_changes_of_free_memory_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, rooms in ((2**30 - 1, 0), (2**30 + 2**28 - 1, 0), (2**30 + 2**28, 2**28), (2**31 - 1, 3 * 2**28)):
        assert placement._memory([replace(CARD, free=free)], Placement())[0] == [rooms]


def test_experts_are_in_ram_before_layers(moe: Path, set_devices: Callable[..., None]) -> None:
    layers = len({name.split(".")[1] for name in read_header(moe).shapes if name.startswith("blk.")})
    found, keys = [], set()
    for room in range(0, 4000, 40):
        set_devices(with_room(room * 1024))
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


def test_layers_are_split_over_gpus(set_devices: Callable[..., None]) -> None:
    set_devices(with_room(3 * MIB), with_room(13 * MIB, OTHER))
    made = plan()
    first, second, rest = parameters(made)["tensor_split"]
    assert (first > 0, second > 0, rest) == (True, True, 0)
    assert made.arguments["placement"].tensor_split == (first, second)
    assert first + second == (9 if made.gpu_layers == AUTO else made.gpu_layers)


@pytest.mark.parametrize(
    "asked",
    [
        {"tensor_split": (1.0, 1.0)},
        {"split_mode": "row"},
        {"overrides": (("attn", "CUDA1"),)},
    ],
)
def test_placements_that_cannot_be_predicted_are_not_fitted(
    asked: dict[str, Any], set_devices: Callable[..., None]
) -> None:
    set_devices(with_room(0), with_room(0, OTHER))
    assert plan(**asked).gpu_layers == AUTO
    for total in (0, CARD.total):  # the driver does not report the memory
        set_devices(replace(CARD, free=0, total=total))
        assert plan().gpu_layers == AUTO


def test_a_copy_has_the_same_placement_in_less_memory(moe: Path, set_devices: Callable[..., None]) -> None:
    for room in range(0, 4000, 200):
        set_devices(with_room(room * 1024))
        made = plan(moe)
        set_devices(with_room(0))
        arguments = made.arguments
        copy = make_plan(moe, arguments["n_gpu_layers"], arguments["placement"], Demand(64))
        assert (max(AUTO, copy.gpu_layers), copy.cpu_experts) == (made.gpu_layers, made.cpu_experts)


def test_a_copy_on_the_cpu_has_the_same_key(set_devices: Callable[..., None]) -> None:
    set_devices()
    assert plan().arguments == {"n_gpu_layers": ALL, "placement": Placement()}


# ---------------------------------------------------------------------- errors and notes


@pytest.mark.parametrize(
    ("made", "asked", "words"),
    [
        ((CARD, OTHER), {"devices": ("CUDA2",)}, "--device CUDA2 does not exist; available: CUDA0 (RTX 3090), CUDA1"),
        ((CARD,), {"devices": ("CPU",)}, "--device CPU does not exist; available: CUDA0 (RTX 3090)"),
        ((), {"devices": ("CUDA0",)}, "--device CUDA0 does not exist; this build of llama.cpp finds no GPU"),
        ((CARD,), {"tensor_split": (1.0, 1.0)}, "--tensor-split has 2 values for 1 devices; available: CUDA0 (RTX"),
        ((CARD,), {"split_mode": "none", "main_gpu": 1}, "--main-gpu 1 does not exist; available: 0 (CUDA0)"),
    ],
)
def test_devices_that_do_not_exist_are_rejected(
    made: Sequence[Device], asked: dict[str, Any], words: str, set_devices: Callable[..., None]
) -> None:
    set_devices(*made)
    with pytest.raises(ModelError, match=re.escape(words)):
        plan(**asked)


def test_unknown_types_of_buffers_are_rejected(set_devices: Callable[..., None]) -> None:
    set_devices(CARD)
    with pytest.raises(ModelError, match=r"ffn=GPU: unknown buffer type GPU; available: CUDA0, CUDA1, Vulkan0, CPU$"):
        parameters(plan(overrides=(("ffn", "GPU"),)))


NO_GPU = "has no effect: the model uses no GPU"


@pytest.mark.parametrize(
    ("made", "layers", "asked", "lines"),
    [
        ((), AUTO, {}, []),
        ((), AUTO, {"tensor_split": (1.0,), "main_gpu": 1}, [f"--main-gpu {NO_GPU}", f"--tensor-split {NO_GPU}"]),
        ((), AUTO, {"op_offload": False, "split_mode": "row"}, [f"--split-mode {NO_GPU}", f"--no-op-offload {NO_GPU}"]),
        ((), AUTO, {"overrides": (("ffn", "CPU"),)}, [f"--override-tensor {NO_GPU}"]),
        ((), AUTO, {"cpu_experts": 3}, [f"--n-cpu-moe {NO_GPU}"]),
        ((), AUTO, {"devices": ()}, []),
        ((CARD,), 0, {"op_offload": False, "main_gpu": 1}, [f"--main-gpu {NO_GPU}"]),
        ((CARD,), AUTO, {"op_offload": False, "split_mode": "row"}, []),
        ((SHARED,), AUTO, {"split_mode": "row"}, ["--split-mode row has no effect: the devices can only split layers"]),
        (
            (CARD,),
            AUTO,
            {"main_gpu": 1},
            ["--main-gpu has no effect without --split-mode none; --device selects devices"],
        ),
        ((CARD,), AUTO, {"cpu_experts": 3}, ["--n-cpu-moe has no effect: the model has no expert tensors"]),
        (
            (CARD,),
            AUTO,
            {"overrides": (("nothing", "CPU"),)},
            ["--override-tensor nothing has no effect: no tensor has such a name"],
        ),
    ],
)
def test_options_without_effect_are_reported(
    made: Sequence[Device], layers: int, asked: dict[str, Any], lines: list[str], set_devices: Callable[..., None]
) -> None:
    set_devices(*made)
    assert plan(n_gpu_layers=layers, **asked).notes == tuple(f"warning: {line}" for line in lines)


FULL = ModelError("m.gguf: llama.cpp cannot load this model (error loading model: unable to allocate CUDA0 buffer)")


def test_a_load_without_memory_names_a_setting_that_fits(moe: Path, set_devices: Callable[..., None]) -> None:
    set_devices(with_room(8 * MIB))
    fits = plan().gpu_layers
    assert str(plan(n_gpu_layers=ALL).explain_error(FULL)) == f"{FULL}; set -ngl {fits} to use less GPU memory"
    smaller = int(re.findall(r"set -ngl (\d+) to", str(plan().explain_error(FULL)))[0])
    assert smaller < fits
    assert str(plan(n_gpu_layers=fits - 1).explain_error(FULL)) == f"{FULL}; set -ngl {smaller} to use less GPU memory"
    other = ModelError("m.gguf: llama.cpp cannot load this model (unknown model architecture)")
    assert plan(n_gpu_layers=ALL).explain_error(other) is other
    assert plan(n_gpu_layers=0).explain_error(FULL) is FULL
    for room in range(0, 4000, 40):
        set_devices(with_room(room * 1024))
        if (made := plan(moe)).cpu_experts and made.gpu_layers == AUTO:
            line = str(plan(moe, n_gpu_layers=99).explain_error(FULL))
            assert line == f"{FULL}; set -ngl all --n-cpu-moe {made.cpu_experts} to use less GPU memory"
            return
    pytest.fail("no room at which only experts are moved")


def test_a_failed_load_is_explained(set_devices: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> None:
        line = b"llama_model_load: error loading model: unable to allocate CUDA0 buffer\n"
        weights.bindings._collect_log(4, line, None)

    set_devices(with_room(8 * MIB))
    monkeypatch.setattr(weights.llama, "llama_model_load_from_file", load)
    with pytest.raises(ModelError, match=r"unable to allocate CUDA0 buffer\); set -ngl \d+ to use less GPU memory$"):
        Target(DEMO, n_gpu_layers=99, **SMALL)


# ---------------------------------------------------------------------- keys


def test_keys_distinguish_placements(set_devices: Callable[..., None]) -> None:
    set_devices(CARD, OTHER, SHARED)
    asked: list[dict[str, Any]] = [
        {},
        {"devices": ("CUDA0",)},
        {"devices": ("Vulkan0",)},
        {"devices": ()},
        {"split_mode": "row"},
        {"split_mode": "none", "main_gpu": 1},
        {"tensor_split": (3.0, 1.0)},
        {"cpu_experts": 1},
        {"overrides": (("ffn", "CPU"),)},
        {"op_offload": False},
    ]
    keys = [tuning_key(DEMO, AUTO, ("f16", "f16"), Placement(**one)) for one in asked]
    assert keys[0] == tuning_key(DEMO, ALL, ("f16", "f16"), Placement(reserved=1, margin=1))
    set_devices(CARD, OTHER, replace(SHARED, description="Arc"))
    keys.append(tuning_key(DEMO, AUTO, ("f16", "f16"), Placement(devices=("Vulkan0",))))
    assert len(set(keys)) == len(keys)


def test_a_fit_is_part_of_the_keys_of_measurements(set_devices: Callable[..., None], moe: Path) -> None:
    def fingerprint() -> str:
        with Target(moe, **SMALL) as target:
            return target.sequences[0].fingerprint

    set_devices(CARD)
    found = {fingerprint()}
    set_devices(replace(CARD, free=CARD.free - 2**30))
    assert found == {fingerprint()}
    for room in (900, 1400):
        set_devices(with_room(room * 1024))
        found.add(fingerprint())
    assert len(found) == 3


def test_the_default_context_leaves_memory_for_a_draft_model_on_the_gpu(
    set_devices: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "free_bytes", lambda *_: 16 * MIB)
    for made, is_smaller in (((), False), ((CARD,), True)):
        set_devices(*made)
        sizes = []
        for reserved in (0, 12 * MIB):
            with Target(DEMO, threads=1, exact="off", placement=Placement(reserved=reserved)) as target:
                sizes.append(target.n_ctx)
        assert (sizes[1] < sizes[0]) == is_smaller


# ---------------------------------------------------------------------- real loads on the CPU


@pytest.fixture
def moe_text(moe: Path) -> Callable[..., str]:
    def text(**settings: Any) -> str:
        notes: list[str] = []
        given = {"ctx_size": 128, "threads": 1, "no_memory": True, "no_draft": True, **settings}
        with ngramspec.load(moe, on_note=notes.append, **given) as model:
            steps = [*model.decoder.generate(model.target.vocabulary.tokenize("def f(n):"), max_tokens=8)]
        assert [line for line in notes if "has no effect" not in line] == []
        return "".join(step.text for step in steps) + "".join(sorted(notes))

    return text


def test_overrides_to_ram_give_the_same_text_on_a_cpu(moe_text: Callable[..., str]) -> None:
    plain = moe_text()
    for settings, flag in (
        ({"n_cpu_moe": 1}, "--n-cpu-moe"),
        ({"cpu_moe": True}, "--n-cpu-moe"),
        ({"override_tensor": (("ffn_.*_exps", "CPU"),)}, "--override-tensor"),
    ):
        assert moe_text(**settings) == f"{plain}warning: {flag} {NO_GPU}"


def test_command_line_options_reach_the_model(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Plan] = []
    make = weights.make_plan

    def note(*arguments: Any) -> Plan:
        seen.append(make(*arguments))
        return seen[-1]

    monkeypatch.setattr(weights, "make_plan", note)
    monkeypatch.setattr(devices, "gpu_backends", list)
    options = ["-ts", "3,1", "-sm", "row", "-ncmoe", "2", "-ot", "attn=CPU,ffn=CPU", "-ot", "norm=CPU"]
    small = ["complete", DEMO, "-t", "1", "-c", "64", "-n", "1", "--exact", "off", "--no-draft"]
    done = run(env, *small, *options, "--no-op-offload", stdin=b"one").ok()
    assert seen[-1].asked == Placement(
        split_mode="row",
        tensor_split=(3.0, 1.0),
        cpu_experts=2,
        overrides=(("attn", "CPU"), ("ffn", "CPU"), ("norm", "CPU")),
        op_offload=False,
    )
    assert done.err.count(NO_GPU) == 5
    run(env, *small, "-dev", "none", stdin=b"one").ok()
    assert seen[-1].asked == Placement(devices=())
    run(env, *small, "--device", "CUDA7", stdin=b"one").assert_failed(
        "--device CUDA7 does not exist; this build of llama.cpp"
    )
    run(env, *small, "-ot", "attn=GPU", stdin=b"one").assert_failed("unknown buffer type GPU; available: CPU")


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, {}),
        ({"device": "CUDA1,CUDA0", "tensor_split": "3/1"}, {"devices": ("CUDA1", "CUDA0"), "tensor_split": (3.0, 1.0)}),
        ({"device": "CUDA1", "device_draft": "none"}, {"devices": ()}),
        ({"n_cpu_moe": 2, "override_tensor": (("a", "CPU"),)}, {}),
        (
            {"no_op_offload": True, "split_mode": "none", "main_gpu": 1},
            {"op_offload": False, "split_mode": "none", "main_gpu": 1},
        ),
        ({"tensor_split": "3,1", "device_draft": "CUDA1"}, {"devices": ("CUDA1",)}),
    ],
)
def test_a_draft_model_uses_the_devices_of_the_target_unless_it_has_its_own(
    settings: dict[str, Any], asked: dict[str, Any]
) -> None:
    made = LoadSettings(draft_model="small.gguf", **settings).make_draft_settings(64, 1)
    assert made.placement == Placement(**asked)
