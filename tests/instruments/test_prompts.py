"""Tests of prompts: every kind of input, a clear error for every bad one, and the packaged prompts."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from ngramspec.data import NGramSpecError
from ngramspec.instruments import prompts
from ngramspec.instruments.prompts import Prompt, load_prompts, prepare
from ngramspec.llama.vocabulary import Vocabulary

TOML = """
category = "chat"
source = "made up"
licence = "MIT"

[[prompts]]
id = "one"
text = "Once upon a time"

[[prompts]]
id = "two"
system = "Be brief."
messages = [{role = "user", content = "Hi"}, {role = "assistant", content = "Yes?"}]
"""

ONE = Prompt("one", "chat", text="Once upon a time")
TALK = (("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes?"))
TWO = Prompt("two", "chat", messages=tuple({"role": role, "content": content} for role, content in TALK))


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_load_prompts_reads_toml_jsonl_and_other_texts(tmp_path: Path) -> None:
    file = write(tmp_path / "notes.md", "# Títle\r\n\r\ntext \n")
    assert load_prompts(file) == [Prompt("notes.md", "notes", text="# Títle\r\n\r\ntext \n")]
    assert load_prompts(write(tmp_path / "a.toml", TOML)) == [ONE, TWO]
    # This file has a byte order mark and Windows line ends.
    data = b"\xef\xbb\xbf" + TOML.replace("\n", "\r\n").encode()
    assert load_prompts(write(tmp_path / "b.toml", data)) == [ONE, TWO]
    lines = [
        {"id": "one", "category": "chat", "text": "Once upon a time"},
        {"id": "two", "category": "chat", "messages": list(TWO.messages or ())},
        {"id": "three", "category": "odd", "text": "a\u2028b"},
    ]
    text = "\n \n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n"
    assert load_prompts(write(tmp_path / "a.jsonl", text)) == [ONE, TWO, Prompt("three", "odd", text="a\u2028b")]


def test_load_prompts_of_folder_reads_files_in_order_and_skips_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    (folder / "sub").mkdir(parents=True)
    for name, text in {
        "sub/inner.txt": "not read",
        "b.toml": TOML,
        "a.py": "x = 1\n",
        "c.txt": "text",
        "empty.txt": "\n",
        ".hidden": "no",
        "README.md": "about these prompts",
        "LICENSE": "MIT",
        "image.png": b"\x89PNG\xff\xfe",
        "zeros.bin": b"ab\0\0",
    }.items():
        write(folder / name, text)
    expected = [Prompt("a.py", "mine", text="x = 1\n"), ONE, TWO, Prompt("c.txt", "mine", text="text")]
    assert load_prompts(folder) == expected
    monkeypatch.chdir(folder)
    assert load_prompts(Path()) == expected


def test_load_prompts_without_path_reads_packaged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packaged_prompts_of_a_test"
    package.mkdir()
    write(package / "__init__.py", "raise_if_read_as_a_prompt = 1\n")
    write(package / "chat.toml", TOML)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(prompts, "PACKAGE", package.name)
    try:
        assert load_prompts(None) == [ONE, TWO]
    finally:
        sys.modules.pop(package.name, None)
    monkeypatch.setattr(prompts, "PACKAGE", "no_such_package_of_prompts")
    with pytest.raises(NGramSpecError, match="missing from this installation"):
        load_prompts(None)


HEAD = 'category = "c"\n[[prompts]]\nid = "x"\n'

BAD_TOML = {
    "not valid TOML": "category = ",
    "toml: tags: unknown key": 'tags = 1\ncategory = "c"\nprompts = []',
    "category: is missing": '[[prompts]]\nid = "x"\ntext = "t"',
    "licence: Input should be a valid string": 'category = "c"\nlicence = 3',
    "prompts: is missing": 'category = "c"',
    "contains no prompts": 'category = "c"\nprompts = []',
    r"prompts\[1\]: Input should be a valid dictionary": 'category = "c"\nprompts = ["x"]',
    "prompt 1: id: is missing": 'category = "c"\n[[prompts]]\ntext = "t"',
    "prompt 1: message: unknown key": HEAD + 'message = "t"',
    "prompt 1: requires either text or messages": HEAD,
    "either text or messages": HEAD + 'text = "t"\nmessages = [{role="user", content="c"}]',
    "text: must not be empty": HEAD + 'text = " "',
    "a system message requires messages": HEAD + 'text = "t"\nsystem = "s"',
    "at least 1 item": HEAD + "messages = []",
    r"messages\[1\]: Input should be a valid dictionary": HEAD + 'messages = ["hi"]',
    r"messages\[1\]: must have the keys role and content, got role": HEAD + 'messages = [{role="user"}]',
    r"messages\[1\]: role must be one of assistant, ": HEAD + 'messages = [{role="bot", content="c"}]',
    r"got role, content, name": HEAD + 'messages = [{role="user", content="c", name="n"}]',
    r"messages\[1\]: must not be empty": HEAD + 'messages = [{role="user", content=" "}]',
    "two system messages": HEAD + 'system="s"\nmessages = [{role="system", content="c"}]',
    "a system message must come first": HEAD + 'messages = [{role="user", content="c"}, {role="system", content="c"}]',
    "first": HEAD + 'system="s"\nmessages = [{role="user", content="c"}, {role="system", content="c"}]',
    "two prompts of c have the id x": HEAD + 'text = "t"\n[[prompts]]\nid = "x"\ntext = "u"',
}

BAD_JSONL = {
    "line 2 is not valid JSON": '{"id": "x", "category": "c", "text": "t"}\n{',
    "line 1: Input should be a dictionary": "[1]",
    "line 1: category: is missing": '{"id": "x", "text": "t"}',
    "line 1: answer: unknown key": '{"id": "x", "category": "c", "text": "t", "answer": 1}',
    "line 1: id: Input should be a valid string": '{"id": 7, "category": "c", "text": "t"}',
    "contains no prompts": "\n\n",
}

BAD: dict[str, Mapping[str, str | bytes]] = {
    "bad.toml": BAD_TOML,
    "bad.jsonl": BAD_JSONL,
    "bad.txt": {"text: must not be empty": b" \n", "not UTF-8": b"caf\xe9", "NUL": b"a\0b"},
}


@pytest.mark.parametrize("name", BAD)
def test_load_prompts_rejects_invalid_files(tmp_path: Path, name: str) -> None:
    for reason, text in BAD[name].items():
        with pytest.raises(NGramSpecError, match=reason) as caught:
            load_prompts(write(tmp_path / name, text))
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


def test_load_prompts_rejects_missing_empty_and_unreadable_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NGramSpecError, match="no such file or folder"):
        load_prompts(tmp_path / "none.toml")
    with pytest.raises(NGramSpecError, match="contains no prompts"):
        load_prompts(tmp_path)

    def refuse(_self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    file = write(tmp_path / "a.txt", "x")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(NGramSpecError, match=r"cannot read a\.txt: Permission denied"):
        load_prompts(file)


FILES = sorted((Path(__file__).parents[2] / "prompts").glob("*.toml"))
PROMPTS = [prompt for path in FILES for prompt in load_prompts(path)]
RAW = {"code-continuation", "prose"}
MAX_CHARACTERS = 6_000
MAX_TOKENS = 1_900  # The rest of the demo model's context of 2,048 is for the answer.


def texts(prompt: Prompt) -> list[str]:
    return [message["content"] for message in prompt.messages] if prompt.messages else [prompt.text or ""]


def test_packaged_prompt_files_name_category_source_and_licence() -> None:
    assert len(FILES) >= 6
    for path in FILES:
        name, data = path.stem, tomllib.loads(path.read_text("utf-8"))
        assert data.keys() == {"category", "source", "licence", "prompts"}
        assert data["category"] == name
        ids = [prompt["id"] for prompt in data["prompts"]]
        assert len(ids) >= 8
        assert ids == [f"{name}-{number:02}" for number in range(1, len(ids) + 1)]
        sources, licences = (set(re.findall(rf"{name}-\d+", data[field])) for field in ("source", "licence"))
        assert sources | licences <= set(ids)
        assert sources <= licences


def test_packaged_prompts_follow_documented_format() -> None:
    assert sum(any(message["role"] == "assistant" for message in prompt.messages or ()) for prompt in PROMPTS) >= 3
    for prompt in PROMPTS:
        assert (prompt.text is not None) == (prompt.category in RAW), prompt.id
        # Turns alternate, and the first and the last turn are the user's.
        roles = [message["role"] for message in prompt.messages or () if message["role"] != "system"]
        assert roles == ["assistant" if number % 2 else "user" for number in range(len(roles))], prompt.id
        assert not roles or roles[-1] == "user", prompt.id
        # White space at the end of a raw prompt would change how its last word is tokenised.
        assert all(text == text.strip() for text in texts(prompt)), prompt.id
        assert sum(map(len, texts(prompt))) <= MAX_CHARACTERS, prompt.id


def test_packaged_prompts_share_no_texts_or_long_passages() -> None:
    """No prompt contains another's text, which a drafter with a memory of earlier prompts would find."""
    counts = Counter(" ".join(text.split()) for prompt in PROMPTS for text in texts(prompt))
    assert [text for text, count in counts.items() if count > 1] == []
    first_seen: dict[tuple[str, ...], str] = {}
    for prompt in PROMPTS:
        words = " ".join(texts(prompt)).split()
        for start in range(len(words) - 19):
            passage = tuple(words[start : start + 20])
            assert first_seen.setdefault(passage, prompt.id) == prompt.id, passage


def test_packaged_prompts_fit_demo_model_context(demo_vocabulary: Vocabulary) -> None:
    cases, skipped = prepare(demo_vocabulary, PROMPTS, 0, MAX_TOKENS)
    assert (len(cases), skipped) == (len(PROMPTS), [])
