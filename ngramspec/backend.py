"""What any model runner must offer: `TargetProtocol` for one text, `BranchingTarget` for many that share a beginning.

`ngramspec.llama.target.Target` is the real one; tests use a mock with a known distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling.settings import Sampling

Logits = NDArray[np.float32]
Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all)."""


class TargetProtocol(Protocol):
    """A language model with one sequence in its KV cache; see `ngramspec.llama.target.Target` for the contracts.

    Attributes:
        tokens: what the cache holds.
        n_ctx: most tokens it can hold.
        n_vocab: size of the vocabulary.
        max_batch: most tokens of a pass of which all but the first can be taken back.
        can_rollback: whether rejected drafts can be taken out of the memory again.
        replays: whether that takes a `checkpoint` before the pass, and evaluating tokens again after it.
        owed: tokens that the next call evaluates again, before its own.
    """

    tokens: list[int]
    n_ctx: int
    n_vocab: int
    max_batch: int
    can_rollback: bool
    replays: bool

    @property
    def owed(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def prefill(self, tokens: Sequence[int], *, aligned: bool = False, progress: Progress | None = None) -> Logits: ...

    def evaluate(self, tokens: Sequence[int]) -> Logits: ...

    def rollback(self, length: int) -> None: ...

    def checkpoint(self) -> None: ...

    def clear(self) -> None: ...

    def is_eog(self, token: int) -> bool: ...

    def piece(self, token: int) -> bytes: ...

    def sampler(self, sampling: Sampling) -> Sampler: ...


Likely = Sequence[tuple[int, float]]
"""(token id, natural logarithm of its probability), best first."""


class Node:
    """A token after all that stands before it.

    Attributes:
        parent: the node before it; None for the root.
        token: its id; -1 for the root, which stands for the prompt.
        length: tokens from the start of the prompt to here.
        children: nodes that follow it, by token.
        likely: what the logits after it say, for whoever reads them to leave here; None until then.
        notes: a drafter's.
    """

    __slots__ = ("children", "holder", "length", "likely", "mark", "notes", "parent", "token")

    def __init__(self, parent: Node | None, token: int, length: int) -> None:
        self.parent = parent
        self.token = token
        self.length = length
        self.children: dict[int, Node] = {}
        self.likely: Likely | None = None
        self.notes: Any = None
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
        later = a if a.length >= b.length else b
        assert later.parent is not None
        if later is a:
            a = later.parent
        else:
            b = later.parent
    return a


class TreeProtocol(Protocol):
    """A tree of continuations in a target's cache; see `ngramspec.llama.sequences.Sequences` for the contracts."""

    leaves: int
    max_batch: int
    windowed: bool

    def evaluate(self, nodes: Sequence[Node]) -> Logits: ...

    def keep(self, nodes: Sequence[Node]) -> None: ...

    def close(self) -> None: ...


class BranchingTarget(TargetProtocol, Protocol):
    """A target whose cache can hold several continuations of a prompt; see `ngramspec.llama.target.Target`."""

    n_seq: int

    @property
    def suppressed(self) -> tuple[int, ...]: ...

    @property
    def can_branch(self) -> bool: ...

    def sequences(self, root: Node) -> TreeProtocol: ...
