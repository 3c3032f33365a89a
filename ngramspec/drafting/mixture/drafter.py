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

MOST = 1 << 22  # tokens of answers to remember, at about 12 bytes each; beyond that, the older half is dropped


class Recall:
    """Texts to draft from. `ngramspec.memory.Memory` adds those that are kept on disk.

    Args:
        stored: indexes of texts that were there before, which never change.

    Attributes:
        indexes: what to look up, the oldest first; all but the last never change. A negative token in one is a
            seam between two texts. Always the same list.
        answers: the answers to earlier requests of this process; `None` if repeated requests are no special case.
    """

    def __init__(self, stored: Sequence[TokenIndex] = ()) -> None:
        self._heard = [TokenIndex()]
        self.indexes: list[TokenIndex] = [*stored, *self._heard]
        self.answers: AnswerStore | None = AnswerStore()

    def hear(self, tokens: Sequence[int]) -> None:
        """Remember an answer in this process. One that stays in the context need not be heard: it is there already.

        Args:
            tokens: token ids, none of them negative.
        """
        if self._heard[-1].size > MOST // 2:
            del self.indexes[-len(self._heard) :]
            self._heard = [self._heard[-1], TokenIndex()]
            self.indexes += self._heard
        if tokens:
            self._heard[-1].extend(tokens)
            self._heard[-1].append(SEAM)

    def refresh(self) -> None:
        """Take up what other processes added; for texts that none does, nothing."""


_LEADS_TO = 8  # tokens of a prompt by which a predicted answer to it is found

LONGEST = 63  # most tokens in a draft

ROWS = 8  # rows after refused tokens that are read of a pass: those behind them are seldom of use

CHEAP = 0.05
"""Cost of a drafted token, in one-token passes, up to which rows beside those of an accepted draft are read."""

SHARE = 0.005  # part of the time of a one-token pass that reading may take

SLOWER = 1.1
"""How much longer a row is taken to need each time than the quickest one so far, so that a hiccup is soon forgotten."""

HOPELESS = 0.004
"""A draft ends when the probability that all of it is accepted has fallen below this, however cheap a token is."""

FREE = MarginalCost(0.0, [0.0] * (LONGEST + 1))  # the price for callers that did not say what a token costs


class MixtureDrafter(Drafter):
    """Drafts from the context, from what it remembers, and from how well each of them recently did.

    Args:
        memory: texts to look up beside the context, kept up by its owner; True remembers earlier requests and
            what was emitted, in this drafter alone.
        kept: the file in which what it learns about tokens goes from one process to the next; None: nowhere.
        context: whether to draft from the context too, which else only says where to look.
    """

    name = "mixture"

    def __init__(self, memory: Recall | bool | None = None, kept: Path | None = None, *, context: bool = True) -> None:
        self.prediction: Sequence[int] = ()
        self.guesser = Guesser()
        if not context:
            self.name, self.guesser.local = "memory", False
        # what nearly surely comes next, which the next draft begins with, and how likely each of these tokens is right
        self.known: Sequence[int] = ()
        self.trust = 1.0
        self._own: Recall | None = None
        if memory is True:
            self._own = memory = Recall()
        self._memory: Recall | None = memory or None
        if self._memory is not None:
            self.guesser.memory = self._memory.indexes
        self._remembered = 0
        self._sampling: Sampling | None = None  # settings of the next request, if they are known
        self._answer: CurrentAnswer | None = None
        self._given = 0  # tokens at the start of the last draft that the guesser did not choose
        # The chance that a token comes next is not the chance that it is accepted once it was drawn, nor the chance
        # that a token yet to be drawn is accepted: each needs an estimate of its own.
        self._drawn, self._blind = OutcomeMap(), OutcomeMap()
        self._asked: tuple[OutcomeMap, Sequence[float]] | None = None
        self._to_read, self._row_seconds = 0, 0.0
        self._kept = kept
        if kept is not None:
            learnt.take_up(self.guesser.about_tokens(), learnt.read(kept))

    def save_state(self) -> None:
        """Write down what its judge has learnt about tokens; of several processes that do, the last one counts."""
        if self._kept is not None:
            learnt.keep(self._kept, self.guesser.about_tokens())

    def beside(self) -> Self:
        """A drafter for another text at the same time: it shares memory, and what is learnt about tokens.

        Raises:
            ValueError: this one remembers requests by itself, which come one after the other.
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
        # A predicted answer stands in the text that is looked up as it would have been given to this prompt before.
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
            # The most likely chain is not drawn, so its chances may decide on the length of the one that is.
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
        """Ask for the rows after refused tokens that are worth reading; for ROWS where nobody knows what that takes."""
        self._to_read = ROWS if self.guesser.local and price.slopes[0] <= CHEAP else 0
        if price.seconds and self._row_seconds:
            self._to_read = min(self._to_read, int(SHARE * price.seconds / self._row_seconds))
        self.wants_logits = self._to_read > 0

    def _stand(self, tokens: Sequence[int]) -> None:
        """Make tokens the chain, and context, whoever guessed them."""
        self.guesser.pending = 0
        for at, token in enumerate(tokens):
            self.guesser.look(at)
            self.guesser.put(at, token)

    def _draw(
        self, limit: int, choose: Chooser, price: MarginalCost | None, start: int, reach: float
    ) -> tuple[dict[int, float], ...]:
        """Make a chain of tokens picked by `choose`, after the `start` that stand already; returns their q.

        Those are right with the chance `reach`. Without a price, no look at the tokens decides on their number.
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
        # Rows are wanted of a pass that was drafted for at a price that says so, and of no other.
        self.wants_logits = False
        proposed = self.guesser.pending
        hits = self.guesser.accept(tokens)
        if self._asked is not None:
            secondary, chances = self._asked
            self._asked = None
            for at in range(given, min(hits + 1, proposed, len(tokens), len(chances))):
                secondary.learn(chances[at], at < hits)
        return hits
