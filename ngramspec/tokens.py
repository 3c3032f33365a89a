"""Sequences of token ids, and the `Tokenizer` that they come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
        n_vocab: size of the vocabulary; token ids are 0 to n_vocab - 1.
    """

    @property
    def n_vocab(self) -> int: ...

    def tokenize(self, text: str, *, special: bool = False, add_bos: bool = True) -> list[int]:
        """Token ids of `text`; `special` parses special tokens in it, `add_bos` adds what the model wants in front."""

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for, which need not be whole characters; none for control tokens."""

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation (end of text, of turn, of message)."""


class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that knows how its model wants conversations to be laid out."""

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's next turn; ModelError where that cannot be."""

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template (Jinja), or None."""

    @property
    def end_of_turn(self) -> int | None:
        """The token that ends an answer; None if the vocabulary has none."""


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences share from the start."""
    n = min(len(a), len(b))
    if list(a[:n]) == list(b[:n]):
        return n
    return next(i for i in range(n) if a[i] != b[i])
