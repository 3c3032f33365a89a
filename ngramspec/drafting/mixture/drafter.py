"""`MixtureDrafter`: the default drafter, around a `Guesser`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ngramspec.drafting.chances import OutcomeMap
from ngramspec.drafting.draft import Chooser, Draft, Drafter, MarginalCost
from ngramspec.drafting.mixture import learnt
from ngramspec.drafting.mixture.guesser import Guesser
from ngramspec.drafting.mixture.same_requests import AnswerStore, CurrentAnswer
from ngramspec.drafting.token_index import SEAM, TokenIndex
from ngramspec.sampling.settings import Sampling
from ngramspec.tokens import common_prefix

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST = 1 << 22  # maximum number of remembered tokens, about 12 bytes each; beyond it the older half is dropped


class Recall:
    """Texts to draft from in addition to the context. `ngramspec.memory.Memory` adds those that are stored on disk.

    Args:
        stored: Indexes of earlier texts, which never change.

    Attributes:
        indexes: Token indexes for lookups, the oldest first; only the last one changes. A negative token marks the seam
            between two texts. The list object stays the same.
        answers: Answers to earlier requests of this process; `None` if repeated requests are not treated specially.
    """

    def __init__(self, stored: Sequence[TokenIndex] = ()) -> None:
        self._heard = [TokenIndex()]
        self.indexes: list[TokenIndex] = [*stored, *self._heard]
        self.answers: AnswerStore | None = AnswerStore()

    def hear(self, tokens: Sequence[int]) -> None:
        """Add an answer to the memory of this process.

        An answer that stays in the context need not be added, because the context is looked up anyway.

        Args:
            tokens: Token ids, none of them negative.
        """
        if self._heard[-1].size > MOST // 2:
            del self.indexes[-len(self._heard) :]
            self._heard = [self._heard[-1], TokenIndex()]
            self.indexes += self._heard
        if tokens:
            self._heard[-1].extend(tokens)
            self._heard[-1].append(SEAM)

    def refresh(self) -> None:
        """Load the texts that other processes added; by default there are no such texts."""


_LEADS_TO = 8  # tokens at the end of a prompt that are put before a predicted answer, so that a lookup finds it

LONGEST = 63  # maximum number of tokens in a draft

ROWS = 8  # maximum number of logits rows read after rejected tokens; later rows are rarely useful

CHEAP = 0.05
"""Maximum cost of a draft token, in decode calls of one token, at which rows after rejected tokens are read."""

SHARE = 0.005  # maximum time for reading rows, as a part of a one-token decode call

SLOWER = 1.1
"""Maximum factor by which one measurement raises the estimated time per row, so that a slow one has little effect."""

HOPELESS = 0.004
"""A draft ends when the probability that all of it is accepted falls below this value, however cheap a token is."""

FREE = MarginalCost(0.0, [0.0] * (LONGEST + 1))  # the cost that is used if the caller passes no `price`


class MixtureDrafter(Drafter):
    """Drafts from the context and from remembered texts, weighted by how often each source was right recently.

    Args:
        memory: Texts to look up in addition to the context, maintained by their owner. True means that this drafter
            remembers its own earlier requests and their answers.
        kept: File that stores the statistics about tokens for later processes; `None` means that they are not stored.
        context: True to draft from the context too; otherwise the context only selects the places in memory.
    """

    name = "mixture"

    def __init__(self, memory: Recall | bool | None = None, kept: Path | None = None, *, context: bool = True) -> None:
        self.prediction: Sequence[int] = ()
        self.guesser = Guesser()
        if not context:
            self.name, self.guesser.local = "memory", False
        # The next draft begins with the tokens of `known`, each of which is right with probability `trust`.
        self.known: Sequence[int] = ()
        self.trust = 1.0
        self._own: Recall | None = None
        if memory is True:
            self._own = memory = Recall()
        self._memory: Recall | None = memory or None
        if self._memory is not None:
            self.guesser.memory = self._memory.indexes
        self._remembered = 0
        self._sampling: Sampling | None = None  # sampling of the next request, if it is known
        self._answer: CurrentAnswer | None = None
        self._given = 0  # tokens at the start of the last draft that the guesser did not choose
        # Three probabilities differ: that a token comes next, that a drawn token is accepted, and that a token not yet
        # drawn is accepted. The last two therefore have separate calibrations.
        self._drawn, self._blind = OutcomeMap(), OutcomeMap()
        self._asked: tuple[OutcomeMap, Sequence[float]] | None = None
        self._to_read, self._row_seconds = 0, 0.0
        self._kept = kept
        if kept is not None:
            learnt.take_up(self.guesser.about_tokens(), learnt.read(kept))

    def save_state(self) -> None:
        """Store the statistics about tokens; if several processes do so, the last one overwrites the others."""
        if self._kept is not None:
            learnt.keep(self._kept, self.guesser.about_tokens())

    def beside(self) -> Self:
        """Return a drafter for another sequence at the same time; both share memory and statistics about tokens.

        Raises:
            ValueError: This drafter stores its own earlier requests, which must come one after the other.
        """
        if self._own is not None:
            raise ValueError("a drafter that stores earlier requests itself can draft for only one sequence at a time")
        other = copy(self)
        other.guesser = Guesser(self.guesser)
        other._asked = other._kept = other._answer = None
        return other

    def set_sampling(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def begin(self, prompt: Sequence[int]) -> None:
        if self._own is not None:
            before = self.guesser.text()
            # Add the common start of requests to the memory only once.
            self._own.hear(before[self._remembered :])
            self._remembered = common_prefix(before, prompt)
        self._asked, self.known = None, ()
        sampling, self._sampling, self._answer = self._sampling, None, None
        if self._memory is not None:
            self._memory.refresh()
            if sampling is not None and self._memory.answers is not None:
                self._answer = self._memory.answers.begin(prompt, sampling)
        # The predicted answer is put before the prompt, after a copy of the prompt's end. It then looks like an earlier
        # answer to the same prompt, and lookups in the context find it.
        before = [*prompt[-_LEADS_TO:], *self.prediction] if self.prediction else []
        self.guesser.begin([*before, *prompt] if before else prompt)

    def propose(
        self,
        limit: int,
        choose: Chooser | None = None,
        *,
        fixed_length: bool = False,
        price: MarginalCost | None = None,
    ) -> Draft:
        guesser = self.guesser
        price = price or FREE
        limit = min(limit, LONGEST, len(price.slopes) - 1)
        known = self.known[:limit]
        sure, repeats = (self.trust,) * len(known), False
        if self._answer is not None and self._answer.earlier:
            expected, trust = self._answer.continuation(limit)
            if expected and expected[: len(known)] == [*known]:
                known, sure, repeats = expected, trust, True
        start, reach = len(known), prod(sure)
        self._given = start
        self._stand(known)
        self._want_rows(price)
        if choose is None:
            guesser.guess(limit, HOPELESS, price, start, reach)
            tokens, match, chances = guesser.chain()
            self._asked = None
            return Draft(tokens, (), match, (), (*sure, *chances[start:]), self.name, repeats=repeats)
        if fixed_length:
            # The most likely chain is not drawn, so its probabilities may decide the length of the drawn chain.
            limit = guesser.guess(limit, HOPELESS, price, start, reach)
            likeliest = guesser.chain()[2]
            self._stand(known)
        q = self._draw(limit, choose, None if fixed_length else price, start, reach)
        tokens, match, chances = guesser.chain()
        self._asked = (self._blind, likeliest) if fixed_length else (self._drawn, chances)
        secondary, given = self._asked
        estimated = (*sure, *[secondary.estimate(p) for p in given[start:]])
        return Draft(tokens, q, match, (), estimated, self.name, repeats=repeats)

    def _want_rows(self, price: MarginalCost) -> None:
        """Request the rows after rejected tokens that are worth reading; up to `ROWS` if their time is unknown."""
        self._to_read = ROWS if self.guesser.local and price.slopes[0] <= CHEAP else 0
        if price.seconds and self._row_seconds:
            self._to_read = min(self._to_read, int(SHARE * price.seconds / self._row_seconds))
        self.wants_logits = self._to_read > 0

    def _stand(self, tokens: Sequence[int]) -> None:
        """Replace the guesser's chain with these tokens, which become context, whatever their source."""
        self.guesser.pending = 0
        for at, token in enumerate(tokens):
            self.guesser.look(at)
            self.guesser.put(at, token)

    def _draw(
        self, limit: int, choose: Chooser, price: MarginalCost | None, start: int, reach: float
    ) -> tuple[dict[int, float], ...]:
        """Extend the chain with tokens picked by `choose` and return q, the distributions of all its tokens.

        Args:
            limit: Maximum length of the chain.
            choose: See `Chooser`.
            price: Cost of one more token. `None` means that the drawn tokens must not decide the length.
            start: Number of tokens that the chain already has.
            reach: Probability that all of these are right.
        """
        guesser = self.guesser
        q = [{guesser.guesses[at]: 1.0} for at in range(start)]
        for at in range(start, limit):
            if guesser.look(at) < 0:
                break
            weights = guesser.distribution(at)
            chosen = list(weights).index(choose(at, weights))
            guesser.take(at, chosen)
            q.append(weights)
            reach *= self._drawn.estimate(guesser.acceptance_probs[at])
            if price is not None and (reach < HOPELESS or not price.worth_extending(reach, at + 1)):
                break
        return tuple(q)

    def observe_logits(self, tokens: Sequence[int], rows: NDArray[np.float32], accepted: int = 0) -> None:
        refused = rows[1 + accepted : len(tokens)][: self._to_read]
        if not refused.size:
            return
        began = time.perf_counter()
        likeliest = [int(row.argmax()) for row in refused]
        seconds = (time.perf_counter() - began) / len(refused)
        self._row_seconds = min(seconds, self._row_seconds * SLOWER) if self._row_seconds else seconds
        self.guesser.hear(tokens[1:], accepted, likeliest)

    def accept(self, tokens: Sequence[int]) -> int:
        given, self._given, self.known = self._given, 0, ()
        if self._answer is not None:
            self._answer.accept(tokens)
        # `_want_rows` requests rows for each draft whose cost allows it, so a request ends with its decode call.
        self.wants_logits = False
        proposed = self.guesser.pending
        hits = self.guesser.accept(tokens)
        if self._asked is not None:
            secondary, chances = self._asked
            self._asked = None
            for at in range(given, min(hits + 1, proposed, len(tokens), len(chances))):
                secondary.learn(chances[at], at < hits)
        return hits
