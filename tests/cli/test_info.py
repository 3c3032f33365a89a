"""Tests of `ngramspec info` as a user runs it, and of the notes about an uncompiled drafting core."""

from __future__ import annotations

import importlib.machinery
import json
import re
from collections import Counter
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest
from ngramspec_cli import info, show
from ngramspec_cli.conditions import Load
from support.cli_runner import DEMO, environment, run
from support.machines import CARD, CPU, SHARED
from support.model_files import LAYERS, write_model

from ngramspec import drafting
from ngramspec.cost.bits import SIZES
from ngramspec.cpu import cores
from ngramspec.cpu.cores import process_load
from ngramspec.drafting import find_uncompiled_modules
from ngramspec.llama import devices
from ngramspec.llama.target import Target
from ngramspec.quants.costs import typical_gain

INFO = ["info", "-t", "1", "-c", "512"]


def facts(out: str) -> dict[str, str]:
    """Return the lines that contain a name and, in column 15, its value."""
    return {line[:15].rstrip(): line[15:] for line in out.splitlines() if re.match(r"[a-zK].{13} \S", line)}


@pytest.fixture(autouse=True)
def _known_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the replay of typical text, which takes longer than all else, except in the test of its result."""
    monkeypatch.setattr(info, "typical_gain", lambda _: 1.5)


@pytest.fixture
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that runs no other programs."""
    monkeypatch.setattr(Load, "cores", 0.1)
    monkeypatch.setattr(info, "process_load", lambda: SimpleNamespace(wait=lambda: None))


@pytest.mark.usefixtures("_quiet")
def test_info_begins_with_verdict_and_facts_that_decide_it(env: dict[str, str], tiny: Path) -> None:
    done = run({**env, "COLUMNS": "80"}, *INFO, tiny).ok()
    verdict, about, costs = done.out.split("\n\n")
    found = facts(about)
    assert re.match(r"Here a draft of 3 tokens costs [\d.]+ tokens' time(: expect|, so drafts gain nothing)", verdict)
    assert re.fullmatch(rf"{tiny.name}: \w+.*, [\d.]+ M parameters, \d+ MiB", found["model"])
    assert found["file"] == str(tiny)
    assert found["threads"] == "1 for one token, 1 for drafts, 1 for prompts: set by the user"
    assert set(found) == {"model", "file", "placement", "threads", "load", "tuned"}
    headings, row, evidence = costs.splitlines()
    assert headings.split() == ["T(2)", "T(4)", "T(8)", "T(16)"]
    assert all(float(ratio) >= 0.8 for ratio in row.split())
    pairs = re.fullmatch(r"These costs come from (\d+) pairs of calls in this run, with 1 thread\.", evidence)
    assert int(pairs[1]) >= 3 * 13
    again = run(env, *INFO, tiny).ok().out
    assert f"{pairs[1]} pairs of calls in earlier runs, with the threads that other programs left" in again
    assert all(len(line) <= 100 for line in done.out.splitlines() if str(tiny) not in line)


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize(
    ("cost", "prefers", "expected"),
    [
        (0.1, True, ["costs 0.3 tokens' time: expect 1.", "up to 6.4 times", "Batches are cheap"]),
        (0.5, True, ["costs 1.5 tokens' time: expect", "A Q4_0 file of this model would be faster"]),
        (0.5, False, ["up to 1.9 times", "A batch of 4 tokens costs 2.5 times one token here; "]),
        (1.0, False, ["costs 3.0 tokens' time, so drafts gain nothing", "No type is known to be faster"]),
    ],
)
def test_info_verdict_follows_costs_and_kernels(
    cost: float, prefers: bool, expected: list[str], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = environment(tmp_path)
    monkeypatch.setattr(info, "prefers_q4_0", lambda *_, **__: prefers)
    run(home, *INFO, tiny).ok()
    (stored,) = (tmp_path / "cache" / "ngramspec" / "calibration").glob("*-times.json")
    stored.write_text(json.dumps({"ratios": {n: 1 + cost * (n - 1) for n in SIZES}, "change": [0, 0], "pairs": 40}))
    monkeypatch.setattr(info, "typical_gain", typical_gain)
    verdict = " ".join(run(home, *INFO, tiny).ok().out.partition("\n\n")[0].split())
    assert all(words in verdict for words in expected), verdict
    assert len(re.findall(r"\.( |$)", verdict)) == 2, "two sentences"


@pytest.mark.usefixtures("_quiet")
def test_info_verbose_adds_build_and_all_batch_sizes(env: dict[str, str], tiny: Path) -> None:
    done = run({**env, "COLUMNS": "80"}, *INFO, tiny, "-v").ok()
    found = facts(done.out)
    with Target(tiny, ctx_size=512, threads=1) as target:
        assert found["name in file"] == target.weights.name
        assert found["architecture"] == f"{target.weights.architecture}, {target.weights.description}"
        assert found["context"] == f"512 tokens (the model's: {target.weights.n_ctx_train})"
        assert found["vocabulary"] == f"{target.vocabulary.n_vocab} tokens"
    assert found["KV cache"] == "drafts of any length can be rolled back"
    assert found["settings"] == "1 threads, flash attention auto, KV cache f16/f16"
    assert re.match(r"llama-cpp-python \d+\.\d+.*; ", found["build"])
    assert {"chat template", "devices", "machine"} <= found.keys()
    rows = [line.split() for line in done.out.splitlines() if re.match(r" *\d+ +\d+\.\d\d +\d", line)]
    assert [int(row[0]) for row in rows] == list(SIZES)
    assert rows[0][1:] == ["1.00", "1.00"]
    text = " ".join(done.out.split())
    same = re.search(r"Sizes with bit-identical logits: ([\d ;]+)\.", text)
    classes = [tuple(map(int, part.split())) for part in same[1].split(";")]
    assert sorted(n for part in classes for n in part) == list(SIZES)
    assert re.search(r"Largest logit difference from single tokens: [\d.e-]+ \(contexts of", text)
    exact = re.search(r"Exact mode here uses batches of ([\d ]+)\.", text)
    assert tuple(map(int, exact[1].split())) in classes
    assert re.search(r"A change of batch size costs ([\d.]+ calls over one token|nothing that was seen)\.", text)
    assert "…" not in done.out


@pytest.mark.usefixtures("_quiet")
def test_info_reuses_measurements_until_remeasure(env: dict[str, str], tiny: Path) -> None:
    for options in (["--remeasure"], ["-fa", "off"]):
        done = run(env, *INFO, tiny, "-v", *options)
        assert "timing batches of this model" in done.err
        assert "comparing the logits of batch sizes" in done.err
        assert ("flash attention off" in done.out) == ("-fa" in options)
        assert run(env, *INFO, tiny, "-v").err == ""


@pytest.mark.parametrize("busy", [0, 9])
def test_info_on_busy_machine_shows_load_and_no_costs_even_if_reads_are_preempted(
    busy: int, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = environment(tmp_path)
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
    monkeypatch.setattr(Load, "cores", float(busy))
    process_load.cache_clear()
    try:
        out = run(env, "info", "-c", "512", tiny).ok().out
    finally:
        process_load.cache_clear()
    assert facts(out)["load"] == f"other programs use {busy:.1f} of 10 cores"
    assert ("the machine is idle" in facts(out)["threads"]) == (not busy)
    assert ("Other programs disturbed the timing" in out) == bool(busy)
    assert ("T(4)" in out) == (not busy)
    assert bool(list(tmp_path.rglob("*-times.json"))) == (not busy)


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
    assert facts(done.out)["file"] == str(model)
    assert all(line == line.rstrip() for line in done.out.splitlines())


@pytest.mark.usefixtures("_quiet")
def test_info_of_recurrent_model_describes_rollback(env: dict[str, str], mamba: Path) -> None:
    done = run(env, *INFO, mamba, "-v").ok()
    assert "tokens are evaluated" in facts(done.out)["KV cache"]
    assert "per token" in done.out

    text = ["complete", "-t", "1", "-c", "512", "-n", "8", str(mamba)]
    for draft, said in ((["--exact", "on"], True), (["--policy", "fixed"], False), (["--no-draft"], False)):
        assert ("drafting is off with --exact" in run(env, *text, *draft, stdin=b"one two three").err) == said


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
    for layers, warned in {"99": 1, "0": 0, "all": 1, "auto": 0, "-1": 0}.items():
        done = run(env, *INFO, tiny, "-ngl", layers).ok()
        assert len(warnings(done.err)) == warned
        assert facts(done.out)["placement"] == f"{LAYERS + 1} in RAM (including the output layer)"
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
    plan = SimpleNamespace(gpus=(CARD,), cpu_experts=cpu_experts)
    return cast(
        Target, SimpleNamespace(weights=SimpleNamespace(devices=[SHARED, CARD, CPU], layers=Counter(layers), plan=plan))
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
    marked = "Vulkan1 (Iris, 14.0 GiB, not used), CUDA0 (RTX 3090, 24.0 GiB), CPU (EPYC, 16.0 GiB)"
    assert info._devices(target) == marked


def test_info_lists_devices_without_loading_a_model(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "devices", lambda: [CARD, CPU])
    done = run(env, "info", "--list-devices", "no-such-model").ok()
    assert done.out.splitlines() == [
        "CUDA0: RTX 3090 (24576 MiB, 20480 MiB free)",
        "CPU: EPYC (16384 MiB, 8192 MiB free)",
    ]


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
    for module in (info, show):
        monkeypatch.setattr(module, "find_uncompiled_modules", lambda: ("ngramspec.drafting.draft",))
    assert re.match("core in plain Python.*: install a C compiler", facts(run(env, *INFO, tiny).out)["drafting"])
    for command, draft, slow in (("complete", [], True), ("chat", [], True), ("complete", ["--no-draft"], False)):
        options = ["-t", "1", "-c", "512", "-n", "4", "--exact", "off", *draft]
        done = run(env, command, tiny, *options, stdin=b"def f(").ok()
        assert ("drafting is slow because its core is not compiled" in done.err.splitlines()[-1]) == slow
