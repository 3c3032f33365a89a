"""Whether emitted tokens follow the target's law: drafts accepted and refused, by two ways of verifying.

The logits of a small tree of drafts are computed once; every seed then drafts from it, verifies, and emits. What
came first, and what followed an accepted draft, is counted and held against a law that is computed here from the
logits alone, in plain float64, sharing no code with the samplers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ngramspec.acceptance.verifier import RuleVerifier
from ngramspec.backend import Logits, Runner
from ngramspec.drafting.draft import NO_DRAFT, Draft
from ngramspec.prompts import Case
from ngramspec.sampling.settings import Sampling

FALSE_ALARM = 1e-6
"""Upper bound on the probability that a sound build fails any of the tests."""

PROMPTS = 3
METHODS = ("coupled", "rejection")
SETTINGS = (Sampling(temperature=0.8), Sampling(temperature=1.2, top_k=20, top_p=1.0, min_p=0.0))
DRAWS, FEWEST_DRAWS = 4000, 400

_FIRST = (0.45, 0.35, 0.2)  # weights of the drafts: the likeliest token, the second, and the least likely of all
_SECOND = (0.6, 0.4)

ALARM = FALSE_ALARM / (PROMPTS * len(SETTINGS) * len(METHODS) * (1 + len(_FIRST)))
"""The part of `FALSE_ALARM` that each single test gets."""

_ALL = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
_EDGE = 1e-4  # llama.cpp filters in float32: a token closer than this to a filter's edge may fall on either side
_FEW = 5.0  # tokens expected less often share a bin


@dataclass(frozen=True, slots=True)
class LawTest:
    """Emitted tokens against the target's law.

    Attributes:
        category, prompt: what they follow.
        method: how drafts were verified.
        temperature, top_k: of the sampling; the rest is in `SETTINGS`.
        after: the accepted draft before them; None for the first token of all.
        draws: how many there were.
        accepted: how many of them were drafted.
        refused: how often the draft was refused, and a token of the target's own came instead.
        bins: how many kinds of tokens were told apart.
        outside: how many were tokens that the law does not contain.
        distance: draws * KL(observed || law), in nats; half the G statistic.
        false_alarm: upper bound on the probability that the law itself gives such a distance.
    """

    category: str
    prompt: str
    method: str
    temperature: float
    top_k: int
    after: int | None
    draws: int
    accepted: int
    refused: int
    bins: int
    outside: int
    distance: float
    false_alarm: float

    @property
    def held(self) -> bool:
        """Whether the law is believable: all tests of a check together fail a sound build in `FALSE_ALARM` of cases."""
        return self.outside == 0 and self.false_alarm >= ALARM


@dataclass(slots=True)
class _Tree:
    """Drafts and the logits after each: `rows[prefix]` of shape (n_vocab,), `weights[prefix]` of the next token."""

    rows: dict[tuple[int, ...], Logits] = field(default_factory=dict)
    weights: dict[tuple[int, ...], Mapping[int, float]] = field(default_factory=dict)


def law_tests(
    target: Runner,
    case: Case,
    *,
    seed: int,
    exact: bool,
    in_time: Callable[[], bool],
) -> Iterator[LawTest]:
    """Test the tokens after one prompt, for every setting and method; `in_time` ends the draws early.

    A setting with a token on the edge of a filter is left out, as is all drafting on a target that cannot roll back.
    """
    tree = _grow(target, case.tokens, exact)
    rows = {prefix: _allowed(target, row) for prefix, row in tree.rows.items() if len(prefix) < 2}
    for sampling in SETTINGS:
        laws = {prefix: reference_law(row, sampling) for prefix, row in rows.items()}
        if any(law is None for law in laws.values()):
            continue
        for method in METHODS:
            counts: dict[tuple[int, ...], Counter[int]] = {prefix: Counter() for prefix in laws}
            accepted: Counter[tuple[int, ...]] = Counter()
            refused: Counter[tuple[int, ...]] = Counter()
            for number in range(DRAWS):
                if number >= FEWEST_DRAWS and not in_time():
                    break
                drawn = replace(sampling, seed=(seed * DRAWS + number) % 2**64)
                draft, tokens = _emit(target, tree, case.tokens, drawn, method)
                for depth, token in enumerate(tokens[: 1 + bool(len(draft))]):
                    prefix = tokens[:depth]
                    counts[prefix][token] += 1
                    if draft:
                        (accepted if len(tokens) > depth + 1 else refused)[prefix] += 1
            for prefix, law in laws.items():
                if law is None or not counts[prefix]:
                    continue
                bins, outside, distance = _compare(counts[prefix], law)
                yield LawTest(
                    case.category,
                    case.id,
                    method,
                    sampling.temperature,
                    sampling.top_k,
                    prefix[0] if prefix else None,
                    counts[prefix].total(),
                    accepted[prefix],
                    refused[prefix],
                    bins,
                    outside,
                    distance,
                    false_alarm(distance, bins),
                )


def _grow(target: Runner, prompt: Sequence[int], exact: bool) -> _Tree:
    """Evaluate drafts of two tokens, or only the prompt if the target cannot roll back."""
    tree = _Tree({(): target.prefill(prompt, aligned=exact).copy()})
    target.checkpoint()
    if not target.can_rollback:
        return tree

    def branch(prefix: tuple[int, ...], tokens: Sequence[int], weights: Sequence[float]) -> Iterator[tuple[int, ...]]:
        tree.weights[prefix] = dict(zip(tokens, weights, strict=True))
        for token in tokens:
            tree.rows[*prefix, token] = target.evaluate([token])[0].copy()
            yield (*prefix, token)
            target.rollback(len(prompt) + len(prefix))

    order = np.argsort(-tree.rows[()], kind="stable")
    for prefix in branch((), [int(order[i]) for i in (0, 1, -1)], _FIRST):
        likely = np.argsort(-tree.rows[prefix], kind="stable")[: len(_SECOND)]
        for _ in branch(prefix, [int(token) for token in likely], _SECOND):
            pass
    return tree


def _emit(
    target: Runner, tree: _Tree, prompt: Sequence[int], sampling: Sampling, method: str
) -> tuple[Draft, tuple[int, ...]]:
    """One seed's pass after the prompt: (what was drafted, what was emitted)."""
    sampler = target.sampler(sampling)
    sampler.begin(prompt)
    verifier = RuleVerifier(sampler, method)
    draft = NO_DRAFT
    if tree.weights:
        choose = verifier.choose(len(prompt))
        assert choose is not None
        first = choose(0, tree.weights[()])
        second = choose(1, tree.weights[first,])
        draft = Draft((first, second), (tree.weights[()], tree.weights[first,]))
    rows = [tree.rows[draft.tokens[:depth]] for depth in range(len(draft) + 1)]
    return draft, verifier.verify(rows, draft, len(prompt)).tokens


def _allowed(target: Runner, row: Logits) -> Logits:
    """The logits, -inf for tokens forbidden by the model's file, which a sampler without filters leaves out."""
    ids = target.sampler(_ALL).distribution(row).ids
    allowed = np.full_like(row, -np.inf)
    allowed[ids] = row[ids]
    return allowed


def reference_law(row: Logits, sampling: Sampling) -> dict[int, float] | None:
    """The law that top-k, top-p, min-p and temperature, in this order, make of logits of shape (n_vocab,).

    None where a token is so close to a filter's edge that float32 may decide otherwise.
    """
    ids = np.argsort(-row, kind="stable")[: np.isfinite(row).sum()]
    logits = row[ids].astype(np.float64)
    k = sampling.top_k
    if 0 < k < logits.size:
        if logits[k - 1] == logits[k]:
            return None
        logits = logits[:k]
    if sampling.top_p < 1:
        mass = np.cumsum(_softmax(logits))
        if np.abs(mass - sampling.top_p).min() < _EDGE:
            return None
        logits = logits[: int(np.argmax(mass >= sampling.top_p)) + 1]
    if sampling.min_p > 0:
        margins = logits - logits[0] - math.log(sampling.min_p)
        if np.abs(margins).min() < _EDGE:
            return None
        logits = logits[margins >= 0]
    law = _softmax(logits / sampling.temperature)
    return {int(token): float(p) for token, p in zip(ids, law, strict=False) if p > 0}


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(logits - logits.max())
    law: NDArray[np.float64] = weights / weights.sum()
    return law


def _compare(counts: Counter[int], law: Mapping[int, float]) -> tuple[int, int, float]:
    """(bins, draws outside the law, draws * KL(observed || law))."""
    draws = counts.total()
    outside = sum(n for token, n in counts.items() if token not in law)
    # Bins are shared by expected counts, never by observed ones: the bound holds for any bins fixed beforehand.
    common = [token for token, p in law.items() if draws * p >= _FEW]
    observed = [counts[token] for token in common]
    expected = [draws * law[token] for token in common]
    if len(common) < len(law):
        observed.append(draws - outside - sum(observed))
        expected.append(draws * sum(p for token, p in law.items() if draws * p < _FEW))
    if outside:
        return len(observed), outside, math.inf
    distance = sum(seen * math.log(seen / mean) for seen, mean in zip(observed, expected, strict=True) if seen)
    return len(observed), outside, max(0.0, distance)


def false_alarm(distance: float, bins: int) -> float:
    """Most probability that n draws from a law over k = `bins` tokens have n * KL(observed || law) >= x = `distance`.

        P <= exp(-x) (e x / (k - 1))^(k - 1)    for x > k - 1, at any n

    (Agrawal 2020, "Finite-sample concentration of the multinomial in relative entropy", arXiv 1904.02291: the moment
    generating function is at most that of a gamma law of shape k - 1, and this is Chernoff's bound for it.) Unlike
    the chi-square limit of the same statistic it holds at any count, and so at a rate as small as `FALSE_ALARM`.
    """
    free = bins - 1
    if distance == math.inf:
        return 0.0
    if distance <= free:
        return 1.0
    return math.exp(free - distance + (free * math.log(distance / free) if free else 0.0))
