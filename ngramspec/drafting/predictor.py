# cython: language_level=3
"""`NGramPredictor`: counts the tokens that followed each short context, and chains the most likely into a draft.

It follows the n-gram predictor in akunu's book, in the chapter on speculative decoding: a table per order, FNV-1a keys,
the longest known context first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from ngramspec.drafting.acceptance_estimator import AcceptanceEstimator, pick
from ngramspec.drafting.draft import Ask, Chooser, Draft, Drafter

MAX_PAIRS = 65_536  # maximum number of (context, next token) pairs in a `CountTable`
MAX_CONTINUATIONS = 256  # maximum number of distinct next tokens of one context


class Shares(Mapping[int, float]):
    """Counts as probabilities, which are divided on access: dividing 256 of them takes longer than a greedy draft."""

    __slots__ = ("_counts", "_total")

    def __init__(self, counts: Mapping[int, int], total: int) -> None:
        self._counts, self._total = counts, total

    def __getitem__(self, token: int) -> float:
        return self._counts[token] / self._total

    def __iter__(self) -> Iterator[int]:
        return iter(self._counts)

    def __len__(self) -> int:
        return len(self._counts)


class Continuations:
    """The tokens that followed one context; only the table that contains the instance may change it."""

    __slots__ = ("best", "counts", "total")

    def __init__(self, token: int) -> None:
        self.counts = {token: 1}  # count by next token, the least recently seen first
        self.best = token  # most frequent next token, the most recently seen among equals
        self.total = 1  # sum of the counts

    def add(self, token: int) -> None:
        """Count an occurrence of `token`; as the latest token, it becomes `best` if its count is equal."""
        counts = self.counts
        count = counts.pop(token, 0) + 1
        counts[token] = count
        self.total += 1
        if token != self.best and count >= counts[self.best]:
            self.best = token

    def drop_stale(self) -> None:
        """Remove the least recently seen token, or the next one if that is the best, so that `best` stays valid."""
        stale, next_stale = islice(self.counts, 2)
        if stale == self.best:
            stale = next_stale
        self.total -= self.counts.pop(stale)

    def probabilities(self) -> Mapping[int, float]:
        """Return the counts divided by their sum, as a copy that does not change later."""
        if len(self.counts) == 1:
            return {self.best: 1.0}
        return Shares(self.counts.copy(), self.total)


Entry = int | Continuations
"""Entry of a table for a context: a token id after one occurrence, and counts after more. This halves the memory."""


class CountTable(OrderedDict[int, Entry]):
    """A mapping from context keys to entries, the least recently updated first, which it drops beyond `MAX_PAIRS`.

    Beyond `MAX_CONTINUATIONS`, a context drops the least recently seen token except its most frequent one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pairs = 0  # number of stored (context, next token) pairs

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
            n_before = len(counts)
            entry.add(token)
            if len(counts) == n_before:
                return
            if n_before < MAX_CONTINUATIONS:
                self.pairs += 1
            else:
                entry.drop_stale()
        while self.pairs > MAX_PAIRS:
            _, oldest = self.popitem(last=False)
            self.pairs -= len(oldest.counts) if isinstance(oldest, Continuations) else 1


# The keys are 64-bit FNV-1a hashes (Noll, Vo, Eastlake, Hansen, "The FNV Non-Cryptographic Hash Algorithm", RFC 9923)
# of token ids, the oldest first. A whole id replaces FNV's octet: h <- (h xor token) * FNV_PRIME mod 2^64, starting
# with FNV_BASIS.
FNV_BASIS = 14695981039346656037
FNV_PRIME = 1099511628211
_MASK = (1 << 64) - 1


def roll(keys: Sequence[int], token: int, orders: int) -> list[int]:
    """Return the keys of the contexts of 1 to `orders` tokens that end at `token`, given those at the previous token.

    `keys[k - 1]` is the hash of the last k tokens; near the start of a text there are fewer keys.
    """
    prime = FNV_PRIME
    next_keys = [((FNV_BASIS ^ token) * prime) & _MASK]
    for key in keys[: orders - 1]:
        next_keys.append(((key ^ token) * prime) & _MASK)
    return next_keys


class NGramPredictor:
    """An n-gram draft predictor with tables of orders 2 to `max_order` over the tokens so far.

    Args:
        max_order: Length of the longest n-gram, 2 to 8; contexts have 1 to `max_order - 1` tokens.
        draft_count: Number of tokens that `predict` drafts without a limit.
        window: Number of latest tokens that count as history (`len`), at least `max_order`. As in akunu, the counts of
            tokens that leave the window are kept; `CountTable` limits the memory.

    Raises:
        ValueError: An argument is out of range.

    >>> predictor = NGramPredictor()
    >>> predictor.update_batch([5, 6, 7, 5, 6, 8, 5, 6])
    >>> draft = predictor.predict()
    >>> draft.tokens, draft.match_lengths, draft.context_counts
    ((8, 5, 6, 8), (2, 3, 3, 2), (2, 1, 1, 2))
    >>> dict(draft.q[0])
    {7: 0.5, 8: 0.5}

    Complexity: O(max_order) table operations per `update` and per draft token, plus a copy of the counts for each `q`.
    Memory: O(MAX_PAIRS) per order.

    Contexts are distinguished only by a 64-bit hash. Two contexts that collide share their counts, which causes wrong
    guesses.
    """

    def __init__(self, *, max_order: int = 4, draft_count: int = 4, window: int = 512) -> None:
        if not 2 <= max_order <= 8:
            raise ValueError(f"max_order must be 2 to 8, not {max_order}")
        if draft_count < 1:
            raise ValueError(f"draft_count must be 1 or more, not {draft_count}")
        if window < max_order:
            raise ValueError(f"window must be max_order ({max_order}) or more, not {window}")
        self.max_order, self.draft_count, self.window = max_order, draft_count, window
        self.reset()

    def reset(self) -> None:
        """Remove all tokens and counts."""
        self._history: deque[int] = deque(maxlen=self.window)
        self._keys: list[int] = []  # keys of the contexts that end at the newest token, shortest first
        self._tables = [CountTable() for _ in range(self.max_order - 1)]

    def __len__(self) -> int:
        """Return the number of tokens in the window."""
        return len(self._history)

    def _lookup(self, keys: Sequence[int]) -> tuple[int, Continuations] | None:
        """Return the length of the longest known context among `keys`, and its continuations; `None` if all are new."""
        tables = self._tables
        for index in range(len(keys) - 1, -1, -1):
            entry = tables[index].get(keys[index])
            if entry is not None:
                return index + 1, entry if isinstance(entry, Continuations) else Continuations(entry)
        return None

    def count_candidate(self, token: int) -> None:
        """Count a token after each context that ends at the newest token, without appending it."""
        for table, key in zip(self._tables, self._keys, strict=False):  # there are fewer keys at the start of a text
            table.add(key, token)

    def update(self, token: int) -> None:
        """Append one token and count it after each context that ends before it."""
        self.count_candidate(token)
        self._keys = roll(self._keys, token, self.max_order - 1)
        self._history.append(token)

    def update_batch(self, tokens: Sequence[int]) -> None:
        """Append many tokens, such as a prompt."""
        for token in tokens:
            self.update(token)

    def predict(
        self,
        limit: int | None = None,
        choose: Chooser | None = None,
        should_continue: Callable[[int, int, int], bool] | None = None,
    ) -> Draft:
        """Draft the most frequent continuation of the longest known context, token by token.

        Args:
            limit: Maximum number of draft tokens; `None` means `draft_count`.
            choose: Function that picks a token from the counts of the context, instead of the most frequent one.
            should_continue: Function of the length of the context, the token's count and the total of the context. If
                it returns False, the draft ends after the token.

        Returns:
            The draft, without `acceptance_probs`; shorter than `limit`, or empty, if no table contains the context.

        Raises:
            ValueError: `limit` is negative, or `choose` returned a token without a count.
        """
        if limit is None:
            limit = self.draft_count
        elif limit < 0:
            raise ValueError(f"limit must be 0 or more, not {limit}")
        orders = self.max_order - 1
        keys = self._keys
        tokens, q, match, context_counts = [], [], [], []
        for offset in range(limit):
            entry = self._lookup(keys)
            if entry is None:
                break
            length, continuations = entry
            token = continuations.best if choose is None else pick(choose, offset, continuations.counts)
            tokens.append(token)
            q.append(continuations.probabilities())
            match.append(length)
            context_counts.append(continuations.total)
            if should_continue is not None and not should_continue(
                length, continuations.counts[token], continuations.total
            ):
                break
            keys = roll(keys, token, orders)
        return Draft(tuple(tokens), tuple(q), tuple(match), tuple(context_counts), source="ngram")


class NGramDrafter(Drafter):
    """An `NGramPredictor` as a drafter, which learns from every proposal, whether it was verified or not."""

    name = "ngram"

    def __init__(self, predictor: NGramPredictor | None = None) -> None:
        self.predictor = NGramPredictor() if predictor is None else predictor
        self._estimator = AcceptanceEstimator()

    def begin(self, prompt: Sequence[int]) -> None:
        self.predictor.reset()
        self.predictor.update_batch(prompt)
        self._estimator.begin()

    def propose(self, ask: Ask) -> Draft:
        estimator = self._estimator
        estimator.open(ask.price)
        draft = self.predictor.predict(ask.limit, ask.choose, estimator.add_guess)
        estimator.close(draft.tokens)
        probs = estimator.acceptance_probs
        if ask.fixed_length and draft.tokens:
            estimate = estimator.estimate_undrawn(draft.match_lengths[0], draft.q[0], draft.context_counts[0])
            probs = [estimate] * ask.limit
        return Draft(draft.tokens, draft.q, draft.match_lengths, draft.context_counts, tuple(probs), self.name)

    def accept(self, tokens: Sequence[int]) -> int:
        self.predictor.update_batch(tokens)
        return self._estimator.record_outcome(tokens)
