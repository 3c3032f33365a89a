"""Tests that no text of a client becomes a control token, with llama.cpp's chat templates and real vocabularies.

`support.templates` finds the templates; without them these tests are skipped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
from support.templates import find_marks, template_files
from support.vocabulary_files import write_vocabulary

from ngramspec.chat.stream import Tool
from ngramspec.data import ModelError
from ngramspec.llama import crash_check
from ngramspec.llama.vocabulary import Vocabulary

FILES = template_files()
KINDS = (pytest.param(gguf.TokenType.CONTROL, marks=pytest.mark.exhaustive), gguf.TokenType.USER_DEFINED)
PLAIN = ("<table>", "</td>", " " * 31, "\t" * 9, "\n" * 7)  # user-defined tokens that are ordinary text
EVERYWHERE = ("description", "property", "about", "system", "user", "key", "argument", "result", "variable")
ANSWERS = ("said", "reasoning")


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """The demo model's vocabulary with the marks of all templates as tokens of one type."""
    marks = sorted(set[str]().union(*(find_marks(file.read_text("utf-8")) for file in FILES)))
    path = tmp_path_factory.mktemp("marks") / "marks.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crash_check, "run", lambda *_: None)
        return Vocabulary(write_vocabulary(path, controls=[*marks, *PLAIN], kind=request.param))


def make_conversation(texts: Mapping[str, str]) -> tuple[list[dict[str, Any]], list[Tool], dict[str, Any]]:
    """Return messages, tools and variables with a text in each of these places, and its name in the others."""
    text = {place: place for place in (*EVERYWHERE, *ANSWERS)} | texts
    schema = {"type": "object", "properties": {text["property"]: {"type": "string", "description": text["about"]}}}
    arguments = json.dumps({text["key"]: text["argument"]})
    call = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    answer = {"role": "assistant", "content": text["said"], "reasoning_content": text["reasoning"]}
    messages = [
        {"role": "system", "content": text["system"]},
        {"role": "user", "content": text["user"]},
        answer,
        {"role": "user", "content": text["user"]},
        answer | {"tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": text["result"]},
    ]
    return messages, [Tool("weather", text["description"], schema)], {"custom": text["variable"]}


def count_controls(vocabulary: Vocabulary, marks: set[str], texts: Mapping[str, str]) -> Counter[str]:
    """Return the number of tokens of each mark in a prompt; its tokens have the text of the prompt."""
    prompt = vocabulary.chat(*make_conversation(texts))
    pieces = [vocabulary.display_piece(token).decode("utf-8", "replace") for token in prompt.tokens]
    if "\ufffd" not in "".join(pieces):
        assert "".join(pieces).endswith(prompt.text)
    return Counter(piece for piece in pieces if piece in marks)


def use_template(vocabulary: Vocabulary, file: Path) -> tuple[set[str], Counter[str]]:
    """Give the vocabulary a template; return its marks and how often a harmless prompt has each."""
    template = file.read_text("utf-8")
    marks = find_marks(template)
    vocabulary.use_chat_template(template)
    return marks, count_controls(vocabulary, marks, {})


def inject(marks: set[str]) -> list[str]:
    joined = sorted(marks)
    return ["".join(joined), "a " + " \n".join(joined) + " b", "<think>y</think>z", "<think>\ny\n</think>\n\nz"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_chat_with_marks_in_foreign_text_creates_no_control_token(file: Path, vocabulary: Vocabulary) -> None:
    marks, usual = use_template(vocabulary, file)
    assert not count_controls(vocabulary, marks, dict.fromkeys(EVERYWHERE, inject(marks)[1])) - usual
    n_tokens = {token: len(vocabulary.tokenize(token, add_bos=False)) for token in PLAIN}
    assert PLAIN[0] in vocabulary.controls or set(n_tokens.values()) == {1}, n_tokens


@pytest.mark.exhaustive
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_chat_with_marks_in_one_place_creates_no_control_token(file: Path, vocabulary: Vocabulary) -> None:
    marks, usual = use_template(vocabulary, file)
    for text in inject(marks):
        for place in EVERYWHERE:
            assert not count_controls(vocabulary, marks, {place: text}) - usual, (place, text)
        for place in ANSWERS:
            try:
                counts = count_controls(vocabulary, marks, {place: text})
            except ModelError:
                assert len(marks) > 2, (place, text)
            else:
                assert not counts - usual, (place, text)
