"""Distributions of sampled text by a sampler's distributions, and tests of samples against them.

The seeds 0, 1, 2, ... give the samples, so that a test always passes or always fails.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray
from support.llama_chain import make_chain
from support.mock_target import MockTarget

from ngramspec.sampling.settings import Sampling

ALARM = 1e-7
"""Probability that a comparison fails although the sample follows the distribution; the tests make fewer than 200."""

Path = tuple[int, ...]
Probabilities = NDArray[np.float64]
"""Probability of every token."""

Text = tuple[Sequence[int], Sequence[int]]
"""(prompt, tokens emitted after it)."""

LegalTokens = Callable[[Sequence[int]], Collection[int]]
"""(tokens emitted so far) -> the tokens that a grammar allows next."""

NextDistribution = Callable[[Sequence[int], Sequence[int]], Probabilities]
"""(prompt, tokens emitted so far) -> the distribution of the next token."""


def next_distribution(logits: NDArray[np.float32], sampling: Sampling, context: Sequence[int] = ()) -> Probabilities:
    """Return the probability of every token after `context`."""
    sampler, probabilities = make_chain(sampling, logits.size), np.zeros(logits.size)
    sampler.begin(context)
    distribution = sampler.distribution(logits)
    probabilities[distribution.ids] = distribution.probs
    return probabilities


def make_next_distribution(mock: MockTarget, sampling: Sampling, legal: LegalTokens | None = None) -> NextDistribution:
    """Return the distribution of the next token on a mock target, whose few different rows are computed once."""
    looks_back = make_chain(sampling, mock.n_vocab).needs_tokens

    @cache
    def after(row: bytes, context: Path) -> Probabilities:
        return next_distribution(np.frombuffer(row, np.float32), sampling, context)

    def next_token(prompt: Sequence[int], output: Sequence[int]) -> Probabilities:
        context = (*prompt, *output)
        row, seen = mock.row(context), context if looks_back else ()
        without_grammar = after(row.tobytes(), seen)
        if legal is None:
            return without_grammar
        # The sampler draws a token. If the grammar forbids it, the sampler draws again among the legal tokens.
        is_legal = np.isin(np.arange(row.size), list(legal(output)))
        redrawn = after(np.where(is_legal, row, np.float32(-np.inf)).tobytes(), seen)
        return np.where(is_legal, without_grammar, 0.0) + without_grammar[~is_legal].sum() * redrawn

    return next_token


def tail(x: float, k: int) -> float:
    """Return the probability that a chi-square variable is larger than x.

    It has k degrees of freedom, or k + 1 if k is odd.
    """
    term = total = 1.0
    for i in range(1, (k + 1) // 2):
        term *= x / 2 / i
        total += term
    return math.exp(-x / 2) * total


def follows(texts: Iterable[Text], distribution: NextDistribution) -> bool:
    """Return True if texts follow a distribution, token by token.

    If they do, the result is False with a probability of at most twice `ALARM`.

    At each position, the test subtracts the probability of each token from 1 for the emitted token and from 0 for the
    others. Over a text these differences are a martingale, whatever the distribution depends on. So their sums over all
    positions after the same token are normal, and their covariance is the sum of the covariances. Chi-square is the
    square of these sums in units of their covariance. The test does the same for positions after the same two tokens.
    """
    places: list[tuple[Path, int, Probabilities]] = []
    for prompt, tokens in texts:
        for i, token in enumerate(tokens):
            context = tuple([*prompt, *tokens[:i]][-2:])
            places.append((context, token, distribution(prompt, tokens[:i])))
    if not all(p[token] for _, token, p in places):
        return False
    return all(_chance(places, back) >= ALARM for back in (1, 2))


def _chance(places: Iterable[tuple[Path, int, Probabilities]], length: int) -> float:
    """Return the probability of a larger chi-square.

    It omits rare tokens: those whose sum has a variance below 8.
    """
    groups: dict[Path, list[tuple[int, Probabilities]]] = {}
    for context, token, p in places:
        groups.setdefault(context[-length:], []).append((token, p))
    x, k = 0.0, 0
    for group in groups.values():
        p = np.array([probabilities for _, probabilities in group])
        difference = np.bincount([token for token, _ in group], minlength=p.shape[1]) - p.sum(0)
        spread = np.diag(p.sum(0)) - p.T @ p
        common = np.flatnonzero(spread.diagonal() >= 8)[1:]  # The first one is redundant, as all differences sum to 0.
        x += float(difference[common] @ np.linalg.solve(spread[np.ix_(common, common)], difference[common]))
        k += common.size
    assert k > 1, "too few tokens"
    return tail(x, k)


def check_sample(sample: Counter[Path], distribution: Mapping[Path, float]) -> None:
    """Check by a chi-square test that independent samples follow a distribution.

    Outcomes that are expected fewer than 8 times count as one outcome.
    """
    assert abs(sum(distribution.values()) - 1) < 1e-9
    assert not sample.keys() - distribution.keys()
    n = sample.total()
    cells = [(sample[k], n * p) for k, p in distribution.items() if n * p >= 8]
    rest = (n - sum(o for o, _ in cells), n - sum(e for _, e in cells))
    if rest[1] >= 8:
        cells.append(rest)
    assert tail(sum((o - e) ** 2 / e for o, e in cells), len(cells) - 1) >= ALARM
