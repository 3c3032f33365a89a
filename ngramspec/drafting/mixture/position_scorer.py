# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`PositionScorer`: the candidates for one position of a chain of guesses, each with its probability.

For each position:

1. `ContextCounts` gathers candidates: the tokens that followed the same context before, in this request and in memory.
   A copy in progress (`History.near`), `RejectedRowPredictions` and `Pointers` add their candidates.
2. For each candidate, the state of each source, the weight sets and the facts about it are the input of `ChanceMixer`,
   which estimates its probability. If `Pointers` or `RejectedRowPredictions` have a candidate at this position, they
   correct all estimates.
3. The most likely candidate is the guess. `Correction` calibrates its probability by how often such guesses were right.

Example: the last two tokens occurred four times before; A followed three times and B once. For A, the source of two
tokens is in the state "seen 4 times, followed 3 times by this token, and by it last". The mixer estimates 0.70 for A
and 0.20 for B. The guess is A. Being the maximum of two noisy estimates, its 0.70 is too high on average, and the
correction returns 0.65. Each position takes constant time, which does not depend on the length of the context.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import cython

from ngramspec.drafting.mixture.answers import RejectedRowPredictions
from ngramspec.drafting.mixture.chance_mixer import ChanceMixer, Correction
from ngramspec.drafting.mixture.context_counts import ContextCounts
from ngramspec.drafting.mixture.history import History
from ngramspec.drafting.mixture.pointers import Pointers

if cython.compiled:
    from cython.cimports.ngramspec.drafting.mixture.history import doublings, mix
else:
    from ngramspec.drafting.mixture.history import doublings, mix

if TYPE_CHECKING:
    from ngramspec.drafting.token_index import TokenIndex

CANDIDATES = cython.declare(cython.int, 10)
POSITIONS = cython.declare(cython.int, 64)

# `ChanceMixer` numbers the sources: first the `CONTEXT_SOURCES` sources of `ContextCounts`, then `MATCH` and `NEAR`.
CONTEXT_SOURCES = cython.declare(cython.int, 6)
MATCH = cython.declare(cython.int, 6)
NEAR = cython.declare(cython.int, 7)
SOURCES = cython.declare(cython.int, 8)
VIEWS = cython.declare(cython.int, 5)
BIASES = cython.declare(cython.int, 13)
FREE_ROOM = cython.declare(cython.int, 1 << 12)
TOKEN_ROOM = cython.declare(cython.int, 1 << 17)
PAIR_ROOM = cython.declare(cython.int, 1 << 18)
FACTS = cython.declare(cython.int, 6)
CURVES = cython.declare(cython.ulonglong, 1 << 13)
FREE_CURVES = cython.declare(cython.ulonglong, 512)
POINTERS = cython.declare(cython.int, 3)
NOWHERE = cython.declare(cython.int, -1)
ABSENT = cython.declare(cython.int, -1)


def _share(count: cython.int, n_seen: cython.int, latest: cython.int) -> cython.int:
    """Return the state of a source that saw the context `n_seen` times, followed by this guess `count` times."""
    q: cython.int = 1 + (4 * count > n_seen) + (2 * count > n_seen) + (4 * count > 3 * n_seen)
    if count == 0:
        q = 0
    elif count == n_seen:
        q = 5
    return ((n_seen if n_seen < 8 else 8) - 1) * 12 + q * 2 + latest


def _length(match: cython.int) -> cython.int:
    """Return the class of a match length, one of 12."""
    if match < 8:
        return match
    return 8 if match < 12 else 9 if match < 16 else 10 if match < 32 else 11


def _free(state: cython.ulonglong) -> cython.int:
    """Return the number of a fact whose hash contains no token."""
    return cython.cast(cython.int, (state >> 20) & (FREE_ROOM - 1))


def _token(state: cython.ulonglong) -> cython.int:
    """Return the number of a fact whose hash contains one token."""
    return FREE_ROOM + cython.cast(cython.int, (state >> 20) & (TOKEN_ROOM - 1))


def _pair(state: cython.ulonglong) -> cython.int:
    """Return the number of a fact whose hash contains two tokens."""
    return FREE_ROOM + TOKEN_ROOM + cython.cast(cython.int, (state >> 20) & (PAIR_ROOM - 1))


def _rarity(p: cython.double) -> cython.int:
    """Return the class of a probability, one of 8."""
    if p < 0.15:
        return 0 if p < 0.01 else 1 if p < 0.03 else 2 if p < 0.07 else 3
    return 4 if p < 0.3 else 5 if p < 0.5 else 6 if p < 0.8 else 7


class PositionScorer:
    """Gathers and scores the candidates for the positions of a chain.

    The constructor accepts the scorer of another sequence that is decoded at the same time. Both then share the memory
    and the statistics about tokens; all other statistics are separate for each sequence.
    """

    def __init__(self, sibling: PositionScorer | None = None) -> None:
        self.history = History()
        sets = 12 * 6 * 2, 64, 1024, 4 * 14 * 2, 8  # number of weight sets for each of `mixer.views`
        mixer, correction = (None, None) if sibling is None else (sibling.mixer, sibling.correction)
        self.mixer: ChanceMixer = ChanceMixer(POSITIONS * CANDIDATES, sets, mixer)
        self.correction: Correction = Correction(POSITIONS, correction)
        # Each `TokenIndex` of the memory is looked up in addition to the request's own tokens.
        self.memory: list[TokenIndex] = [] if sibling is None else sibling.memory
        self.local: bool = sibling is None or sibling.local  # True if the request's own tokens are looked up
        self.counts = ContextCounts(POSITIONS)
        self.answers = RejectedRowPredictions(POSITIONS * CANDIDATES)
        self.pointers = Pointers(POSITIONS * CANDIDATES)
        self.match_lengths = array("i", bytes(4 * POSITIONS))  # length of the longest match at each position
        self._has_answer = array("i", bytes(4 * POSITIONS))
        self._has_pointer = array("i", bytes(4 * POSITIONS))
        self._best = array("i", bytes(4 * POSITIONS))
        # For a position on a side branch, `_branch_offset` is its number minus the number of guesses before it. `_fork`
        # is the number of these guesses that belong to the chain.
        self._branch_offset = self._fork = 0
        # State of the request, which `Guesser` updates.
        self._prompt = 0  # number of tokens of the prompt
        self._recent = 0.5  # average of recent outcomes: 1 for a right guess, 0 for a wrong one
        self._streak = 0  # number of right guesses in a row
        self._copy_place, self._copy_length = NOWHERE, 0  # next position of the copy in progress, and its length so far
        # The same along a chain, and at the position scored last.
        self._chain_copy_place, self._chain_copy_length = NOWHERE, 0
        self._near_place, self._near_token = NOWHERE, -1
        self._copy_at, self._copy_token, self._match_kind = NOWHERE, -1, 0
        # Length of the longest match in the request and in memory at the position scored last.
        self._longest = self._memory_match = 0

    def score_position(self, at: cython.Py_ssize_t) -> cython.int:
        """Gather the candidates for position `at` of the chain; return the number of the most likely one, or -1."""
        depth: cython.Py_ssize_t = at - self._branch_offset
        end: cython.Py_ssize_t = self.history.size + depth
        self._gather_candidates(at, end)
        n: cython.int = self.counts.n_candidates[at]
        if n == 0:
            return -1
        self._describe_position(depth, end)
        best: cython.int = -1
        highest: cython.double = -1.0
        for c in range(n):
            top: cython.int = self._set_states(at, c)
            self._set_facts(at, c, top)
            p: cython.double = self._estimate(at, c, top)
            if p > highest:
                highest = p
                best = c
        self._best[at] = best
        self._correct(at, n)
        self._near_token = self._copy_token
        self._near_place = self._copy_at
        self.match_lengths[at] = self._longest if self._longest > self._memory_match else self._memory_match
        return best

    def _gather_candidates(self, at: cython.Py_ssize_t, end: cython.Py_ssize_t) -> None:
        """Gather the candidates of all sources for position `at`, after `end` tokens."""
        counts: ContextCounts = self.counts
        if at == 0:
            self._chain_copy_place = self._copy_place
            self._chain_copy_length = self._copy_length
        counts.clear(at)
        self._longest = counts.count_in_request(self.history, at, end) if self.local else 0
        if self._longest > self._chain_copy_length + 2:
            self._chain_copy_place = counts.best_place
            if at == 0:
                self._copy_place = counts.best_place
                self._copy_length = self._chain_copy_length = self._longest
        self._memory_match = 0
        if self.memory:
            self._memory_match = counts.count_in_memory(self.history, self.memory, at, end, self._longest)
        self._copy_at = NOWHERE
        self._copy_token = -1
        self._match_kind = 0
        if self._chain_copy_place > 0:
            self._copy_at = self.history.near(end, self._chain_copy_place)
            self._match_kind = self.history.match_kind
            if self._copy_at != NOWHERE:
                self._copy_token = self.history.tokens[self._copy_at]
                counts.add_candidate(at, self._copy_token)
        self._has_answer[at] = self.answers.find_predictions(self.history, end)
        if self._has_answer[at]:
            if self.answers.place_token >= 0:
                counts.add_candidate(at, self.answers.place_token)
            if self.answers.pool_token >= 0:
                counts.add_candidate(at, self.answers.pool_token)
        is_chain: cython.bint = self.local and self._branch_offset == 0
        self._has_pointer[at] = is_chain and self.pointers.find_predictions(self.history, end, at)
        if self._has_pointer[at]:
            for i in range(POINTERS):
                if self.pointers.tokens[i] >= 0:
                    counts.add_candidate(at, self.pointers.tokens[i])

    def _describe_position(self, depth: cython.Py_ssize_t, end: cython.Py_ssize_t) -> None:
        """Compute what all candidates of a position have in common."""
        t = self.history.tokens
        streak: cython.int = self._streak if self._branch_offset == 0 else -1 - self._fork
        streak += cython.cast(cython.int, depth)
        self._run = streak if streak < 3 else 3 if streak < 8 else 4
        recent: cython.int = cython.cast(cython.int, self._recent * 6)
        self._recent_class = min(recent, 5)
        self._copy_class = doublings(self._chain_copy_length, 9)
        self._length = _length(self._longest if self._longest > self._memory_match else self._memory_match)
        # The source of the longest match is 0 (prompt), 1 (answer so far), 2 (none) or 3 (memory). `_distance` is the
        # class of its distance.
        self._source = 2
        if self._memory_match > self._longest:
            self._source = 3
        elif self._longest > 0:
            self._source = 1 if self.counts.best_place >= self._prompt else 0
        self._distance = doublings(end - self.counts.best_place, 13) if self._source < 2 else 0
        self._step = cython.cast(cython.int, depth) if depth < 7 else 7
        self._last_token = t[end - 1] if end > 0 else 0
        self._token_before = t[end - 2] if end > 1 else 0

    def _set_states(self, at: cython.Py_ssize_t, c: cython.int) -> cython.int:
        """Set the states and views of candidate `c`; return the last source that saw it, plus 1; 0 if none did."""
        counts: ContextCounts = self.counts
        mixer: ChanceMixer = self.mixer
        token: cython.int = counts.tokens[at * CANDIDATES + c]
        s: cython.Py_ssize_t = (at * CANDIDATES + c) * SOURCES
        v: cython.Py_ssize_t = (at * CANDIDATES + c) * VIEWS
        top: cython.int = 0
        for i in range(CONTEXT_SOURCES):
            if counts.occurrences[i] == 0:
                mixer.states[s + i] = ABSENT
                continue
            count: cython.int = counts.count[c * CONTEXT_SOURCES + i]
            if count > 0:
                top = i + 1
            mixer.states[s + i] = _share(count, counts.occurrences[i], counts.latest[c * CONTEXT_SOURCES + i])
        agrees: cython.int = 1 if token == counts.best_token else 0
        mixer.states[s + MATCH] = self._length * 10 + agrees * 5 + self._run
        if self._copy_at == NOWHERE:
            mixer.states[s + NEAR] = ABSENT
        else:
            mixer.states[s + NEAR] = (self._match_kind * 10 + self._copy_class) * 2 + (token == self._copy_token)
        mixer.views[v] = (self._length * 6 + self._recent_class) * 2 + agrees
        mixer.views[v + 1] = self._step * 8 + top
        mixer.views[v + 2] = (mix(331 + agrees, self._last_token) >> 20) & 1023
        mixer.views[v + 3] = (self._source * 14 + self._distance) * 2 + agrees
        mixer.views[v + 4] = self._step
        return top

    def _set_facts(self, at: cython.Py_ssize_t, c: cython.int, top: cython.int) -> cython.void:
        """Set the facts about candidate `c`, after `_set_states`, whose result is `top`."""
        mixer: ChanceMixer = self.mixer
        s: cython.Py_ssize_t = (at * CANDIDATES + c) * SOURCES
        f: cython.Py_ssize_t = (at * CANDIDATES + c) * BIASES
        token: cython.int = self.counts.tokens[at * CANDIDATES + c]
        x: cython.ulonglong = token
        last: cython.ulonglong = self._last_token
        agrees: cython.int = 1 if token == self.counts.best_token else 0
        continues_copy: cython.int = 2
        if self._copy_at != NOWHERE:
            continues_copy = 1 if token == self._copy_token else 0
        bigram: cython.ulonglong = mix(mix(271 + agrees, last), self._token_before)
        state_1: cython.int = mixer.states[s] + 1
        state_2: cython.int = mixer.states[s + 1] + 1
        mixer.facts[f] = _token(mix(11 + agrees, x))
        mixer.facts[f + 1] = _token(mix(21 + agrees, last))
        mixer.facts[f + 2] = _free(mix(31 + self._length * 16 + self._recent_class, agrees))
        mixer.facts[f + 3] = _free(mix(1041 + self._run * 2, agrees))
        mixer.facts[f + 4] = _pair(mix(mix(51, last), x))
        mixer.facts[f + 5] = _token(mix(61 + top * 2 + agrees, last))
        mixer.facts[f + 6] = _free(mix(81 + self._match_kind * 8 + continues_copy, self._length * 2 + agrees))
        mixer.facts[f + 7] = _token(mix(191 + top * 2 + agrees, x))
        mixer.facts[f + 8] = _pair(bigram)
        mixer.facts[f + 9] = _token(mix(mix(341 + agrees, self._source * 16 + self._distance), x))
        mixer.facts[f + 10] = _token(mix(mix(351, state_1 * 128 + state_2), x))
        mixer.facts[f + 11] = _pair(mix(mix(bigram, 361), state_2))
        mixer.facts[f + 12] = _pair(mix(mix(bigram, 371), x))

    def _estimate(self, at: cython.Py_ssize_t, c: cython.int, top: cython.int) -> cython.double:
        """Return the probability of candidate `c` by the mixer, corrected by pointers and predictions."""
        mixer: ChanceMixer = self.mixer
        cell: cython.Py_ssize_t = at * CANDIDATES + c
        token: cython.int = self.counts.tokens[cell]
        p: cython.double = mixer.estimate(cell)
        if self._has_pointer[at]:
            p = mixer.p[cell] = self.pointers.estimate(cell, token, p, self._length)
        if self._has_answer[at]:
            p = mixer.p[cell] = self.answers.estimate(cell, token, p, top, self._length)
        return p

    def _correct(self, at: cython.Py_ssize_t, n: cython.int) -> None:
        """Calibrate the probability of the most likely of the `n` candidates of a position."""
        p = self.mixer.p
        states = self.mixer.states
        facts = self.correction.facts
        best: cython.int = self._best[at]
        second: cython.double = 0.0
        other_sum: cython.double = 0.0
        for c in range(n):
            if c != best:
                other_sum += p[at * CANDIDATES + c]
                second = max(second, p[at * CANDIDATES + c])
        s: cython.Py_ssize_t = (at * CANDIDATES + best) * SOURCES
        f: cython.Py_ssize_t = at * FACTS
        token: cython.ulonglong = self.counts.tokens[at * CANDIDATES + best]
        facts[f] = 8 * _rarity(second) + _rarity(other_sum)
        facts[f + 1] = 64 + 4 * doublings(self.history.size - self._prompt, 11) + self._source
        facts[f + 2] = 128 + states[s]
        facts[f + 3] = 256 + states[s + 2]
        facts[f + 4] = 384 + states[s + NEAR]
        facts[f + 5] = FREE_CURVES + (mix(381, token) >> 20) % (CURVES - FREE_CURVES)
        self.correction.estimate(at, p[at * CANDIDATES + best])

    def score_branch_position(self, at: cython.Py_ssize_t, depth: cython.Py_ssize_t, fork: cython.int) -> cython.int:
        """Gather the candidates for a position on a side branch; return the number of the most likely one, or -1.

        The caller wrote the `depth` guesses before it into `history`; the first `fork` of them belong to the chain.
        """
        self._branch_offset, self._fork = at - depth, fork
        self._chain_copy_place, self._chain_copy_length = NOWHERE, 0
        self.counts._n_places = 0
        best = self.score_position(at)
        self._branch_offset = 0
        return best

    def distribution(self, at: cython.int) -> dict[int, float]:
        """Return the candidates at a position after `score_position`, in order, with probabilities that sum to 1."""
        c: cython.int
        whole: cython.double = 0.0
        n: cython.int = self.counts.n_candidates[at]
        for c in range(n):
            whole += self.mixer.p[at * CANDIDATES + c]
        tokens = self.counts.tokens
        return {tokens[at * CANDIDATES + c]: self.mixer.p[at * CANDIDATES + c] / whole for c in range(n)}
