"""Which tokens followed a context, how often and how lately; two tables that forget differently.

Contract: a context is an opaque integer key here. Learning is O(1), amortised; unlearning says when
it is not. Used by `ngramspec.drafting.predictor`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import islice

MAX_PAIRS = 65_536
"""Most (context, next token) pairs in a `BoundedTable`."""

MAX_CONTINUATIONS = 256
"""Most distinct next tokens of one context in a `BoundedTable`."""


class Shares(Mapping[int, float]):
    """Counts as probabilities (token id -> count / total), divided only when asked for.

    Greedy decoding never looks at them, and dividing 256 counts takes longer than a whole draft.
    """

    __slots__ = ("_counts", "_total")

    def __init__(self, counts: Mapping[int, int], total: int) -> None:
        self._counts = counts
        self._total = total

    def __getitem__(self, token: int) -> float:
        return self._counts[token] / self._total

    def __iter__(self) -> Iterator[int]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)


class Continuations:
    """The tokens seen after one context. Read-only to everyone but the table that holds it.

    Attributes:
        counts: next token -> how often, least recently seen first.
        best: the most frequent of them, the most recently seen among equals.
        total: the sum of the counts.
    """

    __slots__ = ("best", "counts", "total")

    def __init__(self, token: int) -> None:
        self.counts = {token: 1}
        self.best = token
        self.total = 1

    def add(self, token: int) -> None:
        """Count `token` once more. Being the latest now, it wins every tie that it reaches."""
        counts = self.counts
        count = counts.pop(token, 0) + 1
        counts[token] = count
        self.total += 1
        if token != self.best and count >= counts[self.best]:
            self.best = token

    def subtract(self, token: int) -> None:
        """Undo the oldest `add(token)`. O(1), or O(distinct tokens) if `token` was the best.

        A token keeps its place in the order until its last occurrence goes: its latest one stays.
        """
        counts = self.counts
        count = counts[token] - 1
        if count:
            counts[token] = count
        else:
            del counts[token]
        self.total -= 1
        if token == self.best:
            self.best = max(reversed(counts), key=counts.__getitem__)

    def drop_stale(self) -> None:
        """Forget the least recently seen token, but never the best: so the best stays known."""
        stale, next_stale = islice(self.counts, 2)
        if stale == self.best:
            stale = next_stale
        self.total -= self.counts.pop(stale)

    def probabilities(self) -> Mapping[int, float]:
        """The counts divided by their sum: a copy, which later learning leaves as it is."""
        if len(self.counts) == 1:
            return {self.best: 1.0}
        return Shares(self.counts.copy(), self.total)


Entry = int | Continuations
"""What a table holds per context: a bare token id after one occurrence, counts after more.

Text that repeats little takes half the memory so, and leaves the garbage collector little to walk.
"""


class BoundedTable(OrderedDict[int, Entry]):
    """Context key -> `Entry`, least recently updated first. Forgets only when it is full.

    Beyond `MAX_PAIRS` it drops the least recently updated contexts; beyond `MAX_CONTINUATIONS` a
    context drops the least recently seen token that is not its most frequent.

    Attributes:
        pairs: (context, next token) pairs held now.
    """

    pairs = 0

    def add(self, key: int, token: int) -> None:
        """Count `token` after context `key`."""
        entry = self.get(key)
        if entry is None:
            self[key] = token
            self.pairs += 1
        else:
            self.move_to_end(key)
            if not isinstance(entry, Continuations):
                entry = self[key] = Continuations(entry)
            counts = entry.counts
            known = len(counts)
            entry.add(token)
            if len(counts) == known:
                return
            if known < MAX_CONTINUATIONS:
                self.pairs += 1
            else:
                entry.drop_stale()
        while self.pairs > MAX_PAIRS:
            _, oldest = self.popitem(last=False)
            self.pairs -= len(oldest.counts) if isinstance(oldest, Continuations) else 1


class ExactTable(dict[int, Entry]):
    """Context key -> `Entry`. Forgets exactly what it is told to."""

    def add(self, key: int, token: int) -> None:
        """Count `token` after context `key`."""
        entry = self.get(key)
        if entry is None:
            self[key] = token
        elif isinstance(entry, Continuations):
            entry.add(token)
        else:
            entry = self[key] = Continuations(entry)
            entry.add(token)

    def subtract(self, key: int, token: int) -> None:
        """Undo the oldest `add(key, token)`. As costly as `Continuations.subtract`."""
        entry = self[key]
        if isinstance(entry, Continuations) and entry.total > 1:
            entry.subtract(token)
        else:
            del self[key]
