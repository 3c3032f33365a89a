"""A mock target whose cache contains several continuations, and a tree that checks its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.mock_target import MockTarget

from ngramspec.tokens import Node


class MockBranchingTarget(MockTarget):
    """`MockTarget` with the methods of `ngramspec.llama.target.Target` that beam search needs.

    Args:
        n_seq: Number of sequences in the context; a tree has at most one leaf less.
        suppressed: Tokens that the model's file forbids.
        windowed: Nodes kept between two passes must not be more than a token ahead of the shortest text.
        decimals: Number of decimals to which logits are rounded, so that some scores are equal.
        options: Arguments of `MockTarget`.
    """

    def __init__(
        self,
        n_vocab: int = 16,
        *,
        n_seq: int = 64,
        suppressed: Sequence[int] = (),
        windowed: bool = False,
        decimals: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(n_vocab, **options)
        self.n_seq = n_seq
        self.suppress_tokens = tuple(suppressed)
        self.windowed = windowed
        self.decimals = decimals
        self.trees: list[MockTree] = []

    @property
    def can_branch(self) -> bool:
        return self.can_rollback

    def row(self, context: Sequence[int]) -> NDArray[np.float32]:
        row = super().row(context)
        return row if self.decimals is None else np.round(row, self.decimals)

    def tree(self, root: Node) -> MockTree:
        self.trees.append(MockTree(self, root))
        return self.trees[-1]


class MockTree:
    """Tree that only tracks which nodes are in the cache; an assertion fails if llama.cpp would fail."""

    def __init__(self, target: MockBranchingTarget, root: Node) -> None:
        assert root.length == len(target.tokens)
        self._target = target
        self._root = root
        self._prompt = list(target.tokens)
        self._nodes = {root}
        self.leaves = target.n_seq - 1
        self.max_batch = target.max_batch
        self.windowed = target.windowed
        self.max_cells = len(self._prompt)
        self.closed = False

    def evaluate(self, nodes: Sequence[Node]) -> NDArray[np.float32]:
        assert not self.closed
        assert 0 < len(nodes) <= self.max_batch
        for node in nodes:
            assert node not in self._nodes
            assert node.parent in self._nodes
            assert node.length == node.parent.length + 1
            self._nodes.add(node)
        inner = {node.parent for node in self._nodes}
        assert len(self._nodes - inner) <= self.leaves
        self.max_cells = max(self.max_cells, len(self._prompt) + len(self._nodes) - 1)
        assert self.max_cells <= self._target.n_ctx + self._target.max_batch
        target = self._target
        target.batches.append(len(nodes))
        if target._seconds is not None and target._clock is not None:
            target._clock.now += target._seconds(len(nodes))
        return target._return_rows([target.row([*self._prompt, *node.path()]) for node in nodes])

    def keep(self, nodes: Iterable[Node]) -> None:
        assert not self.closed
        ancestors = {self._root}
        lengths = set()
        for node in nodes:
            assert node in self._nodes
            lengths.add(node.length)
            ancestor: Node | None = node
            while ancestor is not None and ancestor not in ancestors:
                ancestors.add(ancestor)
                ancestor = ancestor.parent
        if self.windowed:
            assert max(lengths) - min(lengths) <= 1
        self._nodes = ancestors

    def close(self) -> None:
        self.closed = True
