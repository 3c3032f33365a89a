"""`MixtureDrafter`: the default drafter, around a `Guesser`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ngramspec.drafting.acceptance_estimator import ProbabilityCalibrator
from ngramspec.drafting.draft import Ask, Chooser, Draft, Drafter, MarginalCost
from ngramspec.drafting.mixture import weight_files
from ngramspec.drafting.mixture.guesser import Guesser
from ngramspec.drafting.mixture.history import AnswerStore, CurrentAnswer
from ngramspec.drafting.token_index import SEAM, TokenIndex
from ngramspec.sampling.settings import Sampling
from ngramspec.tokens import common_prefix

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_TOKENS = 1 << 22  # maximum number of remembered tokens, about 12 bytes each; beyond it the older half is dropped


class TextIndexSet:
    """Texts to draft from in addition to the context. `Memory` adds those that are stored on disk."""

    def __init__(self, indexes: Sequence[TokenIndex] = ()) -> None:
        self._session_indexes = [TokenIndex()]
        # Indexes for lookups, the oldest first; only the last one changes. A negative token marks the seam between two
        # texts. The list object stays the same.
        self.indexes: list[TokenIndex] = [*indexes, *self._session_indexes]
        self.answers: AnswerStore | None = AnswerStore()  # `None` if repeated requests are not treated specially

    def add_text(self, tokens: Sequence[int]) -> None:
        """Add an answer to the memory of this process, unless it stays in the context, which is looked up anyway."""
        if self._session_indexes[-1].size > MAX_TOKENS // 2:
            del self.indexes[-len(self._session_indexes) :]
            self._session_indexes = [self._session_indexes[-1], TokenIndex()]
            self.indexes += self._session_indexes
        if tokens:
            self._session_indexes[-1].extend(tokens)
            self._session_indexes[-1].append(SEAM)

    def refresh(self) -> None:
        """Load the texts that other processes added; by default there are no such texts."""


_LEADS_TO = 8  # tokens at the end of a prompt that are put before a predicted answer, so that a lookup finds it
LONGEST = 63  # maximum number of tokens in a draft
ROWS = 8  # maximum number of logits rows read after rejected tokens; later rows are rarely useful
CHEAP = (
    0.05  # maximum cost of a draft token, in decode calls of one token, at which rows after rejected tokens are read
)
SHARE = 0.005  # maximum time for reading rows, as a part of a one-token decode call
SLOWER = 1.1  # maximum factor by which one measurement raises the estimated time per row
# A draft ends when the probability that all of it is accepted falls below this value, however cheap a token is. It is
# lower than `MIN_CHAIN_PROB` of the other drafters, so that the cost of a token decides on GPUs too.
HOPELESS = 0.004
SAVE_SECONDS = 10.0  # between two writes of the statistics about tokens, each of which takes 6 ms
FREE = MarginalCost(0.0, [0.0] * (LONGEST + 1))  # the cost that is used if the caller passes no `price`


class MixtureDrafter(Drafter):
    """Drafts from the context and from remembered texts, weighted by how often each source was right recently.

    Args:
        memory: Texts to look up in addition to the context, maintained by their owner. True means that this drafter
            remembers its own earlier requests and their answers.
        state_path: File that stores the statistics about tokens for later processes; `None` means that they are not
            stored.
        context: True to draft from the context too; otherwise the context only selects the places in memory.
    """

    name = "mixture"

    def __init__(
        self, memory: TextIndexSet | bool | None = None, state_path: Path | None = None, *, context: bool = True
    ) -> None:
        self.prediction: Sequence[int] = ()
        self.guesser = Guesser()
        if not context:
            self.name, self.guesser.local = "memory", False
        # The next draft begins with the tokens of `known_prefix`, each of which is right with probability
        # `prefix_probability`.
        self.known_prefix: Sequence[int] = ()
        self.prefix_probability = 1.0
        self._own_memory: TextIndexSet | None = None
        if memory is True:
            self._own_memory = memory = TextIndexSet()
        self._memory: TextIndexSet | None = memory or None
        if self._memory is not None:
            self.guesser.memory = self._memory.indexes
        self._n_stored = 0
        self._sampling: Sampling | None = None  # sampling of the next request, if it is known
        self._answer: CurrentAnswer | None = None
        self._n_prefix = 0  # tokens at the start of the last draft that the guesser did not choose
        self._unread: list[int] = []  # emitted tokens that the guesser learns before the next draft
        # Three probabilities differ: that a token comes next, that a drawn token is accepted, and that a token not yet
        # drawn is accepted. The last two therefore have separate calibrations.
        self._drawn_calibrator, self._undrawn_calibrator = ProbabilityCalibrator(), ProbabilityCalibrator()
        self._calibration: tuple[ProbabilityCalibrator, Sequence[float]] | None = None
        self._max_rows, self._row_seconds = 0, 0.0
        self._state_path, self._save_at = state_path, 0.0
        if state_path is not None:
            weight_files.load_into(self.guesser.token_weights, weight_files.read(state_path))

    def save_state(self) -> None:
        """Store the statistics about tokens, at most every `SAVE_SECONDS`; the last of several processes wins."""
        now = time.monotonic()
        if self._state_path is not None and now >= self._save_at:
            weight_files.save(self._state_path, self.guesser.token_weights)
            self._save_at = now + SAVE_SECONDS

    def clone_for_sequence(self) -> Self:
        """Return a drafter for another sequence at the same time; both share memory and statistics about tokens."""
        if self._own_memory is not None:
            raise ValueError("a drafter that stores earlier requests itself can draft for only one sequence at a time")
        clone = copy(self)
        clone.guesser = Guesser(self.guesser)
        clone._calibration = clone._state_path = clone._answer = None
        clone._unread = []
        return clone

    def set_sampling(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def begin(self, prompt: Sequence[int]) -> None:
        if self._own_memory is not None:
            self._read_tokens()
            before = self.guesser.text()
            # Add the common start of requests to the memory only once.
            self._own_memory.add_text(before[self._n_stored :])
            self._n_stored = common_prefix(before, prompt)
        self._calibration, self.known_prefix = None, ()
        sampling, self._sampling, self._answer = self._sampling, None, None
        if self._memory is not None:
            self._memory.refresh()
            if sampling is not None and self._memory.answers is not None:
                self._answer = self._memory.answers.begin(prompt, sampling)
        # The predicted answer is put before the prompt, after a copy of the prompt's end. It then looks like an earlier
        # answer to the same prompt, and lookups in the context find it.
        before = [*prompt[-_LEADS_TO:], *self.prediction] if self.prediction else []
        self._unread.clear()
        self.guesser.begin([*before, *prompt] if before else prompt)

    def propose(self, ask: Ask) -> Draft:
        guesser, choose, price = self.guesser, ask.choose, ask.price or FREE
        if self._unread:
            self._read_tokens()
        limit = min(ask.limit, LONGEST, len(price.slopes) - 1)
        prefix = self.known_prefix[:limit]
        prefix_probs, repeats = (self.prefix_probability,) * len(prefix), False
        if self._answer is not None and self._answer.earlier:
            answer, probs = self._answer.continuation(limit)
            if answer and answer[: len(prefix)] == [*prefix]:
                prefix, prefix_probs, repeats = answer, probs, True
        start, reach = len(prefix), prod(prefix_probs)
        self._n_prefix = start
        guesser.start_chain(prefix)
        self._request_rows(price)
        if choose is None:
            guesser.guess(limit, HOPELESS, price, start, reach)
            tokens, match_lengths, chances = guesser.chain()
            self._calibration = None
            return Draft(tokens, (), match_lengths, (), (*prefix_probs, *chances[start:]), self.name, repeats=repeats)
        if ask.fixed_length:
            # The most likely chain is not drawn, so its probabilities may decide the length of the drawn chain.
            limit = guesser.guess(limit, HOPELESS, price, start, reach)
            likeliest = guesser.chain()[2]
            guesser.start_chain(prefix)
        q = self._draw(limit, choose, None if ask.fixed_length else price, start, reach)
        tokens, match_lengths, chances = guesser.chain()
        self._calibration = (
            (self._undrawn_calibrator, likeliest) if ask.fixed_length else (self._drawn_calibrator, chances)
        )
        calibrator, uncalibrated = self._calibration
        acceptance_probs = (*prefix_probs, *[calibrator.estimate(p) for p in uncalibrated[start:]])
        return Draft(tokens, q, match_lengths, (), acceptance_probs, self.name, repeats=repeats)

    def _read_tokens(self) -> None:
        """Let the guesser learn the tokens that were emitted since the last draft."""
        self.guesser.accept(self._unread)
        self._unread.clear()

    def _request_rows(self, price: MarginalCost) -> None:
        """Request the rows after rejected tokens that are worth reading; up to `ROWS` if their time is unknown."""
        self._max_rows = ROWS if self.guesser.local and price.slopes[0] <= CHEAP else 0
        if price.seconds and self._row_seconds:
            self._max_rows = min(self._max_rows, int(SHARE * price.seconds / self._row_seconds))
        self.wants_logits = self._max_rows > 0

    def _draw(
        self, limit: int, choose: Chooser, price: MarginalCost | None, start: int, reach: float
    ) -> tuple[dict[int, float], ...]:
        """Extend the chain with tokens picked by `choose` and return q, the distributions of all its tokens.

        A `price` of `None` means that the drawn tokens must not decide the length. The chain already has `start`
        tokens, which are all right with probability `reach`.
        """
        guesser = self.guesser
        q = [{guesser.guesses[at]: 1.0} for at in range(start)]
        for at in range(start, limit):
            if guesser.score_position(at) < 0:
                break
            weights = guesser.distribution(at)
            candidate = list(weights).index(choose(at, weights))
            guesser.take_candidate(at, candidate)
            q.append(weights)
            reach *= self._drawn_calibrator.estimate(guesser.acceptance_probs[at])
            if price is not None and (reach < HOPELESS or not price.worth_extending(reach, at + 1)):
                break
        return tuple(q)

    def observe_logits(self, tokens: Sequence[int], rows: NDArray[np.float32], n_accepted: int = 0) -> None:
        rejected_rows = rows[1 + n_accepted : len(tokens)][: self._max_rows]
        if not rejected_rows.size:
            return
        start_time = time.perf_counter()
        likeliest = [int(row.argmax()) for row in rejected_rows]
        seconds = (time.perf_counter() - start_time) / len(rejected_rows)
        self._row_seconds = min(seconds, self._row_seconds * SLOWER) if self._row_seconds else seconds
        self.guesser.record_target_guesses(tokens[1:], n_accepted, likeliest)

    def accept(self, tokens: Sequence[int]) -> int:
        n_prefix, self._n_prefix, self.known_prefix = self._n_prefix, 0, ()
        if self._answer is not None:
            self._answer.accept(tokens)
        # `_request_rows` requests rows for each draft whose cost allows it, so a request ends with its decode call.
        self.wants_logits = False
        n_guesses = self.guesser.pending
        if not n_guesses:
            # There are no outcomes to learn from. The tokens themselves are needed only if another draft is requested.
            self._unread += tokens
            return 0
        hits = self.guesser.accept(tokens)
        if self._calibration is not None:
            calibrator, chances = self._calibration
            self._calibration = None
            for at in range(n_prefix, min(hits + 1, n_guesses, len(tokens), len(chances))):
                calibrator.learn(chances[at], at < hits)
        return hits
