"""Tests of `ngramspec memory`, and of the memory and the draft statistics of `complete`, `chat` and `bench`."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from ngramspec_cli import options
from ngramspec_cli.chat_session import Session
from ngramspec_cli.chat_view import MemoryTip
from ngramspec_cli.console import note
from support.cli_runner import DEMO, run
from support.model_files import write_vocabulary
from support.signals import by_signal, signal_at

from ngramspec import drafting
from ngramspec.data import NGramSpecError
from ngramspec.drafting.mixture import weight_files
from ngramspec.drafting.predictor import NGramDrafter
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.loading import load, settings
from ngramspec.memory.memory import Memory, memory_folder, memory_names, open_memory, settings_path, write_save_answers
from ngramspec.memory.store import Store
from ngramspec.models.find import ModelSource
from ngramspec.steps import Step


@pytest.fixture
def home(env: dict[str, str], tmp_path: Path) -> Iterator[dict[str, str]]:
    """Give each test a separate home folder, also for this process; measurements of the machine are shared."""
    mine = env | {"HOME": str(tmp_path / "home")}
    with mock.patch.dict(os.environ, mine, clear=True):
        assert tmp_path in memory_folder().parents
        yield mine


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "sub").mkdir(parents=True)
    (folder / ".gitignore").write_text("*.log\n")
    (folder / "a.py").write_text("def add(a, b):\n    return a + b\n" * 20)
    (folder / "sub" / "b.py").write_text("print('hello')\n" * 30)
    (folder / "noise.log").write_text("noise\n" * 30)
    (folder / "data.bin").write_bytes(bytes(100))
    return folder


Captured = pytest.CaptureFixture[str]


def stored(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "home").rglob("*.memory"))


def keep_answer(memory: Memory | None, vocabulary: Vocabulary) -> None:
    """Keep an answer, which ends with a token for its end."""
    end = next(token for token in range(vocabulary.n_vocab) if vocabulary.is_eog(token))
    steps = [Step((101, 102)), Step((103, end))]
    assert options.keep(memory, vocabulary, steps) == [101, 102, 103]


def test_memory_commands_add_list_remove_and_clear_files(home: dict[str, str], project: Path) -> None:
    added = run(home, "memory", "add", project)
    assert (added.code, added.raw) == (0, b"")
    assert re.search(r"3 files added; [\d,]+ tokens read \(skipped: 1 binary, 1 in .gitignore\)", added.err), added.err
    assert "demo model" in added.err
    listed = run(home, "memory", "list").ok()
    assert re.findall(r"^ +[\d,]+  (\S+)$", listed.out, re.MULTILINE) == [
        str(project / name) for name in (".gitignore", "a.py", "sub/b.py")
    ]
    assert "noise" not in listed.out
    assert "3 unchanged" in run(home, "memory", "add", project).err
    run(home, "memory", "remove", "sub", str(project / "sub")).assert_failed("does not contain sub")
    assert "removed 1 file" in run(home, "memory", "remove", project / "sub").err
    assert "deleted" in run(home, "memory", "clear").err
    empty = run(home, "memory", "list")
    assert "memories: none; saving answers: off" in empty.err
    assert "is empty" in empty.error_message
    usage = run(home, "memory")
    assert (usage.code, usage.raw) == (2, b"")
    assert all(name in usage.err for name in ("add", "list", "remove", "clear", "save-answers"))


def test_memory_add_skips_and_reports_secret_files(home: dict[str, str], project: Path) -> None:
    (project / ".env").write_text("KEY=hush\n")
    (project / "\x1b[31mred").write_text("text")
    (project / "link.py").symlink_to(project / "a.py")
    added = run(home, "memory", "add", project).ok().err
    assert "(skipped: 1 binary, 1 in .gitignore, 1 looks like a secret, 1 symbolic link)" in added
    assert "are added only if you name the file itself" in added
    listed = run(home, "memory", "list").ok()
    assert ".env" not in listed.out
    assert b"\x1b" not in listed.raw
    assert "1 file added" in run(home, "memory", "add", project / ".env").ok().err
    assert "/.env" in run(home, "memory", "list").ok().out
    assert "1 removed" in run(home, "memory", "add", project).ok().err


def test_memory_stores_files_by_name_and_tokenizer(home: dict[str, str], project: Path, tmp_path: Path) -> None:
    other = write_vocabulary(tmp_path / "other tokenizer.gguf", chatml=False)
    mine = tmp_path / "mine.gguf"
    mine.symlink_to(DEMO)
    for variables, chosen, name in (
        ({}, ["--memory", "work"], "small demo model"),
        ({}, ["--memory", "work", "--model", other], "other tokenizer.gguf"),
        ({"NGRAMSPEC_MODEL": str(mine)}, [], "for mine.gguf"),
    ):
        assert name in run(home | variables, "memory", "add", *chosen, project).ok().err
    assert len(stored(tmp_path)) == 3
    listed = run(home, "memory", "list", "--memory", "work")
    assert {"tokenizer of demo.gguf", "tokenizer of other tokenizer.gguf"} < set(listed.out.splitlines())
    assert "memories: default, work" in listed.err
    # This removes files of all tokenizers.
    assert "removed 2 files" in run(home, "memory", "remove", "--memory", "work", project / "a.py").err
    run(home, "memory", "clear", "--memory", "work").ok()
    assert len(stored(tmp_path)) == 1


def test_memory_add_names_the_converted_file_of_smollm2(
    home: dict[str, str], project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy.Q4_0.gguf"
    copy.symlink_to(DEMO)
    monkeypatch.setattr("ngramspec.models.find.smollm", lambda convert: ModelSource(convert(DEMO), "smollm2"))
    monkeypatch.setattr(load, "choose_smollm", lambda path, **_: copy)
    assert "for copy.Q4_0.gguf" in run(home, "memory", "add", "--model", "smollm2", project).ok().err


def test_memory_commands_report_damaged_file(home: dict[str, str], project: Path, tmp_path: Path) -> None:
    run(home, "memory", "add", project)
    (path,) = stored(tmp_path)
    path.write_bytes(path.read_bytes()[:-5000])
    for command in (["list"], ["add", str(project)], ["remove", str(project)]):
        done = run(home, "memory", *command)
        assert done.code == 1
        assert all(words in done.error_message for words in (str(path), "memory clear"))
    run(home, "memory", "clear").ok()
    run(home, "memory", "add", project).ok()


@by_signal
def test_memory_add_with_signal_leaves_memory_unchanged(
    home: dict[str, str], project: Path, tmp_path: Path, number: int, code: int
) -> None:
    with signal_at(number, Vocabulary, "tokenize", 2):
        done = run(home, "memory", "add", project)
    assert done.code == code, done.err
    assert done.err.splitlines()[-1] == "interrupted; the memory is unchanged"
    assert stored(tmp_path) == []


def test_memory_tip_after_repetitive_answer_appears_once(home: dict[str, str], capsys: Captured) -> None:
    earlier, other = list(range(100, 200)), list(range(300, 400))

    def shown(*answers: list[int], is_retry: bool = False) -> bool:
        tip = MemoryTip()
        for answer in answers[:-1]:
            tip.show_after(answer)
        assert "tip:" not in capsys.readouterr().err
        tip.show_after(answers[-1], is_retry=is_retry)
        return "of this answer repeats earlier ones; 'ngramspec memory save-answers on'" in capsys.readouterr().err

    assert not shown(earlier)
    assert not shown(earlier, other)
    assert not shown(earlier, earlier, is_retry=True)
    assert not shown(earlier, [*other[:60], *earlier[:19]]), "less than a quarter"
    assert not shown(earlier, [*earlier[:15], *other[:9], *earlier[20:35]]), "runs that are too short"
    for decided in (True, False):
        write_save_answers(decided)
        assert not shown(earlier, earlier)
    settings_path().unlink()
    assert shown(earlier, [*other[:60], *earlier[:20]])
    assert not shown(earlier, earlier), "it was shown before"


def test_chat_prints_memory_tip_below_answer_line(home: dict[str, str], session: Session, capsys: Captured) -> None:
    sampling = replace(session.options.sampling, temperature=0.0)
    session.options = replace(session.options, sampling=sampling, predict=40)
    session.interactive, session.memory = True, Memory()
    errors = []
    for _ in range(2):
        session.ask("Say it again.")
        errors.append(capsys.readouterr().err)
        session.reset()
    assert ["tip:" in error for error in errors] == [False, True]
    assert errors[1].index("tokens/s") < errors[1].index("tip:")


def test_memory_save_answers_is_off_by_default(home: dict[str, str], tmp_path: Path) -> None:
    assert "saving answers: off" in run(home, "memory", "list").err
    assert "memory save-answers off" in run(home, "memory", "save-answers", "on").err
    assert "saving answers: on" in run(home, "memory", "list").err
    (config,) = (tmp_path / "home").rglob("config.toml")
    assert config.read_text() == "save_answers = true\n"
    run(home, "memory", "save-answers", "off")
    assert "saving answers: off" in run(home, "memory", "list").err


Open, Fill = Callable[..., Memory], Callable[..., Store]


@pytest.fixture
def opened(home: dict[str, str], demo_vocabulary: Vocabulary) -> Open:
    key = demo_vocabulary.vocabulary_hash, demo_vocabulary.path
    return lambda name=None: open_memory(name, *key, on_note=note, keep=True)


@pytest.fixture
def fill(home: dict[str, str], demo_vocabulary: Vocabulary) -> Fill:
    def call(name: str = "default") -> Store:
        store = Store(memory_folder(name), demo_vocabulary.vocabulary_hash, "demo")
        store.append([5, 6, 7, 8])
        return store

    return call


def test_open_memory_without_name_uses_existing_default(
    opened: Open, fill: Fill, demo_vocabulary: Vocabulary, capsys: Captured
) -> None:
    memory = opened()
    assert memory.n_stored_tokens == 0
    for unsaved in (memory, None):
        keep_answer(unsaved, demo_vocabulary)
    assert memory_names() == []
    fill()
    fill("work").append([1, 1])
    assert opened().n_stored_tokens == 5
    assert opened("work").n_stored_tokens == 8
    assert capsys.readouterr() == ("", "")


def test_open_memory_without_files_for_tokenizer_raises_or_warns(
    opened: Open, demo_vocabulary: Vocabulary, capsys: Captured
) -> None:
    with pytest.raises(NGramSpecError, match="memory 'work' has no files for this model's tokenizer"):
        opened("work")
    Store(memory_folder(), bytes(16), "other").append([1, 2])
    assert opened().n_stored_tokens == 0
    assert "has no files for this model's tokenizer, only for other tokenizers" in capsys.readouterr().err
    # The renamed file is rejected too.
    (path,) = memory_folder().glob("*.memory")
    path.rename(path.with_name(f"{demo_vocabulary.vocabulary_hash.hex()}.memory"))
    assert opened().n_stored_tokens == 0
    assert "another tokenizer" in capsys.readouterr().err
    write_save_answers(True)
    assert opened("work").n_stored_tokens == 0


def test_open_memory_with_damaged_or_unwritable_file_only_warns(
    opened: Open, fill: Fill, demo_vocabulary: Vocabulary, capsys: Captured
) -> None:
    def told() -> str:
        return capsys.readouterr().err.strip()

    write_save_answers(True)
    path = fill("work").path
    path.write_bytes(b"nonsense" * 1000)
    memory = opened("work")
    assert memory.n_stored_tokens == 0
    assert str(path) in told()
    # Nothing is written to it either.
    keep_answer(memory, demo_vocabulary)
    assert path.read_bytes() == b"nonsense" * 1000
    memory = opened("new")
    memory_folder("new").write_text("no folder")
    keep_answer(memory, demo_vocabulary)
    assert "not saved" in told()


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Memory | None]:
    """Return the memories that drafters named "spy" received."""
    memories: list[Memory | None] = []

    class Spy(NGramDrafter):
        name = "spy"

        def __init__(self, memory: Memory | bool | None = None, state_path: Path | None = None) -> None:
            super().__init__()
            if not isinstance(memory, bool):  # Such a call only checks the options.
                memories.append(memory)

    monkeypatch.setitem(drafting.DRAFTERS, "spy", Spy)
    for module in (drafting, load, settings):
        monkeypatch.setattr(module, "REMEMBERING", frozenset({"spy"}))
    return memories


SPY = ["-t", "1", "-c", "256", "--drafter", "spy", "--exact", "off"]


def test_complete_and_chat_draft_from_memory_and_save_answers(
    home: dict[str, str], given: list[Memory | None], fill: Fill, demo_vocabulary: Vocabulary, tmp_path: Path
) -> None:
    question = tmp_path / "question.txt"
    question.write_text("def add(a, b):\n")
    for command in ("complete", "chat"):
        write_save_answers(False)
        store = fill()
        line = [command, *SPY, "-n", "6", "-s", "1", "-f", str(question)]
        run(home, *line).ok()
        assert given[-1]
        assert given[-1].n_stored_tokens == 5
        assert len(store.documents()) == 1
        assert "in 1 saved answer" in run(home, "memory", "list").out
        write_save_answers(True)
        done = run(home, *line)
        _, kept = store.documents()
        assert b"".join(map(demo_vocabulary.piece, kept.tokens.tolist())).decode().strip() == done.out.strip()
        run(home, *line, "--no-memory").ok()
        assert given[-1] is None
        run(home, *line, "--memory", "default").ok()
        assert len(store.documents()) == 3
        store.clear()


TEXT = b"def f(x):\n    return x + 1\n\n\ndef g(x):\n    return x + 1\n\n\ndef h(x):\n"
SHORT = ("-t", "1", "-c", "512", "--exact", "off", "--temp", "0", "--policy", "fixed")
COMPLETE = ("complete", DEMO, "-n", "60", *SHORT)


@pytest.fixture
def judges(home: dict[str, str]) -> Callable[[], list[Path]]:
    """Delete the files of draft statistics; return a function that lists them."""
    folder = Path(home["XDG_CACHE_HOME"], "ngramspec", "judge")
    shutil.rmtree(folder, ignore_errors=True)
    return lambda: sorted(folder.glob("*"))


def test_draft_statistics_of_complete_and_chat_share_one_file(
    home: dict[str, str], judges: Callable[[], list[Path]]
) -> None:
    first = run(home, *COMPLETE, stdin=TEXT).ok()
    (path,) = judges()
    early = path.read_bytes()
    assert (weight_files.read(path)["slope"] != 1).sum() > 10
    again = run(home, *COMPLETE, stdin=TEXT)
    assert again.out == first.out
    middle = path.read_bytes()
    assert middle != early
    run(home, "chat", DEMO, "-n", "30", *SHORT, stdin=b"and " * 9).ok()
    assert judges() == [path]
    assert path.read_bytes() != middle
    assert "deleted the draft statistics" in run(home, "memory", "clear").err
    assert judges() == []


def test_draft_statistics_when_disabled_stay_unread_and_unchanged(
    home: dict[str, str],
    judges: Callable[[], list[Path]],
    demo_vocabulary: Vocabulary,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes(TEXT)
    path = Path(home["XDG_CACHE_HOME"], "ngramspec", "judge", f"{demo_vocabulary.vocabulary_hash.hex()}.npz")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"mine")
    seen = list[Path]()
    read = weight_files.read
    monkeypatch.setattr(weight_files, "read", lambda file: seen.append(file) or read(file))
    for arguments in (
        ("complete", DEMO, "-n", "8", *SHORT, "--no-memory"),
        ("complete", DEMO, "-n", "8", *SHORT, "--no-draft"),
        ("complete", DEMO, "-n", "8", *SHORT, "--drafter", "ngram"),
        ("chat", DEMO, "-n", "8", *SHORT, "--no-memory"),
        ("bench", DEMO, "-n", "8", *SHORT, "--repeat", "1", "--prompts", prompt),
    ):
        run(home, *arguments, stdin=TEXT).ok()
        assert path not in seen
        assert judges() == [path]
        assert path.read_bytes() == b"mine"
    run(home, *COMPLETE, stdin=TEXT).ok()
    assert path in seen
    assert path.read_bytes() != b"mine"
