"""Damaged and hostile model files: one line and exit code 1, or a working model; never a signal."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support import hostile_gguf
from support.cli_runner import DEMO, run, run_process
from support.fake_child import HANGS, FakeChild

from ngramspec.child import Ended
from ngramspec.errors import ModelError
from ngramspec.llama import first_load
from ngramspec.llama.devices import build
from ngramspec.llama.vocabulary import Vocabulary

# What ended the process in issue 9's trials, by the words of its mutation.
FATAL = [
    "llama.block_count 0",
    "llama.block_count 1000",
    "llama.attention.layer_norm_rms_epsilon -1.0",
    "llama.attention.layer_norm_rms_epsilon nan",
    "tokenizer.ggml.tokens 4096 of ['<|endoftext|>', '<|endoftext|>'",
]


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


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> FakeChild:
    return FakeChild(monkeypatch)


def refused(path: Path, folder: Path, build: str = "a build") -> str | None:
    """What is said of a file, if it is refused."""
    try:
        first_load.check(path, build, folder)
    except ModelError as error:
        return str(error)
    return None


def test_the_writer_writes_what_was_read() -> None:
    assert hostile_gguf.read(DEMO).bytes() == DEMO.read_bytes()


@pytest.mark.parametrize(
    "fatal", [FATAL[0], FATAL[-1], *(pytest.param(one, marks=pytest.mark.exhaustive) for one in FATAL[1:-1])]
)
def test_what_ended_the_process_is_an_error(
    fatal: str, mutated: dict[str, hostile_gguf.Header], env: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(next(header for name, header in mutated.items() if name.startswith(fatal)).bytes())
    done = run(env, "complete", path, "-t", "1", "-c", "256", "-n", "2", stdin=b"x")
    assert (done.code, done.raw) == (1, b"")
    assert f"{path} is damaged: " in done.complaint
    if fatal == FATAL[-1]:  # a vocabulary alone is tried too, and has the verdict of the file
        with pytest.raises(ModelError, match=r"ends the process over it \(GGML_ASSERT\(.*token.*\) failed\); get it"):
            Vocabulary(path)


@pytest.mark.exhaustive
def test_a_sample_of_mutated_headers(
    mutated: dict[str, hostile_gguf.Header], env: dict[str, str], tmp_path: Path
) -> None:
    """Each gives some text, or one line and exit code 1."""
    path = tmp_path / "hostile.gguf"
    for name in random.Random(9).sample(sorted(mutated), 12):
        path.write_bytes(mutated[name].bytes())
        done = run_process(env, "complete", path, "-t", "1", "-c", "256", "-n", "2", "--no-draft", stdin=b"def f")
        assert done.code in (0, 1), (name, done)
        if done.code:
            assert done.raw == b"", name
            assert done.complaint, name


# ---------------------------------------------------------------------- the verdict

SAID = "x.cpp:1: GGML_ASSERT(a > (b)) failed\n"
NO_MEMORY = ("terminate called: std::bad_alloc", "GGML: insufficient memory\n")


@pytest.mark.parametrize("code", [0, -6, -11, -8, -24])
def test_a_file_is_tried_once(code: int, child: FakeChild, file: Path, folder: Path) -> None:
    child.ended = Ended(code, SAID)
    told = f"{file} is damaged: llama.cpp ends the process over it (GGML_ASSERT(a > (b)) failed); get it again"
    assert [refused(file, folder) for _ in range(2)] == [told if code else None] * 2
    assert child.starts == 1


@pytest.mark.parametrize("ended", [Ended(-15, ""), Ended(1, ""), *(Ended(-6, said) for said in NO_MEMORY), HANGS, None])
def test_what_tells_nothing_of_the_file_condemns_none(ended: Any, child: FakeChild, file: Path, folder: Path) -> None:
    child.ended = ended
    assert [refused(file, folder) for _ in range(2)] == [None, None]
    assert child.starts == 2
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_costs_another_try(child: FakeChild, file: Path) -> None:
    for starts, code in ((2, 0), (4, -11)):
        child.ended = Ended(code, "")
        assert [refused(file, file / "verdicts") is None for _ in range(2)] == [code == 0] * 2
        assert child.starts == starts


def test_another_file_or_build_is_tried_again(child: FakeChild, file: Path, folder: Path) -> None:
    raw = file.read_bytes()
    assert refused(file, folder) is None
    for starts, at in enumerate((1 << 17, len(raw) - 1, len(raw)), 2):  # the header, the end, and a byte more
        file.write_bytes(raw[:at] + b"x" + raw[at + 1 :])
        assert refused(file, folder) is None
        assert child.starts == starts
    assert refused(file, folder, "another") is None
    assert child.starts == 5


def test_what_is_no_model_is_left_to_llama(child: FakeChild, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "text").write_text("GGUX")
    for name in ("text", "none"):
        assert refused(tmp_path / name, folder) is None
    assert child.starts == 0


def test_the_real_child_on_good_files(folder: Path) -> None:
    first_load.check(DEMO, build(), folder)
    (verdict,) = folder.iterdir()
    assert verdict.read_text() == "good"
