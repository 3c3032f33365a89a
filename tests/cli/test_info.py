"""Tests of `ngramspec info` as a user runs it, and of the notes about an uncompiled drafting core."""

from __future__ import annotations

import importlib.machinery
import re
from collections import Counter
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
from ngramspec_cli import info, view
from support.cli_runner import DEMO, run
from support.tiny_models import LAYERS, write_model

from ngramspec import drafting
from ngramspec.cost.bits import SIZES
from ngramspec.cpu import cores
from ngramspec.cpu.cores import process_load
from ngramspec.drafting import find_uncompiled_modules
from ngramspec.llama import devices
from ngramspec.llama.devices import Device
from ngramspec.llama.target import Target

INFO = ["info", "-t", "1", "-c", "512"]
PROBING = "comparing the logits of batch sizes"


def facts(out: str) -> dict[str, str]:
    """Return the lines that contain a name and, in column 15, its value."""
    return {line[:15].rstrip(): line[15:] for line in out.splitlines() if re.match(r"[a-zK].{13} \S", line)}


def test_info_reports_build_model_and_measurements(env: dict[str, str], tiny: Path) -> None:
    done = run({**env, "COLUMNS": "80"}, *INFO, tiny).ok()
    found = facts(done.out)
    with Target(tiny, n_ctx=512, threads=1) as target:
        assert found["model"] == f"{target.weights.name}, {tiny}"
        assert found["architecture"].startswith(f"{target.weights.architecture}, ")
        assert found["size"].endswith(f"{target.weights.n_params / 1e6:.1f} M parameters")
        assert found["context"] == f"512 tokens (the model's: {target.weights.n_ctx_train})"
        assert found["vocabulary"] == f"{target.vocabulary.n_vocab} tokens"
    assert found["KV cache"] == "drafts of any length can be rolled back"
    assert found["settings"] == "1 threads, flash attention auto, KV cache f16/f16"
    assert re.match(r"llama-cpp-python \d+\.\d+.*; .*CPU", found["build"])
    assert {"chat template", "devices", "machine"} <= found.keys()

    rows = [re.findall(r"[\d.]+", line) for line in done.out.splitlines() if re.match(r"\W *\d+ ", line)]
    assert [int(row[0]) for row in rows] == list(SIZES)
    assert all(float(row[1]) > 0 for row in rows)
    assert rows[0][1:3] == ["1.00", "1.00"]
    classes = [tuple(map(int, row[3:])) for row in rows]
    assert all(int(row[0]) in same for row, same in zip(rows, classes, strict=True))
    assert sorted(n for same in set(classes) for n in same) == list(SIZES)
    assert re.search(r"^Largest logit difference from single tokens: [\d.e-]+ \(contexts of", done.out, re.MULTILINE)
    exact = re.search(r"^Exact mode here uses batches of ([\d ]+)\.$", done.out, re.MULTILINE)
    assert tuple(map(int, exact[1].split())) in classes
    seen = re.search(r"^Seen in (\d+) pairs of passes; such a pass takes [\d.]+ ms now\. (.*)$", done.out, re.MULTILINE)
    assert int(seen[1]) >= 3 * 13
    assert re.match(r"A change of batch size costs ([\d.]+ passes over one token|nothing that was seen)\.$", seen[2])
    assert "…" not in done.out


def test_info_reuses_measurements_until_remeasure(env: dict[str, str], tiny: Path) -> None:
    assert PROBING in run(env, *INFO, tiny, "--remeasure").err
    assert PROBING not in run(env, *INFO, tiny).err
    other = run(env, *INFO, tiny, "-fa", "off")
    assert PROBING in other.err
    assert "flash attention off" in other.out


@pytest.mark.parametrize("busy", [0, 9])
def test_info_reports_present_load_even_if_reads_are_preempted(
    busy: int, env: dict[str, str], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, stops = 0.0, chain((0.5, 0.5), repeat(0.0))

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    def read(percpu: bool) -> list[SimpleNamespace]:
        wait(next(stops))
        return [SimpleNamespace(user=now if n < busy else 0.0, system=0.0) for n in range(10)]

    clocks = SimpleNamespace(perf_counter=lambda: now, process_time=lambda: 0.0, sleep=wait)
    monkeypatch.setattr(cores, "time", clocks)
    monkeypatch.setattr(psutil, "cpu_times", read)
    monkeypatch.setattr(cores, "available_cpus", lambda: set(range(10)))
    process_load.cache_clear()
    try:
        out = run(env, "info", "-c", "512", tiny).ok().out
    finally:
        process_load.cache_clear()
    reason = facts(out)["threads now"].rpartition(": ")[2]
    assert reason == ("other programs use 9.0 of 10 cores" if busy else "the machine is idle")


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with a recurrent state."""
    return write_model(tmp_path_factory.mktemp("models") / "m.gguf", "mamba")


def test_info_in_pipe_keeps_long_lines(env: dict[str, str], mamba: Path, tmp_path: Path) -> None:
    folder = tmp_path / ("[bold]" + "long " * 40 + ":bug:")
    folder.mkdir()
    model = folder / "m.gguf"
    model.symlink_to(mamba)
    done = run({**env, "COLUMNS": "40"}, *INFO, model)
    assert facts(done.out)["model"] == f"tiny mamba, {model}"
    about, _, _ = done.out.partition("Cost of a target pass")
    assert all(line == line.rstrip() for line in about.splitlines())


def test_info_of_recurrent_model_describes_rollback(env: dict[str, str], mamba: Path) -> None:
    done = run(env, *INFO, mamba).ok()
    assert "tokens are evaluated again" in facts(done.out)["KV cache"]
    assert "Cost of a target pass" in done.out

    text = ["complete", "-t", "1", "-c", "512", "-n", "8", str(mamba)]
    for draft, said in ((["--exact", "on"], True), (["--policy", "fixed"], False), (["--no-draft"], False)):
        assert ("drafting is off with --exact" in run(env, *text, *draft, stdin=b"one two three").err) == said


# ---------------------------------------------------------------------- layers and GPUs

CPU = Device("CPU", "EPYC", False, 1, 16 * 2**30)
GPU = Device("CUDA0", "RTX 3090", True, 1, 24 * 2**30)
SHARED = Device("Vulkan0", "Iris", True, 1, 14 * 2**30, is_integrated=True)


def warnings(err: str) -> list[str]:
    return [line for line in err.splitlines() if "running on the CPU" in line]


@pytest.fixture
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build without a GPU backend."""
    monkeypatch.setattr(devices, "devices", lambda: [CPU])
    monkeypatch.setattr(devices, "gpu_backends", list)


@pytest.mark.usefixtures("cpu_only")
def test_info_with_layers_for_missing_gpu_warns_once(
    env: dict[str, str], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, warned in (
        (["-ngl", "99"], 1),
        (["-ngl", "0"], 0),
        (["-ngl", "all"], 1),
        (["-ngl", "auto"], 0),
        ([], 0),
    ):
        done = run(env, *INFO, tiny, *options).ok()
        assert len(warnings(done.err)) == warned
        assert facts(done.out)["layers"] == f"{LAYERS + 1} in RAM (including the output layer)"
    monkeypatch.setattr(devices, "gpu_backends", lambda: ["Vulkan"])
    assert ["Vulkan found no usable GPU" in line for line in warnings(run(env, *INFO, tiny).err)] == [True]
    assert warnings(run(env, *INFO, tiny, "-ngl", "0").err) == []


@pytest.mark.usefixtures("cpu_only")
def test_commands_with_two_models_warn_once_about_gpu(env: dict[str, str], tiny: Path, prompts: Path) -> None:
    small = ["-t", "1", "-c", "512", "-n", "2", "-ngl", "9"]
    drafted = run(env, "complete", DEMO, *small, "--exact", "off", "-md", DEMO, "-ngld", "9", stdin=b"one two").ok()
    assert len(warnings(drafted.err)) == 1
    exact = run(env, "bench", tiny, *small, "--exact", "on", "--prompts", prompts, "--limit", "1", "--repeat", "1").ok()
    assert len(warnings(exact.err)) == 1


def placed(layers: dict[str, int], cpu_experts: int = 0) -> Target:
    plan = SimpleNamespace(gpus=(GPU,), cpu_experts=cpu_experts)
    return cast(
        Target, SimpleNamespace(weights=SimpleNamespace(devices=[SHARED, GPU, CPU], layers=Counter(layers), plan=plan))
    )


@pytest.mark.parametrize(
    ("layers", "experts", "line"),
    [
        ({"CPU": 9}, 0, "9 in RAM (including the output layer)"),
        ({"CPU": 4, "CUDA0": 5}, 0, "5 on CUDA0, 4 in RAM (including the output layer)"),
        ({"RPC0": 4, "CUDA0": 5}, 0, "4 on RPC0, 5 on CUDA0 (including the output layer)"),
        ({"CUDA0": 9}, 3, "9 on CUDA0 (including the output layer); experts of the first 3 layers in RAM"),
        ({}, 0, ""),
    ],
)
def test_info_layers_returns_counts_by_device(layers: dict[str, int], experts: int, line: str) -> None:
    assert info._layers(placed(layers, experts)) == line


def test_a_gpu_that_a_model_does_not_use_is_marked() -> None:
    target = placed({})
    marked = "Vulkan0 (Iris, 14.0 GiB, not used), CUDA0 (RTX 3090, 24.0 GiB), CPU (EPYC, 16.0 GiB)"
    assert info._devices(target) == marked


def test_info_lists_devices_without_loading_a_model(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "devices", lambda: [GPU, CPU])
    done = run(env, "info", "--list-devices", "no-such-model").ok()
    assert done.out.splitlines() == ["CUDA0: RTX 3090 (24576 MiB, 0 MiB free)", "CPU: EPYC (16384 MiB, 0 MiB free)"]


# ---------------------------------------------------------------------- a core that was not compiled


def test_uncompiled_returns_modules_without_extension() -> None:
    folder = Path(str(drafting.__file__)).parent
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    plain = {
        "ngramspec.drafting." + path.relative_to(folder).with_suffix("").as_posix().replace("/", ".")
        for path in folder.rglob("*.pxd")
        if not any(path.with_suffix(suffix).exists() for suffix in suffixes)
    }
    assert set(find_uncompiled_modules()) == plain


def test_uncompiled_core_adds_advice_to_info_and_note_to_speed(
    env: dict[str, str], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_packaging.py` tests such a wheel."""
    for module in (info, view):
        monkeypatch.setattr(module, "find_uncompiled_modules", lambda: ("ngramspec.drafting.draft",))
    core = facts(run(env, *INFO, tiny).out)["drafting"]
    assert "core in plain Python" in core
    assert "install a C compiler" in core
    for command in ("complete", "chat"):
        for draft, slow in (([], True), (["--no-draft"], False)):
            options = ["-t", "1", "-c", "512", "-n", "4", "--exact", "off", *draft]
            done = run(env, command, tiny, *options, stdin=b"def f(").ok()
            assert ("drafting is slow because its core is not compiled" in done.err.splitlines()[-1]) == slow
