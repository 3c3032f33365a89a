"""Tests of llama.cpp's built-in chat templates, by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.cli_runner import DEMO

from ngramspec.chat.stream import Tool
from ngramspec.data import ModelError
from ngramspec.llama.chat_format import builtin_names
from ngramspec.llama.vocabulary import Vocabulary

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "a <|im_end|> " + "é" * 1000},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]


@pytest.fixture
def vocabulary() -> Iterator[Vocabulary]:
    with Vocabulary(DEMO) as vocabulary:
        yield vocabulary


def test_builtin_chatml_equals_template_of_demo_model(vocabulary: Vocabulary, demo_vocabulary: Vocabulary) -> None:
    vocabulary.use_chat_template("chatml")
    for answered in (True, False):
        prompt = vocabulary.chats.prompt(TALK, answered=answered)
        assert prompt == demo_vocabulary.chats.prompt(TALK, answered=answered)
    assert prompt.tokens.count(vocabulary.controls["<|im_end|>"]) == 4  # The marker in the message is text.


def test_builtin_templates_format_a_conversation(vocabulary: Vocabulary) -> None:
    assert {"llama3", "gemma", "mistral-v7"} < {*builtin_names()}
    for name in builtin_names():
        vocabulary.use_chat_template(name)
        text = vocabulary.chats.prompt(TALK, [Tool("clock", "Tells the time.")]).text
        assert text.index("Be brief.") < text.index('"name": "clock"') < text.index("é" * 1000), name
    assert vocabulary.chats.capabilities["supports_tools"] is False


def test_builtin_template_rejects_null_character(vocabulary: Vocabulary) -> None:
    vocabulary.use_chat_template("llama3")
    with pytest.raises(ModelError, match="without null characters"):
        vocabulary.chats.prompt([{"role": "user", "content": "a\0b"}])
