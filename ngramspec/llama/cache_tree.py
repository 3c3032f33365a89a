"""`CacheTree`: many continuations of one prompt in a KV cache; `BranchingSequence`: branches next to a sequence.

    root = Node(None, -1, len(prompt))
    tree = target.tree(root)
    a = root.child(token)                   # creating a node evaluates nothing
    b = a.child(other)
    logits = tree.evaluate([a, b])          # (2, n_vocab): ONE llama_decode
    tree.keep([b])                          # frees the cells of all nodes but `b` and those before it
    tree.close()

A node is a token together with all tokens before it. llama.cpp stores sequence numbers in each cell of the cache, and
a cell can have several. A path from the root to a leaf is one sequence. A fork copies no keys or values: it adds a
number to cells (`llama_memory_seq_cp` in a unified cache). In one llama_decode each token sees only its own path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import llama_cpp.llama_cpp as llama

from ngramspec.backend import Logits
from ngramspec.data import TargetError
from ngramspec.llama.cache import Cache
from ngramspec.llama.passes import MAX_EVALUATE, Passes
from ngramspec.llama.sequence import CacheSequence
from ngramspec.tokens import Node

Branch = tuple[int, tuple[int, ...]]
"""A branch next to a sequence, as a pair (fork, path).

The first `fork` + 1 new tokens of the sequence come before the branch. The tokens of `path` follow them instead of the
sequence's tokens; the last one is the branch's own token.
"""


class CacheTree:
    """A tree of continuations in the cache of a context whose sequence 0 contains the prompt and keeps it.

    Args:
        passes: Passes of the context.
        root: Node of the prompt.
        count: Number of sequences in the context, including sequence 0.
        windowed: Whether the cache may discard tokens before a sliding window. Between two passes no kept path may then
            be longer than a path that continues: tokens before the longer path's window may be gone.
    """

    max_batch = MAX_EVALUATE  # maximum number of tokens in a pass

    def __init__(self, passes: Passes, root: Node, *, count: int, windowed: bool) -> None:
        self._passes = passes
        self.leaves = count - 1  # maximum number of leaves at once
        self.windowed = windowed
        self.root = root  # node of the prompt
        self._lengths = [root.length, *[0] * self.leaves]  # number of tokens in each sequence
        # A free sequence has at most this many tokens. It keeps the prompt, so that the prompt is not copied again.
        self._spare = 0 if windowed else root.length
        self._pinned: dict[Node, int] = {}
        self._free: list[int] = []
        self._keeps = 0
        self.close()  # remove the sequences that `ask` may have left in the cache
        self.keep([])

    def evaluate(self, nodes: Sequence[Node]) -> Logits:
        """Add nodes to the cache in one `llama_decode`, and return the logits after each.

        Args:
            nodes: Nodes that are not in the cache; the parent of each is in the cache or earlier in the list.

        Returns:
            A view that is valid until the next pass.

        Raises:
            ValueError: The list is empty, or has too many nodes or leaves.
            TargetError: llama.cpp could not evaluate the nodes, possibly for lack of room.
        """
        if not 0 < len(nodes) <= self.max_batch:
            raise ValueError(f"a pass takes 1 to {self.max_batch} tokens, got {len(nodes)}")
        # 1. Each leaf gets a sequence. A node belongs to the sequences of all leaves after it.
        owners: dict[Node, list[int]] = {node: [] for node in nodes}
        for node in reversed(owners):
            sequences = owners[node]
            if not sequences:
                sequences.append(self._sequence_for(node))
            if node.parent in owners:
                owners[node.parent] += sequences
        # 2. One pass evaluates all nodes.
        rows = [(node.token, node.length - 1, sequences) for node, sequences in owners.items()]
        logits = self._passes.branch(rows)
        for node, sequences in owners.items():
            node.mark = self._keeps
            node.holder = sequences[0]
            for sequence in sequences:
                self._lengths[sequence] = node.length
        return logits

    def keep(self, nodes: Iterable[Node]) -> None:
        """Keep the prompt, these nodes and all nodes before them, and free the cells of all others.

        Raises:
            ValueError: A node is not in the cache.
        """
        before, self._keeps = self._keeps, self._keeps + 1
        self.root.mark = self._keeps
        self._pinned.clear()
        # The longest nodes come first: all nodes before a leaf are in that leaf's sequence, which does not change.
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
        self._free = [sequence for sequence in range(1, len(self._lengths)) if sequence not in lengths]
        for sequence in range(1, len(self._lengths)):
            length = lengths.get(sequence, self._spare)
            if self._lengths[sequence] > length:
                cut_sequence(self._passes.memory, sequence, length)
                self._lengths[sequence] = length

    def close(self) -> None:
        """Remove everything from the cache except the prompt in sequence 0."""
        cut_sequence(self._passes.memory, -1, self.root.length)
        for sequence in range(1, len(self._lengths)):
            cut_sequence(self._passes.memory, sequence, 0)

    # ------------------------------------------------------------------ sequences

    def _sequence_for(self, leaf: Node) -> int:
        """Return a sequence that contains exactly the cached part of the path to `leaf`."""
        base = leaf.parent
        while base is not None and base.mark != self._keeps:
            base = base.parent
        assert base is not None
        if base in self._pinned:
            return self._pinned.pop(base)
        if not self._free:
            raise ValueError(f"the tree has more leaves than {self.leaves} sequences can hold")
        sequence = self._free.pop()
        if (length := self._lengths[sequence]) < base.length:
            llama.llama_memory_seq_cp(self._passes.memory, base.holder, sequence, length, base.length)
            self._lengths[sequence] = base.length
        return sequence


# --------------------------------------------------------------------------- branches next to a sequence


class BranchingSequence(CacheSequence):
    """A sequence that is alone in a cache whose llama.cpp sequences share their cells, for temporary branches.

    Recurrent states and sliding windows would take memory for each llama.cpp sequence, so such models have no branches.
    """

    def __init__(self, passes: Passes, cache: Cache, *, n_ctx: int, leaves: int) -> None:
        super().__init__(passes, cache, n_ctx=n_ctx)
        self.leaves = leaves  # maximum number of branches that no other branch extends

    def ask(self, tokens: Sequence[int], branches: Sequence[Branch]) -> Logits:
        """Append tokens as `evaluate` does and evaluate branches in the same pass; they leave nothing in the cache.

            rows = sequence.ask([last, a, b], [(0, (x,)), (0, (x, y)), (1, (z,))])   # last x y, and last a z

        The pass puts the new tokens into the same cells as `evaluate`. Each branch that no other extends has a separate
        llama.cpp sequence, whose cells are free again after the pass.

        Args:
            tokens: Tokens to append; at most `max_batch` together with the branches.
            branches: Distinct branches, each listed after the branches that it extends.

        Returns:
            Logits after each token, then after each branch. Those of the tokens are bit-identical to what `evaluate`
            returns for a batch that has as many additional tokens as there are branches.

        Raises:
            ValueError: There are more than `leaves` branches, or more than fit.
            TargetError: llama.cpp could not evaluate them; the cache is as before.
        """
        passes, n = self._passes, len(tokens) + len(branches)
        memory = passes.memory
        self.settle()
        start = len(self.tokens)
        if not tokens or n > MAX_EVALUATE or start + n > self.n_ctx + MAX_EVALUATE:
            raise ValueError(f"{len(tokens)} tokens and {len(branches)} tokens of branches do not fit after {start}")
        owners, used = _owners(len(tokens), branches)
        if used > self.leaves:
            raise ValueError(f"{used} branches are more than {self.leaves} sequences can hold")
        for sequence in range(1, used + 1):
            length = llama.llama_memory_seq_pos_max(memory, sequence) + 1
            if length < start:
                llama.llama_memory_seq_cp(memory, 0, sequence, length, start)
        positions = [*range(start, start + len(tokens)), *(start + fork + len(path) for fork, path in branches)]
        row_tokens = [*tokens, *(path[-1] for _, path in branches)]
        try:
            logits = passes.branch(list(zip(row_tokens, positions, owners, strict=True)))
        except TargetError:
            cut_sequence(memory, 0, start)
            raise
        finally:
            for sequence in range(1, used + 1):
                cut_sequence(memory, sequence, start)
        self.cache.length += len(tokens)
        self.tokens += tokens
        return logits


def _owners(count: int, branches: Sequence[Branch]) -> tuple[list[list[int]], int]:
    """Return the sequences of each row, and the number of sequences in addition to the text's.

    A row belongs to the sequences of all branches that contain it. Each branch that no other extends has a sequence.
    """
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
    """Keep the first `length` tokens in a sequence of llama.cpp's memory; -1 means all sequences."""
    if not llama.llama_memory_seq_rm(memory, sequence, length, -1):
        raise TargetError(f"llama.cpp did not cut sequence {sequence} to {length} tokens")
