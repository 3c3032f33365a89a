"""Token ids: the `Tokenizer` interface, trees of tokens (`Node`), and helpers for sequences of tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary


class Tokenizer(Protocol):
    """Converter from text to token ids, 0 to n_vocab - 1, and back."""

    @property
    def n_vocab(self) -> int: ...

    def tokenize(self, text: str, *, special: bool = False, add_bos: bool = True) -> list[int]:
        """Return the token ids of a text; `special` parses special tokens in it, `add_bos` adds those at the start."""

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token, which need not be whole characters; b"" for control tokens."""

    def display_piece(self, token: int) -> bytes:
        """Return the bytes of a token, or the name of a control token for parsers that need it."""

    def is_eog(self, token: int) -> bool:
        """Return True if the token ends a generation (end of text, of turn, of message)."""


# The search reads the whole vocabulary (100,000 tokens), and every request needs the result.
_ending_tokens_cache: WeakKeyDictionary[Tokenizer, tuple[int, ...]] = WeakKeyDictionary()


def ending_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return all tokens that end a generation."""
    tokens = _ending_tokens_cache.get(tokenizer)
    if tokens is None:
        tokens = tuple(token for token in range(tokenizer.n_vocab) if tokenizer.is_eog(token))
        _ending_tokens_cache[tokenizer] = tokens
    return tokens


@dataclass(frozen=True, slots=True)
class Control:
    """A control token: its id, and whether it swallows the white space before and after it."""

    token: int
    lstrip: bool = False
    rstrip: bool = False


NEVER = re.compile(r"(?!)")


def make_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of several texts, the longest first; without texts it matches nothing."""
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else NEVER


V = TypeVar("V")


class TokenTable(dict[int, V]):
    """Cached values of a function of a token id, each computed when it is first needed.

    Reading a known value takes no Python call, which matters in loops over all tokens of a text.
    """

    def __init__(self, function: Callable[[int], V]) -> None:
        self._function = function

    def __missing__(self, token: int) -> V:
        value = self[token] = self._function(token)
        return value


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    if list(a[:n]) == list(b[:n]):
        return n
    return next(i for i in range(n) if a[i] != b[i])


TopLogprobs = Sequence[tuple[int, float]]  # (token id, natural logarithm of its probability), best first


class Node:
    """A token in a tree; the path from the root contains the tokens before it."""

    __slots__ = ("children", "length", "likely", "notes", "parent", "token")

    def __init__(self, parent: Node | None, token: int, length: int) -> None:
        self.parent = parent  # node before this one; `None` for the root
        self.token = token  # id of the token; -1 for the root, which represents the prompt
        self.length = length  # number of tokens from the start of the prompt up to this one
        self.children: dict[int, Node] = {}  # nodes after this one, by token
        self.likely: TopLogprobs | None = None  # most likely next tokens; `None` until the logits were read
        self.notes: Any = None  # data of a drafter

    def child(self, token: int) -> Node:
        node = self.children.get(token)
        if node is None:
            node = self.children[token] = Node(self, token, self.length + 1)
        return node

    def path(self) -> list[int]:
        """Return the tokens from the prompt to this node, in order."""
        tokens: list[int] = []
        node = self
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]


def common_ancestor(a: Node, b: Node) -> Node:
    """Return the last node that is on the paths to both nodes of a tree."""
    while a is not b:
        if a.length < b.length:
            a, b = b, a
        assert a.parent is not None
        a = a.parent
    return a
