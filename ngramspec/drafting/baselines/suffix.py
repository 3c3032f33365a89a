"""`SuffixDrafter`: drafts from the longest context, of any length, that occurred before in the request.

Comparable methods are SAM-Decoding (Hu et al. 2024, arXiv 2411.10666), an automaton without counts, and SuffixDecoding
(Oliaro et al. 2024, arXiv 2411.04975), a suffix tree with counts, of bounded depth. `SuffixAutomaton` contains all
contexts of a growing text, and the tokens that followed each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ngramspec.drafting.acceptance_estimator import AcceptanceEstimator, pick
from ngramspec.drafting.draft import Ask, Draft, Drafter
from ngramspec.drafting.predictor import Shares

CLEARLY = 2  # minimum ratio of counts at which another continuation is preferred to the most recent one
MAX_COUNTED = 16  # maximum number of known contexts after which a token is counted, the longest first
NOWHERE = -1


class SuffixAutomaton:
    """A growing text, as the online automaton of Blumer, Blumer, Haussler, Ehrenfeucht, Chen and Seiferas (1985).

    (See "The smallest automaton recognizing the subwords of a text".) A state is a number. It represents the contexts
    that occurred at the same places; state 0 is the empty context. A text of n tokens has at most 2n - 1 states and
    3n - 4 transitions, and adding a token takes amortised constant time.

    In addition, each transition counts its occurrences. A token follows every suffix of the text, one state for each
    step along the suffix links, and their number is not bounded. So only the first `MAX_COUNTED` known contexts are
    counted per token. The counts of short contexts may therefore be too low in a text with repetitions, but no
    continuation is lost.
    """

    def __init__(self) -> None:
        self.last = 0  # state of the whole text; the other attributes are lists by state
        self.length: list[int] = []  # length of the longest context
        self.link: list[int] = []  # state of the longest suffix that also occurred elsewhere; NOWHERE for state 0
        self.goals: list[dict[int, int]] = []  # next state for each token that followed
        self.counts: list[dict[int, int]] = []  # count of each token that followed, in the order of first occurrence
        self.best: list[int] = []  # most frequent token that followed, the most recent among equals; NOWHERE at the end
        self.latest: list[int] = []  # token that followed last
        self.total: list[int] = []  # sum of the counts
        self._state(0, NOWHERE)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end. Amortised O(1) per token."""
        for token in tokens:
            self._add(token)

    def _add(self, token: int) -> None:
        new, p = self._state(self.length[self.last] + 1, 0), self.last
        self.last = new
        # Each context that this token never followed gets a transition. No transition is ever removed.
        while p != NOWHERE and token not in self.goals[p]:
            self.goals[p][token] = new
            self._count(p, token)
            p = self.link[p]
        if p == NOWHERE:
            return
        self.link[new] = self._split(p, token)
        # The remaining contexts are suffixes of `p`, so the token followed them before.
        steps = 0
        while p != NOWHERE and steps < MAX_COUNTED:
            self._count(p, token)
            p = self.link[p]
            steps += 1

    def _split(self, p: int, token: int) -> int:
        """Return the state whose longest context is the longest context of `p` followed by a token.

        Longer contexts may have shared this state. They did not occur at the present end of the text, so the state is
        then split.
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
        self.length.append(length)
        self.link.append(link)
        self.goals.append({})
        self.counts.append({})
        self.best.append(NOWHERE)
        self.latest.append(NOWHERE)
        self.total.append(0)
        return len(self.length) - 1

    def _count(self, state: int, token: int) -> None:
        counts = self.counts[state]
        counts[token] = count = counts.get(token, 0) + 1
        self.total[state] += 1
        self.latest[state] = token
        if self.best[state] == NOWHERE or count >= counts[self.best[state]]:
            self.best[state] = token

    def weights(self, state: int) -> dict[int, int]:
        """Return the counts of a state, with the token that followed first at the end. O(number of tokens)."""
        return dict(reversed(self.counts[state].items()))

    def likeliest(self, state: int) -> int:
        """Return the most recent token, or the most frequent one if it occurred clearly more often; see `CLEARLY`."""
        counts, best, latest = self.counts[state], self.best[state], self.latest[state]
        return best if counts[best] >= CLEARLY * counts[latest] else latest

    def longest_suffix(self) -> tuple[int, int]:
        """Return the state of the longest suffix that occurred before, and the length of the suffix."""
        state = self.link[self.last]
        return state, self.length[state] if state >= 0 else 0


class SuffixDrafter(Drafter):
    """Drafts with a `SuffixAutomaton` over prompt and answer, and learns from every proposal, verified or not.

    At each position, the longest suffix of text and draft that has a continuation provides two tokens: the most recent
    one and the most frequent one. If they differ, the frequent one is used if it occurred at least `CLEARLY` times as
    often. The match grows by the guess, and the next position follows. A copy that reaches the end of the text
    continues with the longest suffix that also occurred elsewhere. So a loop in the text is drafted for as long as it
    pays.

    >>> drafter = SuffixDrafter()
    >>> drafter.begin([5, 6, 7, 5, 6, 8, 5, 6])
    >>> draft = drafter.propose(Ask(4))
    >>> draft.tokens, draft.match_lengths, draft.context_counts
    ((8, 5, 6, 8), (2, 3, 4, 2), (2, 1, 1, 2))

    Complexity: amortised O(1) per token of the text and O(1) per draft token; with `choose`, O(continuations of the
    context) per draft token.
    """

    name = "suffix"

    def __init__(self) -> None:
        self._estimator = AcceptanceEstimator()
        self.begin(())

    def begin(self, prompt: Sequence[int]) -> None:
        self._text = SuffixAutomaton()
        self._text.extend(prompt)
        self._estimator.begin()

    def propose(self, ask: Ask) -> Draft:
        text, estimator, choose = self._text, self._estimator, ask.choose
        estimator.open(ask.price)
        tokens: list[int] = []
        q: list[Mapping[int, float]] = []
        matches: list[int] = []
        support: list[int] = []
        probs: Sequence[float] = estimator.acceptance_probs
        state, match = text.longest_suffix()
        while match > 0 and len(tokens) < ask.limit:
            total = text.total[state]
            if choose is None:
                token = text.likeliest(state)
            else:
                weights = text.weights(state)
                token = pick(choose, len(tokens), weights)
                q.append(Shares(weights, total))
                if ask.fixed_length and not tokens:
                    probs = [estimator.estimate_undrawn(match, q[0], total)] * ask.limit
            tokens.append(token)
            matches.append(match)
            support.append(total)
            if not estimator.add_guess(match, text.counts[state][token], total):
                break
            state, match = text.goals[state][token], match + 1
            if state == text.last:
                state, match = text.longest_suffix()
        estimator.close(tokens)
        return Draft(tuple(tokens), tuple(q), tuple(matches), tuple(support), tuple(probs), self.name)

    def accept(self, tokens: Sequence[int]) -> int:
        self._text.extend(tokens)
        return self._estimator.record_outcome(tokens)
