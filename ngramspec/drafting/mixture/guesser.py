# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`Guesser`: a chain of likely next tokens, combined from all sources, with the probability of each guess.

For each position of the chain, `PositionScorer` gathers candidates and estimates their probabilities. The most likely
one is the guess. It becomes context, and the next position follows. When the target has emitted its tokens, all sources
learn which candidates were right.

Example: A is the most likely first guess, with 0.65. At the next position, after A, the candidate C has 0.90, and then
D has 0.50:

    guess    probability    probability that the chain is right up to here
    A        0.65           0.65
    C        0.90           0.585
    D        0.50           0.29

If one more token must be accepted with a probability of at least 0.3 to pay for its time, the chain ends after D: the
next token cannot exceed 0.29. When the target emits A, C and E, the mixer and the correction learn that A and C were
right and D was wrong.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import cython

from ngramspec.drafting.draft import MarginalCost
from ngramspec.drafting.mixture import weight_files
from ngramspec.drafting.mixture.position_scorer import PositionScorer

CANDIDATES = cython.declare(cython.int, 10)
POSITIONS = cython.declare(cython.int, 64)
NOWHERE = cython.declare(cython.int, -1)


class Guesser(PositionScorer):
    """Guesses a chain of tokens, and learns from the tokens that the target emits."""

    def __init__(self, sibling: Guesser | None = None) -> None:
        super().__init__(sibling)
        self.guesses = array("i", bytes(4 * POSITIONS))  # token ids of the chain
        # Entry i is the probability that guess i is right if all before it are.
        self.acceptance_probs = array("d", bytes(8 * POSITIONS))
        self.pending = 0  # length of the chain that waits for its outcome, at most 64
        # As in `ChanceMixer`, of all parts.
        corrections = {"correction": self.correction, "pointers": self.pointers.correction}
        self.global_weights = self.mixer.global_weights | {
            f"{part}_{name}": array
            for part, correction in corrections.items()
            for name, array in correction.global_weights.items()
        }
        own = {f"correction_{name}": array for name, array in self.correction.token_weights.items()}
        self.token_weights = self.mixer.token_weights | own
        self.begin(())

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a request. Statistics about tokens are kept; all other weights are reset to those of the package."""
        token: cython.int
        weight_files.load_into(self.global_weights, weight_files.read_packaged(weight_files.START))
        self.history.clear()
        self.answers.begin()
        self.pointers.begin()
        weight_files.load_into(self.answers.correction.global_weights, weight_files.read_packaged(weight_files.ANSWERS))
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

    def start_chain(self, tokens: Sequence[int]) -> None:
        """Start a chain with these tokens, which become context, whatever their source."""
        self.pending = 0
        for at, token in enumerate(tokens):
            self.score_position(at)
            self.set_guess(at, token)

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
        pay. It is also shorter than `price.slopes`, and at most `POSITIONS` long. It already has `start` tokens, which
        are all right with probability `reach`.
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

    def record_target_guesses(self, draft: Sequence[int], n_accepted: int, answers: Sequence[int]) -> None:
        """Store the target's predictions after rejected tokens as later candidates; called before `accept`.

        `answers` are the most likely tokens after the first rejected token, after the next one, and so on.
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
