"""Laws of sampled text from first principles, and whether a sample follows one.

The settings are applied by hand, in float64, without any of the code under test.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from support.mock_target import MockTarget

from ngramspec.sampling.settings import Sampling

ALARM = 5e-9
"""Chance that one comparison with a law fails though the sample follows it."""

Path = tuple[int, ...]
Legal = Callable[[Path], Collection[int]]
"""(what was emitted so far) -> the tokens that a grammar allows next."""


def next_law(logits: NDArray[np.float32], sampling: Sampling, context: Sequence[int] = ()) -> NDArray[np.float64]:
    """Probability of every token after `context`, by the settings that this knows: penalties, biases, the filters
    of the default order, and temperature."""
    s, values = sampling, logits.astype(np.float64)
    for token, bias in s.logit_bias:
        values[token] += bias
    for token, count in Counter(context[max(0, len(context) - s.repeat_last_n) :]).items():
        values[token] *= s.repeat_penalty if values[token] <= 0 else 1 / s.repeat_penalty
        values[token] -= count * s.frequency_penalty + s.presence_penalty
    if s.greedy:
        return np.eye(1, values.size, int(values.argmax()))[0]
    order = np.argsort(-values, kind="stable")[: s.top_k or None]
    p = np.exp(values[order] - values[order[0]])
    count = int(np.argmax(np.cumsum(p) >= s.top_p * p.sum())) + 1 if s.top_p < 1 else order.size
    order = order[:count][p[:count] >= s.min_p]
    law = np.zeros(values.size)
    law[order] = np.exp((values[order] - values[order[0]]) / s.temperature)
    law /= law.sum()
    return law


def grammar_law(
    logits: NDArray[np.float32], sampling: Sampling, context: Sequence[int], legal: Collection[int]
) -> NDArray[np.float64]:
    """A token is drawn; in place of a forbidden one another is, as if there were only the legal ones."""
    law = next_law(logits, sampling, context)
    allowed = np.isin(np.arange(logits.size), list(legal))
    again = next_law(np.where(allowed, logits, np.float32(-np.inf)), sampling, context)
    return np.where(allowed, law, 0.0) + law[~allowed].sum() * again


def law_of_text(
    mock: MockTarget, prompt: Sequence[int], sampling: Sampling, n: int, legal: Legal | None = None
) -> dict[Path, float]:
    """The law of the next n tokens: all paths, by the chain rule; a path ends at an end-of-generation token."""
    law: dict[Path, float] = {(): 1.0}
    for _ in range(n):
        longer: dict[Path, float] = {}
        for path, probability in law.items():
            if path and mock.is_eog(path[-1]):
                longer[path] = probability
                continue
            context = [*prompt, *path]
            row = mock.row(context)
            if legal is None:
                p = next_law(row, sampling, context)
            else:
                p = grammar_law(row, sampling, context, legal(path))
            for token in np.flatnonzero(p):
                longer[(*path, int(token))] = probability * float(p[token])
        law = longer
    return law


def head(law: Mapping[Path, float], n: int) -> dict[Path, float]:
    """The law of the first n tokens."""
    shorter: Counter[Path] = Counter()
    for path, p in law.items():
        shorter[path[:n]] += p  # type: ignore[assignment]
    return dict(shorter)


def chi_square_excess(sample: Counter[Path], law: Mapping[Path, float]) -> float:
    """How far a sample is above the largest chi-square that chance gives it with probability `ALARM`.

    Laurent and Massart (2000), lemma 1: P(X >= k + 2 sqrt(k x) + 2 x) <= exp(-x). Cells expected fewer than 8 times
    become one. Infinite where something came out that has no probability.
    """
    if any(path not in law for path in sample):
        return math.inf
    n = sample.total()
    cells = [(sample[k], n * p) for k, p in law.items() if n * p >= 8]
    rest = (n - sum(o for o, _ in cells), n - sum(e for _, e in cells))
    if rest[1] >= 8:
        cells.append(rest)
    x, k = -math.log(ALARM), len(cells) - 1
    return sum((o - e) ** 2 / e for o, e in cells) - (k + 2 * math.sqrt(k * x) + 2 * x)


def check_law(sample: Counter[Path], law: Mapping[Path, float], *, positions: bool = False) -> None:
    """Fail unless the sample follows the law; with `positions`, at each length of it, too."""
    assert abs(sum(law.values()) - 1) < 1e-9
    longest = max(map(len, law))
    for n in range(1, longest + 1) if positions else [longest]:
        heads: Counter[Path] = Counter()
        for path, count in sample.items():
            heads[path[:n]] += count
        assert chi_square_excess(heads, head(law, n)) < 0, n
