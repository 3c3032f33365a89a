"""`NGramPredictor`: counts what followed each short context and chains the likeliest into a draft.

After the n-gram predictor that akunu's book describes in its chapter on speculative decoding: a table per order, FNV-1a
keys, the longest known context first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal

from ngramspec.drafting.draft import Chooser, Draft

MAX_PAIRS = 65_536  # most (context, next token) pairs in a bounded `CountTable`
MAX_CONTINUATIONS = 256  # most distinct next tokens of one context in a bounded `CountTable`


class Shares(Mapping[int, float]):
    """Counts as probabilities, divided only when asked for: dividing 256 of them takes longer than a greedy draft."""

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
    """The tokens seen after one context. Read-only to everyone but the table that holds it."""

    __slots__ = ("best", "counts", "total")

    def __init__(self, token: int) -> None:
        self.counts = {token: 1}  # next token -> how often, least recently seen first
        self.best = token  # the most frequent of them, the most recently seen among equals
        self.total = 1  # the sum of the counts

    def add(self, token: int) -> None:
        """Count `token` once more. Being the latest now, it wins every tie that it reaches."""
        counts = self.counts
        count = counts.pop(token, 0) + 1
        counts[token] = count
        self.total += 1
        if token != self.best and count >= counts[self.best]:
            self.best = token

    def subtract(self, token: int) -> None:
        """Undo the oldest `add(token)`. O(1), or O(distinct tokens) if `token` was the best."""
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
"""What a table holds per context: a bare token id after one occurrence, counts after more, which halves the memory."""


class CountTable(OrderedDict[int, Entry]):
    """Context key -> `Entry`, least recently updated first.

    A bounded one drops the least recently updated contexts beyond `MAX_PAIRS`; beyond `MAX_CONTINUATIONS` a context
    drops the least recently seen token that is not its most frequent. Any other forgets what it is told to.
    """

    def __init__(self, *, bounded: bool = True) -> None:
        super().__init__()
        self.bounded = bounded
        self.pairs = 0  # (context, next token) held now, where that is bounded

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
            if known < MAX_CONTINUATIONS or not self.bounded:
                self.pairs += 1
            else:
                entry.drop_stale()
        while self.bounded and self.pairs > MAX_PAIRS:
            _, oldest = self.popitem(last=False)
            self.pairs -= len(oldest.counts) if isinstance(oldest, Continuations) else 1

    def subtract(self, key: int, token: int) -> None:
        """Undo the oldest `add(key, token)` of a table without bounds. As costly as `Continuations.subtract`."""
        entry = self[key]
        if isinstance(entry, Continuations) and entry.total > 1:
            entry.subtract(token)
        else:
            del self[key]


GoOn = Callable[[int, int, int], bool]
"""Asked after each drafted token: (length of its context, its count, the context's total)."""

FNV_BASIS = 14695981039346656037
FNV_PRIME = 1099511628211
_MASK = (1 << 64) - 1


def fnv1a(tokens: Iterable[int]) -> int:
    """64-bit FNV-1a over token ids, oldest first, with a whole id in the place of FNV's octet.

    h <- (h xor token) * 1099511628211 mod 2^64 for each token, from h = 14695981039346656037 on. Source: Noll, Vo,
    Eastlake, Hansen, "The FNV Non-Cryptographic Hash Algorithm" (RFC 9923).
    """
    key = FNV_BASIS
    for token in tokens:
        key = ((key ^ token) * FNV_PRIME) & _MASK
    return key


def roll(keys: Sequence[int], token: int, orders: int) -> list[int]:
    """Keys of the contexts of 1 to `orders` tokens that end at `token`, from those that ended at the token before it.

    `keys[k - 1]` is the `fnv1a` of the last k tokens; near the start of a text there are fewer. The hash runs in text
    order, so k tokens hash to the key of the first k - 1 of them, mixed with the last.
    """
    prime = FNV_PRIME
    rolled = [((FNV_BASIS ^ token) * prime) & _MASK]
    for key in keys[: orders - 1]:
        rolled.append(((key ^ token) * prime) & _MASK)
    return rolled


class NGramPredictor:
    """N-gram draft predictor: tables of orders 2 to `max_order` over the tokens seen so far.

    Args:
        max_order: longest n-gram counted, 2 to 8; contexts have 1 to `max_order - 1` tokens.
        draft_count: how many tokens `predict` drafts when it is given no limit.
        window: how many of the latest tokens count as history, `max_order` or more.
        evict: what becomes of the counts of tokens that leave the window.

            - "keep" (akunu's): they stay. The window bounds the history alone (`len`), `CountTable` the memory.
            - "decrement": a true sliding window: the tables equal those built from the last `window` tokens alone.

    Raises:
        ValueError: an argument is out of its range.

    Example: 5 6 7 5 6 8 5 6 was seen. Its last three tokens (8 5 6) never had a successor; (5 6)
    had 7 and 8, once each, so the latest wins: 8. Then (5 6 8) had 5, and (6 8 5) had 6. After
    those comes (8 5 6) again, hence (5 6) and 8 once more.

    >>> predictor = NGramPredictor()
    >>> predictor.update_batch([5, 6, 7, 5, 6, 8, 5, 6])
    >>> draft = predictor.predict()
    >>> draft.tokens, draft.match, draft.support
    ((8, 5, 6, 8), (2, 3, 3, 2), (2, 1, 1, 2))
    >>> dict(draft.q[0])
    {7: 0.5, 8: 0.5}

    Complexity: O(max_order) table operations per `update` and per drafted token, plus a copy of the counts for each
    `q`. With "decrement", a search among the continuations of a context (at most `window`) whenever the oldest token's
    was its best. Memory: O(MAX_PAIRS) or O(window) per order.

    Contexts are told apart by 64 bits of hash alone: two that collide share their counts, which costs wrong guesses.
    """

    def __init__(
        self,
        *,
        max_order: int = 4,
        draft_count: int = 4,
        window: int = 512,
        evict: Literal["keep", "decrement"] = "keep",
    ) -> None:
        if not 2 <= max_order <= 8:
            raise ValueError(f"max_order must be 2 to 8, not {max_order}")
        if draft_count < 1:
            raise ValueError(f"draft_count must be 1 or more, not {draft_count}")
        if window < max_order:
            raise ValueError(f"window must be max_order ({max_order}) or more, not {window}")
        if evict not in ("keep", "decrement"):
            raise ValueError(f'evict must be "keep" or "decrement", not {evict!r}')
        self.max_order = max_order
        self.draft_count = draft_count
        self.window = window
        self.evict = evict
        self.reset()

    def reset(self) -> None:
        """Forget everything seen."""
        orders = self.max_order - 1
        sliding = self.evict == "decrement"
        self._history: deque[int] = deque()
        self._keys: list[int] = []
        self._tables = [CountTable(bounded=not sliding) for _ in range(orders)]
        # The tables that forget what leaves the window: all of them or none.
        self._sliding = self._tables if sliding else []

    def __len__(self) -> int:
        """Number of tokens now in the window."""
        return len(self._history)

    @property
    def keys(self) -> list[int]:
        """Keys of the contexts that end at the newest token, shortest first (a copy)."""
        return list(self._keys)

    def lookup(self, keys: Sequence[int]) -> tuple[int, Continuations] | None:
        """The longest known context among `keys`: (its length, what followed it); None if none is.

        `predict` is made of `keys`, `lookup` and `roll`:

        >>> predictor = NGramPredictor()
        >>> predictor.update_batch([5, 6, 7, 5])
        >>> length, found = predictor.lookup(predictor.keys)
        >>> length, found.best, found.total
        (1, 6, 1)
        >>> length, found = predictor.lookup(roll(predictor.keys, found.best, predictor.max_order - 1))
        >>> length, found.best
        (2, 7)
        """
        tables = self._tables
        for index in range(len(keys) - 1, -1, -1):
            entry = tables[index].get(keys[index])
            if entry is not None:
                found = entry if isinstance(entry, Continuations) else Continuations(entry)
                return index + 1, found
        return None

    def suppose(self, token: int) -> None:
        """Count a token after each context that ends now, without appending it; "decrement" never takes that back."""
        for table, key in zip(self._tables, self._keys, strict=False):  # few keys at the start
            table.add(key, token)

    def update(self, token: int) -> None:
        """Append one token and count it after each context that ends before it."""
        history = self._history
        if len(history) == self.window:
            self._drop_oldest()
        self.suppose(token)
        self._keys = roll(self._keys, token, self.max_order - 1)
        history.append(token)

    def update_batch(self, tokens: Sequence[int]) -> None:
        """Append many tokens, such as a prompt: the same as `update` on each in turn, but faster, table by table."""
        if self._sliding and len(tokens) >= self.window:
            self.reset()  # whatever came before leaves the window anyway
            tokens = tokens[-self.window :]
        prime = FNV_PRIME
        newest = []
        ending = [((FNV_BASIS ^ token) * prime) & _MASK for token in tokens]  # at each token
        for order, table in enumerate(self._tables):
            if not ending:
                break
            newest.append(ending.pop())
            contexts = self._keys[order : order + 1] + ending  # of length order + 1, by follower
            followers = tokens[len(tokens) - len(contexts) :]
            add = table.add
            ending = []
            for key, token in zip(contexts, followers, strict=True):
                add(key, token)
                ending.append(((key ^ token) * prime) & _MASK)
        if tokens:
            self._keys = newest
        self._history.extend(tokens)
        # Only now: n-grams that begin in the old window may end in the batch.
        for _ in range(len(self._history) - self.window):
            self._drop_oldest()

    def predict(self, limit: int | None = None, choose: Chooser | None = None, go_on: GoOn | None = None) -> Draft:
        """Draft what most often followed the longest known context, token by token.

        Args:
            limit: most tokens to draft; `draft_count` if None.
            choose: picks a token from the counts of the context, instead of the most frequent one.
            go_on: told about each token drafted; the draft ends with the one it answers False to.

        Returns:
            The draft, without `chances`; shorter than `limit`, or empty, if no table knows the context.

        Raises:
            ValueError: `limit` is negative, or `choose` returned a token it was not offered.
        """
        if limit is None:
            limit = self.draft_count
        elif limit < 0:
            raise ValueError(f"limit must be 0 or more, not {limit}")
        orders = self.max_order - 1
        keys = self._keys
        tokens, q, match, support = [], [], [], []
        for offset in range(limit):
            known = self.lookup(keys)
            if known is None:
                break
            length, found = known
            if choose is None:
                token = found.best
            else:
                token = choose(offset, found.counts)
                if token not in found.counts:
                    raise ValueError(f"choose returned {token}, which is not among the counts")
            tokens.append(token)
            q.append(found.probabilities())
            match.append(length)
            support.append(found.total)
            if go_on is not None and not go_on(length, found.counts[token], found.total):
                break
            keys = roll(keys, token, orders)
        return Draft(tuple(tokens), tuple(q), tuple(match), tuple(support), source="ngram")

    def _drop_oldest(self) -> None:
        """Take the oldest token out of the window, and its n-grams out of sliding tables."""
        history = self._history
        token = history.popleft()
        key = FNV_BASIS
        for table, follower in zip(self._sliding, history, strict=False):  # a follower per table
            key = ((key ^ token) * FNV_PRIME) & _MASK
            table.subtract(key, follower)
            token = follower
