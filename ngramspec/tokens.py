"""Sequences of token ids, trees of them (`Node`), the `Tokenizer` that they come from, and text cut into tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary


class Tokenizer(Protocol):
    """Text to token ids, 0 to n_vocab - 1, and back."""

    @property
    def n_vocab(self) -> int: ...

    def tokenize(self, text: str, *, special: bool = False, add_bos: bool = True) -> list[int]:
        """Token ids of `text`; `special` parses special tokens in it, `add_bos` adds what the model wants in front."""

    def piece(self, token: int) -> bytes:
        """The bytes of a token, which need not be whole characters; none for control tokens."""

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation (end of text, of turn, of message)."""


_known_ends: WeakKeyDictionary[Tokenizer, tuple[int, ...]] = WeakKeyDictionary()


def ending_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """All tokens that end a generation, looked for once: a vocabulary has 100,000 tokens, a server many requests."""
    known = _known_ends.get(tokenizer)
    if known is None:
        known = tuple(token for token in range(tokenizer.n_vocab) if tokenizer.is_eog(token))
        _known_ends[tokenizer] = known
    return known


V = TypeVar("V")


class TokenTable(dict[int, V]):
    """The values of a function of a token id, each computed when it is first needed.

    Reading a known value takes no Python call, which matters in loops over all tokens of a text.
    """

    def __init__(self, function: Callable[[int], V]) -> None:
        self._function = function

    def __missing__(self, token: int) -> V:
        value = self[token] = self._function(token)
        return value


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences share from the start."""
    n = min(len(a), len(b))
    if list(a[:n]) == list(b[:n]):
        return n
    return next(i for i in range(n) if a[i] != b[i])


def begun(text: str, marks: Collection[str], start: int = 0) -> int:
    """Where, from `start` on, the longest end of a text begins that one of some strings may begin with."""
    longest = max(map(len, marks), default=1)
    for at in range(max(start, len(text) - longest + 1), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return at
    return len(text)


Likely = Sequence[tuple[int, float]]  # (token id, natural logarithm of its probability), best first


class Node:
    """A token after all that stands before it."""

    __slots__ = ("children", "holder", "length", "likely", "mark", "notes", "parent", "token")

    def __init__(self, parent: Node | None, token: int, length: int) -> None:
        self.parent = parent  # the node before it; None for the root
        self.token = token  # its id; -1 for the root, which stands for the prompt
        self.length = length  # tokens from the start of the prompt to here
        self.children: dict[int, Node] = {}  # nodes that follow it, by token
        self.likely: Likely | None = None  # the most likely tokens after it; None until somebody reads the logits
        self.notes: Any = None  # a drafter's own
        self.holder = 0  # a sequence that holds it, if any does
        self.mark = 0  # the last `keep` that it lived through

    def child(self, token: int) -> Node:
        """The node of `token` after this one, made if there is none."""
        node = self.children.get(token)
        if node is None:
            node = self.children[token] = Node(self, token, self.length + 1)
        return node

    def path(self) -> list[int]:
        """The tokens after the prompt, in order."""
        tokens: list[int] = []
        node = self
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]


def common_ancestor(a: Node, b: Node) -> Node:
    """The last node that two paths of one tree have in common."""
    while a is not b:
        if a.length < b.length:
            a, b = b, a
        assert a.parent is not None
        a = a.parent
    return a
