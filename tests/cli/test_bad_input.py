"""Mistakes at the command line, and ends that nobody planned: one clear line, the right exit code, nothing lost."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from ngramspec_cli import app
from support.cli_runner import COMMAND, DEMO, ENDLESS, PATIENCE, Done, run, run_signalled, shell
from support.tiny_gguf import write_gguf

SMALL = ["complete", "-t", "1", "-c", "512", "-n", "4"]
TEXT = b"def add(a, b):\n    return a + b\n"
SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "code.py"
    path.write_bytes(TEXT)
    return path


def failed(done: Done, *words: str, code: int = 1) -> None:
    """It ended with this code, with nothing on stdout, and with one line that has these words."""
    assert (done.code, done.raw) == (code, b""), done.err
    for word in words:
        assert word in done.complaint


# ---------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--temp", "-0.1"], "temperature is -0.1"),
        (["--temp", "nan"], "temperature is nan"),
        (["--temp", "warm"], "--temp"),
        (["--top-p", "0"], "top_p is 0"),
        (["--top-p", "1.5"], "top_p is 1.5"),
        (["--min-p", "2"], "min_p is 2"),
        (["--top-k", "-1"], "top_k is -1"),
        (["-s", "-2"], "seed is -2"),
        (["-s", str(2**64)], "2^64"),
        (["-n", "0"], "-n/--predict is 0"),
        (["-n", "-5"], "-n/--predict is -5"),
        (["--stop", ""], "--stop"),
        (["--drafter", "psychic"], "'psychic'; choose one of: "),
        (["--policy", "psychic"], "'psychic'; choose one of: "),
        (["--acceptance", "psychic"], "coupled"),
        (["--draft-max", "0"], "--draft-max"),
        (["-ctk", "q2"], "q8_0"),
        (["-ctv", "q8_0", "-fa", "off"], "flash attention"),
        (["-c", "15"], "--ctx-size"),
        (["-c", str(2**32 + 512)], "--ctx-size"),
        (["-t", "0"], "--threads"),
        (["-t", str(2**40)], "--threads"),
        (["-ngl", str(2**40)], "--gpu-layers"),
        (["--psychic"], "--psychic (see ngramspec complete --help)"),
        (["one.txt", "two.txt", "three.txt"], "three.txt"),
        (["-f", "one.txt", str(DEMO), "two.txt"], "two texts are named: two.txt and, with -f/--file, one.txt"),
        ([""], "is empty"),
    ],
)
def test_a_wrong_option_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], options: list[str], words: str
) -> None:
    # In this process, to save the start of another, and with no way to get at a text or a model.
    for name in ("raise_on_sigterm", "prepare_streams"):
        monkeypatch.setattr(app, name, lambda: None)
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setenv("NGRAMSPEC_MODEL", os.devnull)
    code = app.run([*SMALL, *options])
    out, err = capfdbinary.readouterr()
    failed(Done(code, out, err.decode()), words, code=2)


def test_a_wrong_command_and_none(env: dict[str, str]) -> None:
    failed(run(env, "finish"), "'finish'", "ngramspec --help", code=2)
    done = run(env)
    assert (done.code, done.raw) == (2, b"")
    assert all(name in done.err for name in ("Usage:", "chat", "complete", "bench", "info"))
    asked = run(env, "--help")
    assert asked.code == 0
    assert "complete" in asked.out


# ---------------------------------------------------------------------- the text


def test_texts_that_cannot_be_read(env: dict[str, str], tmp_path: Path) -> None:
    failed(run(env, *SMALL, tmp_path / "gone.txt"), "gone.txt", "No such file")
    failed(run(env, *SMALL, tmp_path), str(tmp_path), "directory")
    if os.geteuid() != 0:
        locked = tmp_path / "locked.txt"
        locked.write_bytes(TEXT)
        locked.chmod(0)
        failed(run(env, *SMALL, locked), "locked.txt", "Permission denied")


def test_texts_that_are_empty(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "nothing.txt").touch()
    failed(run(env, *SMALL, tmp_path / "nothing.txt"), "nothing.txt is empty")
    failed(run(env, *SMALL), "standard input is empty")


def test_texts_that_are_not_utf8(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    failed(run(env, *SMALL, tmp_path / "latin.txt"), "latin.txt", "not UTF-8", "byte 2 is 0xfc")
    failed(run(env, *SMALL, stdin=b"\xff\xfeh\0i\0"), "standard input", "not UTF-8", "byte 0 is 0xff")
    failed(run(env, *SMALL, stdin=b"half a character \xe2\x82"), "not UTF-8")


def test_a_text_longer_than_the_context(env: dict[str, str]) -> None:
    done = run(env, "complete", "-t", "1", "-c", "64", stdin=TEXT * 20)
    failed(done, "tokens, but the context holds 64", "-c/--ctx-size", "--truncate")
    asked = [int(word) for word in done.complaint.split() if word.isdigit()]
    assert asked[0] > 64
    assert run(env, "complete", "-t", "1", "-c", "64", "-n", "4", "--truncate", stdin=TEXT * 20).code == 0


def test_a_terminal_is_no_text(env: dict[str, str]) -> None:
    terminal, other_end = pty.openpty()
    try:
        done = subprocess.run(
            [*COMMAND, *SMALL], stdin=other_end, capture_output=True, env=env, timeout=PATIENCE, check=False
        )
    finally:
        os.close(terminal)
        os.close(other_end)
    failed(Done(done.returncode, done.stdout, done.stderr.decode()), "no text to continue", code=2)


def test_a_closed_stdin_is_no_text(env: dict[str, str]) -> None:
    failed(shell(env, '"$@" <&-', *SMALL), "no text to continue", code=2)


# ---------------------------------------------------------------------- the model


def test_models_that_are_none(env: dict[str, str], file: Path, tmp_path: Path) -> None:
    (tmp_path / "[red]odd:bug:.txt").write_text("text\n")
    failed(run(env, *SMALL, tmp_path / "gone.gguf", file), "gone.gguf")
    failed(run(env, *SMALL, tmp_path, file), str(tmp_path), "folder")
    failed(run(env, *SMALL, file, file), str(file), "looks like a text file")
    # Neither markup nor the name of an emoji to the library that prints the line.
    failed(run(env, "info", tmp_path / "[red]odd:bug:.txt"), str(tmp_path / "[red]odd:bug:.txt"))


def damaged(path: Path) -> Path:
    """The demo model with one of its metadata's types replaced by one that there is not."""
    raw = bytearray(DEMO.read_bytes())
    key = b"general.architecture"
    struct.pack_into("<I", raw, raw.index(key) + len(key), 99)
    path.write_bytes(raw)
    return path


def unfounded(path: Path) -> Path:
    """The demo model with one of its metadata's names spoilt: llama.cpp misses it."""
    path.write_bytes(DEMO.read_bytes().replace(b"llama.embedding_length", b"llama.embedding_lengtX", 1))
    return path


def truncated(path: Path, part: int) -> Path:
    raw = DEMO.read_bytes()
    path.write_bytes(raw[: len(raw) // part])
    return path


def test_models_that_cannot_be_used(env: dict[str, str], file: Path, tmp_path: Path) -> None:
    for model, word in (
        (truncated(tmp_path / "half.gguf", 2), "truncated"),
        (truncated(tmp_path / "header.gguf", 1000), "truncated"),
        (write_gguf(tmp_path / "vocabulary.gguf", tensors={}), "only a vocabulary"),
        (write_gguf(tmp_path / "encoder.gguf", architecture="bert"), "encoder"),
        (write_gguf(tmp_path / "new.gguf", architecture="next-years"), "unknown model architecture: 'next-years'"),
        (write_gguf(tmp_path / "bare.gguf"), "llama.cpp cannot load this model"),
        (damaged(tmp_path / "damaged.gguf"), "general.architecture"),
        (unfounded(tmp_path / "unfounded.gguf"), "llama.embedding_length"),
    ):
        failed(run(env, *SMALL, model, file), str(model), word)


def test_a_model_that_may_not_be_read(env: dict[str, str], file: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    model = Path(shutil.copy(DEMO, tmp_path / "locked.gguf"))
    model.chmod(0)
    failed(run(env, *SMALL, model, file), "locked.gguf", "Permission denied")


@pytest.mark.skipif(sys.platform != "linux", reason="not every system limits a process's memory")
def test_a_context_that_no_memory_holds(env: dict[str, str], file: Path) -> None:
    done = shell(env, 'ulimit -v 6000000 && exec "$@"', "complete", "-t", "1", "-c", "2000000", file)
    failed(done, "no context of 2000000 tokens", "-c/--ctx-size")


# ---------------------------------------------------------------------- stdout and stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", [SMALL, [*SMALL, "--json"], ["info", "-t", "1", "-c", "512"], ["--help"]])
def test_a_full_disk(env: dict[str, str], arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = run(env, *arguments, stdin=TEXT, stdout=full.fileno())
    failed(done, "No space left on device")


def test_a_closed_stdout(env: dict[str, str]) -> None:
    for arguments in (SMALL, ["info"]):
        failed(shell(env, '"$@" >&-', *arguments), "stdout is closed")


def test_stderr_is_not_needed(env: dict[str, str], file: Path) -> None:
    wanted = run(env, *SMALL, file)
    assert wanted.code == 0
    for redirection in ("2>&-", "2>/dev/full"):
        done = shell(env, f'"$@" {redirection}', *SMALL, file)
        assert (done.code, done.raw, done.err) == (0, wanted.raw, "")
        assert shell(env, f'"$@" {redirection}', *SMALL, "gone.txt").code == 1


# ---------------------------------------------------------------------- signals


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_in_the_generation_loses_nothing(env: dict[str, str], file: Path, number: int, code: int) -> None:
    options = ["complete", "-t", "1", "-c", "512", "-n", "400", "--no-draft", *ENDLESS, str(file)]
    done = run_signalled(env, "generation", number, *options, "--json")
    assert done.code == code, done.err
    result = json.loads(done.out)
    assert result["stop_reason"] == "interrupted"
    assert result["tokens"] == 5
    assert "; interrupted; seed 1" in done.err
    assert "Traceback" not in done.err

    done = run_signalled(env, "generation", number, *options)
    assert done.code == code
    assert done.out == result["text"]
    assert "Traceback" not in done.err


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_in_the_prefill(env: dict[str, str], number: int, code: int) -> None:
    options = ["complete", "-t", "1", "-c", "2048", "-n", "4", "--json"]
    done = run_signalled(env, "prefill", number, *options, stdin=TEXT * 70)
    assert done.code == code, done.err
    result = json.loads(done.out)
    assert (result["text"], result["tokens"], result["stop_reason"]) == ("", 0, "interrupted")
    assert "Traceback" not in done.err


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_while_the_model_loads(env: dict[str, str], file: Path, number: int, code: int) -> None:
    for command in ([*SMALL, str(file)], ["info", "-t", "1", "-c", "512"]):
        done = run_signalled(env, "load", number, *command)
        assert (done.code, done.raw) == (code, b""), done.err
        assert "Traceback" not in done.err


CALLED_BACK = """
import ctypes, signal, sys, time
from ngramspec_cli.console import Terminated, raise_on_sigterm

raise_on_sigterm()
dropped = sys.unraisablehook
sys.unraisablehook = lambda lost: (print("lost"), dropped(lost))
number = int(input())
try:
    ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(number))()
    for _ in range(100):
        time.sleep(0.1)
except (KeyboardInterrupt, Terminated) as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "Terminated")])
def test_a_signal_within_a_call_back_from_c_is_not_lost(env: dict[str, str], number: int, error: str) -> None:
    script = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{CALLED_BACK}"
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, input=str(int(number)), capture_output=True, check=True, text=True, env=env, timeout=PATIENCE
    )
    assert (done.stdout.split(), done.stderr) == (["lost", error], "")


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_from_outside(env: dict[str, str], file: Path, number: int, code: int) -> None:
    command = [*COMMAND, "complete", "-t", "1", "-c", "16384", "-n", "-1", *ENDLESS, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as running:
        assert running.stdout
        first = running.stdout.read(1)
        running.send_signal(number)
        rest, errors = running.communicate(timeout=PATIENCE)
    assert running.returncode == code, errors
    assert first
    (first + rest).decode("utf-8")
    assert b"interrupted; seed 1" in errors
    assert b"Traceback" not in errors
