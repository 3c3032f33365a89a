"""Samplers in numpy, for tests of the algorithms without llama.cpp.

Its distributions equal llama.cpp's (`tests/llama/test_samplers.py`), but XTC and mirostat draw other random numbers. It
has no vocabulary, so it raises for DRY and ignores grammars. It does not support `typical_p`, `top_n_sigma` and
dynatemp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ngramspec.sampling.distribution import BadLogits, Distribution, gumbel_pick, point_mass, softmax, top_token
from ngramspec.sampling.settings import Sampling

Scores = NDArray[np.float64]


class NumpySampler:
    """Sampler that implements `ngramspec.sampling.sampler.Sampler`.

    Args:
        sampling: Settings of the sampler.
        n_vocab: Size of the vocabulary.
        n_ctx: Number of tokens that a `repeat_last_n` of -1 means.

    Raises:
        ValueError: The settings use DRY or the bias of an unknown token.
    """

    is_argmax = False
    needs_tokens = True
    grammar = None

    def __init__(self, sampling: Sampling, n_vocab: int, n_ctx: int = 0) -> None:
        for token, _ in sampling.logit_bias:
            if not 0 <= token < n_vocab:
                raise ValueError(f"the token of a logit bias must be 0 to {n_vocab - 1}, got {token}")
        if sampling.dry_multiplier > 0:
            raise ValueError("DRY needs a vocabulary, for the texts that break a sequence")
        self.sampling = sampling
        self._window = n_ctx if sampling.repeat_last_n < 0 else sampling.repeat_last_n
        self._recent: list[int] = []
        self._coins = np.random.default_rng(sampling.seed)
        self._mu = 2 * sampling.mirostat_tau

    def begin(self, prompt: Sequence[int]) -> None:
        for token in prompt:
            self.accept(token)

    def accept(self, token: int) -> None:
        self._recent = [*self._recent, token][-self._window :] if self._window else []

    def draw(self, logits: NDArray[np.float32], position: int, distributions: list[Distribution] | None = None) -> int:
        distribution = self.distribution(logits)
        if distributions is not None:
            distributions.append(distribution)
        return gumbel_pick(self.sampling.seed, position, distribution)

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        s = self.sampling
        assert (s.typical_p, s.top_n_sigma <= 0, s.dynatemp_range) == (1, True, 0), "not known here"
        top_token(logits)  # This raises if no token can be chosen.
        scores = logits.astype(np.float64)
        for token, bias in s.logit_bias:
            scores[token] += bias
        if scores.max() == -np.inf:
            raise BadLogits("no token is left to sample: all logits are -inf")
        if s.samples_internally:
            return point_mass(self._mirostat(scores / s.temperature))
        for name in s.samplers:
            # After the temperature only penalties change logits, and greedy sampling chooses before these.
            if s.greedy and name == "temperature":
                break
            if step := getattr(self, f"_{name}", None):
                scores = step(scores)
        if scores.max() in (-np.inf, np.inf) or np.isnan(scores).any():
            raise BadLogits("no token is left to sample: the sampling settings move all logits out of range")
        if s.greedy:
            return point_mass(int(np.argmax(scores)))
        ids = np.flatnonzero(scores > -np.inf)
        return softmax(ids.astype(np.int32), scores[ids])

    def _penalties(self, scores: Scores) -> Scores:
        s, scores = self.sampling, scores.copy()
        for token, count in Counter(self._recent).items():
            scores[token] *= 1 / s.repeat_penalty if scores[token] > 0 else s.repeat_penalty
            scores[token] -= count * s.frequency_penalty + s.presence_penalty
        return scores

    def _top_k(self, scores: Scores) -> Scores:
        k = self.sampling.top_k
        return _first(scores, k) if 0 < k < scores.size else scores

    def _top_p(self, scores: Scores) -> Scores:
        p = self.sampling.top_p
        if p >= 1:
            return scores
        mass = np.cumsum(np.sort(_probabilities(scores))[::-1])
        # llama.cpp adds in float32, so the sum of all may be slightly below 1.
        is_reached = mass >= p
        return _first(scores, int(np.argmax(is_reached)) + 1 if is_reached.any() else scores.size)

    def _min_p(self, scores: Scores) -> Scores:
        p = self.sampling.min_p
        return _keep(scores, scores >= scores.max() + np.log(p)) if p > 0 else scores

    def _xtc(self, scores: Scores) -> Scores:
        s = self.sampling
        if s.xtc_probability <= 0 or s.xtc_threshold > 0.5 or self._coins.random() > s.xtc_probability:
            return scores
        order = np.argsort(-scores, kind="stable")
        above = int(((_probabilities(scores) >= s.xtc_threshold) & (scores > -np.inf)).sum())
        return _keep_ids(scores, order[max(0, above - 1) :])

    def _temperature(self, scores: Scores) -> Scores:
        return scores / max(self.sampling.temperature, 1e-20)

    def _mirostat(self, scores: Scores) -> int:
        """Sample by mirostat 2: remove tokens with a surprise of more than mu bits, draw, and move mu towards tau."""
        s = self.sampling
        surprise = -np.log2(np.maximum(_probabilities(scores), 1e-300))
        is_allowed = surprise <= max(self._mu, surprise.min())
        probabilities = _probabilities(_keep(scores, is_allowed))
        token = int(np.searchsorted(np.cumsum(probabilities), self._coins.random() * probabilities.sum()))
        self._mu -= s.mirostat_eta * (-np.log2(probabilities[token]) - s.mirostat_tau)
        return token


def _probabilities(scores: Scores) -> Scores:
    weights: Scores = np.exp(scores - scores.max())
    return weights / weights.sum()


def _keep(scores: Scores, mask: NDArray[np.bool_]) -> Scores:
    return np.where(mask, scores, -np.inf)


def _keep_ids(scores: Scores, ids: NDArray[np.intp]) -> Scores:
    mask = np.zeros(scores.size, np.bool_)
    mask[ids] = True
    return _keep(scores, mask)


def _first(scores: Scores, count: int) -> Scores:
    """Return the largest scores; among equal scores, those of the lowest ids."""
    return _keep_ids(scores, np.argsort(-scores, kind="stable")[:count])
