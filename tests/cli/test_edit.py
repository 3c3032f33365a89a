"""Tests of `ngramspec edit`: the file in an answer, what is written, and when nothing is written."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ngramspec_cli.edit import _HiddenView
from ngramspec_cli.edited_file import find_file, is_complete, merge_lines
from support.cli_runner import DEMO, RunResult, run
from support.http import demo_vocabulary
from support.scripted_chat import TEMPLATE, make_generate
from support.signals import by_signal, signal_after

from ngramspec.chat.stream import Delta
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.instruments.trace import read_trace
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.steps import Step

EDIT = ("edit", "-t", "1", "-c", "1024", "--exact", "off", "-m", str(DEMO))

OLD = "def area(r):\n    return 3 * r\n"
NEW = "def area(radius):\n    return 3 * radius\n"
OTHER = "print(area(2))\n"

PAGE = "# Shop\n\nInstall it:\n\n```sh\npip install shop\n```\n\nIt prints:\n\n```\n3 apples\n```\n\nThe end.\n"
NEW_PAGE = PAGE.replace("shop", "market").replace("apples", "pears")


ANSWERS = {
    "a fence": (OLD, f"```py\n{NEW}```", NEW),
    "words around it": (OLD, f"Sure! Here it is:\n\n```python\n{NEW}```\n\nI renamed `r`.", NEW),
    "a fence of tildes": (OLD, f"~~~\n{NEW}~~~", NEW),
    "a block opened twice": (OLD, f"```\n```py\n{NEW}```\nI renamed `r`.", NEW),
    "a block opened and closed twice": (OLD, f"```py\n```py\n{NEW}```\n```\n", NEW),
    "a new text that begins with a block": (OLD, "```md\n```sh\nls\n```\nBye.\n```\n", "```sh\nls\n```\nBye.\n"),
    "a new text that is a block": (OLD, "````md\n```sh\nls\n```\n````\n", "```sh\nls\n```\n"),
    "another language": (OLD, "Voilà :\n```c++ title=a.cc\nint x;\n```\nC'est tout.", "int x;\n"),
    "no fence": (OLD, NEW, None),
    "no fence, only the file": (PAGE, NEW_PAGE, NEW_PAGE),
    "no fence, one line of the file": (PAGE, "The end.", None),
    "no file": (OLD, "I cannot do that.", None),
    "no answer": (OLD, "", None),
    "an empty fence": (OLD, "```py\n```", None),
    "a fence that is never closed": (OLD, f"Here:\n```py\n{NEW}", NEW),
    "line ends of Windows": (OLD, f"```py\n{NEW}```".replace("\n", "\r\n"), NEW),
    "two fences, a call of the file": (OLD, f"```py\n{NEW}```\nCall it:\n```py\n{OTHER}{OTHER}{OTHER}```", NEW),
    "two fences, a command first": (OLD, f"```sh\nls\n```\n\n```py\n{NEW}```", NEW),
    "two fences, the old file first": (PAGE, f"Old:\n````\n{PAGE}````\nNew:\n````\n{NEW_PAGE}````", NEW_PAGE),
    "two fences, nothing to change": (OLD, f"```py\n{OLD}```\nRun it:\n```sh\npython a.py\n```", OLD),
    "an empty original": ("", f"```py\n{NEW}```\nRun it:\n```sh\nls\n```", NEW),
    "a new text": (OLD, "```py\nx = 1\ny = 2\n```\nRun it:\n```sh\nls\n```", "x = 1\ny = 2\n"),
    "a translation": ("Hello, world.\n", "```\nHallo, Welt.\n```\nI translated Hello, world.", "Hallo, Welt.\n"),
    "fences in a longer fence": (PAGE, f"````markdown\n{NEW_PAGE}````", NEW_PAGE),
    "fences in a fence of their length": (PAGE, f"Sure:\n```markdown\n{NEW_PAGE}```\nI renamed it.", NEW_PAGE),
    "fences in a fence that is never closed": (PAGE, f"```markdown\n{NEW_PAGE}", NEW_PAGE),
    "fences in no fence, words around": (PAGE, f"Sure:\n{NEW_PAGE}Bye.", None),
    "fences and another block": (PAGE, f"```md\n{NEW_PAGE}```\nRun it:\n```\nls\n```", NEW_PAGE),
    "a new block with a language": (
        OLD,
        f"```py\n{NEW}\n'''\n```sh\nls\n```\n'''\n```",
        f"{NEW}\n'''\n```sh\nls\n```\n'''\n",
    ),
    "a fence that the original never closes": (
        f"{OLD}# ```json\n```sh\n",
        f"```py\n{NEW}```sh\n```\nDone.",
        f"{NEW}```sh\n",
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_find_file_returns_file_without_fence_and_words(name: str) -> None:
    original, answer, expected = ANSWERS[name]
    assert find_file(answer, original) == expected


LONG = "".join(f"def area{i}(r):\n    return {i} * r\n" for i in range(9))
NEW_LONG = LONG.replace("area5", "square")


def test_find_file_ends_in_answer_of_many_fences() -> None:
    """Small models may repeat fences without end; all other cases here have a few."""
    assert find_file("```\n\n" * 5_000, OLD) is None
    assert find_file(f"```md\n{NEW_PAGE}```\n" + "```\n\n" * 5_000, PAGE) == NEW_PAGE


def test_answer_ends_at_the_line_that_completes_the_file_in_a_step_of_several() -> None:
    view = _HiddenView(LONG, 100, 10_000, lambda *_: None)
    view.show(Step((1,)), [Delta("text", f"```py\n{NEW_LONG}")], [])
    assert view.ending is None
    view.show(Step((2, 3, 4)), [Delta("text", "```\n\n```\n")], [])
    assert view.ending == "stop"


@pytest.mark.parametrize(
    ("original", "answer", "expected"),
    [
        (LONG, f"Sure:\n```py\n{NEW_LONG}```\n", True),
        (LONG, f"Sure:\n```py\n{NEW_LONG}```\n\nI renamed", True),
        (LONG, f"```sh\nls\n```\n```py\n{NEW_LONG}```\n", True),
        (LONG, f"Sure:\n```py\n{NEW_LONG}```", False),
        (LONG, f"Sure:\n```py\n{NEW_LONG}", False),
        (LONG, NEW_LONG, False),
        (LONG, "```sh\nls\n```\n", False),
        (LONG, f"Old:\n```py\n{LONG}```\n", False),
        (LONG, f"```py\n{NEW_LONG[:200]}```\n", False),
        (LONG, f"```py\n{NEW_LONG}```sh\nls\n```\n", False),
        (PAGE * 9, f"````md\n{PAGE * 8}{NEW_PAGE}````\n", False),
        ("", f"```py\n{NEW}```\n", True),
        ("", "```\n```py\n", False),
    ],
)
def test_is_complete_at_end_of_fence_around_file(original: str, answer: str, expected: bool) -> None:
    assert is_complete(original, answer, 0) == expected
    assert not is_complete(original, answer, len(answer)), "no line is new"


@pytest.mark.parametrize(
    ("original", "new", "expected", "n_changed"),
    [
        ("a\nb\n", "a\nb\n", "a\nb\n", 0),
        ("a\nb\nc\n", "a\nx\ny\nc\n", "a\nx\ny\nc\n", 2),
        ("a\nb\nc\n", "a\n", "a\n", 2),
        ("a\r\nb\r\n", "a\nx\n", "a\r\nx\r\n", 1),
        ("a\r\nb\nc\r\nd\r\n", "a\nb\nx\nd\n", "a\r\nb\nx\r\nd\r\n", 1),
        ("a\nb", "x\nb\n", "x\nb", 1),
        ("a\nb", "a\nb\nc\n", "a\nb\nc", 1),
        ("a\r\nb", "a\nb\nc\n", "a\r\nb\r\nc", 1),
        ("", "a\nb\n", "a\nb\n", 2),
        ("\f\x0b\u2028a\n\n", "\f\x0b\u2028a\n\n", "\f\x0b\u2028a\n\n", 0),
    ],
)
def test_merge_lines_keeps_line_ends_of_original(original: str, new: str, expected: str, n_changed: int) -> None:
    lines, n = merge_lines(original, new)
    assert ("".join(lines), n) == (expected, n_changed)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "area.py"
    path.write_text(OLD)
    return path


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that sets the answer of the model."""
    return lambda text: monkeypatch.setattr(SpeculativeDecoder, "generate", make_generate(text))


def edit(env: dict[str, str], *arguments: str | Path, stdin: str = "") -> RunResult:
    return run(env, *EDIT, *arguments, stdin=stdin.encode())


def dictate(answer: str) -> tuple[str, str]:
    """Return the options with which the demo model gives an answer."""
    return "--grammar", f"root ::= {json.dumps(answer)}"


def test_edit_prints_only_the_new_file(env: dict[str, str], file: Path) -> None:
    options = dictate(f"Sure:\n```py\n{NEW}```\nDone.")
    done = edit(env, *options, file, "Rename r to radius.").ok()
    assert done.out == NEW
    assert re.fullmatch(r"2 lines changed; \d+ tokens at [\d.,]+ tokens/s.*\n", done.err)
    assert len(done.err) <= 101
    assert file.read_text() == OLD
    assert edit(env, *options, "-", "Rename r.", stdin=OLD).ok().out == NEW
    plain = ("edit", "-t", "1", "-c", "1024", "--exact", "off", "--no-draft")
    assert run(env, *plain, DEMO, file, "Rename r.", *options).ok().out == NEW
    assert "no model given; using" in run(env, *plain, file, "Rename r.", *options).ok().err
    assert run({**env, "NGRAMSPEC_MODEL": str(DEMO)}, *plain, file, "Rename r.", *options).ok().out == NEW


def test_edit_write_replaces_file_and_keeps_mode_and_line_ends(
    env: dict[str, str], file: Path, tmp_path: Path, answers: Callable[[str], None]
) -> None:
    answers(f"```py\n{NEW}```")
    link = tmp_path / "link.py"
    link.symlink_to(file)
    file.write_bytes(b"\xef\xbb\xbf" + OLD.replace("\n", "\r\n").encode())
    file.chmod(0o751)
    done = edit(env, "--write", link, "Rename r.").ok()
    assert (done.out, done.err.split(";")[0]) == ("", "2 lines changed")
    assert file.read_bytes() == b"\xef\xbb\xbf" + NEW.replace("\n", "\r\n").encode()
    assert file.stat().st_mode & 0o777 == 0o751
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["area.py", "link.py"]
    before = file.stat()
    done = edit(env, "-w", "--diff", file, "Rename r.").ok()
    assert (done.out, done.err.split(";")[0]) == ("", "0 lines changed")
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize(
    "old", [OLD, OLD.rstrip(), OLD.replace("\n", "\r\n"), ""], ids=["lf", "no end", "crlf", "empty"]
)
def test_edit_diff_can_be_applied(env: dict[str, str], file: Path, answers: Callable[[str], None], old: str) -> None:
    answers(f"Done:\n\n```py\n{NEW}```")
    file.write_bytes(old.encode())
    new = run(env, *EDIT, file.name, "Rename r.", cwd=file.parent).ok().raw
    diff = run(env, *EDIT, "--diff", file.name, "Rename r.", cwd=file.parent).ok().raw
    assert diff.startswith(b"--- a/area.py\n+++ b/area.py\n@@ ")
    assert file.read_bytes() == old.encode()
    apply = ["git", "apply", "--whitespace=nowarn", "-"]
    subprocess.run(apply, input=diff, cwd=file.parent, check=True)
    assert file.read_bytes() == new
    file.write_bytes(old.encode())
    assert run(env, *EDIT, "--diff", "-w", file.name, "Rename r.", cwd=file.parent).ok().raw == diff
    assert file.read_bytes() == new


def test_edit_of_long_file_returns_it_whole(
    env: dict[str, str], tmp_path: Path, answers: Callable[[str], None]
) -> None:
    path = tmp_path / "long.txt"
    path.write_text("".join(f"x{i}\n" for i in range(3000)))
    new = path.read_text().replace("x1500\n", "y1500\n")
    answers(f"```\n{new}```\n\nI renamed it.")
    done = edit(env, "-c", "65536", path, "Rename x1500.").ok()
    assert done.out == new
    assert "1 line changed" in done.err


def test_edit_stops_after_the_file(env: dict[str, str], file: Path, answers: Callable[[str], None]) -> None:
    file.write_text(LONG)
    n_tokens = []
    for words in ("", "\n\nI renamed" + " it" * 99):
        answers(f"Sure:\n\n```py\n{NEW_LONG}```{words}")
        done = edit(env, file, "Rename area5.").ok()
        assert done.out == NEW_LONG
        n_tokens.append(int(re.search(r"(\d+) tokens", done.err)[1]))
    assert n_tokens[1] <= n_tokens[0] + 1


def test_edit_without_whole_file_in_answer_writes_nothing(env: dict[str, str], file: Path) -> None:
    whole = f"Sure:\n```py\n{NEW}```"
    for answer, options, words in (
        ("I cannot do that.", (), "the answer contains no file; nothing was written"),
        (whole, ("-n", "12"), "the answer was cut; raise -n/--predict or -c/--ctx-size; nothing was written"),
    ):
        for output in ((), ("--write",), ("--diff",)):
            done = edit(env, *dictate(answer), *options, *output, file, "Rename r.")
            done.assert_failed(words)
            assert answer[:8] in done.err
            assert file.read_text() == OLD


def test_edit_ends_endless_answer_unless_limit_is_given(
    env: dict[str, str], file: Path, answers: Callable[[str], None]
) -> None:
    new = "x = 1\n" * 900
    answers(f"```py\n{new}```")
    done = edit(env, file, "Rename r.")
    done.assert_failed("the answer is far longer than the file")
    shown, left_out = done.err.splitlines()[:10], done.err.splitlines()[10]
    assert shown == ["```py", *["x = 1"] * 9]
    assert re.fullmatch(r"\d{2,3} more lines of the answer left out", left_out)
    assert edit(env, "-n", "-1", file, "Rename r.").ok().out == new
    answers("word " * 9999)  # in one line
    assert len(edit(env, file, "Rename r.").err) < 2000


def test_edit_of_file_that_changes_meanwhile_keeps_it(
    env: dict[str, str], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say = make_generate(f"```py\n{NEW}```")

    def generate(*arguments: Any, **options: Any) -> Iterator[Step]:
        file.write_text(OTHER)
        return say(*arguments, **options)

    monkeypatch.setattr(SpeculativeDecoder, "generate", generate)
    done = edit(env, "--write", file, "Rename r.")
    done.assert_failed("area.py has changed since it was read")
    assert NEW in done.err
    assert file.read_text() == OTHER


@by_signal
def test_edit_with_signal_writes_nothing(
    env: dict[str, str], file: Path, answers: Callable[[str], None], number: int, code: int
) -> None:
    answers(f"```py\n{NEW}```")
    with signal_after(number, steps=3):
        done = edit(env, "--write", file, "Rename r.")
    assert (done.code, done.out, file.read_text()) == (code, "", OLD)
    assert re.match(r"interrupted; \d+ tokens?", done.err)


def test_edit_shows_reasoning_on_stderr(
    env: dict[str, str], file: Path, answers: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vocabulary, "chat_template", TEMPLATE)
    answers(f"<think>Hm.\n```\nno\n```\n</think>```py\n{NEW}```")
    done = edit(env, file, "Rename r.").ok()
    assert done.out == NEW
    assert done.err.startswith("Hm.\n")


@pytest.mark.parametrize(
    ("options", "drafts"), [((), True), (("--no-draft",), False), (("--drafter", "recycle"), False)]
)
def test_edit_predicts_the_file(
    env: dict[str, str], file: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], drafts: bool
) -> None:
    calls, say = list[dict[str, Any]](), make_generate(f"```py\n{NEW}```")

    def generate(*arguments: Any, **options: Any) -> Iterator[Step]:
        calls.append(options)
        return say(*arguments, **options)

    monkeypatch.setattr(SpeculativeDecoder, "generate", generate)
    file.write_bytes(OLD.replace("\n", "\r\n").encode())
    edit(env, *options, file, "Rename r.").ok()
    expected = demo_vocabulary().tokenize(OLD, add_bos=False) if drafts else []
    assert list(calls[0]["prediction"]) == expected
    assert calls[0]["sampling"].temperature == 0


def test_edit_records_trace(env: dict[str, str], file: Path, tmp_path: Path) -> None:
    trace = tmp_path / "edit.jsonl"
    edit(env, *dictate(f"```py\n{NEW}```"), "--trace", trace, file, "Rename r.").ok()
    assert len([*read_trace(trace.read_bytes().splitlines())]) > 5


def test_edit_with_mistake_fails_before_generation(
    env: dict[str, str], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(SpeculativeDecoder, "generate")
    other, long, binary = tmp_path / "other.py", tmp_path / "long.py", tmp_path / "a.bin"
    other.write_text(OTHER)
    long.write_text(OLD * 60)
    binary.write_bytes(b"a\xff")
    one_file = "edit changes one file, and the instruction must be in quotes"
    for arguments, code, words in (
        ([], 2, "Missing argument"),
        ([file], 2, "edit requires a file and an instruction"),
        ([file, " "], 2, "edit requires a file and an instruction"),
        ([DEMO, file], 2, "edit requires a file and an instruction"),
        ([file, other, "Rename r."], 2, one_file),
        ([file, "rename", "r"], 2, one_file),
        ([DEMO, file, other, "Rename r."], 2, one_file),
        ([DEMO, file, "Rename r."], 2, "two models were given"),
        (["--write", "-", "Rename r."], 2, "--write requires a file, got -"),
        (["--write", os.devnull, "Rename r."], 2, f"--write requires a file, got {os.devnull}"),
        ([tmp_path / "gone.py", "Rename r."], 1, "gone.py: No such file"),
        ([tmp_path, "Rename r."], 1, "Is a directory"),
        ([binary, "Rename r."], 1, "a.bin is not UTF-8 text"),
        ([long, "Rename r."], 1, "-c/--ctx-size"),
    ):
        edit(env, *arguments).assert_failed(words, code=code)
    assert file.read_text() == OLD
