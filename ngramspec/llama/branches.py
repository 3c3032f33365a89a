"""Several continuations of a text in one cache: `BranchingSequence` for temporary branches, `Cells` for beam search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ngramspec.backend import Logits
from ngramspec.llama.cache import Cache
from ngramspec.llama.passes import MAX_EVALUATE, Passes
from ngramspec.llama.sequence import CacheSequence
from ngramspec.tokens import Node

Branch = tuple[int, tuple[int, ...]]
"""A branch next to a sequence, as a pair (fork, path).

The first `fork` + 1 new tokens of the sequence come before the branch. The tokens of `path` follow them instead of the
sequence's tokens; the last one is the branch's own token.
"""


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

        A branch is listed after the branches that it extends. Return the logits after each token, bit-identical to
        those of `evaluate` for a batch with as many additional tokens as there are branches, then after each branch.
        """
        passes, n = self._passes, len(tokens) + len(branches)
        self.settle()
        start = len(self.tokens)
        if not tokens or n > MAX_EVALUATE or start + n > self.n_ctx + MAX_EVALUATE:
            raise ValueError(f"{len(tokens)} tokens and {len(branches)} tokens of branches do not fit after {start}")
        owners, used = _owners(len(tokens), branches)
        if used > self.leaves:
            raise ValueError(f"{used} branches are more than {self.leaves} sequences can hold")
        for sequence in range(1, used + 1):
            passes.share(0, sequence, start)
        positions = [*range(start, start + len(tokens)), *(start + fork + len(path) for fork, path in branches)]
        row_tokens = [*tokens, *(path[-1] for _, path in branches)]
        try:
            logits = passes.branch(list(zip(row_tokens, positions, owners, strict=True)))
        except BaseException:
            passes.cut(0, start)
            raise
        finally:
            for sequence in range(1, used + 1):
                passes.cut(sequence, start)
        self.cache.length += len(tokens)
        self.tokens += tokens
        return logits


def _owners(count: int, branches: Sequence[Branch]) -> tuple[list[list[int]], int]:
    """Return the sequences of each row, one for each branch that no other extends, and the number of these."""
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


class Cells:
    """The nodes in the KV cache of a context. Its sequence 0 contains the prompt, which stays.

    A cell of llama.cpp's cache can belong to several sequences. A path from the prompt to a leaf is one sequence, and a
    fork adds a number to cells instead of copying them. In a pass each token sees only its own path.

    If the cache may discard tokens before a sliding window (`is_windowed`), no kept path may be longer than a path that
    continues: tokens before the longer path's window may be gone.
    """

    def __init__(self, passes: Passes, root: Node, n_seq: int, *, is_windowed: bool) -> None:
        self._passes, self._root, self.is_windowed = passes, root, is_windowed
        self.max_batch = passes.max_rows
        self.leaves = n_seq - 1  # maximum number of leaves at once
        self._held = {root: 0}  # a sequence that contains each node
        self.clear()  # remove what `BranchingSequence.ask` may have left in other sequences
        self.keep([])

    def evaluate(self, nodes: Sequence[Node]) -> Logits:
        """Evaluate nodes in one pass, each after its parent, and return the logits after each, valid until the next."""
        # Each leaf gets a sequence. A node belongs to the sequences of all leaves after it.
        owners: dict[Node, list[int]] = {node: [] for node in nodes}
        for node in reversed(owners):
            sequences = owners[node]
            if not sequences:
                sequences.append(self._sequence_for(node))
            if node.parent in owners:
                owners[node.parent] += sequences
        logits = self._passes.branch([(node.token, node.length - 1, owners[node]) for node in owners])
        self._held |= {node: sequences[0] for node, sequences in owners.items()}
        return logits

    def keep(self, nodes: Iterable[Node]) -> None:
        """Keep the prompt, these nodes and all nodes before them, and free the cells of all others."""
        held, self._tips = {self._root: 0}, dict[Node, int]()
        # The longest nodes come first: all nodes before a leaf are in that leaf's sequence, which does not change.
        for node in sorted(nodes, key=lambda node: node.length, reverse=True):
            sequence = self._held[node]
            if node not in held:
                self._tips[node] = sequence
            at: Node | None = node
            while at is not None and at not in held:
                held[at] = sequence
                at = at.parent
        self._held = held
        lengths = {sequence: node.length for node, sequence in self._tips.items()}
        self._free = [sequence for sequence in range(1, 1 + self.leaves) if sequence not in lengths]
        # A free sequence keeps the prompt, so that the prompt is not copied again.
        lengths |= dict.fromkeys(self._free, 0 if self.is_windowed else self._root.length)
        for sequence, length in lengths.items():
            if self._passes.length(sequence) > length:
                self._passes.cut(sequence, length)

    def clear(self) -> None:
        """Remove everything from the cache except the prompt in sequence 0."""
        self._passes.cut(-1, self._root.length)
        for sequence in range(1, 1 + self.leaves):
            self._passes.cut(sequence, 0)

    def _sequence_for(self, leaf: Node) -> int:
        """Return a sequence that contains exactly the cached part of the path to `leaf`."""
        base = leaf.parent
        while base not in self._held:
            assert base is not None
            base = base.parent
        if base in self._tips:
            return self._tips.pop(base)
        sequence = self._free.pop()
        self._passes.share(self._held[base], sequence, base.length)
        return sequence
