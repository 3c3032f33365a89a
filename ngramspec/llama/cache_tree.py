"""`CacheTree`: many continuations of one prompt in one KV cache, as a tree; `ask`: some beside a text.

    root = Node(None, -1, len(prompt))
    with target.tree(root) as tree:
        a = root.child(token)                   # nodes are made freely
        b = a.child(other)
        logits = tree.evaluate([a, b])          # (2, n_vocab): ONE llama_decode
        tree.keep([b])                          # frees the cells of whatever is neither `b` nor before it

A node is a token and all that stands before it. llama.cpp has sequences: numbers that a cell of the cache carries, any
of them at once. A path from the root to a leaf is one sequence, and a fork copies no key and no value, it writes a
number into cells (`llama_memory_seq_cp` in a unified cache). In one llama_decode each token sees its own path only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import llama_cpp.llama_cpp as llama

from ngramspec.backend import Logits
from ngramspec.errors import TargetError
from ngramspec.llama.passes import MAX_EVALUATE, Passes
from ngramspec.llama.sequence import CacheSequence
from ngramspec.tokens import Node

Branch = tuple[int, tuple[int, ...]]
"""A token beside a text: how many of the text's new tokens but the first stand before it, and the tokens that follow
these instead of the text's, its own last."""


class CacheTree:
    """A tree of continuations in the cache of a context whose sequence 0 holds the prompt, and continues holding it.

    Args:
        passes: of the context.
        root: the prompt.
        count: sequences of the context, sequence 0 among them.
        windowed: the cache may give away what is behind a sliding window. What is kept between two passes must then
            not be longer than any path that continues: what is behind the window of the longer one may be gone.
    """

    max_batch = MAX_EVALUATE  # most tokens of a pass

    def __init__(self, passes: Passes, root: Node, *, count: int, windowed: bool) -> None:
        self._passes = passes
        self.leaves = count - 1  # most leaves that the tree can have at once
        self.windowed = windowed
        self.root = root  # the prompt
        self._held = [root.length, *[0] * self.leaves]  # tokens of each sequence
        self._spare = 0 if windowed else root.length  # of a free one at most: the prompt need not be copied again
        self._pinned: dict[Node, int] = {}
        self._free: list[int] = []
        self._keeps = 0
        self.close()  # branches leave their sequences there
        self.keep([])

    def evaluate(self, nodes: Sequence[Node]) -> Logits:
        """Put nodes into the cache, in one `llama_decode`; the logits after each, a view, valid until the next one.

        None of them is in the cache; the node before each of them is, or stands earlier in the list.

        Raises:
            ValueError: no nodes, too many, or too many leaves.
            TargetError: llama.cpp could not evaluate them, for want of room perhaps.
        """
        if not 0 < len(nodes) <= self.max_batch:
            raise ValueError(f"a pass takes 1 to {self.max_batch} tokens, got {len(nodes)}")
        # 1. A sequence for each leaf. What stands before it belongs to the sequences of all leaves after it.
        owners: dict[Node, list[int]] = {node: [] for node in nodes}
        for node in reversed(owners):
            sequences = owners[node]
            if not sequences:
                sequences.append(self._sequence_for(node))
            if node.parent in owners:
                owners[node.parent] += sequences
        # 2. One pass.
        rows = [(node.token, node.length - 1, sequences) for node, sequences in owners.items()]
        logits = self._passes.branch(rows)
        for node, sequences in owners.items():
            node.mark = self._keeps
            node.holder = sequences[0]
            for sequence in sequences:
                self._held[sequence] = node.length
        return logits

    def keep(self, nodes: Iterable[Node]) -> None:
        """Free the cells of all nodes but these, which the cache holds, those before them, and the prompt."""
        before, self._keeps = self._keeps, self._keeps + 1
        self.root.mark = self._keeps
        self._pinned.clear()
        # The longest first: what stands before a leaf is held by that leaf's sequence, which stays as it is.
        for node in sorted(nodes, key=lambda node: node.length, reverse=True):
            if node.mark < before:
                raise ValueError(f"token {node.token} at {node.length} is not in the cache")
            if node.mark == before:
                self._pinned[node] = node.holder
            at: Node | None = node
            while at is not None and at.mark != self._keeps:
                at.mark, at.holder = self._keeps, node.holder
                at = at.parent
        lengths = {sequence: node.length for node, sequence in self._pinned.items()}
        self._free = [sequence for sequence in range(1, len(self._held)) if sequence not in lengths]
        for sequence in range(1, len(self._held)):
            length = lengths.get(sequence, self._spare)
            if self._held[sequence] > length:
                cut_sequence(self._passes.memory, sequence, length)
                self._held[sequence] = length

    def close(self) -> None:
        """Leave nothing in the cache but the prompt, in sequence 0."""
        cut_sequence(self._passes.memory, -1, self.root.length)
        for sequence in range(1, len(self._held)):
            cut_sequence(self._passes.memory, sequence, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ sequences

    def _sequence_for(self, leaf: Node) -> int:
        """A sequence that holds what the cache has of the path to `leaf`, and no more."""
        base = leaf.parent
        while base is not None and base.mark != self._keeps:
            base = base.parent
        assert base is not None
        if base in self._pinned:
            return self._pinned.pop(base)
        if not self._free:
            raise ValueError(f"the tree has more leaves than {self.leaves} sequences can hold")
        sequence = self._free.pop()
        if (held := self._held[sequence]) < base.length:
            llama.llama_memory_seq_cp(self._passes.memory, base.holder, sequence, held, base.length)
            self._held[sequence] = base.length
        return sequence


# --------------------------------------------------------------------------- branches beside a text


def ask(passes: Passes, text: CacheSequence, leaves: int, tokens: Sequence[int], branches: Sequence[Branch]) -> Logits:
    """Evaluate branches beside a text that is alone in a cache whose sequences share their cells; see `Target.ask`.

        rows = ask(passes, text, 8, [last, a, b], [(0, (x,)), (0, (x, y)), (1, (z,))])   # last x y, and last a z

    What the pass appends to the text lies where `CacheSequence.evaluate` would have put it, so its logits are those of
    a padded batch of that size, bit for bit. Each branch has a sequence of its own; after the pass its cells are free
    again. Recurrent states and sliding windows would take memory for each sequence, so such models have no branches.
    """
    n, memory = len(tokens) + len(branches), passes.memory
    text.settle()
    start = len(text.tokens)
    if not tokens or n > MAX_EVALUATE or start + n > text.n_ctx + MAX_EVALUATE:
        raise ValueError(f"{len(tokens)} tokens and {len(branches)} tokens of branches do not fit behind {start}")
    owners, used = _owners(len(tokens), branches)
    if used > leaves:
        raise ValueError(f"{used} branches are more than {leaves} sequences can hold")
    for sequence in range(1, used + 1):
        held = llama.llama_memory_seq_pos_max(memory, sequence) + 1
        if held < start:
            llama.llama_memory_seq_cp(memory, 0, sequence, held, start)
    positions = [*range(start, start + len(tokens)), *(start + fork + len(path) for fork, path in branches)]
    asked = [*tokens, *(path[-1] for _, path in branches)]
    try:
        logits = passes.branch(list(zip(asked, positions, owners, strict=True)))
    except TargetError:
        cut_sequence(memory, 0, start)
        raise
    finally:
        for sequence in range(1, used + 1):
            cut_sequence(memory, sequence, start)
    text.cache.decoded(len(tokens))
    text.tokens += tokens
    return logits


def _owners(count: int, branches: Sequence[Branch]) -> tuple[list[list[int]], int]:
    """The sequences of each row, and how many there are beside the text's: one for each branch at or behind it."""
    numbers = {(fork, path): count + i for i, (fork, path) in enumerate(branches)}
    owners: list[list[int]] = [*([0] for _ in range(count)), *([] for _ in branches)]
    used = 0
    for fork, path in reversed(branches):
        of = owners[numbers[fork, path]]
        if not of:
            used += 1
            of.append(used)
        if len(path) > 1:
            owners[numbers[fork, path[:-1]]] += of
        else:
            for i in range(fork + 1):
                owners[i] += of
    return owners, used


def cut_sequence(memory: Any, sequence: int, length: int) -> None:
    """Leave the first `length` tokens in a sequence of llama.cpp's memory; -1: in all. TargetError if it does not."""
    if not llama.llama_memory_seq_rm(memory, sequence, length, -1):
        raise TargetError(f"llama.cpp did not cut sequence {sequence} to {length} tokens")
