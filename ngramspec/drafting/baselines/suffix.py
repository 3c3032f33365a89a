"""`SuffixDrafter`: what followed the longest context of any length that was seen before in the request.

The peers of this kind are SAM-Decoding (Hu et al. 2024, arXiv 2411.10666), an automaton without counts, and
SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975), a suffix tree with counts, of bounded depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ngramspec.drafting.baselines.suffix_automaton import SuffixAutomaton
from ngramspec.drafting.chances import ChanceEstimator, pick
from ngramspec.drafting.draft import Chooser, Draft, Drafter
from ngramspec.drafting.predictor import Shares
from ngramspec.drafting.price import TokenPrice

CLEARLY = 2  # another continuation is preferred to the most recent one if it followed at least this many times as often


class SuffixDrafter(Drafter):
    """Drafts with a `SuffixAutomaton` over prompt and answer, and learns from every proposal, sent or not.

    At each position the longest suffix of text and draft that has a continuation offers two: the most recent one and
    the most frequent one. Where they differ, the frequent one is taken if it was seen at least `CLEARLY` times as
    often as the other. The match grows by the guess, and the next position follows; a copy that runs into the end of
    the text goes on with the longest suffix seen elsewhere, so that what loops is drafted for as long as it pays.

    Example: 5 6 7 5 6 8 5 6 was seen. The longest suffix seen before is (5 6), with 7 and 8 after it, once each: 8, the
    most recent one. (5 6 8) was followed by 5, and (5 6 8 5) by 6; that is the whole end of the text, whose longest
    suffix seen elsewhere is (5 6) again.

    >>> drafter = SuffixDrafter()
    >>> drafter.begin([5, 6, 7, 5, 6, 8, 5, 6])
    >>> draft = drafter.propose(4)
    >>> draft.tokens, draft.match, draft.support
    ((8, 5, 6, 8), (2, 3, 4, 2), (2, 1, 1, 2))

    Complexity: amortised O(1) per token of the text and O(1) per drafted one; with `choose`, O(continuations of the
    context) per drafted one.
    """

    name = "suffix"

    def __init__(self) -> None:
        self._text = SuffixAutomaton()
        self._estimator = ChanceEstimator()

    def begin(self, prompt: Sequence[int]) -> None:
        self._text.clear()
        self._text.extend(prompt)
        self._estimator.begin()

    def propose(
        self, limit: int, choose: Chooser | None = None, *, blind: bool = False, price: TokenPrice | None = None
    ) -> Draft:
        text, estimator = self._text, self._estimator
        estimator.open(price)
        tokens: list[int] = []
        q: list[Mapping[int, float]] = []
        matches: list[int] = []
        support: list[int] = []
        chances: Sequence[float] = estimator.chances
        # The text as a whole was seen once, so this is its longest suffix that was seen before.
        state = text.link[text.last]
        match = text.length[state] if state >= 0 else 0
        while match > 0 and len(tokens) < limit:
            total = text.total[state]
            if choose is None:
                edge, latest = text.best[state], text.latest[state]
                if text.count[edge] < CLEARLY * text.count[latest]:
                    edge = latest
            else:
                counts = text.counts(state)
                edge = text.find(state, pick(choose, len(tokens), counts))
                q.append(Shares(counts, total))
                if blind and not tokens:
                    chances = [estimator.blind(match, q[0], total)] * limit
            tokens.append(text.token[edge])
            matches.append(match)
            support.append(total)
            if not estimator.go_on(match, text.count[edge], total):
                break
            state, match = text.goal[edge], match + 1
            if state == text.last:
                state = text.link[state]
                match = text.length[state]
        estimator.close(tokens)
        return Draft(tuple(tokens), tuple(q), tuple(matches), tuple(support), tuple(chances), self.name)

    def accept(self, tokens: Sequence[int]) -> int:
        self._text.extend(tokens)
        return self._estimator.settle(tokens)
