# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`Guesser`: a chain of likely next tokens, combined from all sources, with the probability of each guess.

For each position of the chain:

1. `ContextCounts` gathers candidates: the tokens that followed the same context before, in this request and in memory.
   A copy in progress (`History.near`), `RejectedRowPredictions` and `Pointers` add their candidates.
2. `ChanceMixer` estimates the probability of each candidate from the states of the sources. If `Pointers` or
`RejectedRowPredictions`
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
from ngramspec.drafting.mixture import weight_files
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


def _join_arrays(mixer: dict[str, memoryview], **parts: dict[str, memoryview]) -> dict[str, memoryview]:
    return mixer | {f"{part}_{name}": array for part, arrays in parts.items() for name, array in arrays.items()}


class Guesser:
    """Guesses a chain of tokens, and learns from the tokens that the target emits.

    The constructor accepts the guesser of another sequence that is decoded at the same time. Both then share the memory
    and the statistics about tokens; all other statistics are separate for each sequence.
    """

    def __init__(self, sibling: Guesser | None = None) -> None:
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
        self._has_answer = array("i", bytes(4 * POSITIONS))
        self._has_pointer = array("i", bytes(4 * POSITIONS))
        self.guesses = array("i", bytes(4 * POSITIONS))  # token ids of the chain
        # Entry i is the probability that guess i is right if all before it are.
        self.acceptance_probs = array("d", bytes(8 * POSITIONS))
        self.match_lengths = array("i", bytes(4 * POSITIONS))  # match length that each guess rests on
        self._best = array("i", bytes(4 * POSITIONS))
        self.pending = 0  # length of the chain that waits for its outcome, at most 64
        # For a position on a side branch, `_branch_offset` is its number minus the number of guesses before it. `_fork`
        # is the number of these guesses that belong to the chain.
        self._branch_offset = self._fork = 0
        self.begin(())

    def global_weights(self) -> dict[str, memoryview]:
        """Return the weights that do not depend on tokens, by name: the arrays themselves, for reading and writing."""
        pointers = self.pointers.correction.global_weights()
        return _join_arrays(self.mixer.global_weights(), correction=self.correction.global_weights(), pointers=pointers)

    def token_weights(self) -> dict[str, memoryview]:
        """Return the weights for single tokens, by name: the arrays themselves, for reading and writing."""
        return _join_arrays(self.mixer.token_weights(), correction=self.correction.token_weights())

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a request. Statistics about tokens are kept; all other weights are reset to those of the package."""
        token: cython.int
        weight_files.load_into(self.global_weights(), weight_files.read_packaged(weight_files.START))
        self.history.clear()
        self.answers.begin()
        self.pointers.begin()
        weight_files.load_into(
            self.answers.correction.global_weights(), weight_files.read_packaged(weight_files.ANSWERS)
        )
        for token in prompt:
            self.history.add(token)
        self._prompt = self.history.size
        self.pending = 0
        self._recent = 0.5
        self._streak = 0
        self._copy_place = NOWHERE
        self._copy_length = 0

    def text(self) -> list[int]:
        """Return the tokens of the request so far."""
        i: cython.Py_ssize_t
        return [self.history.tokens[i] for i in range(self.history.size)]

    def score_position(self, at: cython.Py_ssize_t) -> cython.int:
        """Gather the candidates for position `at` of the chain; return the number of the most likely one, or -1."""
        t = self.history.tokens
        depth: cython.Py_ssize_t = at - self._branch_offset
        end: cython.Py_ssize_t = self.history.size + depth
        if at == 0:
            self._chain_copy_place = self._copy_place
            self._chain_copy_length = self._copy_length
        counts: ContextCounts = self.counts
        counts.clear(at)
        longest: cython.int = counts.count_in_request(self.history, at, end) if self.local else 0
        if longest > self._chain_copy_length + 2:
            self._chain_copy_place = counts.best_place
            if at == 0:
                self._copy_place = counts.best_place
                self._copy_length = self._chain_copy_length = longest
        memory_match: cython.int = 0
        if self.memory:
            memory_match = counts.count_in_memory(self.history, self.memory, at, end, longest)
        place: cython.Py_ssize_t = NOWHERE
        near_token: cython.int = -1
        match_kind: cython.int = 0
        if self._chain_copy_place > 0:
            place = self.history.near(end, self._chain_copy_place)
            match_kind = self.history.match_kind
            if place != NOWHERE:
                near_token = t[place]
                counts.add_candidate(at, near_token)
        has_answer: cython.bint = self.answers.find_predictions(self.history, end)
        self._has_answer[at] = has_answer
        if has_answer:
            if self.answers.place_token >= 0:
                counts.add_candidate(at, self.answers.place_token)
            if self.answers.pool_token >= 0:
                counts.add_candidate(at, self.answers.pool_token)
        has_pointer: cython.bint = (
            self.local and self._branch_offset == 0 and self.pointers.find_predictions(self.history, end, at)
        )
        self._has_pointer[at] = has_pointer
        if has_pointer:
            for i in range(POINTERS):
                if self.pointers.tokens[i] >= 0:
                    counts.add_candidate(at, self.pointers.tokens[i])
        n: cython.int = counts.n_candidates[at]
        if n == 0:
            return -1
        copy_class: cython.int = doublings(self._chain_copy_length, 9)
        streak: cython.int = cython.cast(cython.int, depth) + (
            self._streak if self._branch_offset == 0 else -1 - self._fork
        )
        run: cython.int = streak if streak < 3 else 3 if streak < 8 else 4
        recent: cython.int = cython.cast(cython.int, self._recent * 6)
        recent = min(recent, 5)
        length: cython.int = _length(longest if longest > memory_match else memory_match)
        # The source of the longest match is 0 (prompt), 1 (answer so far), 2 (none) or 3 (memory). `distance` is the
        # class of its distance.
        source: cython.int = 2
        if memory_match > longest:
            source = 3
        elif longest > 0:
            source = 1 if counts.best_place >= self._prompt else 0
        distance: cython.int = doublings(end - counts.best_place, 13) if source < 2 else 0
        step: cython.int = cython.cast(cython.int, depth) if depth < 7 else 7
        last: cython.ulonglong = t[end - 1] if end > 0 else 0
        before: cython.ulonglong = t[end - 2] if end > 1 else 0
        mixer: ChanceMixer = self.mixer
        best: cython.int = -1
        chance: cython.double = -1.0
        for c in range(n):
            token: cython.int = counts.tokens[at * CANDIDATES + c]
            cell: cython.Py_ssize_t = at * CANDIDATES + c
            s: cython.Py_ssize_t = cell * SOURCES
            f: cython.Py_ssize_t = cell * BIASES
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
            mixer.states[s + MATCH] = length * 10 + agrees * 5 + run
            continues_copy: cython.int = 2
            if place == NOWHERE:
                mixer.states[s + NEAR] = ABSENT
            else:
                continues_copy = 1 if token == near_token else 0
                mixer.states[s + NEAR] = (match_kind * 10 + copy_class) * 2 + continues_copy
            v: cython.Py_ssize_t = cell * VIEWS
            mixer.views[v] = (length * 6 + recent) * 2 + agrees
            mixer.views[v + 1] = step * 8 + top
            mixer.views[v + 2] = (mix(331 + agrees, last) >> 20) & 1023
            mixer.views[v + 3] = (source * 14 + distance) * 2 + agrees
            mixer.views[v + 4] = step
            x: cython.ulonglong = token
            mixer.facts[f] = _token(mix(11 + agrees, x))
            mixer.facts[f + 1] = _token(mix(21 + agrees, last))
            mixer.facts[f + 2] = _free(mix(31 + length * 16 + recent, agrees))
            mixer.facts[f + 3] = _free(mix(1041 + run * 2, agrees))
            mixer.facts[f + 4] = _pair(mix(mix(51, last), x))
            mixer.facts[f + 5] = _token(mix(61 + top * 2 + agrees, last))
            mixer.facts[f + 6] = _free(mix(81 + match_kind * 8 + continues_copy, length * 2 + agrees))
            mixer.facts[f + 7] = _token(mix(191 + top * 2 + agrees, x))
            bigram: cython.ulonglong = mix(mix(271 + agrees, last), before)
            mixer.facts[f + 8] = _pair(bigram)
            state_1: cython.int = mixer.states[s] + 1
            state_2: cython.int = mixer.states[s + 1] + 1
            mixer.facts[f + 9] = _token(mix(mix(341 + agrees, source * 16 + distance), x))
            mixer.facts[f + 10] = _token(mix(mix(351, state_1 * 128 + state_2), x))
            mixer.facts[f + 11] = _pair(mix(mix(bigram, 361), state_2))
            mixer.facts[f + 12] = _pair(mix(mix(bigram, 371), x))
            p: cython.double = mixer.estimate(cell)
            if has_pointer:
                p = mixer.p[cell] = self.pointers.estimate(cell, token, p, length)
            if has_answer:
                p = mixer.p[cell] = self.answers.estimate(cell, token, p, top, length)
            if p > chance:
                chance = p
                best = c
        self._best[at] = best
        self._correct(at, source, n)
        self._near_token = near_token
        self._near_place = place
        self.match_lengths[at] = longest if longest > memory_match else memory_match
        return best

    def score_branch_position(self, at: cython.Py_ssize_t, depth: cython.Py_ssize_t, fork: cython.int) -> cython.int:
        """Gather the candidates for a position on a side branch; return the number of the most likely one, or -1.

        Args:
            at: Number of the position.
            depth: Number of guesses before it, which the caller wrote into `history`.
            fork: Number of these guesses that belong to the chain.
        """
        self._branch_offset, self._fork = at - depth, fork
        self._chain_copy_place, self._chain_copy_length = NOWHERE, 0
        self.counts._n_places = 0
        best = self.score_position(at)
        self._branch_offset = 0
        return best

    def _correct(self, at: cython.Py_ssize_t, source: cython.int, n: cython.int) -> None:
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
        facts[f + 1] = 64 + 4 * doublings(self.history.size - self._prompt, 11) + source
        facts[f + 2] = 128 + states[s]
        facts[f + 3] = 256 + states[s + 2]
        facts[f + 4] = 384 + states[s + NEAR]
        facts[f + 5] = FREE_CURVES + (mix(381, token) >> 20) % (CURVES - FREE_CURVES)
        self.correction.estimate(at, p[at * CANDIDATES + best])

    def take_candidate(self, at: cython.Py_ssize_t, c: cython.int) -> None:
        """Guess candidate `c` at position `at`; it becomes context for the next positions."""
        cell: cython.Py_ssize_t = at * CANDIDATES + c
        chance: cython.double = self.correction.p[at] if c == self._best[at] else self.mixer.p[cell]
        self._append(at, self.counts.tokens[cell], chance)

    def _append(self, at: cython.Py_ssize_t, token: cython.int, chance: cython.double) -> None:
        self.guesses[at] = token
        self.acceptance_probs[at] = chance
        self.history.tokens[self.history.size + at] = token
        self.pending = at + 1
        self.pointers.advance(token)
        if self._near_place != NOWHERE and token == self._near_token:
            self._chain_copy_place = self._near_place + 1
            self._chain_copy_length += 1
        elif self._chain_copy_place != NOWHERE:
            self._chain_copy_place += 1
            self._chain_copy_length = 0

    def set_guess(self, at: cython.Py_ssize_t, token: cython.int) -> None:
        """Set the guess at position `at`, after `score_position`; any token but a candidate gets the probability 0."""
        for c in range(self.counts.n_candidates[at]):
            if self.counts.tokens[at * CANDIDATES + c] == token:
                self.take_candidate(at, c)
                return
        self.match_lengths[at] = 0
        self._near_place = NOWHERE
        self._append(at, token, 0.0)

    def guess(
        self,
        limit: cython.int,
        min_probability: cython.double,
        price: MarginalCost,
        start: cython.int = 0,
        reach: cython.double = 1.0,
    ) -> int:
        """Extend the chain with the most likely tokens, in `guesses` and `acceptance_probs`; return its length.

        The chain ends when all of it is right with a probability below `min_probability`, or when one more token cannot
        pay.

        Args:
            limit: Maximum length. The chain is also shorter than `price.slopes`, and at most `POSITIONS` long.
            min_probability: Minimum probability that the whole chain is right.
            price: Cost of one more token.
            start: Number of tokens that the chain already has.
            reach: Probability that all of these are right.
        """
        at: cython.int
        c: cython.int
        limit = min(limit, POSITIONS, cython.cast(cython.int, len(price.slopes)) - 1)
        self.pending = start
        for at in range(start, limit):
            c = self.score_position(at)
            if c < 0:
                break
            self.take_candidate(at, c)
            reach *= self.acceptance_probs[at]
            if reach < min_probability or not price.worth_extending(reach, at + 1):
                break
        return self.pending

    def chain(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
        """Return the tokens of the chain, the match lengths they rest on, and their acceptance probabilities."""
        i: cython.Py_ssize_t
        n: cython.Py_ssize_t = self.pending
        return (
            tuple([self.guesses[i] for i in range(n)]),
            tuple([self.match_lengths[i] for i in range(n)]),
            tuple([self.acceptance_probs[i] for i in range(n)]),
        )

    def distribution(self, at: cython.int) -> dict[int, float]:
        """Return the candidates at a position after `score_position`, in order, with probabilities that sum to 1."""
        c: cython.int
        whole: cython.double = 0.0
        n: cython.int = self.counts.n_candidates[at]
        for c in range(n):
            whole += self.mixer.p[at * CANDIDATES + c]
        tokens = self.counts.tokens
        return {tokens[at * CANDIDATES + c]: self.mixer.p[at * CANDIDATES + c] / whole for c in range(n)}

    def record_target_guesses(self, draft: Sequence[int], n_accepted: int, answers: Sequence[int]) -> None:
        """Store the target's predictions after rejected tokens as later candidates; called before `accept`.

        Args:
            draft: The draft, fewer than `POSITIONS` tokens.
            n_accepted: Number of accepted draft tokens.
            answers: Most likely token after the first rejected token, after the next one, and so on.
        """
        at: cython.Py_ssize_t
        for at in range(len(draft)):
            self.history.tokens[self.history.size + at] = draft[at]
        self.answers.record(self.history, self.history.size + n_accepted, answers)

    def accept(self, tokens: Sequence[int]) -> int:
        """Learn from emitted tokens; return the number of right guesses in the chain."""
        n: cython.Py_ssize_t = len(tokens)
        hits: cython.int = 0
        for at in range(min(self.pending, n)):
            token = tokens[at]
            for c in range(self.counts.n_candidates[at]):
                right = self.counts.tokens[at * CANDIDATES + c] == token
                self.mixer.learn(at * CANDIDATES + c, right)
                if self._has_pointer[at]:
                    self.pointers.correction.learn(at * CANDIDATES + c, right)
                if self._has_answer[at]:
                    self.answers.correction.learn(at * CANDIDATES + c, right)
            if self.counts.n_candidates[at] > 0:
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
        if self._copy_place > 0:
            place = self.history.near(self.history.size, self._copy_place)
            if place != NOWHERE and self.history.tokens[place] == token:
                self._copy_place = place + 1
                self._copy_length += 1
            else:
                self._copy_place += 1
                self._copy_length = 0
        self.pointers.add(self.history, token)
        self.history.add(token)
