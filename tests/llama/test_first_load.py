"""Damaged and hostile model files: one line and exit code 1, or a working model; never a signal."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support import hostile_gguf
from support.cli_runner import DEMO, run
from support.fake_child import Child

from ngramspec.errors import ModelError
from ngramspec.llama import first_load
from ngramspec.llama.devices import build
from ngramspec.llama.target import Target
from ngramspec.llama.vocabulary import Vocabulary

# What ended the process in issue 9's trials, by the words of its mutation.
FATAL = [
    "llama.block_count 0",
    "llama.block_count 1000",
    "llama.attention.layer_norm_rms_epsilon -1.0",
    "llama.attention.layer_norm_rms_epsilon nan",
    "tokenizer.ggml.tokens 4096 of ['<|endoftext|>', '<|endoftext|>'",
]
KILL = "import os, signal; os.kill(os.getpid(), signal.{})"
WITHOUT_CORE = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "
SAID = "import sys; sys.stderr.write({!r}); "


@pytest.fixture(scope="module")
def mutated() -> dict[str, hostile_gguf.Header]:
    return dict(hostile_gguf.mutations(hostile_gguf.read(DEMO)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(DEMO.read_bytes()[: 1 << 18])
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "new" / "verdicts"


def refused(path: Path, folder: Path, child: Child, **options: float) -> str | None:
    """What is said of a file, if it is refused."""
    try:
        first_load.check(path, "a build", folder, command=child.command, **options)
    except ModelError as error:
        return str(error)
    return None


def test_the_writer_writes_what_was_read() -> None:
    assert hostile_gguf.read(DEMO).bytes() == DEMO.read_bytes()


@pytest.mark.parametrize("fatal", FATAL)
def test_what_ended_the_process_is_an_error(
    fatal: str, mutated: dict[str, hostile_gguf.Header], env: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(next(header for name, header in mutated.items() if name.startswith(fatal)).bytes())
    done = run(env, "complete", path, "-t", "1", "-c", "256", "-n", "2", stdin=b"x")
    assert (done.code, done.raw) == (1, b"")
    assert str(path) in done.complaint
    # As a library the file is refused too, and the process lives.
    with pytest.raises(ModelError, match="is damaged: "):
        Target(path, n_ctx=256, threads=1)


def test_a_vocabulary_is_tried_too(mutated: dict[str, hostile_gguf.Header], tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(next(header for name, header in mutated.items() if name.startswith(FATAL[-1])).bytes())
    with pytest.raises(ModelError, match=r"ends the process over it \(GGML_ASSERT\(.*token.*\) failed\); get it again"):
        Vocabulary(path)


def test_a_sample_of_mutated_headers(
    mutated: dict[str, hostile_gguf.Header], env: dict[str, str], tmp_path: Path
) -> None:
    """Each gives some text, or one line and exit code 1."""
    path = tmp_path / "hostile.gguf"
    for name in random.Random(9).sample(sorted(mutated), 12):
        path.write_bytes(mutated[name].bytes())
        done = run(env, "complete", path, "-t", "1", "-c", "256", "-n", "2", "--no-draft", stdin=b"def f")
        assert done.code in (0, 1), (name, done)
        if done.code:
            assert done.raw == b"", name
            assert done.complaint, name


# ---------------------------------------------------------------------- the verdict


def test_a_good_file_is_tried_once(file: Path, folder: Path, tmp_path: Path) -> None:
    child = Child(tmp_path, "")
    assert [refused(file, folder, child) for _ in range(3)] == [None] * 3
    assert child.starts == 1


@pytest.mark.parametrize("signal", ["SIGABRT", "SIGSEGV", "SIGFPE", "SIGXCPU"])
def test_a_bad_file_is_tried_once(signal: str, file: Path, folder: Path, tmp_path: Path) -> None:
    child = Child(tmp_path, WITHOUT_CORE + SAID.format("x.cpp:1: GGML_ASSERT(a > (b)) failed\n") + KILL.format(signal))
    told = {refused(file, folder, child) for _ in range(3)}
    assert told == {
        f"{file} is damaged: llama.cpp ends the process over it (GGML_ASSERT(a > (b)) failed); get it again"
    }
    assert child.starts == 1


@pytest.mark.parametrize(
    "script",
    [
        KILL.format("SIGKILL"),
        KILL.format("SIGTERM"),
        "raise SystemExit(1)",
        WITHOUT_CORE + SAID.format("terminate called: std::bad_alloc") + KILL.format("SIGABRT"),
        WITHOUT_CORE + SAID.format("GGML: insufficient memory\n") + KILL.format("SIGABRT"),
    ],
)
def test_what_tells_nothing_of_the_file_condemns_none(script: str, file: Path, folder: Path, tmp_path: Path) -> None:
    child = Child(tmp_path, script)
    assert [refused(file, folder, child) for _ in range(2)] == [None, None]
    assert child.starts == 2
    assert not folder.exists()


def test_a_child_that_takes_too_long_condemns_no_file(file: Path, folder: Path, tmp_path: Path) -> None:
    child = Child(tmp_path, "import time; time.sleep(600)")
    assert refused(file, folder, child, patience=0.5) is None
    assert not folder.exists()


def test_a_child_that_cannot_be_started_condemns_no_file(file: Path, folder: Path) -> None:
    first_load.check(file, "a build", folder, command=["/nonexistent/python"])
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_costs_another_try(file: Path, tmp_path: Path) -> None:
    for script, good in (("", True), (WITHOUT_CORE + KILL.format("SIGSEGV"), False)):
        child = Child(tmp_path, script)
        assert [refused(file, file / "verdicts", child) is None for _ in range(2)] == [good, good]
        assert child.starts == 2


@pytest.mark.parametrize("change", ["header", "end", "size", "build"])
def test_another_file_or_build_is_tried_again(change: str, file: Path, folder: Path, tmp_path: Path) -> None:
    child = Child(tmp_path, "")
    first_load.check(file, "a build", folder, command=child.command)
    raw = file.read_bytes()
    if change != "build":
        at = {"header": 1 << 17, "end": len(raw) - 1, "size": len(raw)}[change]
        file.write_bytes(raw[:at] + b"x" + raw[at + 1 :])
    first_load.check(file, "another" if change == "build" else "a build", folder, command=child.command)
    assert child.starts == 2


def test_what_is_no_model_is_left_to_llama(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "text").write_text("GGUX")
    child = Child(tmp_path, "raise AssertionError")
    for name in ("text", "none"):
        assert refused(tmp_path / name, folder, child) is None
    assert child.starts == 0


def test_the_real_child_on_good_files(folder: Path) -> None:
    first_load.check(DEMO, build(), folder)
    (verdict,) = folder.iterdir()
    assert verdict.read_text() == "good"
