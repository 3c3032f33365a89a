"""What speculative decoding should gain: the formulas of Leviathan, Kalman and Matias as functions.

Source of every formula, but for typical acceptance: Y. Leviathan, M. Kalman, Y. Matias, "Fast
Inference from Transformers via Speculative Decoding", ICML 2023 (arXiv 2211.17192). Their model: the
target accepts each drafted token with the same probability alpha, independently of the others. Pure
functions, no state.

    alpha   probability that a drafted token is accepted, given that all before it were; 0 to 1
    gamma   drafted tokens per target pass; a pass evaluates gamma + 1 positions
    c       time of drafting one token / time of a target pass (definition 3.7); near 0 for n-grams
    p, q    the target's and the drafter's law of the next token: arrays of one shape (n,), entries
            0 or more that sum to 1

Alpha is the mean over contexts of what the functions of p and q give for one context. All raise
ValueError for arguments out of these ranges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Law = NDArray[np.floating]

EPSILON, DELTA = 0.09, 0.3
"""What Medusa's code takes for typical acceptance unless told otherwise (`posterior_threshold`, `posterior_alpha`)."""


def expected_tokens(alpha: float, gamma: int) -> float:
    """Expected tokens emitted per target pass, the target's own token included: 1 to gamma + 1.

    Equation (1), section 3.1: (1 - alpha^(gamma + 1)) / (1 - alpha), which is the geometric series
    1 + alpha + ... + alpha^gamma: position i is emitted if the i tokens before it were accepted.
    Summed as such, it also holds at alpha = 1 (gamma + 1) and loses no digits close to it.
    """
    _check(alpha, gamma)
    total = 1.0
    for _ in range(gamma):
        total = 1.0 + alpha * total
    return total


def improvement_factor(alpha: float, gamma: int, c: float = 0.0) -> float:
    """Expected speed-up of wall time over plain decoding (1 = as fast).

    Theorem 3.8, section 3.3: (1 - alpha^(gamma + 1)) / ((1 - alpha) (gamma c + 1)). It takes a pass
    over gamma + 1 positions to last as long as a pass over one, which holds on an accelerator with
    compute to spare and hardly ever on a CPU: see `improvement_on_curve`.
    """
    _check(alpha, gamma)
    _check_cost(c)
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def improvement_on_curve(alpha: float, gamma: int, cost: Callable[[int], float]) -> float:
    """Expected speed-up of wall time when larger batches cost more, drafts themselves nothing.

    Theorem 3.8 with c = 0 and the measured time of the wider pass: E[tokens] T(1) / T(gamma + 1).

    Args:
        alpha: acceptance rate.
        gamma: drafted tokens per pass.
        cost: seconds of a target pass over a batch of that many tokens; above 0.
    """
    _check(alpha, gamma)
    single, batch = cost(1), cost(gamma + 1)
    if single <= 0 or batch <= 0:
        raise ValueError(f"cost must be above 0 seconds, not {single} and {batch}")
    return expected_tokens(alpha, gamma) * single / batch


def operations_factor(alpha: float, gamma: int, c_hat: float = 0.0) -> float:
    """Expected factor by which the arithmetic operations per emitted token grow (1 = as many).

    Theorem 3.11, section 3.4: (1 - alpha) (gamma c_hat + gamma + 1) / (1 - alpha^(gamma + 1)).

    Args:
        alpha: acceptance rate.
        gamma: drafted tokens per pass.
        c_hat: operations of drafting one token / operations of the target per token
            (definition 3.10); 0 for n-grams.
    """
    _check(alpha, gamma)
    _check_cost(c_hat)
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def optimal_gamma(alpha: float, c: float, max_gamma: int) -> int:
    """The gamma of 0 to `max_gamma` with the largest `improvement_factor`; the smallest of equals.

    Section 3.5. It is 0 (draft nothing) if alpha <= c: only alpha > c can gain anything
    (corollary 3.9). O(max_gamma^2).
    """
    _check(alpha, max_gamma)
    _check_cost(c)
    return max(range(max_gamma + 1), key=lambda gamma: improvement_factor(alpha, gamma, c))


def alpha_from_acceptance(accepted_by_position: Sequence[int], drafted_by_position: Sequence[int]) -> float:
    """Estimate alpha from counts: accepted positions / tested positions.

    A drafted position is tested if every one before it in its draft was accepted; positions after
    the first refusal say nothing about alpha, which is why accepted / drafted would fall short.

    With drafts of one length the tested positions are counted exactly: at position i, the drafts
    accepted at i - 1. Where some drafts end earlier, those accepted at i - 1 went on to i as often
    as drafts at large did, `drafted[i] / drafted[i - 1]`: the paper's assumption again, acceptance
    is independent of all else (section 3.1).

    Args:
        accepted_by_position: drafts whose positions 0 to i were all accepted, for each i.
        drafted_by_position: drafts that had a position i, for each i.

    Returns:
        The estimate, 0 to 1.

    Raises:
        ValueError: nothing was drafted, or the counts cannot be: different lengths, a count that
            rises with the position or is negative, more accepted than drafted.
    """
    accepted, drafted = accepted_by_position, drafted_by_position
    if len(accepted) != len(drafted):
        raise ValueError(f"{len(accepted)} accepted positions, but {len(drafted)} drafted ones")
    if not drafted or drafted[0] <= 0:
        raise ValueError("nothing was drafted: there is no alpha to estimate")
    if any(not 0 <= hits <= tries for hits, tries in zip(accepted, drafted, strict=True)):
        raise ValueError("accepted must be 0 to drafted at every position")
    if any(later > sooner for counts in (accepted, drafted) for sooner, later in pairwise(counts)):
        raise ValueError("counts must not rise with the position")
    tested = float(drafted[0])
    for i in range(1, len(drafted)):
        if accepted[i - 1]:
            reached = accepted[i - 1] * drafted[i] / drafted[i - 1]
            tested += max(reached, accepted[i])  # drafts may have been longer where they fared well
    return sum(accepted) / tested


def overlap_alpha(p: Law, q: Law) -> float:
    """Probability that the target accepts a token drawn from q: sum over x of min(p(x), q(x)).

    Theorem 3.5 and corollary 3.6, section 3.2; 1 less the total variation distance of p and q.
    """
    return lenient_alpha(p, q, 1.0)


def lenient_alpha(p: Law, q: Law, lenience: float) -> float:
    """The same under lenience L: sum over x of min(p(x) / L, q(x)).

    Appendix A.5: q(x) is multiplied by L before it is compared with p(x), so that a token is kept with
    probability min(1, p(x) / (L q(x))). The output's law is then no longer p, but no token is emitted with
    more than p(x) / L.

    Args:
        p, q: as in the module docstring.
        lenience: L, above 0 to 1; 1 is exact.
    """
    _check_laws(p, q)
    _check_lenience(lenience)
    return float(np.minimum(p / lenience, q).sum())


def lenient_argmax_alpha(p: Law, q: Law, lenience: float) -> float:
    """The same under lenience at temperature 0: the mass of q on tokens with p(x) >= L max(p).

    Appendix A.5, whose text has the inequality the other way round: there p is the softmax of the logits, before
    it is standardized to the argmax, and the rule needs no random number. At L = 1 only the likeliest token is kept.

    Args:
        p, q: as in the module docstring; q has one token alone where the drafter does not draw.
        lenience: L, above 0 to 1; 1 is exact.
    """
    _check_laws(p, q)
    _check_lenience(lenience)
    return float(q[p >= lenience * p.max()].sum())


def typical_threshold(p: Law, epsilon: float = EPSILON, delta: float = DELTA) -> float:
    """The probability above which typical acceptance keeps a token: min(epsilon, delta exp(-H(p))).

    T. Cai et al., "Medusa: simple LLM inference acceleration framework with multiple decoding heads", ICML 2024
    (arXiv 2401.10774), section 2.3.1. H is the entropy of p in nats: where the target has many likely tokens, less
    will do.

    Args:
        p: as in the module docstring; tokens of probability 0 may be left out.
        epsilon: the hard threshold, 0 to 1.
        delta: the share of exp(-H), above 0.
    """
    if not 0 <= epsilon <= 1:
        raise ValueError(f"epsilon must be 0 to 1, not {epsilon}")
    if not 0 < delta < math.inf:
        raise ValueError(f"delta must be above 0 and finite, not {delta}")
    some = p[p > 0]
    return min(epsilon, delta * math.exp(float((some * np.log(some)).sum())))


def typical_alpha(p: Law, q: Law, epsilon: float = EPSILON, delta: float = DELTA) -> float:
    """Probability that typical acceptance keeps a token drawn from q: the mass of q above `typical_threshold`.

    The arguments are those of `typical_threshold`, and q.
    """
    _check_laws(p, q)
    return float(q[p > typical_threshold(p, epsilon, delta)].sum())


def _check_laws(p: Law, q: Law) -> None:
    if p.shape != q.shape or p.ndim != 1:
        raise ValueError(f"p and q must be arrays of one shape (n,), not {p.shape} and {q.shape}")
    for name, law in (("p", p), ("q", q)):
        if not (law >= 0).all() or not math.isclose(float(law.sum()), 1, rel_tol=1e-4):
            raise ValueError(f"{name} must hold probabilities that sum to 1")


def _check_lenience(lenience: float) -> None:
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience must be above 0 and at most 1, not {lenience}")


def _check(alpha: float, gamma: int) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be 0 to 1, not {alpha}")
    if gamma < 0:
        raise ValueError(f"gamma must be 0 or more, not {gamma}")


def _check_cost(c: float) -> None:
    if not 0 <= c < math.inf:
        raise ValueError(f"a relative cost must be 0 or more and finite, not {c}")
