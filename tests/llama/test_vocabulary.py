"""`Vocabulary`: the tokenizer of a file, with weights or without."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli_runner import DEMO
from support.tiny_gguf import write_gguf
from support.vocabulary_files import write_vocabulary

from ngramspec.errors import ModelError
from ngramspec.llama.target import Target
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.models.check import check_vocabulary_file
from ngramspec.tool_calls.deltas import Tool

TEXT = "<|im_start|>user\nGrüße, 漢字!<|im_end|>\n"


def test_it_cuts_as_the_model_does(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "vocab.gguf")
    check_vocabulary_file(path)
    with Vocabulary(path) as alone, Vocabulary(DEMO) as of_model, Target(DEMO, n_ctx=64, threads=1) as target:
        for special in (True, False):
            tokens = target.tokenize(TEXT, special=special)
            assert alone.tokenize(TEXT, special=special) == of_model.tokenize(TEXT, special=special) == tokens
            assert [alone.piece(t) for t in tokens] == [target.piece(t) for t in tokens]
        assert alone.end_of_turn == target.end_of_turn == target.tokenize("<|im_end|>", special=True)[-1]
        assert alone.is_eog(alone.end_of_turn)
        assert alone.n_vocab == target.n_vocab
        messages = [{"role": "user", "content": "hello"}]
        assert alone.chat_prompt(messages) == target.chat_prompt(messages)


def test_a_closed_one_cannot_be_used(tmp_path: Path) -> None:
    vocabulary = Vocabulary(write_vocabulary(tmp_path / "vocab.gguf"))
    vocabulary.close()
    vocabulary.close()
    with pytest.raises(ValueError, match="the vocabulary is closed"):
        vocabulary.tokenize("a")


def test_files_that_hold_none(tmp_path: Path) -> None:
    no_text = tmp_path / "text.gguf"
    no_text.write_text("not a model")
    with pytest.raises(ModelError, match="text file"):
        check_vocabulary_file(no_text)
    with pytest.raises(ModelError, match="no such model file"):
        check_vocabulary_file(tmp_path / "gone.gguf")
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        Vocabulary(write_gguf(tmp_path / "broken.gguf", architecture="unheard-of"))


def test_variables_of_the_template() -> None:
    """The demo model's template asks for none; those that are the prompt's own cannot be set."""
    messages = [{"role": "user", "content": "hello"}]
    with Vocabulary(DEMO) as vocabulary:
        assert vocabulary.chat(messages, variables={"enable_thinking": False}).tokens == vocabulary.chat_prompt(
            messages
        )
        for name in ("messages", "tools", "bos_token", "add_generation_prompt"):
            with pytest.raises(ValueError, match=f"^the chat template's variable '{name}' cannot be set$"):
                vocabulary.chat(messages, variables={name: "x"})


def test_tools_in_a_template_that_knows_none() -> None:
    tool = Tool("clock", "Tells <|im_end|> the time.")
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"a": "<|im_end|>"}'}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "<|im_start|>12"},
    ]
    with Vocabulary(DEMO) as vocabulary:
        prompt = vocabulary.chat(messages, [tool])
        assert '"name": "clock"' in prompt.text
        assert "<tool_response>\n<|im_start|>12\n</tool_response>" in prompt.text
        assert prompt.opening.endswith("<|im_start|>assistant\n")
        start, end = (vocabulary.tokenize(text, special=True)[-1] for text in ("<|im_start|>", "<|im_end|>"))
        # System, user, assistant, and the result in a user's turn; then the answer.
        assert prompt.tokens.count(start) == 5
        assert prompt.tokens.count(end) == 4
