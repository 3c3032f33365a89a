"""`ModelDrafter`: a small language model guesses, token by token, the output of a large one.

    decoder = SpeculativeDecoder(target, drafter=ModelDrafter(Target("small.gguf")))

Leviathan, Kalman, Matias 2023, "Fast inference from transformers via speculative decoding", section 2. Unlike a lookup,
a guess takes time. This time decides if the model is used, when it begins to read a text, and how long a draft is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Self

import numpy as np

from ngramspec.backend import Logits, Model, SharedModel
from ngramspec.drafting.acceptance_estimator import ProbabilityCalibrator, pick
from ngramspec.drafting.draft import NO_DRAFT, Chooser, Draft, MarginalCost
from ngramspec.drafting.draft_model.passes import Drafting, DraftModelGain, ModelPasses, PassRequest, StepwiseDrafter
from ngramspec.sampling.distribution import entropy_ratio, largest
from ngramspec.sampling.settings import Sampling
from ngramspec.tokens import common_prefix

FIRST_READ = 8  # number of tokens in the first pass over several, which measures the time of reading
PROBES = 0.004  # maximum part of the time for probes, which check if a model that did not pay still does not
RARE = 0.01  # minimum probability of a drawn draft token, as a part of the probability of the most likely token
WIDEST = 32  # maximum number of tokens that a draft token is drawn from
TEXTS = 8  # number of latest texts from which the length of the next one is estimated
ModelGuess = tuple[int, float, Mapping[int, float]]  # result of `model_guess`
Asking = Generator[PassRequest, Logits, Logits]  # generator that requests a pass for a draft and returns the logits


class ModelDrafter(StepwiseDrafter):
    """Drafts with a model of the same vocabulary, token by token, while the next guess is expected to pay.

    If the cost of a token is known in seconds, so is the expected gain of the model (see `DraftModelGain`). If the gain
    is not positive, the model is not used, except in rare probes, which take at most `PROBES` of the time.

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
        self._passes = ModelPasses(clock, shared_model)
        self._payoff = DraftModelGain(self._passes)
        self._free = list(shared_model.sequences[1:]) if shared_model is not None else []
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
        return type(self)(self.model, n_vocab=self.n_vocab, clock=self._passes.clock)

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
        self._length = 0
        self.prefill_seconds = 0.0
        self._forget()

    def accept(self, tokens: Sequence[int]) -> int:
        hits = common_prefix(self._guesses, tokens)
        n_tested = min(hits + 1, len(self._guesses), len(tokens))
        for at in range(n_tested):
            self._payoff.learn(at, at < hits)
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

    # ------------------------------------------------------------------ draft

    def propose_stepwise(
        self,
        limit: int,
        choose: Chooser | None = None,
        *,
        fixed_length: bool = False,
        price: MarginalCost | None = None,
    ) -> Drafting:
        self.prefill_seconds = 0.0
        self._forget()
        limit = min(limit, self.model.max_batch - 1, self.model.n_ctx + 1 - len(self._text))
        if price is not None:
            limit = min(limit, len(price.slopes) - 1)
        if limit < 1 or not self._text or not self._readable or not self._pays(limit, price):
            return NO_DRAFT
        row = yield from self._catch_up()
        return (yield from self._draft(row, limit, choose, fixed_length=fixed_length, price=price))

    def _draft(
        self, row: Logits, limit: int, choose: Chooser | None, *, fixed_length: bool, price: MarginalCost | None
    ) -> Drafting:
        """Make a draft from the logits after the text; a drawn token never decides whether it stays in the draft."""
        tokens: list[int] = []
        q: list[Mapping[int, float]] = []
        chances: list[float] = []
        reach = 1.0
        # The entropy is computed only on request, because few policies use it and it takes longer than copying the row.
        # The row must be copied, because the next guess overwrites it.
        entropy = partial(entropy_ratio, row[: self.n_vocab].copy())
        while True:
            guess = self.guess(row, len(tokens), choose)
            if guess is None:
                break
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
            if len(tokens) >= limit or not self._payoff.should_continue(reach, len(tokens), price):
                break
            if len(tokens) == 1 and self.model.replays:
                self.model.checkpoint()
            row = yield from self._evaluate(len(self.model.tokens), tokens[-1:])
        self._guesses = tuple(tokens)
        if self._before is not None:
            chances = [self._undrawn.estimate(self._before), *(self._payoff.rate(at) for at in range(1, limit))]
        return Draft(self._guesses, tuple(q), (), (), tuple(chances), self.name, entropy=entropy)

    def guess(self, row: Logits, offset: int, choose: Chooser | None) -> ModelGuess | None:
        """Return the guess at position `offset` of the draft from its logits; `None` if they are not finite."""
        return model_guess(row[: self.n_vocab], offset, choose, self._sampling)

    # ------------------------------------------------------------------ cost

    def _pays(self, limit: int, price: MarginalCost | None) -> bool:
        """Return True if the model should be used now."""
        if price is None or not price.seconds:
            return True
        self._time()
        behind = len(self._text) - self._n_cached
        reading = (self._passes.read_seconds(max(1, behind)) - self._passes.token_seconds) / price.seconds
        gain = self._payoff.gain(limit, price)
        if gain > 0:
            return price.rate * reading <= gain * (self._length + self._remaining_calls())
        self._credit += PROBES
        if self._credit < self._passes.token_seconds / price.seconds + reading:
            return False
        self._credit = 0.0
        return True

    def _remaining_calls(self) -> float:
        """Return the expected number of further decode calls of a text that is not read yet; otherwise 0."""
        if self._has_read or not self._lengths:
            return 0.0
        return sum(max(0, length - self._length) for length in self._lengths) / len(self._lengths)

    def _time(self) -> None:
        """Read the beginning of the text if the time of reading was not measured yet."""
        if not self._passes.token_seconds and len(self._text) - self._n_cached > FIRST_READ + 2:
            for size in (1, 1, FIRST_READ):
                self._read(self._n_cached + size)

    # ------------------------------------------------------------------ model

    def _catch_up(self) -> Asking:
        """Read the rest of the text, and return the logits after it."""
        last = len(self._text) - 1
        self._n_cached = min(self._n_cached, last)
        if not self._has_read and self._n_cached < last:
            self._read(last)  # separately, so that the time of a single token is measured
        if self._has_read and self._n_cached == last:
            row = yield from self._evaluate(last, self._text[last:])
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
        start_time = self._passes.clock()
        row = self.model.prefill(self._text[:end])
        seconds = self._passes.clock() - start_time
        self._passes.record_time(n_tokens, seconds)
        if not self._has_read:
            self.prefill_seconds += seconds
        self._n_cached = end
        return row

    def _evaluate(self, keep: int, tokens: Sequence[int]) -> Asking:
        """Request a pass after the first `keep` tokens of the cache, and return the logits after the last token."""
        rows = yield PassRequest(self._passes, self.model, keep, tokens, 1)
        row: Logits = rows[-1]
        return row


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
