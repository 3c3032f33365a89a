"""Tests of `ngramspec tune`, with and without --quants: its output, its advice, and the storage of its results."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import signal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from ngramspec_cli import serve as serve_module
from ngramspec_cli.conditions import Load, tuning_line
from support.cli_runner import DEMO, run
from support.model_files import write_changed_demo
from support.signals import signal_at

from ngramspec.llama.target import Target
from ngramspec.llama.trial import Measure, SettingsTimer
from ngramspec.loading.load import apply_tuning, model_tuning_path
from ngramspec.loading.settings import LoadSettings, Tuned, load_tuned, save_tuned
from ngramspec.model_settings import ModelSettings
from ngramspec.quants import costs as quants
from ngramspec.quants.costs import QUANTISATIONS, SIZES, QuantCost, costs_path, keep_costs, quant_note
from ngramspec.quants.models import SyntheticModels, parse_shape, shape_of

TUNE = ["tune", "-t", "1", "--time-limit", "5", "--context-depth", "256"]
PLAIN = ["-c", "512", "--exact", "off", "--no-draft"]
COMPLETE = ["complete", *PLAIN, "-n", "4"]
TEXT = b"def add(a, b):\n    return a + b\n"
FASTER = Tuned({"threads": 1, "threads_batch": 2, "no_mmap": True}, 0.8, "2026-11-22")


def invented(_bench: SettingsTimer, settings: ModelSettings, measure: Measure) -> float:
    """Return the time of a pass on a machine on which a model that was read is faster than a mapped one."""
    return 0.001 * measure.size * (1.0 if not settings.no_mmap else 0.8)


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace timings by results that need no time, on an idle machine."""
    monkeypatch.setattr(SettingsTimer, "seconds", invented)
    monkeypatch.setattr(Load, "is_high", False)


def kept() -> Tuned | None:
    return load_tuned(model_tuning_path(DEMO, LoadSettings()))


def apply(what: Tuned = FASTER, model: Path = DEMO) -> None:
    save_tuned(model_tuning_path(model, LoadSettings()), what)


@pytest.mark.usefixtures("_quick")
def test_tune_reports_results_as_table_and_json(home: dict[str, str], tmp_path: Path) -> None:
    done = run(home, *TUNE, "--json", tmp_path / "found.json").ok()
    assert "current settings, ms" in done.out
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["complete"], found["settings"]["depth"], found["present"]["threads"]) == (True, 256, 1)
    assert found["compared"]
    for name, one in found["compared"].items():
        assert name in done.out
        assert one["speed"]["pairs"] >= 2
        assert found["present_seconds"].keys() >= one["each"].keys()
    assert found["recommended"] == {"options": "--no-mmap", "changes": {"no_mmap": True}, "applied": False}
    assert "Recommended: --no-mmap, 1.25 times as fast where it matters." in done.out
    assert found["conditions"]["command"] in done.out.splitlines()
    assert kept() is None


@pytest.mark.usefixtures("_quick")
def test_tune_next_to_a_busy_program_saves_nothing(home: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Load, "is_high", True)
    done = run(home, *TUNE, "--apply")
    assert (done.code, kept()) == (1, None)
    assert "Recommended: --no-mmap" in done.out
    assert "the settings are not saved, because other programs used " in done.error_message
    assert "Saved: " not in done.out


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    ("factors", "code", "line"),
    [
        ([1.0], 0, "No difference that these runs can show, so nothing is recommended or saved."),
        ([1.0, 1.0, 1.0, 2.0, 2.0, 2.0], 1, "nothing can be compared on this machine now"),
    ],
    ids=["equal", "unsteady"],
)
def test_tune_without_a_clear_gain_saves_nothing_and_keeps_saved_settings(
    home: dict[str, str], monkeypatch: pytest.MonkeyPatch, factors: list[float], code: int, line: str
) -> None:
    times = itertools.cycle(factors)
    monkeypatch.setattr(SettingsTimer, "seconds", lambda _bench, _settings, measure: measure.size * next(times))
    apply()
    done = run(home, *TUNE, "--apply")
    assert (done.code, kept()) == (code, FASTER)
    assert line in (done.err if code else done.out)


@pytest.mark.usefixtures("_quick")
def test_tune_changes_used_settings_only_with_apply(home: dict[str, str]) -> None:
    apply()
    run(home, *TUNE).ok()
    assert kept() == FASTER
    assert run(home, *TUNE, "--apply", "--json", "-").json["recommended"]["changes"] == {"no_mmap": True}
    assert (kept().changes, kept().ratio) == ({"no_mmap": True}, pytest.approx(0.8))


@pytest.mark.usefixtures("_quick")
def test_tune_when_interrupted_reports_partial_results(home: dict[str, str]) -> None:
    with signal_at(signal.SIGINT, SettingsTimer, "seconds", 150):
        done = run(home, *TUNE, "--time-limit", "3600", "--apply")
    assert done.code == 130, done.err
    assert "Interrupted: these are the results so far" in done.out
    assert "current settings, ms" in done.out
    assert kept() is None


def test_complete_uses_tuned_settings_until_reset(home: dict[str, str]) -> None:
    assert "tuned" not in run(home, *COMPLETE, stdin=TEXT).err
    apply()
    used = run(home, *COMPLETE, stdin=TEXT).ok()
    assert "tuned: -t 1 -tb 2 --no-mmap (" in used.err
    assert "tuned: --no-mmap (" in run(home, *COMPLETE, "-t", "1", stdin=TEXT).err
    assert "tuned" not in run(home, *COMPLETE, "--ignore-tuned", stdin=TEXT).err
    quants = costs_path(shape_of(DEMO), LoadSettings().gpu_layers)
    quants.parent.mkdir(parents=True)
    quants.touch()
    forgotten = run(home, "tune", "--reset").ok()
    assert (forgotten.raw, "deleted" in forgotten.err) == (b"", True)
    assert (kept(), quants.exists()) == (None, False)
    assert "tuned" not in run(home, *COMPLETE, stdin=TEXT).err
    assert "nothing is saved for this model" in run(home, "tune", "--reset").err


SERVE = ["serve", "-c", "512", "--exact", "off", "--no-draft", "--port", "0"]
BENCH = ["bench", *PLAIN, "--category", "chat", "--limit", "1", "--repeat", "1", "-n", "8"]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["chat", *PLAIN, "-n", "4"], id="chat"),
        # This loads the server's libraries if no earlier test did, which takes about 2 s of processor time.
        pytest.param(SERVE, id="serve", marks=pytest.mark.exhaustive),
        pytest.param(BENCH, id="bench"),
    ],
)
def test_chat_serve_and_bench_use_tuned_settings(
    home: dict[str, str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    apply()
    monkeypatch.setattr(serve_module, "wait_for_signal", lambda: None)
    done = run(home, *command, stdin=b"Hello\n")
    assert (done.code, done.err.count("tuned: -t 1 -tb 2 --no-mmap (")) == (0, 1), done.err
    if command is BENCH:
        line = "tuned: -t 1 -tb 2 --no-mmap, 1.25 times as fast where it matters (2026-11-22)"
        without = run(home, *command, "--ignore-tuned", "-t", "1")
        assert f"{line}; ngramspec tune --reset deletes it" in done.out.splitlines()
        assert ("tuned: " in without.err, f"{line}; ignored here" in without.out.splitlines()) == (False, True)


def test_tuned_file_differs_by_model_layers_and_cache_type(home: dict[str, str], tmp_path: Path) -> None:
    apply()
    copy = tmp_path / "copy.gguf"
    shutil.copy(DEMO, copy)
    assert model_tuning_path(copy, LoadSettings()) == model_tuning_path(DEMO, LoadSettings())
    with copy.open("ab") as file:
        file.write(b"\0")
    others = [model_tuning_path(copy, LoadSettings()), model_tuning_path(DEMO, LoadSettings(gpu_layers=0))]
    others.append(model_tuning_path(DEMO, LoadSettings(cache_type_k="q8_0")))
    assert len({model_tuning_path(DEMO, LoadSettings()), *others}) == 4


def test_tuned_settings_yield_to_explicit_options(home: dict[str, str]) -> None:
    told: list[str] = []

    def using(**settings: Any) -> LoadSettings:
        return apply_tuning(DEMO, LoadSettings(**settings), told.append)[0]

    apply(Tuned({"threads": 1, "threads_batch": 2, "flash_attn": "off"}, 0.8, "2026-11-22"))
    plain = using()
    assert (plain.threads, plain.threads_batch, plain.flash_attn) == (1, 2, "off")
    assert using(threads_batch=1).threads_batch == 1
    said = using(threads=2, flash_attn="auto")
    assert (said.threads, said.threads_batch, said.flash_attn) == (2, None, "auto")
    assert len(told) == 2
    # The note appears only once.
    assert apply_tuning(DEMO, plain, told.append) == (plain, {})
    apply(Tuned({"ubatch_size": 1024, "no_repack": True}, 0.8, "2026-11-22"))
    assert using() == LoadSettings(ubatch_size=1024, no_repack=True, ignore_tuned=True)
    assert using(flash_attn="off").ubatch_size is None


def test_info_shows_tuned_settings(home: dict[str, str], tiny: Path) -> None:
    apply(model=tiny)
    shown = run(home, "info", tiny, "-v", "-c", "512", "--exact", "off").out
    assert "tuned          -t 1 -tb 2 --no-mmap, 1.25 times as fast where it matters (2026-11-22)" in shown
    assert "settings       1 threads (2 for batches)" in shown
    assert tuning_line(DEMO, LoadSettings()) == "no; ngramspec tune finds the fastest settings"
    assert tuning_line(tiny, LoadSettings()).endswith("; ngramspec tune --reset deletes it")
    assert tuning_line(tiny, LoadSettings(ignore_tuned=True)).endswith("; ignored here")


TINY = "layers=2,embd=64,ff=96,heads=2,vocab=100,tied=yes"
QUANTS = ["tune", "--quants", "-t", "1", "--time-limit", "5", "-ngl", "0"]


def prepare(models: SyntheticModels) -> Iterator[str]:
    """Yield a name as the real method does, without writing or loading models."""
    yield "loading"
    models.files.update(dict.fromkeys(models._quantisations, (100, "output")))
    models.outputs["output"] = "Q4_0"


@pytest.fixture
def _invented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace models and timings by results that need no time."""
    monkeypatch.setattr(SyntheticModels, "prepare", prepare)
    monkeypatch.setattr(SyntheticModels, "seconds", lambda _models, _name, size: 0.001 * size)
    monkeypatch.setattr(quants, "typical_gain", lambda _curve: 1.5)


def test_it_compares_quantisations_of_a_shape(
    home: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"Q4_0", "Q4_K_M", "Q8_0"}
    monkeypatch.setattr(quants, "QUANTISATIONS", tuple(names))
    monkeypatch.setattr(quants, "MAX_SPREAD", math.inf)  # the machine may be busy
    monkeypatch.setattr(Load, "is_high", False)
    done = run(home, *QUANTS, TINY, "--json", tmp_path / "found.json").ok()
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["complete"], found["shape"]["ff"], found["timed_layers"]) == (True, 96, 2)
    assert found["steady"]
    assert found["quantisations"].keys() == names
    for name, one in found["quantisations"].items():
        line = next(line for line in done.out.splitlines() if line.startswith(f"{name} "))
        assert f"{one['size_bytes'] / 2**20:,.0f}" == line.split()[1]
        assert one["seconds"].keys() == set(map(str, SIZES))
        assert min(one["tokens_per_second"], one["prompt_tokens_per_second"]) > 0
        assert one["tokens_per_second_with_drafts"] >= 0.95 * one["tokens_per_second"]
    assert found["conclusions"] == [line for line in done.out.splitlines() if line.startswith("Recommended: ")]
    assert costs_path(parse_shape(TINY), 0).exists()
    command = f"ngramspec tune {TINY} --quants --time-limit 5.0 --context-depth 256 -ngl 0 -t 1"
    assert found["command"] == command
    assert command in done.out.splitlines()
    run(home, "tune", TINY, "--reset", "-ngl", "0").ok()
    assert not costs_path(parse_shape(TINY), 0).exists()


@pytest.mark.usefixtures("_invented")
@pytest.mark.parametrize(("is_busy", "slowest"), [(False, 2.0), (True, 1.0)])
def test_a_disturbed_measurement_is_shown_but_not_stored(
    home: dict[str, str], monkeypatch: pytest.MonkeyPatch, is_busy: bool, slowest: float
) -> None:
    monkeypatch.setattr(Load, "is_high", is_busy)
    slowdown = itertools.cycle([1.0, *[slowest] * 4])
    monkeypatch.setattr(SyntheticModels, "seconds", lambda _models, _name, size: 0.001 * size * next(slowdown))
    done = run(home, *QUANTS, TINY, "--json", "-")
    assert (done.json["steady"], done.json["conclusions"]) == (False, [])
    assert "measure on an idle machine" in done.err
    assert not costs_path(parse_shape(TINY), 0).exists()


def store_costs(path: Path) -> None:
    """Store invented costs: Q4_1 is slow in batches, and Q4_0 is not."""
    keep_costs(
        path,
        [
            QuantCost(name, 100, {n: 1.0 + growth * (n - 1) for n in SIZES}, prompt, 1.0)
            for name, growth, prompt in (("Q4_1", 0.7, 1.0), ("Q4_0", 0.1, 0.1), ("Q8_0", 0.7, 1.0))
        ],
    )


@pytest.mark.usefixtures("home")
def test_quant_note_names_a_faster_quantisation_once_the_costs_are_known(tiny: Path) -> None:
    slow = "note: a batch of 4 tokens costs 2.5 times one token here"
    with Target(tiny, ctx_size=512, threads=1) as target:
        assert quant_note(target.weights, 0, 2.5) == (
            f"{slow}; ngramspec tune --quants measures whether another quantisation of this model is faster"
        )
        store_costs(costs_path(shape_of(tiny), 0))
        better = f"{slow}, but 1.3 times in a file with Q4_0 (ngramspec tune --quants)"
        assert [quant_note(target.weights, 0, steepness) for steepness in (2.5, 1.9)] == [better, None]


def test_an_interruption_before_the_first_round_has_no_results(home: dict[str, str]) -> None:
    with signal_at(signal.SIGINT, SyntheticModels, "seconds", 20):
        done = run(home, *QUANTS, TINY, "--json", "-")
    assert done.code == 130, done.err
    assert json.loads(done.out)["quantisations"] == {}
    assert not costs_path(parse_shape(TINY), 0).exists()


@pytest.mark.usefixtures("_invented")
@pytest.mark.parametrize(("kind", "more"), [(7, []), (14, ["Q4_K_S"]), (19, [])])  # 7: Q8_0, 19: IQ2_XXS
def test_a_model_file_gives_its_shape_and_quantisation(
    home: dict[str, str], tmp_path: Path, kind: int, more: list[str]
) -> None:
    path = write_changed_demo(tmp_path / "model.gguf", {"general.file_type": kind})
    found = run(home, *QUANTS, path, "--json", "-").json
    assert found["shape"] == asdict(shape_of(DEMO))
    assert set(found["quantisations"]) == {*QUANTISATIONS, *more}
