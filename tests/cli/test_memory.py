"""`ngramspec memory`, and the memory behind `complete`, `chat` and `bench`."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from ngramspec_cli import app, chat, memory_option, options
from support.cli_runner import COMMAND, COUNTED, DEMO, NO_SMOLLM, PATIENCE, Done, environment, run, shell
from support.vocabulary_files import write_vocabulary

from ngramspec import drafting
from ngramspec.drafting.ngram import NGramDrafter
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.memory import Memory, Store
from ngramspec.memory.names import memory_folder, memory_names
from ngramspec.memory.remember import settings_path, write_remember


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """A user of its own for each test."""
    return environment(tmp_path / "home")


Here = Callable[..., Done]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Here:
    """Run a command line in this process, to save the start of another."""
    for name in ("raise_on_sigterm", "prepare_streams"):
        monkeypatch.setattr(app, name, lambda: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def call(*arguments: str) -> Done:
        code = app.run([*arguments])
        out, err = capfdbinary.readouterr()
        return Done(code, out, err.decode())

    return call


@pytest.fixture
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This process as a user of its own."""
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(NO_SMOLLM)
    assert tmp_path in memory_folder().parents
    assert tmp_path in settings_path().parents
    return tmp_path


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


ANSWER = [101, 102, 103]


def stored(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "home").rglob("*.memory"))


# ---------------------------------------------------------------------- ngramspec memory


def test_add_list_remove_clear(home: dict[str, str], project: Path) -> None:
    added = run(home, "memory", "add", project)
    assert (added.code, added.raw) == (0, b"")
    assert re.search(r"3 files added; [\d,]+ tokens read \(skipped: 1 binary\)", added.err), added.err
    assert "demo model" in added.err
    listed = run(home, "memory", "list")
    assert listed.code == 0
    assert re.findall(r"^ +[\d,]+  (\S+)$", listed.out, re.MULTILINE) == [
        str(project / name) for name in (".gitignore", "a.py", "sub/b.py")
    ]
    assert "noise" not in listed.out
    assert "3 unchanged" in run(home, "memory", "add", project).err
    removed = run(home, "memory", "remove", "sub", str(project / "sub"))
    assert removed.code == 1
    assert "has no file sub" in removed.complaint
    assert "1 file removed" in run(home, "memory", "remove", project / "sub").err
    stats = run(home, "memory", "stats")
    assert "2 files" in stats.out
    assert "remembering answers: off" in stats.out
    assert "deleted" in run(home, "memory", "clear").err
    assert "memories: none" in run(home, "memory", "stats").out
    assert "is empty" in run(home, "memory", "list").complaint


def test_named_memories_and_tokenizers(home: dict[str, str], project: Path, tmp_path: Path) -> None:
    other = write_vocabulary(tmp_path / "other tokenizer.gguf", chatml=False)
    for chosen in (["--memory", "work"], ["--memory", "work", "--model", other], ["--model", DEMO]):
        done = run(home, "memory", "add", *chosen, project)
        assert done.code == 0, done.err
    assert len(stored(tmp_path)) == 3
    listed = run(home, "memory", "list", "--memory", "work")
    assert {"tokenizer of demo.gguf", "tokenizer of other tokenizer.gguf"} < set(listed.out.splitlines())
    assert "memories: default, work" in run(home, "memory", "stats").out
    # From all tokenizers.
    assert "2 files removed" in run(home, "memory", "remove", "--memory", "work", project / "a.py").err
    assert run(home, "memory", "clear", "--memory", "work").code == 0
    assert len(stored(tmp_path)) == 1


def test_the_model_from_the_environment(home: dict[str, str], project: Path, tmp_path: Path) -> None:
    model = tmp_path / "mine.gguf"
    model.write_bytes(DEMO.read_bytes())
    done = run(home | {"NGRAMSPEC_MODEL": str(model)}, "memory", "add", project)
    assert done.code == 0
    assert "for mine.gguf" in done.err
    assert "demo" not in done.err


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["add", "gone"], "gone: there is no such file", 1),
        (["add", ""], "is empty", 2),
        (["add"], "PATH", 2),
        (["add", "--memory", "../x", "."], "'../x' cannot be the name", 1),
        (["add", "--memory", "", "."], "'' cannot be the name", 1),
        (["add", "--model", "gone.gguf", "."], "gone.gguf", 1),
        (["list", "--memory", "nothing"], "'nothing' is empty", 1),
        (["remove"], "--answers", 2),
        (["remove", ""], "is empty", 2),
        (["remove", "x"], "is empty", 1),
        (["remember", "maybe"], "maybe", 2),
        (["forget"], "forget", 2),
    ],
)
def test_mistakes(own_home: Path, here: Here, arguments: list[str], words: str, code: int) -> None:
    done = here("memory", *arguments)
    assert (done.code, done.raw) == (code, b""), done.err
    assert words in done.complaint


def test_no_command_is_a_usage_error(env: dict[str, str]) -> None:
    done = run(env, "memory")
    assert (done.code, done.raw) == (2, b"")
    assert all(name in done.err for name in ("add", "list", "remove", "clear", "stats", "remember"))


def test_a_folder_without_readable_files(home: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "binary"
    folder.mkdir()
    (folder / "x.bin").write_bytes(bytes(10))
    (folder / "y.txt").write_bytes("Grüße".encode("latin-1"))
    done = run(home, "memory", "add", folder)
    assert done.code == 1
    assert "no text to add (skipped: 1 binary, 1 not UTF-8)" in done.complaint
    assert stored(tmp_path) == []


def test_a_name_that_commands_a_terminal(home: dict[str, str], tmp_path: Path) -> None:
    try:
        (tmp_path / "\x1b[31mred").write_text("text")
    except OSError:
        pytest.skip("no such names here")
    assert run(home, "memory", "add", tmp_path / "\x1b[31mred").code == 0
    assert b"\x1b" not in run(home, "memory", "list").raw


def test_a_damaged_file(home: dict[str, str], project: Path, tmp_path: Path) -> None:
    run(home, "memory", "add", project)
    (path,) = stored(tmp_path)
    path.write_bytes(path.read_bytes()[:-5000])
    for command in (["list"], ["stats"], ["add", str(project)], ["remove", str(project)]):
        done = run(home, "memory", *command)
        assert done.code == 1
        assert str(path) in done.complaint
        assert "memory clear" in done.complaint
    assert run(home, "memory", "clear").code == 0
    assert run(home, "memory", "add", project).code == 0


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX limits")
def test_no_space_while_indexing(home: dict[str, str], project: Path, tmp_path: Path) -> None:
    run(home, "memory", "add", project / "a.py")
    (path,) = stored(tmp_path)
    before = path.read_bytes()
    done = shell(home, 'ulimit -f 8; "$@"', "memory", "add", project)
    assert done.code == 1
    assert "the memory is as it was" in done.complaint
    assert [p.read_bytes() for p in stored(tmp_path)] == [before]
    assert len(list(path.parent.iterdir())) == 2  # and the lock


_INTERRUPTED = f"""{COUNTED}
from ngramspec.memory import store
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec_cli.app import main

if where == "tokenizing":
    Vocabulary.tokenize = counted(Vocabulary.tokenize, 2)
else:
    store.write_snapshot = counted(store.write_snapshot, 1)
main()
"""


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
@pytest.mark.parametrize("where", ["tokenizing", "writing"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_indexing(
    home: dict[str, str], project: Path, tmp_path: Path, where: str, number: int, code: int
) -> None:
    run(home, "memory", "add", project / "a.py")
    (path,) = stored(tmp_path)
    before = path.read_bytes()
    command = [sys.executable, "-c", _INTERRUPTED, where, str(int(number))]
    done = run(home, "memory", "add", project, command=command)
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    assert done.err.splitlines()[-1] == "interrupted; the memory is as it was"
    assert [p.read_bytes() for p in stored(tmp_path)] == [before]
    assert run(home, "memory", "add", project).code == 0


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_watching_until_ctrl_c(home: dict[str, str], project: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "memory", "watch", str(project)], stderr=subprocess.PIPE, env=home, text=True, encoding="utf-8"
    )
    try:
        assert process.stderr is not None
        told = iter(process.stderr.readline, "")
        assert any("3 files added" in line for line in told)
        assert next(told) == f"watching {project}; Ctrl-C ends it\n"
        (project.parent / "c.py").write_text("print('new')\n")
        (project.parent / "c.py").rename(project / "c.py")  # whole at once
        assert re.search(r"^\d\d:\d\d:\d\d 1 file added; \d+ tokens read$", next(told))
        (project / "a.py").unlink()
        assert "0 files added, 1 gone" in next(told)
        process.send_signal(signal.SIGINT)
        # The line before may come again, if the signal fell into its printing.
        assert list(told)[-1] == "watching ended after 2 updates; the memory keeps what it has\n"
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
    listed = run(home, "memory", "list").out
    assert "c.py" in listed
    assert "a.py" not in listed


def test_watching_needs_a_folder_and_a_package(
    own_home: Path, here: Here, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = here("memory", "watch", str(project / "a.py"))
    assert done.code == 2
    assert done.complaint.endswith("a.py is not a folder; watch the folder that it is in")
    done = here("memory", "watch", str(project / "nowhere"))
    assert done.code == 1
    assert "there is no such file or folder" in done.complaint
    monkeypatch.delitem(sys.modules, "ngramspec.memory.watch", raising=False)
    monkeypatch.setitem(sys.modules, "watchfiles", None)
    done = here("memory", "watch", str(project))
    assert done.code == 1
    assert "pip install 'ngramspec[watch]'" in done.complaint
    assert memory_names() == []


def test_remembering_is_suggested_once(own_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory_option.suggest_remembering()
    (line,) = capsys.readouterr().err.splitlines()
    assert "memory remember on" in line
    memory_option.suggest_remembering()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("decided", [True, False])
def test_remembering_is_not_suggested_to_one_who_decided(
    own_home: Path, capsys: pytest.CaptureFixture[str], decided: bool
) -> None:
    write_remember(decided)
    memory_option.suggest_remembering()
    assert capsys.readouterr().err == ""


def test_remembering_is_suggested_by_chat_at_a_terminal(
    own_home: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "Terminal", lambda *_: [])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    line = ["chat", "-t", "1", "-c", "256"]
    assert "remember on" not in here(*line, "--no-memory").err
    assert "remember on" in here(*line).err
    assert "remember on" not in here(*line).err


def test_remembering_is_off_until_it_is_switched_on(home: dict[str, str], tmp_path: Path) -> None:
    assert "off" in run(home, "memory", "stats").out
    assert "memory remember off" in run(home, "memory", "remember", "on").err
    stats = run(home, "memory", "stats").out
    assert "remembering answers: on" in stats
    (config,) = (tmp_path / "home").rglob("config.toml")
    assert str(config) in stats
    assert config.read_text() == "remember = true\n"
    run(home, "memory", "remember", "off")
    assert "remembering answers: off" in run(home, "memory", "stats").out
    config.write_text("remember = 3\n")
    assert str(config) in run(home, "memory", "stats").complaint


# ---------------------------------------------------------------------- what commands draft from


@pytest.fixture(scope="module")
def target() -> Vocabulary:
    return Vocabulary(DEMO)


Open = Callable[..., Memory]


@pytest.fixture
def opened(own_home: Path, target: Vocabulary) -> Open:
    def call(name: str | None = None, *, keep: bool = True) -> Memory:
        return memory_option.open_memory(name, target, keep=keep)

    return call


def fill(target: Vocabulary, name: str = "default") -> Store:
    store = Store(memory_folder(name), target.vocabulary_hash, target.n_vocab, "demo")
    store.append([5, 6, 7, 8])
    return store


def test_without_a_memory_nothing_is_said_and_nothing_made(
    opened: Open, own_home: Path, target: Vocabulary, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = opened()
    assert memory.stored == 0
    memory_option.keep(memory, ANSWER)
    memory_option.keep(None, ANSWER)
    assert memory_names() == []
    assert capsys.readouterr() == ("", "")


def test_the_default_memory_is_used_where_it_exists(opened: Open, target: Vocabulary) -> None:
    fill(target)
    fill(target, "work").append([1, 1])
    assert opened().stored == 5
    assert opened("work").stored == 8


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("switched", [True, False])
def test_answers_are_kept_only_where_the_user_said_so(
    opened: Open, target: Vocabulary, keep: bool, switched: bool
) -> None:
    if switched:
        write_remember(True)
    memory_option.keep(opened(keep=keep), ANSWER)
    again = opened(keep=keep)
    assert again.stored == (4 if keep and switched else 0)
    if again.stored:
        assert list(again.indexes[0].tokens[:4]) == [*ANSWER, -1]


def test_a_memory_that_is_missing(opened: Open, target: Vocabulary, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as error:
        opened("work")
    assert error.value.exit_code == 1
    assert "memory 'work' holds nothing for this model's tokenizer" in capsys.readouterr().err
    write_remember(True)
    assert opened("work").stored == 0


def test_another_tokenizers_memory_is_no_use(
    opened: Open, target: Vocabulary, capsys: pytest.CaptureFixture[str]
) -> None:
    Store(memory_folder(), bytes(16), 10, "other").append([1, 2])
    assert opened().stored == 0
    err = capsys.readouterr().err
    assert "holds nothing for this model's tokenizer, only for others'" in err
    # Renamed, it is refused too.
    (path,) = memory_folder().glob("*.memory")
    path.rename(path.with_name(f"{target.vocabulary_hash.hex()}-000001.memory"))
    assert opened().stored == 0
    assert "another tokenizer" in capsys.readouterr().err


def test_a_damaged_memory_ends_nothing(opened: Open, target: Vocabulary, capsys: pytest.CaptureFixture[str]) -> None:
    write_remember(True)
    path = fill(target, "work").path()
    assert path
    path.write_bytes(b"nonsense" * 1000)
    memory = opened("work")
    assert memory.stored == 0
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert str(path) in err
    # Nor is anything written to it.
    memory_option.keep(memory, ANSWER)
    assert path.read_bytes() == b"nonsense" * 1000


def test_an_answer_that_cannot_be_kept(opened: Open, target: Vocabulary, capsys: pytest.CaptureFixture[str]) -> None:
    write_remember(True)
    memory = opened()
    memory_folder().parent.parent.mkdir(parents=True)
    memory_folder().parent.write_text("no folder")
    memory_option.keep(memory, ANSWER)
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "not kept" in err


def test_broken_settings_are_an_error(env: dict[str, str], opened: Open) -> None:
    settings_path().parent.mkdir(parents=True)
    settings_path().write_text("remember = maybe")
    with pytest.raises(Exception, match="no TOML"):
        opened()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--memory", "x", "--no-memory"], "exclude each other"),
        (["--memory", "x", "--no-draft"], "leave out --no-draft"),
        (["--memory", "x", "--drafter", "ngram"], "'ngram' looks at no memory"),
        (["--memory", "a/b"], "'a/b' cannot be the name of a memory"),
    ],
)
@pytest.mark.parametrize("command", ["complete", "chat", "bench"])
def test_options_that_do_not_go_together(
    own_home: Path, here: Here, command: str, arguments: list[str], words: str
) -> None:
    done = here(command, *arguments)
    assert done.code in (1, 2)
    assert done.raw == b""
    assert words in done.complaint


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Memory | None]:
    """The memories that drafters named "spy" were made with."""
    memories: list[Memory | None] = []

    class Spy(NGramDrafter):
        name = "spy"

        def __init__(self, memory: Memory | None = None) -> None:
            super().__init__()
            memories.append(memory)

    monkeypatch.setitem(drafting.DRAFTERS, "spy", Spy)
    for module in (drafting, options):
        monkeypatch.setattr(module, "REMEMBERING", frozenset({"spy"}))
    return memories


SPY = ["-t", "1", "-c", "1024", "--drafter", "spy"]


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_an_answer_is_drafted_from_memory_and_remembered(
    own_home: Path, here: Here, given: list[Memory | None], target: Vocabulary, tmp_path: Path, command: str
) -> None:
    store = fill(target)
    question = tmp_path / "question.txt"
    question.write_text("def add(a, b):\n")
    line = [command, *SPY, "-n", "6", "-s", "1", "-f", str(question)]
    assert here(*line).code == 0
    assert given[-1]
    assert given[-1].stored == 5
    assert len(store.read().texts()) == 1
    write_remember(True)
    done = here(*line)
    kept = store.read().texts()[1:]
    assert len(kept) == 1
    assert b"".join(map(target.piece, kept[0].tokens.tolist())).decode().strip() == done.out.strip()
    assert here(*line, "--no-memory").code == 0
    assert given[-1] is None
    assert here(*line, "--memory", "default").code == 0
    assert len(store.read().texts()) == 3


def test_answers_are_heard_once_they_leave_the_context(
    own_home: Path, here: Here, given: list[Memory | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello.\n/reset\nHello again.\n")))
    done = here("chat", *SPY, "-n", "4", "--temp", "0")
    assert done.code == 0, done.err
    memory = given[-1]
    assert memory
    # The first answer and a seam; the second is still in the context.
    assert memory.stored == 0
    assert 1 < memory.indexes[-1].size <= 5
    assert memory_names() == []


def test_a_benchmark_drafts_from_memory_and_leaves_it_alone(
    own_home: Path, here: Here, given: list[Memory | None], target: Vocabulary, tmp_path: Path
) -> None:
    write_remember(True)
    store = fill(target, "work")
    line = ["bench", *SPY, "--limit", "1", "--category", "json", "-n", "4", "--repeat", "1", "--json", "-"]
    done = here(*line, "--memory", "work")
    assert done.code == 0, done.err
    assert "drafting from a memory of 5 tokens too; --no-memory leaves it out" in done.err
    assert json.loads(done.out)["memory"] == {"name": "work", "tokens": 5}
    assert len(store.read().texts()) == 1
    assert json.loads(here(*line, "--no-memory").out)["memory"] is None
