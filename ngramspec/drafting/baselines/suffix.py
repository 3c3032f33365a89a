"""`SuffixDrafter`: what followed the longest context of any length that was seen before in the request.

The peers of this kind are SAM-Decoding (Hu et al. 2024, arXiv 2411.10666), an automaton without counts, and
SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975), a suffix tree with counts, of bounded depth. `SuffixAutomaton`
holds all contexts of a growing text, and what followed each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ngramspec.drafting.chances import ChanceEstimator, pick
from ngramspec.drafting.draft import Chooser, Draft, Drafter, MarginalCost
from ngramspec.drafting.predictor import Shares

CLEARLY = 2  # another continuation is preferred to the most recent one if it followed at least this many times as often
COUNTED = 16  # contexts that a token is counted behind, the longest first
NOWHERE = -1


class SuffixAutomaton:
    """A growing text, as the online automaton of Blumer, Blumer, Haussler, Ehrenfeucht, Chen and Seiferas (1985).

    (See "The smallest automaton recognizing the subwords of a text".) A state, a number, stands for the contexts that
    were seen at the same places; 0 is the empty context's. A text of n tokens has at most 2n - 1 states and 3n - 4
    transitions, and adding a token takes amortised constant time.

    In addition each transition counts how often it was taken. A token follows every suffix of the text, one state for
    each step along the suffix links, and there may be any number of them: only COUNTED are counted per token. So counts
    of short contexts may come out low in a text that repeats itself; what follows them never gets lost.

    Attributes:
        size: how many tokens the text has.
        last: the state of the whole text.
        length: by state, of its longest context.
        link: by state, the state of its longest suffix that was seen elsewhere too; NOWHERE for the empty context.
        goals: by state, where each token leads that followed it.
        counts: by state, how often each token followed it, in the order in which they first did.
        best: by state, the token that followed most often, the most recent one among equals; NOWHERE at the text's end.
        latest: by state, the token that followed last.
        total: by state, how often any followed.
    """

    def __init__(self) -> None:
        self.size = self.last = 0
        self.length: list[int] = []
        self.link: list[int] = []
        self.goals: list[dict[int, int]] = []
        self.counts: list[dict[int, int]] = []
        self.best: list[int] = []
        self.latest: list[int] = []
        self.total: list[int] = []
        self._state(0, NOWHERE)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Add a token at the end. Amortised O(1)."""
        new, p = self._state(self.length[self.last] + 1, 0), self.last
        self.size += 1
        self.last = new
        # Contexts that this token never followed: each gets a transition, and no transition is ever removed.
        while p != NOWHERE and token not in self.goals[p]:
            self.goals[p][token] = new
            self._count(p, token)
            p = self.link[p]
        if p == NOWHERE:
            return
        self.link[new] = self._split(p, token)
        # The rest are suffixes of those, so it did follow them.
        steps = 0
        while p != NOWHERE and steps < COUNTED:
            self._count(p, token)
            p = self.link[p]
            steps += 1

    def _split(self, p: int, token: int) -> int:
        """The state whose longest context is the longest one of `p`, followed by a token.

        Longer contexts may have shared the goal of that transition. Now that the text has ended here they no longer
        do: the goal is then split.
        """
        old = self.goals[p][token]
        if self.length[old] == self.length[p] + 1:
            return old
        copy = self._state(self.length[p] + 1, self.link[old])
        self.goals[copy] = self.goals[old].copy()
        self.counts[copy] = self.weights(old)
        self.best[copy], self.latest[copy], self.total[copy] = self.best[old], self.latest[old], self.total[old]
        self.link[old] = copy
        while p != NOWHERE and self.goals[p][token] == old:
            self.goals[p][token] = copy
            p = self.link[p]
        return copy

    def _state(self, length: int, link: int) -> int:
        """A new state without transitions."""
        self.length.append(length)
        self.link.append(link)
        self.goals.append({})
        self.counts.append({})
        self.best.append(NOWHERE)
        self.latest.append(NOWHERE)
        self.total.append(0)
        return len(self.length) - 1

    def _count(self, state: int, token: int) -> None:
        """Count a transition once more."""
        counts = self.counts[state]
        counts[token] = count = counts.get(token, 0) + 1
        self.total[state] += 1
        self.latest[state] = token
        if self.best[state] == NOWHERE or count >= counts[self.best[state]]:
            self.best[state] = token

    def weights(self, state: int) -> dict[int, int]:
        """The counts of a state, the token that followed first at the end. O(number of them)."""
        return dict(reversed(self.counts[state].items()))

    def likeliest(self, state: int) -> int:
        """The most recent token, or the most frequent one where that was seen clearly more often."""
        counts, best, latest = self.counts[state], self.best[state], self.latest[state]
        return best if counts[best] >= CLEARLY * counts[latest] else latest

    def longest_suffix(self) -> tuple[int, int]:
        """The state of the longest suffix that was seen before, and its length; the text as a whole was seen once."""
        state = self.link[self.last]
        return state, self.length[state] if state >= 0 else 0


class SuffixDrafter(Drafter):
    """Drafts with a `SuffixAutomaton` over prompt and answer, and learns from every proposal, sent or not.

    At each position the longest suffix of text and draft that has a continuation offers two: the most recent one and
    the most frequent one. Where they differ, the frequent one is taken if it was seen at least `CLEARLY` times as
    often as the other. The match grows by the guess, and the next position follows; a copy that runs into the end of
    the text continues with the longest suffix seen elsewhere, so that what loops is drafted for as long as it pays.

    >>> drafter = SuffixDrafter()
    >>> drafter.begin([5, 6, 7, 5, 6, 8, 5, 6])
    >>> draft = drafter.propose(4)
    >>> draft.tokens, draft.match_lengths, draft.context_counts
    ((8, 5, 6, 8), (2, 3, 4, 2), (2, 1, 1, 2))

    Complexity: amortised O(1) per token of the text and O(1) per drafted one; with `choose`, O(continuations of the
    context) per drafted one.
    """

    name = "suffix"

    def __init__(self) -> None:
        self._estimator = ChanceEstimator()
        self.begin(())

    def begin(self, prompt: Sequence[int]) -> None:
        self._text = SuffixAutomaton()
        self._text.extend(prompt)
        self._estimator.begin()

    def propose(
        self,
        limit: int,
        choose: Chooser | None = None,
        *,
        fixed_length: bool = False,
        price: MarginalCost | None = None,
    ) -> Draft:
        text, estimator = self._text, self._estimator
        estimator.open(price)
        tokens: list[int] = []
        q: list[Mapping[int, float]] = []
        matches: list[int] = []
        support: list[int] = []
        chances: Sequence[float] = estimator.acceptance_probs
        state, match = text.longest_suffix()
        while match > 0 and len(tokens) < limit:
            total = text.total[state]
            if choose is None:
                token = text.likeliest(state)
            else:
                weights = text.weights(state)
                token = pick(choose, len(tokens), weights)
                q.append(Shares(weights, total))
                if fixed_length and not tokens:
                    chances = [estimator.blind(match, q[0], total)] * limit
            tokens.append(token)
            matches.append(match)
            support.append(total)
            if not estimator.go_on(match, text.counts[state][token], total):
                break
            state, match = text.goals[state][token], match + 1
            if state == text.last:
                state, match = text.longest_suffix()
        estimator.close(tokens)
        return Draft(tuple(tokens), tuple(q), tuple(matches), tuple(support), tuple(chances), self.name)

    def accept(self, tokens: Sequence[int]) -> int:
        self._text.extend(tokens)
        return self._estimator.settle(tokens)
