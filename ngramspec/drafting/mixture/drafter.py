"""`MixtureDrafter`: the default drafter. Every source proposes at every position, and what is judged likeliest wins.

The work is done by `ngramspec.drafting.mixture.guesser`; this puts it behind the protocol of
`ngramspec.drafting.draft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ngramspec.drafting.draft import Chooser, Draft, Drafter, Question
from ngramspec.drafting.fading import FadingRate
from ngramspec.drafting.mixture import learnt
from ngramspec.drafting.mixture.guesser import Guesser
from ngramspec.drafting.mixture.secondary import OutcomeMap
from ngramspec.drafting.mixture.side_guesses import SideGuesses
from ngramspec.drafting.price import TokenPrice
from ngramspec.drafting.recall import Recall
from ngramspec.drafting.refused_rows import RefusedRows
from ngramspec.tokens import common_prefix

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LONGEST = 63
"""Most tokens in a draft."""

HOPELESS = 0.004
"""A draft ends when the probability that all of it is accepted has fallen below this, however cheap a token is."""

FREE = TokenPrice(0.0, [0.0] * (LONGEST + 1))
"""The price for callers that did not say what a token costs."""


class MixtureDrafter(Drafter):
    """Drafts from the context, from what it remembers, and from how well each of them lately did.

    Args:
        memory: texts to look up beside the context, kept up by its owner; True remembers earlier requests and
            what was emitted, in this drafter alone.
        kept: the file in which what its judge learns about tokens goes from one process to the next; None: nowhere.
    """

    name = "mixture"

    def __init__(self, memory: Recall | bool | None = None, kept: Path | None = None) -> None:
        self._guesser = Guesser()
        self._sides = SideGuesses(self._guesser)
        # What the target said when it was asked: behind the tokens that `accept` is told of next, and behind the text.
        self._heard: Sequence[int] = ()
        self._said: Sequence[int] = ()
        # How often it says the same in the pass after: nearly always, but for rounding and for what was drawn anew.
        self._trust = FadingRate(50.0, 50.5, fade=0.99)
        self._chances: Sequence[float] = ()
        self._own: Recall | None = None
        if memory is True:
            self._own = memory = Recall()
        self._memory: Recall | None = memory or None
        if self._memory is not None:
            self._guesser.memory = self._memory.indexes
        self._known = 0
        # The chance that a token comes next is not the chance that it is accepted once it was drawn, nor the chance
        # that a token yet to be drawn is accepted: each needs an estimate of its own.
        self._drawn, self._blind = OutcomeMap(), OutcomeMap()
        self._asked: tuple[OutcomeMap, Sequence[float]] | None = None
        self._rows, self._to_read = RefusedRows(), 0
        self._kept = kept
        if kept is not None:
            learnt.take_up(self._guesser.about_tokens(), learnt.read(kept))

    def keep(self) -> None:
        """Write down what its judge has learnt about tokens; of several processes that do, the last one counts."""
        if self._kept is not None:
            learnt.keep(self._kept, self._guesser.about_tokens())

    def beside(self) -> Self:
        """A drafter for another text at the same time: it shares memory, and what is learnt about tokens.

        Raises:
            ValueError: this one remembers requests by itself, which come one after the other.
        """
        if self._own is not None:
            raise ValueError("a drafter that remembers requests by itself drafts for one text at a time")
        other = copy(self)
        other._guesser = Guesser(self._guesser)
        other._sides = SideGuesses(other._guesser)
        other._asked = other._kept = None
        return other

    def begin(self, prompt: Sequence[int]) -> None:
        if self._own is not None:
            before = self._guesser.text()
            # What requests have in common from their start enters the memory once.
            self._own.hear(before[self._known :])
            self._known = common_prefix(before, prompt)
        self._asked = None
        self._heard = self._said = ()
        if self._memory is not None:
            self._memory.refresh()
        self._guesser.begin(prompt)

    def propose(
        self, limit: int, choose: Chooser | None = None, *, blind: bool = False, price: TokenPrice | None = None
    ) -> Draft:
        guesser = self._guesser
        price = price or FREE
        limit = min(limit, LONGEST, len(price.slopes) - 1)
        start = self._repeat(limit)
        sure = (self._trust.value,) * start
        self._want_rows(price)
        if choose is None:
            guesser.guess(limit, HOPELESS, price, start, self._trust.value**start)
            tokens, match, chances = guesser.chain()
            self._asked = None
            self._chances = (*sure, *chances[start:])
            return Draft(tokens, (), match, (), self._chances, self.name)
        if blind:
            # The likeliest chain is not drawn, so its chances may decide on the length of the one that is.
            limit = guesser.guess(limit, HOPELESS, price, start, self._trust.value**start)
            likeliest = guesser.chain()[2]
            self._repeat(start)
        q = self._draw(limit, choose, None if blind else price, start)
        tokens, match, chances = guesser.chain()
        self._asked = (self._blind, likeliest) if blind else (self._drawn, chances)
        secondary, given = self._asked
        self._chances = (*sure, *[secondary.estimate(p) for p in given[start:]])
        return Draft(tokens, q, match, (), self._chances, self.name)

    def _want_rows(self, price: TokenPrice) -> None:
        """Ask for rows behind refused tokens, where they are worth reading."""
        self._to_read = self._rows.worth_reading(price) if self._guesser.local else 0
        self.wants_logits = self._to_read > 0

    def _repeat(self, limit: int) -> int:
        """Begin the chain with what the target said when it was asked; how many tokens that are."""
        known = self._said[:limit]
        for at, token in enumerate(known):
            self._guesser.look(at)
            self._guesser.put(at, token)
        return len(known)

    def questions(self, sent: int, limit: int, leaves: int, price: TokenPrice) -> Sequence[Question]:
        return self._sides.find(self._chances, sent, limit, leaves, HOPELESS, price)

    def hear(self, answers: Sequence[int]) -> None:
        self._heard = answers

    def _draw(self, limit: int, choose: Chooser, price: TokenPrice | None, start: int) -> tuple[dict[int, float], ...]:
        """Make a chain of tokens picked by `choose`, behind the `start` that stand already; returns their q.

        Without a price, no look at the tokens decides on their number.
        """
        guesser = self._guesser
        guesser.pending = start
        q = [{guesser.guesses[at]: 1.0} for at in range(start)]
        reach = self._trust.value**start
        for at in range(start, limit):
            if guesser.look(at) < 0:
                break
            law = guesser.law(at)
            chosen = list(law).index(choose(at, law))
            guesser.take(at, chosen)
            q.append(law)
            reach *= self._drawn.estimate(guesser.chances[at])
            if price is not None and (reach < HOPELESS or not price.pays(reach, at + 1)):
                break
        return tuple(q)

    def see(self, tokens: Sequence[int], rows: NDArray[np.float32], accepted: int = 0) -> None:
        refused = rows[1 + accepted : len(tokens)][: self._to_read]
        if refused.size:
            self._guesser.hear(tokens[1:], accepted, self._rows.read(refused))

    def accept(self, tokens: Sequence[int]) -> int:
        for said, token in zip(self._said, tokens, strict=False):
            self._trust.add(said == token)
            if said != token:
                break
        repeated = len(self._said)
        self._said, self._heard = self._heard, ()
        # Rows are wanted of a pass that was drafted for at a price that says so, and of no other.
        self.wants_logits = False
        proposed = self._guesser.pending
        hits = self._guesser.accept(tokens)
        if self._asked is not None:
            secondary, chances = self._asked
            self._asked = None
            for at in range(repeated, min(hits + 1, proposed, len(tokens), len(chances))):
                secondary.learn(chances[at], at < hits)
        return hits


class MemoryDrafter(MixtureDrafter):
    """Drafts from what it remembers alone; the context only says where to look."""

    name = "memory"

    def __init__(self, memory: Recall | bool) -> None:
        super().__init__(memory)
        self._guesser.local = False
