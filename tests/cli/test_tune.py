"""`ngramspec tune` as a user has it, on the demo model: what it shows, keeps and forgets, and who uses what it kept."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ngramspec_cli.options import LoadOptions
from ngramspec_cli.tuned import told
from support.cli_runner import COMMAND, COUNTED, DEMO, PATIENCE, run

from ngramspec.models.find import ModelSource
from ngramspec.tuning.kept import Kept, keep, recalled

TUNE = ["tune", "-t", "1", "--seconds", "5", "--depth", "256"]
COMPLETE = ["complete", "-c", "512", "-n", "4"]
TEXT = b"def add(a, b):\n    return a + b\n"
FASTER = Kept({"threads": 1, "threads_batch": 2, "mmap": False}, 0.8, "2026-11-22", applied=True)
SOURCE = ModelSource(DEMO, "demo")


@pytest.fixture
def home(env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Folders of the user's that are empty, for this process and for others."""
    own = {**env, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, own[name])
    return own


def kept() -> Kept | None:
    return recalled(LoadOptions().tuned_file(DEMO))


def apply(what: Kept = FASTER) -> None:
    keep(LoadOptions().tuned_file(DEMO), what)


def test_it_measures_and_says_so_as_json_and_in_a_table(home: dict[str, str], tmp_path: Path) -> None:
    done = run(home, *TUNE, "--json", tmp_path / "found.json")
    assert done.code == 0, done.err
    assert "as it is, ms" in done.out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["complete"]
    assert found["settings"]["depth"] == 256
    assert found["present"]["threads"] == 1
    assert found["compared"]
    for name, one in found["compared"].items():
        assert name in done.out
        assert one["rounds"] >= 5
        assert all(ratio > 0 for ratio in one["each"].values())
        assert 0 <= one["chance"] <= 1
    assert found["present_seconds"].keys() >= {m for one in found["compared"].values() for m in one["each"]}
    # What it found is known, and not used.
    known = kept()
    assert known is not None
    assert not known.applied
    assert (known.changes == {}) == (found["recommended"] is None)


def test_only_json_where_that_is_asked_for(home: dict[str, str]) -> None:
    done = run(home, *TUNE, "--json", "-")
    assert json.loads(done.out)["complete"]


def test_what_is_kept_is_used_until_it_is_forgotten(home: dict[str, str]) -> None:
    plain = run(home, *COMPLETE, stdin=TEXT)
    assert "tuned" not in plain.err
    apply()
    used = run(home, *COMPLETE, stdin=TEXT)
    assert used.code == 0, used.err
    assert "tuned: -t 1 -tb 2 --no-mmap (" in used.err
    assert "tuned: --no-mmap (" in run(home, *COMPLETE, "-t", "1", stdin=TEXT).err
    assert "tuned" not in run(home, *COMPLETE, "--no-tuned", stdin=TEXT).err
    told_of = run(home, "info", "-c", "512")
    assert "tuned          -t 1 -tb 2 --no-mmap, 1.25 times as fast where it acts (2026-11-22)" in told_of.out
    assert "settings       1 threads (2 for batches)" in told_of.out
    forgotten = run(home, "tune", "--forget")
    assert (forgotten.code, forgotten.raw) == (0, b"")
    assert "taken away" in forgotten.err
    assert kept() is None
    assert "tuned" not in run(home, *COMPLETE, stdin=TEXT).err
    assert "nothing is kept" in run(home, "tune", "--forget").err


def test_a_chat_and_a_benchmark_use_it_too(home: dict[str, str]) -> None:
    apply()
    talk = run(home, "chat", "-c", "512", "-n", "4", stdin=b"Hello\n")
    assert (talk.code, talk.err.count("tuned: -t 1 -tb 2 --no-mmap (")) == (0, 1), talk.err
    bench = ["bench", "--category", "chat", "--limit", "1", "--repeat", "1", "-n", "8", "-c", "512"]
    done = run(home, *bench)
    assert (done.code, done.err.count("tuned: -t 1 -tb 2 --no-mmap (")) == (0, 1), done.err
    line = "tuned: -t 1 -tb 2 --no-mmap, 1.25 times as fast where it acts (2026-11-22)"
    assert line in done.out.splitlines()
    without = run(home, *bench, "--no-tuned", "-t", "1")
    assert "tuned: " not in without.err
    assert f"{line}; left out here" in without.out.splitlines()


def test_a_server_uses_it_too(home: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    apply()
    errors = tmp_path / "log"
    command = [*COMMAND, "serve", str(DEMO), "--port", "0", "-c", "512", "--exact", "off"]
    with errors.open("wb") as log, subprocess.Popen(command, env=home, stderr=log) as process:
        end = time.monotonic() + PATIENCE
        while "is ready" not in errors.read_text() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        process.kill()
    told_of = errors.read_text()
    assert "is ready" in told_of
    assert told_of.count("tuned: -t 1 -tb 2 --no-mmap (") == 1


def test_looking_leaves_what_is_in_use_and_applying_replaces_it(home: dict[str, str]) -> None:
    apply()
    run(home, *TUNE)
    assert kept() == FASTER
    done = run(home, *TUNE, "--apply", "--json", "-")
    recommended = json.loads(done.out)["recommended"]
    now = kept()
    assert now is not None
    assert now != FASTER
    assert now.applied == (recommended is not None)
    assert now.changes == (recommended["changes"] if recommended else {})


def test_another_model_and_other_layers_have_settings_of_their_own(home: dict[str, str], tmp_path: Path) -> None:
    apply()
    copy = tmp_path / "copy.gguf"
    shutil.copy(DEMO, copy)
    assert LoadOptions().tuned_file(copy) == LoadOptions().tuned_file(DEMO)
    with copy.open("ab") as file:
        file.write(b"\0")
    others = [LoadOptions().tuned_file(copy), LoadOptions(gpu_layers=0).tuned_file(DEMO)]
    others.append(LoadOptions(cache_type_k="q8_0").tuned_file(DEMO))
    assert len({LoadOptions().tuned_file(DEMO), *others}) == 4


def test_options_come_first(home: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    apply(Kept({"threads": 1, "threads_batch": 2, "flash_attn": "off"}, 0.8, "2026-11-22", applied=True))
    plain = LoadOptions().tuned(SOURCE)
    assert (plain.threads, plain.threads_batch, plain.flash_attn) == (1, 2, "off")
    assert LoadOptions(threads_batch=1).tuned(SOURCE).threads_batch == 1
    said = LoadOptions(threads=2, flash_attn="auto").tuned(SOURCE)
    assert (said.threads, said.threads_batch, said.flash_attn) == (2, None, "auto")
    assert capsys.readouterr().err.count("tuned: ") == 2
    # What was told of once is not told of again.
    plain.tuned(SOURCE)
    assert capsys.readouterr().err == ""
    apply(Kept({"micro_batch": 1024, "repack": False}, 0.8, "2026-11-22", applied=True))
    assert LoadOptions().tuned(SOURCE).settings(None) == LoadOptions(ubatch_size=1024, no_repack=True).settings(None)
    assert LoadOptions(flash_attn="off").tuned(SOURCE).ubatch_size is None


def test_an_interruption_shows_what_was_measured(home: dict[str, str]) -> None:
    script = f"""{COUNTED}
from ngramspec.llama.workbench import Workbench
from ngramspec_cli.app import main
Workbench.seconds = counted(Workbench.seconds, 150)
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, "-", str(int(signal.SIGINT)), *TUNE, "--seconds", "3600", "--apply"],
        capture_output=True,
        env=home,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert b"Interrupted: this is what was measured so far" in done.stdout
    assert b"as it is, ms" in done.stdout
    assert kept() is None


@pytest.mark.parametrize(
    ("options", "words", "code"),
    [
        (["--seconds", "1"], "--seconds", 2),
        (["--depth", "8"], "--depth", 2),
        (["--apply", "--forget"], "exclude each other", 2),
        (["gone.gguf"], "gone.gguf", 1),
        (["--json", "/nowhere/found.json"], "/nowhere/found.json", 1),
    ],
)
def test_a_wrong_option_is_one_line(home: dict[str, str], options: list[str], words: str, code: int) -> None:
    done = run(home, "tune", *options)
    assert (done.code, done.raw) == (code, b"")
    assert words in done.complaint


@pytest.mark.parametrize(
    ("what", "left_out", "line"),
    [
        (None, False, "no: ngramspec tune finds the settings that are fastest here"),
        (Kept({}, None, "2026-11-22", applied=False), False, "nothing was found faster"),
        (Kept({"threads": 3}, 0.5, "2026-11-22", applied=False), False, "not used: ngramspec tune --apply keeps it"),
        (FASTER, True, "; left out here"),
    ],
)
def test_the_line_of_info(what: Kept | None, left_out: bool, line: str) -> None:
    assert line in told(what, left_out=left_out)
