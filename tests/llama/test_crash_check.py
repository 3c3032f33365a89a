"""Tests of damaged and hostile model files: they give an error message and exit code 1, or work, but never a signal."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import gguf
import pytest
from llama_cpp._ggml import libggml
from support.cli_runner import DEMO, run, run_process
from support.model_files import write_changed_demo, write_damaged_demo

from ngramspec.data import ModelError
from ngramspec.llama import crash_check
from ngramspec.llama.crash_check import ChildEnd, amx_works
from ngramspec.llama.devices import build
from ngramspec.llama.vocabulary import Vocabulary

pytestmark = pytest.mark.usefixtures("_trying")

HANGS: ChildEnd = None, ""
SHORT = ("-t", "1", "-c", "256", "-n", "2")


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Replace the function that runs a child process."""
    run = Mock(return_value=(0, ""))
    monkeypatch.setattr(crash_check, "run", run)
    return run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(DEMO.read_bytes()[: 1 << 18])
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(crash_check, "FOLDERS", SimpleNamespace(user_cache_path=tmp_path))
    return tmp_path / "trial"


def refused(path: Path, build: str = "a build") -> str | None:
    """Return the error message for a file, if it is rejected."""
    try:
        crash_check.check(path, build)
    except ModelError as error:
        return str(error)
    return None


def test_complete_with_file_that_crashes_llama_cpp_reports_damage(env: dict[str, str], tmp_path: Path) -> None:
    """A vocabulary alone is tried too, and shares the result of the file. See also `models/test_check`."""
    tokens = gguf.GGUFReader(DEMO).fields["tokenizer.ggml.tokens"].contents()
    twin = next(token.encode() for token in tokens if len(token.encode()) == len(tokens[-1].encode()))
    path = write_damaged_demo(tmp_path / "twice.gguf", "tokenizer.ggml.tokens", list(twin))
    done = run(env, "complete", path, *SHORT, stdin=b"x")
    assert (done.code, done.raw) == (1, b"")
    assert f"{path} is damaged: " in done.error_message
    with pytest.raises(ModelError, match=r"crashes when loading it \(GGML_ASSERT\(.*token.*\) failed\); download it"):
        Vocabulary(path)


@pytest.mark.exhaustive
def test_complete_with_damaged_headers_exits_without_signal(env: dict[str, str], tmp_path: Path) -> None:
    """Each file gives some text, or an error message and exit code 1."""
    keys = [key for key in gguf.GGUFReader(DEMO).fields if not key.startswith("GGUF.")]
    for key, value in random.Random(9).sample([*product(keys, (0, 1, 255))], 12):
        path = write_damaged_demo(tmp_path / "hostile.gguf", key, value)
        done = run_process(env, "complete", path, *SHORT, "--no-draft", stdin=b"def f")
        assert done.code in (0, 1), (key, value, done)
        if done.code:
            assert done.raw == b"", (key, value)
            assert done.error_message, (key, value)


SAID = "x.cpp:1: GGML_ASSERT(a > (b)) failed\n"
NO_MEMORY = ("terminate called: std::bad_alloc", "GGML: insufficient memory\n")


@pytest.fixture
def library(tmp_path: Path, folder: Path) -> Path:
    lib = tmp_path / "lib"
    lib.mkdir()
    for name in ("libggml.so", "libggml-cpu.so", "libllama.so"):
        (lib / name).write_bytes(b"code")
    return lib / "libggml.so"


@pytest.mark.parametrize(
    ("kind", "ended", "answer", "is_kept"),
    [
        ("trial", (0, SAID), "", True),
        ("trial", (-11, ""), "signal 11", True),
        *(("trial", (code, SAID), "GGML_ASSERT(a > (b)) failed", True) for code in (-6, -8, -24)),
        *(("trial", (-6, said), "", False) for said in NO_MEMORY),
        *(("trial", ended, "", False) for ended in ((-15, ""), (1, ""), HANGS, None)),
        ("amx", (0, ""), True, True),
        *(("amx", ended, False, True) for ended in ((3, ""), (-11, ""), HANGS)),
        *(("amx", ended, False, False) for ended in ((1, "Traceback"), (-9, ""), None)),
    ],
)
def test_verdict_is_stored_unless_the_child_was_inconclusive(
    kind: str, ended: Any, answer: Any, is_kept: bool, child: Mock, file: Path, library: Path, folder: Path
) -> None:
    child.return_value = ended
    if kind == "amx":
        assert [amx_works(library) for _ in range(2)] == [answer] * 2
    else:
        message = f"{file} is damaged: llama.cpp crashes when loading it ({answer}); download it again"
        assert [refused(file) for _ in range(2)] == [message if answer else None] * 2
    assert child.call_count == (1 if is_kept else 2)
    assert folder.with_name(kind).exists() == is_kept


def test_crash_check_with_unwritable_folder_runs_child_again(child: Mock, file: Path, folder: Path) -> None:
    folder.touch()
    for starts, code in ((2, 0), (4, -11)):
        child.return_value = (code, "")
        assert [refused(file) is None for _ in range(2)] == [code == 0] * 2
        assert child.call_count == starts


def test_crash_check_with_damaged_verdict_runs_child_again(child: Mock, file: Path, folder: Path) -> None:
    assert refused(file) is None
    (verdict,) = folder.iterdir()
    raw = verdict.read_bytes()
    for starts, at in enumerate(range(len(raw)), 2):
        verdict.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        assert refused(file) is None
        assert (child.call_count, verdict.read_bytes()) == (starts, raw)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokenizer.ggml.pre", "whitespace", "llama.cpp crashes when loading it (GGML_ASSERT("),
        pytest.param("tokenizer.ggml.model", "rwkv", "crashes when loading it", marks=pytest.mark.exhaustive),
    ],
)
def test_complete_rejects_vocabulary_that_cannot_tokenize(
    env: dict[str, str], tmp_path: Path, key: str, value: str, words: str
) -> None:
    path = write_changed_demo(tmp_path / "changed.gguf", {key: value})
    run(env, "complete", path, *SHORT, stdin=b"def f").assert_failed(words)


@pytest.mark.usefixtures("folder")
def test_complete_with_text_without_tokens_prints_one_line_error(
    env: dict[str, str], tmp_path: Path, child: Mock
) -> None:
    """The child process tries more texts, and never ends with this vocabulary."""
    child.return_value = None
    path = write_changed_demo(tmp_path / "changed.gguf", {"tokenizer.ggml.model": "rwkv"})
    done = run(env, "complete", path, *SHORT, stdin=b"def f")
    done.assert_failed("the model's vocabulary has no tokens for this text")


def test_crash_check_with_changed_file_or_build_runs_child_again(child: Mock, file: Path, folder: Path) -> None:
    raw = file.read_bytes()
    assert refused(file) is None
    for starts, at in enumerate((1 << 17, len(raw) - 1, len(raw)), 2):  # header, end, one more byte
        file.write_bytes(raw[:at] + b"x" + raw[at + 1 :])
        assert refused(file) is None
        assert child.call_count == starts
    assert refused(file, "another") is None
    assert child.call_count == 5


def test_amx_works_after_changed_build_checks_again(child: Mock, library: Path, tmp_path: Path) -> None:
    kernels = library.with_name("libggml-cpu.so")

    def resize() -> None:
        stat = kernels.stat()
        kernels.write_bytes(b"longer code")
        os.utime(kernels, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    changes: list[Callable[[], object]] = [
        resize,
        lambda: os.utime(kernels, ns=(0, 1_000_000_007)),
        library.with_name("libggml-cpu-zen4.so").touch,
    ]
    assert amx_works(library)
    for starts, change in enumerate(changes, 2):
        change()
        assert [amx_works(library) for _ in range(2)] == [True, True]
        assert child.call_count == starts
    # Other files have no influence, but the folder has.
    library.with_name("libllama.so").write_bytes(b"longer code")
    library.with_name("libggml-broken-link.so").symlink_to("nowhere")
    assert amx_works(library)
    assert child.call_count == len(changes) + 1
    assert amx_works(library.parent.rename(tmp_path / "moved") / library.name)
    assert child.call_count == len(changes) + 2


def test_crash_check_skips_files_that_are_not_models(child: Mock, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "text").write_text("GGUX")
    for name in ("text", "none"):
        assert refused(tmp_path / name) is None
    assert child.call_count == 0


def test_crash_check_child_with_good_file_stores_good_verdict(folder: Path) -> None:
    crash_check.check(DEMO, build())
    (verdict,) = folder.iterdir()
    assert verdict.read_text().endswith(" good")


@pytest.mark.exhaustive
def test_crash_check_child_with_amx_kernels_stores_verdict(folder: Path) -> None:
    assert amx_works(Path(libggml._name)) or "AMX_INT8 = 1" in build()
    assert list(folder.with_name("amx").iterdir())


WITHOUT_CORE = "from ngramspec.llama import crash_check; crash_check.confine(); "


def run_script(script: str, patience: float = 60) -> ChildEnd:
    ended = crash_check.run([sys.executable, "-P", "-c", script], patience)
    assert ended is not None
    return ended


@pytest.mark.parametrize(
    ("script", "code", "died"),
    [
        ("import sys; sys.stderr.write('é'); raise SystemExit(3)", 3, False),
        (WITHOUT_CORE + "import os; os.abort()", -6, True),
        ("import os; os.kill(os.getpid(), 9)", -9, False),
    ],
)
def test_crash_check_run_returns_exit_code_and_stderr(script: str, code: int, died: bool) -> None:
    ended, said = run_script(script)
    assert (ended, crash_check.died(ended)) == (code, died)
    assert ("é" in said) == (code == 3)


def test_crash_check_run_reports_timeout_and_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_script("import time; time.sleep(600)", 0.2) == HANGS
    assert crash_check.run(["/nonexistent/python"], 60) is None
    assert crash_check.run([""], 60) is None
    # A frozen application would start a copy of itself.
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert crash_check.run([sys.executable, "-c", ""], 60) is None


def test_crash_check_child_imports_from_path_of_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("there", "here"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"only_{name}.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "there"))
    monkeypatch.chdir(tmp_path / "here")
    script = "import only_there\ntry:\n import only_here\nexcept ImportError:\n pass\nelse:\n raise SystemExit(3)"
    assert run_script(script)[0] == 0
