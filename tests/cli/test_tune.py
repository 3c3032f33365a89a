"""Tests of `ngramspec tune` as a user runs it, on the demo model: its output, and the storage of its results."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from ngramspec_cli import serve as serve_module
from ngramspec_cli.conditions import Load
from ngramspec_cli.show import tuning_line
from support.cli_runner import DEMO, run
from support.signals import signal_at

from ngramspec.llama.trial import SettingsTimer
from ngramspec.loading.load import apply_tuning, model_tuning_path
from ngramspec.loading.settings import LoadSettings
from ngramspec.machine import Measure
from ngramspec.model_settings import ModelSettings, Tuned, load_tuned, save_tuned
from ngramspec.quants.costs import costs_path
from ngramspec.quants.shape import shape_of

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
    for what, left_out, line in (
        (None, False, "no; ngramspec tune finds the fastest settings"),
        (FASTER, False, "; ngramspec tune --reset deletes it"),
        (FASTER, True, "; ignored here"),
    ):
        assert line in tuning_line(what, left_out=left_out)
