# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`Guesser`: a chain of likely next tokens, combined from all sources, with the probability of each guess.

For each position of the chain:

1. `ContextCounts` gathers candidates: the tokens that followed the same context before, in this request and in memory.
   A copy in progress (`History.near`), `Answers` and `Pointers` add their candidates.
2. `ChanceMixer` estimates the probability of each candidate from the states of the sources. If `Pointers` or `Answers`
   have a candidate at this position, they correct all estimates.
3. The most likely candidate is the guess. `Correction` calibrates its probability by how often such guesses were right.
4. The guess becomes context, and the next position follows.

Example: the last two tokens occurred four times before; A followed three times and B once. The mixer estimates 0.70 for
A and 0.20 for B. The guess is A. Being the maximum of two noisy estimates, its 0.70 is too high on average, and the
correction returns 0.65. At the next position, after A, the candidate C has 0.90, and then D has 0.50:

    guess    probability    probability that the chain is right up to here
    A        0.65           0.65
    C        0.90           0.585
    D        0.50           0.29

If one more token must be accepted with a probability of at least 0.3 to pay for its time, the chain ends after D: the
next token cannot exceed 0.29. When the target emits A, C and E, the mixer and the correction learn that A and C were
right and D was wrong.

Each position and each token takes constant time, which does not depend on the length of the context.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import cython

from ngramspec.drafting.draft import MarginalCost
from ngramspec.drafting.mixture import learnt
from ngramspec.drafting.mixture.answers import Answers
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

# `ChanceMixer` numbers the sources: first the `SIGHTED` sources of `ContextCounts`, then `MATCH` and `NEAR`.
SIGHTED = cython.declare(cython.int, 6)
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


def _share(count: cython.int, seen: cython.int, latest: cython.int) -> cython.int:
    """Return the state of a source that saw the context `seen` times, followed by this guess `count` times."""
    q: cython.int = 1 + (4 * count > seen) + (2 * count > seen) + (4 * count > 3 * seen)
    if count == 0:
        q = 0
    elif count == seen:
        q = 5
    return ((seen if seen < 8 else 8) - 1) * 12 + q * 2 + latest


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


def _named(mixer: dict[str, memoryview], **others: dict[str, memoryview]) -> dict[str, memoryview]:
    return mixer | {f"{whose}_{name}": array for whose, known in others.items() for name, array in known.items()}


class Guesser:
    """Guesses a chain of tokens, and learns from the tokens that the target emits.

    The constructor accepts the guesser of another sequence that is decoded at the same time. Both then share the memory
    and the statistics about tokens; all other statistics are separate for each sequence.
    """

    def __init__(self, beside: Guesser | None = None) -> None:
        self.history = History()
        sets = 12 * 6 * 2, 64, 1024, 4 * 14 * 2, 8  # number of weight sets for each of `mixer.views`
        mixer, correction = (None, None) if beside is None else (beside.mixer, beside.correction)
        self.mixer: ChanceMixer = ChanceMixer(POSITIONS * CANDIDATES, sets, mixer)
        self.correction: Correction = Correction(POSITIONS, correction)
        # Each `TokenIndex` of the memory is looked up in addition to the request's own tokens.
        self.memory: list[TokenIndex] = [] if beside is None else beside.memory
        self.local: bool = beside is None or beside.local  # True if the request's own tokens are looked up
        self.counts = ContextCounts(POSITIONS)
        self.answers = Answers(POSITIONS * CANDIDATES)
        self.pointers = Pointers(POSITIONS * CANDIDATES)
        self._answered = array("i", bytes(4 * POSITIONS))
        self._pointed = array("i", bytes(4 * POSITIONS))
        self.guesses = array("i", bytes(4 * POSITIONS))  # token ids of the chain
        # Entry i is the probability that guess i is right if all before it are.
        self.acceptance_probs = array("d", bytes(8 * POSITIONS))
        self.lengths = array("i", bytes(4 * POSITIONS))  # match length that each guess rests on
        self._best = array("i", bytes(4 * POSITIONS))
        self.pending = 0  # length of the chain that waits for its outcome, at most 64
        # For a position on a side branch, `_aside` is its number minus the number of guesses before it. `_fork` is the
        # number of these guesses that belong to the chain.
        self._aside = self._fork = 0
        self.begin(())

    def shared(self) -> dict[str, memoryview]:
        """Return the weights that do not depend on tokens, by name: the arrays themselves, for reading and writing."""
        pointers = self.pointers.correction.shared()
        return _named(self.mixer.shared(), correction=self.correction.shared(), pointers=pointers)

    def about_tokens(self) -> dict[str, memoryview]:
        """Return the weights for single tokens, by name: the arrays themselves, for reading and writing."""
        return _named(self.mixer.about_tokens(), correction=self.correction.about_tokens())

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a request. Statistics about tokens are kept; all other weights are reset to those of the package."""
        token: cython.int
        learnt.take_up(self.shared(), learnt.shipped(learnt.START))
        self.history.clear()
        self.answers.begin()
        self.pointers.begin()
        learnt.take_up(self.answers.correction.shared(), learnt.shipped(learnt.ANSWERS))
        for token in prompt:
            self.history.add(token)
        self._prompt = self.history.size
        self.pending = 0
        self._recent = 0.5
        self._streak = 0
        self._place = NOWHERE
        self._copied = 0

    def text(self) -> list[int]:
        """Return the tokens of the request so far."""
        i: cython.Py_ssize_t
        return [self.history.tokens[i] for i in range(self.history.size)]

    def look(self, at: cython.Py_ssize_t) -> cython.int:
        """Gather the candidates for position `at` of the chain; return the number of the most likely one, or -1."""
        t = self.history.tokens
        depth: cython.Py_ssize_t = at - self._aside
        end: cython.Py_ssize_t = self.history.size + depth
        if at == 0:
            self._at_place = self._place
            self._at_copied = self._copied
        found: ContextCounts = self.counts
        found.clear(at)
        longest: cython.int = found.follow(self.history, at, end) if self.local else 0
        if longest > self._at_copied + 2:
            self._at_place = found.best
            if at == 0:
                self._place = found.best
                self._copied = self._at_copied = longest
        recalled: cython.int = 0
        if self.memory:
            recalled = found.recall(self.history, self.memory, at, end, longest)
        place: cython.Py_ssize_t = NOWHERE
        near: cython.int = -1
        how: cython.int = 0
        if self._at_place > 0:
            place = self.history.near(end, self._at_place)
            how = self.history.how
            if place != NOWHERE:
                near = t[place]
                found.enter(at, near)
        answered: cython.bint = self.answers.look(self.history, end)
        self._answered[at] = answered
        if answered:
            if self.answers.aligned >= 0:
                found.enter(at, self.answers.aligned)
            if self.answers.pooled >= 0:
                found.enter(at, self.answers.pooled)
        pointed: cython.bint = self.local and self._aside == 0 and self.pointers.look(self.history, end, at)
        self._pointed[at] = pointed
        if pointed:
            for i in range(POINTERS):
                if self.pointers.tokens[i] >= 0:
                    found.enter(at, self.pointers.tokens[i])
        n: cython.int = found.found[at]
        if n == 0:
            return -1
        copied: cython.int = doublings(self._at_copied, 9)
        streak: cython.int = cython.cast(cython.int, depth) + (self._streak if self._aside == 0 else -1 - self._fork)
        run: cython.int = streak if streak < 3 else 3 if streak < 8 else 4
        recent: cython.int = cython.cast(cython.int, self._recent * 6)
        recent = min(recent, 5)
        length: cython.int = _length(longest if longest > recalled else recalled)
        # The source of the longest match is 0 (prompt), 1 (answer so far), 2 (none) or 3 (memory). `back` is the class
        # of its distance.
        whence: cython.int = 2
        if recalled > longest:
            whence = 3
        elif longest > 0:
            whence = 1 if found.best >= self._prompt else 0
        back: cython.int = doublings(end - found.best, 13) if whence < 2 else 0
        step: cython.int = cython.cast(cython.int, depth) if depth < 7 else 7
        last: cython.ulonglong = t[end - 1] if end > 0 else 0
        before: cython.ulonglong = t[end - 2] if end > 1 else 0
        mixer: ChanceMixer = self.mixer
        best: cython.int = -1
        chance: cython.double = -1.0
        for c in range(n):
            token: cython.int = found.tokens[at * CANDIDATES + c]
            cell: cython.Py_ssize_t = at * CANDIDATES + c
            s: cython.Py_ssize_t = cell * SOURCES
            f: cython.Py_ssize_t = cell * BIASES
            top: cython.int = 0
            for i in range(SIGHTED):
                if found.seen[i] == 0:
                    mixer.states[s + i] = ABSENT
                    continue
                count: cython.int = found.count[c * SIGHTED + i]
                if count > 0:
                    top = i + 1
                mixer.states[s + i] = _share(count, found.seen[i], found.latest[c * SIGHTED + i])
            agrees: cython.int = 1 if token == found.best_token else 0
            mixer.states[s + MATCH] = length * 10 + agrees * 5 + run
            goes_on: cython.int = 2
            if place == NOWHERE:
                mixer.states[s + NEAR] = ABSENT
            else:
                goes_on = 1 if token == near else 0
                mixer.states[s + NEAR] = (how * 10 + copied) * 2 + goes_on
            v: cython.Py_ssize_t = cell * VIEWS
            mixer.views[v] = (length * 6 + recent) * 2 + agrees
            mixer.views[v + 1] = step * 8 + top
            mixer.views[v + 2] = (mix(331 + agrees, last) >> 20) & 1023
            mixer.views[v + 3] = (whence * 14 + back) * 2 + agrees
            mixer.views[v + 4] = step
            x: cython.ulonglong = token
            mixer.facts[f] = _token(mix(11 + agrees, x))
            mixer.facts[f + 1] = _token(mix(21 + agrees, last))
            mixer.facts[f + 2] = _free(mix(31 + length * 16 + recent, agrees))
            mixer.facts[f + 3] = _free(mix(1041 + run * 2, agrees))
            mixer.facts[f + 4] = _pair(mix(mix(51, last), x))
            mixer.facts[f + 5] = _token(mix(61 + top * 2 + agrees, last))
            mixer.facts[f + 6] = _free(mix(81 + how * 8 + goes_on, length * 2 + agrees))
            mixer.facts[f + 7] = _token(mix(191 + top * 2 + agrees, x))
            both: cython.ulonglong = mix(mix(271 + agrees, last), before)
            mixer.facts[f + 8] = _pair(both)
            one: cython.int = mixer.states[s] + 1
            two: cython.int = mixer.states[s + 1] + 1
            mixer.facts[f + 9] = _token(mix(mix(341 + agrees, whence * 16 + back), x))
            mixer.facts[f + 10] = _token(mix(mix(351, one * 128 + two), x))
            mixer.facts[f + 11] = _pair(mix(mix(both, 361), two))
            mixer.facts[f + 12] = _pair(mix(mix(both, 371), x))
            p: cython.double = mixer.estimate(cell)
            if pointed:
                p = mixer.p[cell] = self.pointers.estimate(cell, token, p, length)
            if answered:
                p = mixer.p[cell] = self.answers.estimate(cell, token, p, top, length)
            if p > chance:
                chance = p
                best = c
        self._best[at] = best
        self._correct(at, whence, n)
        self._near_token = near
        self._near_place = place
        self.lengths[at] = longest if longest > recalled else recalled
        return best

    def look_aside(self, at: cython.Py_ssize_t, depth: cython.Py_ssize_t, fork: cython.int) -> cython.int:
        """Gather the candidates for a position on a side branch; return the number of the most likely one, or -1.

        Args:
            at: Number of the position.
            depth: Number of guesses before it, which the caller wrote into `history`.
            fork: Number of these guesses that belong to the chain.
        """
        self._aside, self._fork = at - depth, fork
        self._at_place, self._at_copied = NOWHERE, 0
        self.counts._kept = 0
        best = self.look(at)
        self._aside = 0
        return best

    def _correct(self, at: cython.Py_ssize_t, whence: cython.int, n: cython.int) -> None:
        """Calibrate the probability of the most likely of the `n` candidates of a position."""
        p = self.mixer.p
        states = self.mixer.states
        facts = self.correction.facts
        best: cython.int = self._best[at]
        second: cython.double = 0.0
        others: cython.double = 0.0
        for c in range(n):
            if c != best:
                others += p[at * CANDIDATES + c]
                second = max(second, p[at * CANDIDATES + c])
        s: cython.Py_ssize_t = (at * CANDIDATES + best) * SOURCES
        f: cython.Py_ssize_t = at * FACTS
        token: cython.ulonglong = self.counts.tokens[at * CANDIDATES + best]
        facts[f] = 8 * _rarity(second) + _rarity(others)
        facts[f + 1] = 64 + 4 * doublings(self.history.size - self._prompt, 11) + whence
        facts[f + 2] = 128 + states[s]
        facts[f + 3] = 256 + states[s + 2]
        facts[f + 4] = 384 + states[s + NEAR]
        facts[f + 5] = FREE_CURVES + (mix(381, token) >> 20) % (CURVES - FREE_CURVES)
        self.correction.estimate(at, p[at * CANDIDATES + best])

    def take(self, at: cython.Py_ssize_t, c: cython.int) -> None:
        """Guess candidate `c` at position `at`; it becomes context for the next positions."""
        cell: cython.Py_ssize_t = at * CANDIDATES + c
        chance: cython.double = self.correction.p[at] if c == self._best[at] else self.mixer.p[cell]
        self._go_on(at, self.counts.tokens[cell], chance)

    def _go_on(self, at: cython.Py_ssize_t, token: cython.int, chance: cython.double) -> None:
        self.guesses[at] = token
        self.acceptance_probs[at] = chance
        self.history.tokens[self.history.size + at] = token
        self.pending = at + 1
        self.pointers.take(token)
        if self._near_place != NOWHERE and token == self._near_token:
            self._at_place = self._near_place + 1
            self._at_copied += 1
        elif self._at_place != NOWHERE:
            self._at_place += 1
            self._at_copied = 0

    def put(self, at: cython.Py_ssize_t, token: cython.int) -> None:
        """Set the guess at position `at`, after `look`; a token that is not a candidate gets the probability 0."""
        for c in range(self.counts.found[at]):
            if self.counts.tokens[at * CANDIDATES + c] == token:
                self.take(at, c)
                return
        self.lengths[at] = 0
        self._near_place = NOWHERE
        self._go_on(at, token, 0.0)

    def guess(
        self,
        limit: cython.int,
        least: cython.double,
        price: MarginalCost,
        start: cython.int = 0,
        reach: cython.double = 1.0,
    ) -> int:
        """Extend the chain with the most likely tokens, in `guesses` and `acceptance_probs`; return its length.

        The chain ends when all of it is right with a probability below `least`, or when one more token cannot pay.

        Args:
            limit: Maximum length. The chain is also shorter than `price.slopes`, and at most `POSITIONS` long.
            least: Minimum probability that the whole chain is right.
            price: Cost of one more token.
            start: Number of tokens that the chain already has.
            reach: Probability that all of these are right.
        """
        at: cython.int
        c: cython.int
        limit = min(limit, POSITIONS, cython.cast(cython.int, len(price.slopes)) - 1)
        self.pending = start
        for at in range(start, limit):
            c = self.look(at)
            if c < 0:
                break
            self.take(at, c)
            reach *= self.acceptance_probs[at]
            if reach < least or not price.worth_extending(reach, at + 1):
                break
        return self.pending

    def chain(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
        """Return the tokens of the chain, the match lengths they rest on, and their acceptance probabilities."""
        i: cython.Py_ssize_t
        n: cython.Py_ssize_t = self.pending
        return (
            tuple([self.guesses[i] for i in range(n)]),
            tuple([self.lengths[i] for i in range(n)]),
            tuple([self.acceptance_probs[i] for i in range(n)]),
        )

    def distribution(self, at: cython.int) -> dict[int, float]:
        """Return the candidates at a position after `look`, in order, with probabilities that sum to 1."""
        c: cython.int
        whole: cython.double = 0.0
        n: cython.int = self.counts.found[at]
        for c in range(n):
            whole += self.mixer.p[at * CANDIDATES + c]
        tokens = self.counts.tokens
        return {tokens[at * CANDIDATES + c]: self.mixer.p[at * CANDIDATES + c] / whole for c in range(n)}

    def hear(self, sent: Sequence[int], accepted: int, answers: Sequence[int]) -> None:
        """Store the target's predictions after rejected tokens as later candidates; called before `accept`.

        Args:
            sent: The draft, fewer than `POSITIONS` tokens.
            accepted: Number of accepted draft tokens.
            answers: Most likely token after the first rejected token, after the next one, and so on.
        """
        at: cython.Py_ssize_t
        for at in range(len(sent)):
            self.history.tokens[self.history.size + at] = sent[at]
        self.answers.hear(self.history, self.history.size + accepted, answers)

    def accept(self, tokens: Sequence[int]) -> int:
        """Learn from emitted tokens; return the number of right guesses in the chain."""
        n: cython.Py_ssize_t = len(tokens)
        hits: cython.int = 0
        for at in range(min(self.pending, n)):
            token = tokens[at]
            for c in range(self.counts.found[at]):
                right = self.counts.tokens[at * CANDIDATES + c] == token
                self.mixer.learn(at * CANDIDATES + c, right)
                if self._pointed[at]:
                    self.pointers.correction.learn(at * CANDIDATES + c, right)
                if self._answered[at]:
                    self.answers.correction.learn(at * CANDIDATES + c, right)
            if self.counts.found[at] > 0:
                self.correction.learn(at, self.counts.tokens[at * CANDIDATES + self._best[at]] == token)
            right = self.guesses[at] == token
            if right and self.acceptance_probs[at] > 0.0:
                self._recent = self._recent * 0.85 + 0.15
                self._streak += 1
            else:
                self._recent *= 0.85
                self._streak = 0
            if not right:
                break
            hits += 1
        self.pending = 0
        for token in tokens:
            self._add(token)
        return hits

    def _add(self, token: cython.int) -> None:
        if self._place > 0:
            place = self.history.near(self.history.size, self._place)
            if place != NOWHERE and self.history.tokens[place] == token:
                self._place = place + 1
                self._copied += 1
            else:
                self._place += 1
                self._copied = 0
        self.pointers.add(self.history, token)
        self.history.add(token)
