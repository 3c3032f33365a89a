"""`ModelDrafter`: a small language model guesses, token by token, the output of a large one.

    decoder = SpeculativeDecoder(target, drafter=ModelDrafter(Target("small.gguf")))

Leviathan, Kalman, Matias 2023, "Fast inference from transformers via speculative decoding", section 2. Unlike a lookup,
a guess takes time. This time decides if the model is used, when it begins to read a text, and how long a draft is.

`HybridDrafter` calls the model for guesses after tokens that n-grams guessed:

    model.open(price)                     start a draft
    model.pass_cost(2, price)             time of reading two tokens and guessing the next one
    rows = model.read_chain([5, 9], 0)    logits after the text, after 5, and after 5 9
    model.guess(rows[-1], 2, choose)      the model's guess at that position
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Self

import numpy as np

from ngramspec.backend import Logits, Model, SharedModel
from ngramspec.cost.times import PassTimes
from ngramspec.drafting.acceptance_estimator import MIN_CHAIN_PROB, DecayingRate, ProbabilityCalibrator, pick
from ngramspec.drafting.draft import NO_DRAFT, Ask, Chooser, Draft, Drafter, MarginalCost
from ngramspec.sampling.distribution import entropy_ratio, largest
from ngramspec.sampling.settings import Sampling
from ngramspec.tokens import common_prefix

FIRST_READ = 8  # number of tokens in the first pass over several, which measures the time of reading
PROBES = 0.004  # maximum part of the time for probes, which check if a model that did not pay still does not
RARE = 0.01  # minimum probability of a drawn draft token, as a part of the probability of the most likely token
WIDEST = 32  # maximum number of tokens that a draft token is drawn from
TEXTS = 8  # number of latest texts from which the length of the next one is estimated
POSITIONS = 8  # draft positions with a separate acceptance rate; the last one includes all later positions
# Assumed acceptance rate before the first outcome, its weight in outcomes, and the factor for older outcomes at each
# new one. A draft model that was chosen for its target is right at 50 to 90 % of the positions (Leviathan et al. 2023,
# section 4.2).
PRIOR, PRIOR_WEIGHT, FADE = 0.8, 4.0, 0.98
# Part of the loss budget that calls of the model within a chain may use; if all of it were lost, n-grams could not
# draft either.
PART = 1 / 2
ModelGuess = tuple[int, float, Mapping[int, float]]  # result of `model_guess`


class ModelDrafter(Drafter):
    """Drafts with a model of the same vocabulary, token by token, while the next guess is expected to pay.

    If the cost of a token is known in seconds, so is the expected gain of the model (see `gain`). If the gain is not
    positive, the model is not used, except in rare probes, which take at most `PROBES` of the time.

    The model does not read a text until the decode calls made without it could have gained as much as reading takes. A
    text that ends early has then not paid for a prefill that it cannot use (ski rental: Karlin et al. 1988,
    "Competitive snoopy caching"). Expected later decode calls count too; their number is estimated from the latest
    texts (Purohit, Svitkina, Kumar 2018, "Improving online algorithms via ML predictions").

    Args:
        model: Draft model; only this drafter may use its cache.
        n_vocab: Number of tokens, from 0 on, that have the same meaning for the target; `None` means all. Other tokens
            are never drafted, and a text that contains one gets no drafts.
        clock: Function that returns the time in seconds; `None` means `time.perf_counter`.
        shared_model: Shared model whose first sequence is `model`; required to make drafters for further sequences.

    Raises:
        ValueError: The model's KV cache cannot be rolled back.

    Complexity: one pass of the model and O(n_vocab) per draft token.
    """

    name = "model"
    is_slow = True

    def __init__(
        self,
        model: Model,
        *,
        n_vocab: int | None = None,
        clock: Callable[[], float] | None = None,
        shared_model: SharedModel | None = None,
    ) -> None:
        if not model.can_rollback:
            raise ValueError("this model cannot be used as a draft model: its state cannot be rolled back")
        self.model = model
        self.n_vocab = min(model.n_vocab, n_vocab or model.n_vocab)
        self.times = PassTimes()
        self._clock = clock or time.perf_counter
        self._shared_model = shared_model  # its sequences do not keep it open
        self._free = list(shared_model.sequences[1:]) if shared_model is not None else []
        # Share of recent guesses that were right, given that all before them were, by position in the draft.
        self._rates = [DecayingRate(PRIOR * PRIOR_WEIGHT, PRIOR_WEIGHT, fade=FADE) for _ in range(POSITIONS)]
        # Calibrations of the most likely token, of a sampled token, and of the most likely token before sampling.
        self._likeliest = ProbabilityCalibrator()
        self._drawn, self._undrawn = ProbabilityCalibrator(), ProbabilityCalibrator()
        self._credit = 0.0
        self._lengths: deque[int] = deque(maxlen=TEXTS)
        self._length = 0
        self.set_sampling(Sampling())
        self.begin(())

    def fresh_copy(self) -> Self:
        """Return a drafter with the same model and no statistics; do not use both for a request at the same time."""
        return type(self)(self.model, n_vocab=self.n_vocab, clock=self._clock)

    def clone_for_sequence(self) -> Self:
        """Return a drafter for another sequence at the same time, in the next free sequence of the model.

        Both share the statistics of the model: its speed and the acceptance of its guesses.

        Raises:
            ValueError: No sequence is free.
        """
        if not self._free:
            raise ValueError("the draft model has no free sequence")
        clone = copy(self)
        clone.model = self._free.pop(0)
        clone._credit = 0.0
        clone.begin(())
        return clone

    # ------------------------------------------------------------------ request

    def set_sampling(self, sampling: Sampling) -> None:
        self._sampling = sampling

    def begin(self, prompt: Sequence[int]) -> None:
        self._text = list(prompt)
        self._readable = self._can_read(prompt)
        self._n_cached = common_prefix(self.model.tokens, self._text)
        self._has_read = False
        if self._length:
            self._lengths.append(self._length)
        self._length = self._calls_since_pass = 0
        self.prefill_seconds = 0.0
        self._forget()

    def accept(self, tokens: Sequence[int]) -> int:
        hits = common_prefix(self._guesses, tokens)
        n_tested = min(hits + 1, len(self._guesses), len(tokens))
        for at in range(n_tested):
            self.learn(at, at < hits)
            outcomes, p = self._asked[at]
            outcomes.learn(p, at < hits)
        if n_tested and self._before is not None:
            self._undrawn.learn(self._before, hits > 0)
        self._forget()
        self._text += tokens
        self._readable = self._readable and self._can_read(tokens)
        cached = self.model.tokens
        self._n_cached += common_prefix(cached[self._n_cached :], self._text[self._n_cached : len(cached)])
        self._length += 1
        self._calls_since_pass += 1
        return hits

    def _forget(self) -> None:
        """Drop the guesses that wait for their outcome."""
        self._guesses: tuple[int, ...] = ()
        # Calibration and uncalibrated probability of each guess.
        self._asked: list[tuple[ProbabilityCalibrator, float]] = []
        self._before: float | None = None  # probability of the most likely first token, before one was drawn

    def _can_read(self, tokens: Sequence[int]) -> bool:
        """Return True if these tokens have the same meaning for the model and the target."""
        return max(tokens, default=0) < self.n_vocab

    # ------------------------------------------------------------------ a draft of the model alone

    def propose(self, ask: Ask) -> Draft:
        choose, fixed_length, price = ask.choose, ask.fixed_length, ask.price
        self.prefill_seconds = 0.0
        self._forget()
        limit = min(ask.limit, self.model.max_batch - 1, self.model.n_ctx + 1 - len(self._text))
        if price is not None:
            limit = min(limit, len(price.slopes) - 1)
        if limit < 1 or not self._text or not self._readable or not self._pays(limit, price):
            return NO_DRAFT
        row = self._catch_up()
        tokens: list[int] = []
        q: list[Mapping[int, float]] = []
        chances: list[float] = []
        reach = 1.0
        # The entropy is computed only on request, because few policies use it and it takes longer than copying the row.
        # The row must be copied, because the next guess overwrites it.
        entropy = partial(entropy_ratio, row[: self.n_vocab].copy())
        while (guess := self.guess(row, len(tokens), choose)) is not None:
            token, m, drawn_from = guess
            outcomes, p = self._likeliest, _inside(m)
            if choose is not None:
                outcomes = self._drawn
                q.append(drawn_from)
                if fixed_length and not tokens:
                    self._before = _inside(max(drawn_from.values()))
            tokens.append(token)
            self._asked.append((outcomes, p))
            chances.append(outcomes.estimate(p))
            reach *= chances[-1]
            # A drawn token never decides whether it stays in the draft.
            if len(tokens) >= limit or not self.should_continue(reach, len(tokens), price):
                break
            if len(tokens) == 1 and self.model.replays:
                self.model.checkpoint()
            row = self._evaluate(len(self.model.tokens), tokens[-1:])[-1]
        self._guesses = tuple(tokens)
        if self._before is not None:
            chances = [self._undrawn.estimate(self._before), *(self.rate(at) for at in range(1, limit))]
        return Draft(self._guesses, tuple(q), (), (), tuple(chances), self.name, entropy=entropy)

    def guess(self, row: Logits, offset: int, choose: Chooser | None) -> ModelGuess | None:
        """Return the guess at position `offset` of the draft; `None`, which disables the model, if it has none."""
        guess = model_guess(row[: self.n_vocab], offset, choose, self._sampling)
        self._is_disabled = guess is None
        return guess

    def _pays(self, limit: int, price: MarginalCost | None) -> bool:
        """Return True if the model should be used now."""
        if price is None or not price.seconds:
            return True
        self._time()
        reading, gain = self._seconds_behind() / price.seconds, self.gain(limit, price)
        if gain > 0:
            return price.rate * reading <= gain * (self._length + self._remaining_calls())
        self._credit += PROBES
        if self._credit < self.times.level / price.seconds + reading:
            return False
        self._credit = 0.0
        return True

    def _remaining_calls(self) -> float:
        """Return the expected number of further decode calls of a text that is not read yet; otherwise 0."""
        if self._has_read or not self._lengths:
            return 0.0
        return sum(max(0, length - self._length) for length in self._lengths) / len(self._lengths)

    # ------------------------------------------------------------------ gain of its guesses

    def learn(self, at: int, right: bool) -> None:
        """Count the outcome of a guess at a draft position; the first position is 0."""
        self._rates[min(at, POSITIONS - 1)].add(right)

    def rate(self, at: int) -> float:
        """Return the share of recent guesses at a position that were right, given that all before them were."""
        return self._rates[min(at, POSITIONS - 1)].value

    def gain(self, limit: int, price: MarginalCost) -> float:
        """Return the expected gain of a draft in tokens; requires a `price` whose unit of time is known in seconds.

        It is

            max over k <= limit of  sum over j <= k of (p_1 * ... * p_j - r * (s_j + t))

        Here p_j is `rate` at position j, and s_j the lowest cost of a draft token for the target. The draft model takes
        the time t for a token, and r is the throughput (`price.rate`).
        """
        gain, reach = 0.0, 1.0
        for at in range(limit):
            reach *= self.rate(at)
            more = reach - price.rate * (price.slopes[at] + self.times.level / price.seconds)
            if more <= 0:
                break
            gain += more
        return gain

    def should_continue(self, reach: float, length: int, price: MarginalCost | None) -> bool:
        """Return True if one more guess pays after `length` guesses that are all accepted with probability `reach`.

        The guess must pay for its own time and for its token in the target's decode call. The draft model's time for
        all guesses must not exceed the loss budget.
        """
        if reach < MIN_CHAIN_PROB or price is None:
            return reach >= MIN_CHAIN_PROB
        if not price.seconds:
            return bool(price.worth_extending(reach, length))
        time_of = self.times.level / price.seconds
        if time_of * (length + 1) > price.loss_budget:
            return False
        return reach * self.rate(length) >= price.rate * (price.slopes[length] + time_of)

    # ------------------------------------------------------------------ calls within the chain of another drafter

    def open(self, price: MarginalCost) -> None:
        """Start a draft of another drafter."""
        self.prefill_seconds = self._spent_seconds = 0.0
        self._caught_up = self._is_disabled = False
        if price.seconds and self._readable:
            self._time()

    def estimate_gain(self, limit: int, price: MarginalCost) -> float:
        """Return the expected gain, in tokens, of a draft that the model makes alone."""
        return self.gain(limit, price) - price.rate * self.catch_up_cost(price) if price.seconds else math.inf

    def pass_cost(self, guesses: int, price: MarginalCost) -> float:
        """Return the time of reading `guesses` tokens and guessing the next one, in units of the price.

        It is infinite if the model cannot do so. It is also infinite if a rejection would lose more than the budget
        allows, including the time of reading the text. `catch_up_cost` charges for reading the text.
        """
        room = min(self.model.n_ctx - len(self._text), self.model.max_batch - 1) - guesses
        if self._is_disabled or not self._readable or room < 0:
            return math.inf
        if not price.seconds:
            return 0.0
        time_of = self._seconds(guesses + (not self._caught_up)) / price.seconds
        behind = self._seconds_behind() if self._has_read and not self._caught_up else 0.0
        loss = (self._spent_seconds + behind) / price.seconds + time_of
        return math.inf if loss > PART * price.loss_budget else time_of

    def extra_pass_cost(self, price: MarginalCost) -> float:
        """Return the time of one more guess, in units of the price."""
        return self._seconds(1) / price.seconds if price.seconds else 0.0

    def catch_up_cost(self, price: MarginalCost) -> float:
        """Return the additional cost of the first call in a draft, in units of the price.

        It is the time of reading the unread tokens, divided by the number of decode calls since the last call of the
        model. If the model has read nothing yet, the expected later decode calls count too.
        """
        if self._caught_up or len(self._text) - self._n_cached <= 1 or not price.seconds:
            return 0.0
        passes = self._calls_since_pass + self._remaining_calls()
        return self._seconds_behind() / price.seconds / passes if passes else math.inf

    def read_chain(self, guesses: Sequence[int], n_read: int) -> Logits:
        """Return the logits after each of the next guesses, and in the first call of a draft also after the text.

        `n_read` tokens of the chain before the guesses are in the cache and still valid. In the first call it is 0, and
        only then there may be no guesses.
        """
        first = not self._caught_up
        if not first:
            rows = self._evaluate(len(self._text) + n_read, guesses, len(guesses))
        else:
            last = len(self._text) - 1
            self._n_cached = min(self._n_cached, last)
            fits = len(self._text) - self._n_cached + len(guesses) <= self.model.max_batch
            if self._n_cached < last and not (self._has_read and fits):
                self._read(last)
            # If a rollback requires a copy of the state, the copy is made after the text.
            along = () if self.model.replays else guesses
            rows = self._evaluate(self._n_cached, [*self._text[self._n_cached :], *along], 1 + len(along))
            self._has_read = self._caught_up = True
            self._calls_since_pass = 0
            self._n_cached = len(self._text)
            if self.model.replays:
                rows = rows.copy()
                self.model.checkpoint()
                if guesses:
                    rows = np.concatenate([rows, self._evaluate(self._n_cached, guesses, len(guesses))])
        self._spent_seconds += self._seconds(first + len(guesses))
        return rows

    # ------------------------------------------------------------------ passes

    def _seconds(self, n_tokens: int) -> float:
        """Return the expected time of a pass; 0 before the first one."""
        return self.times.level * self.times.ratio(n_tokens)

    def _seconds_behind(self) -> float:
        """Return the expected time of reading the unread tokens of the text, beyond that of a single token."""
        return self._seconds(len(self._text) - self._n_cached) - self.times.level

    def _time(self) -> None:
        """Read the beginning of the text if the time of reading was not measured yet."""
        if not self.times.level and len(self._text) - self._n_cached > FIRST_READ + 2:
            for size in (1, 1, FIRST_READ):
                self._read(self._n_cached + size)

    def _catch_up(self) -> Logits:
        """Read the rest of the text, and return the logits after it."""
        last = len(self._text) - 1
        self._n_cached = min(self._n_cached, last)
        if not self._has_read and self._n_cached < last:
            self._read(last)  # separately, so that the time of a single token is measured
        if self._has_read and self._n_cached == last:
            row: Logits = self._evaluate(last, self._text[last:])[-1]
            self._n_cached = last + 1
        else:
            row = self._read(last + 1)
        self._has_read = True
        return row

    def _read(self, end: int) -> Logits:
        """Read the first `end` tokens of the text into the cache, which lacks the last; return the logits after it."""
        if self._has_read:
            self.model.rollback(self._n_cached)
        n_tokens = self.model.owed + end - self._n_cached
        start_time = self._clock()
        row = self.model.prefill(self._text[:end])
        seconds = self._clock() - start_time
        self.times.observe(n_tokens, seconds)
        if not self._has_read:
            self.prefill_seconds += seconds
        self._n_cached = end
        return row

    def _evaluate(self, keep: int, tokens: Sequence[int], n_rows: int = 1) -> Logits:
        """Evaluate tokens after the first `keep` ones of the cache, and return the logits after the last `n_rows`."""
        self.model.rollback(keep)
        n_tokens = self.model.owed + len(tokens)
        start_time = self._clock()
        rows = self.model.evaluate(tokens)[-n_rows:]
        self.times.observe(n_tokens, self._clock() - start_time)
        return rows


def _inside(p: float) -> float:
    """Clip a probability away from 0 and 1, whose log-odds are infinite."""
    return min(max(p, 1e-4), 1.0 - 1e-4)


def model_guess(row: Logits, offset: int, choose: Chooser | None, sampling: Sampling) -> ModelGuess | None:
    """Return the guess of a model at position `offset` of a draft; `None` if the logits are not finite.

    It is the token, its probability, and the distribution that it was drawn from, at the temperature of the target's
    `sampling`; empty in greedy decoding.
    """
    best = int(row.argmax())
    if not math.isfinite(row[best]):
        return None
    gaps = row - row[best]
    if choose is None:
        return best, 1.0 / float(np.exp(gaps).sum()), {}
    temperature = sampling.temperature or 1.0
    rare = temperature * math.log(RARE)
    ids = np.flatnonzero(gaps >= (max(rare, math.log(sampling.min_p)) if sampling.min_p > 0 else rare))
    if ids.size > WIDEST:
        ids = ids[largest(gaps[ids], WIDEST)]
    weights = np.exp(gaps[ids].astype(np.float64) / temperature)
    q = dict(zip(ids.tolist(), (weights / weights.sum()).tolist(), strict=True))
    token = pick(choose, offset, q)
    return token, q[token], q
