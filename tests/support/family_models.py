"""Tiny models with random weights, the demo model's vocabulary, and the marks of a model family as further tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
from support.cli_runner import DEMO
from support.tiny_models import write_model

_LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<unused.*>|<pad>|<mask>|\[@BOS@\]")  # converters' rule
_SPECIAL = re.compile(
    r"\[[/A-Z_]+\]|</?s>|<seed:(bos|eos|pad)>|\]~!?b[\][]|\[e~\[|<(start|end)_of_turn>|<\|?turn\|?>|<sep>"
)
"""Tokens that tokenizer settings mark as special, although their names do not look like it."""
_ALWAYS_VISIBLE = {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"}
_ALWAYS_VISIBLE |= {'<|"|>'}
"""Tokens of Gemma 4 that the converter makes visible."""


def token_type(name: str) -> gguf.TokenType:
    """Return the type of an added token in a real file, by the rules of llama.cpp's converters."""
    is_control = name not in _ALWAYS_VISIBLE and (_LOOKS_SPECIAL.fullmatch(name) or _SPECIAL.fullmatch(name))
    return gguf.TokenType.CONTROL if is_control else gguf.TokenType.USER_DEFINED


@cache
def _demo_fields() -> dict[str, tuple[Any, Any, Any]]:
    """Return the value, the type and the item type of each key of the demo model's vocabulary."""
    return {
        name: (field.contents(), field.types[0], field.types[-1])
        for name, field in gguf.GGUFReader(DEMO).fields.items()
        if name.startswith("tokenizer.") and name != "tokenizer.chat_template"
    }


def write_family_model(path: Path, template: str, marks: Sequence[str], end: str) -> Path:
    """Write a model whose vocabulary has these marks after the demo model's tokens.

    Args:
        path: Path of the file.
        template: Chat template.
        marks: Names of the added tokens; llama.cpp may change the types that `token_type` returns.
        end: Name of the token that ends an answer, one of the marks or of the demo model's.
    """

    def add_vocabulary(writer: gguf.GGUFWriter) -> int:
        fields = _demo_fields()
        tokens, types = list(fields["tokenizer.ggml.tokens"][0]), list(fields["tokenizer.ggml.token_type"][0])
        added = [mark for mark in dict.fromkeys([*marks, end]) if mark not in tokens]
        tokens += added
        types += [int(token_type(mark)) for mark in added]
        changes: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
        changes |= {f"tokenizer.ggml.{kind}_token_id": tokens.index(end) for kind in ("eos", "eot")}
        for name, (value, kind, item) in fields.items():
            is_list = kind == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, changes.get(name, value), kind, sub_type=item if is_list else None)
        writer.add_vocab_size(len(tokens))
        return len(tokens)

    return write_model(path, "llama", chat_template=template, vocabulary=add_vocabulary)
