"""Verification: the same tokens as plain decoding (greedy, coupled) and the same law (all).

The statistical tests take the seeds 0, 1, 2, ... as their sample, so they pass or fail for ever.
Under exact sampling each comparison would fail with probability below 1e-8; there are fewer than
50, so the file's false-alarm rate is below 1e-6. Limits: Laurent and Massart (2000), lemma 1, for
chi-square, P(X >= k + 2 sqrt(k x) + 2 x) <= exp(-x); Hoeffding for frequencies,
P(|mean - expectation| >= sqrt(log(2 / alarm) / (2 n))) <= alarm.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mock_target import MockTarget, plain_generate
from numpy.typing import NDArray

from ngramspec import noise
from ngramspec import verify as verify_module
from ngramspec.draft import NO_DRAFT, Choose, Draft
from ngramspec.sampling import BadLogits, Sampling
from ngramspec.verify import (
    Verdict,
    Verifier,
    coupled_choice,
    rejection_choice,
    verify_coupled,
    verify_greedy,
    verify_rejection,
)

ALARM = 1e-8
ALL: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
Propose = Callable[[list[int], Choose | None], Draft]


def certain(tokens: Sequence[int]) -> Draft:
    """A draft that nobody drew: q is 1 at each token."""
    return Draft(tuple(tokens), tuple({t: 1.0} for t in tokens))


def speculate(
    mock: MockTarget, prompt: Sequence[int], n: int, verifier: Verifier, propose: Propose
) -> tuple[list[int], list[int]]:
    """The smallest drafting loop: n tokens, and how many each pass accepted."""
    mock.prefill(prompt[:-1])
    tokens, accepted = list(prompt), []
    while len(tokens) < len(prompt) + n:
        draft = propose(tokens, verifier.choose(len(tokens)))
        rows = mock.evaluate([tokens[-1], *draft.tokens])
        verdict = verifier.verify(rows, draft, len(tokens))
        accepted.append(verdict.accepted)
        assert verdict.tokens[: verdict.accepted] == draft.tokens[: verdict.accepted]
        tokens.extend(verdict.tokens)
        mock.rollback(len(tokens) - 1)
    return tokens[len(prompt) : len(prompt) + n], accepted


def from_counts(counts: Sequence[dict[int, int]]) -> Propose:
    """A drafter that picks as it is told from tables that ignore the context."""

    def propose(_tokens: list[int], choose: Choose | None) -> Draft:
        assert choose is not None
        picked = [choose(i, c) for i, c in enumerate(counts)]
        q = [{t: c / sum(law.values()) for t, c in law.items()} for law in counts]
        return Draft(tuple(picked), tuple(q))

    return propose


# ---------------------------------------------------------------- same tokens as plain decoding

PROMPT = [3, 1, 4, 1, 5]


def any_drafts(guesses: list[tuple[bool, int]], lengths: list[int], right: list[int]) -> Propose:
    """Drafts of the given lengths whose tokens are, as told, right or arbitrary."""
    length, guess = itertools.cycle(lengths), itertools.cycle(guesses)

    def propose(tokens: list[int], _choose: Choose | None) -> Draft:
        done = len(tokens) - len(PROMPT)
        ahead = right[done : done + next(length)]
        return certain([t if ok else wrong for t, (ok, wrong) in zip(ahead, guess, strict=False)])

    return propose


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(0.8, seed=1),
        Sampling(1.5, seed=2**64 - 1, top_k=4),
        Sampling(1.0, seed=7, **ALL),
    ],
    ids=["greedy", "t0.8", "t1.5", "t1"],
)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    guesses=st.lists(st.tuples(st.booleans(), st.integers(0, 11)), min_size=1, max_size=40),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=10),
    model=st.integers(0, 3),
)
def test_any_draft_gives_the_tokens_of_plain_decoding(
    sampling: Sampling, guesses: list[tuple[bool, int]], lengths: list[int], model: int
) -> None:
    verifier = Verifier(sampling)
    mock = MockTarget(12, seed=model)
    plain = plain_generate(mock, PROMPT, 30, verifier)
    propose = any_drafts(guesses, lengths, plain)
    assert speculate(mock, PROMPT, 30, verifier, propose)[0] == plain


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=1)], ids=["greedy", "sampled"])
def test_right_drafts_are_accepted_whole(sampling: Sampling) -> None:
    verifier = Verifier(sampling)
    mock = MockTarget(12)
    plain = plain_generate(mock, PROMPT, 60, verifier)
    propose = any_drafts([(True, 0)], [5], plain)
    assert speculate(mock, PROMPT, 60, verifier, propose)[1] == [5] * 10


def test_seeds_and_positions_matter() -> None:
    mock = MockTarget(12, peak=1.0)
    texts = {tuple(plain_generate(mock, PROMPT, 30, Verifier(Sampling(1.0, seed=seed)))) for seed in range(5)}
    assert len(texts) == 5
    row = [mock.row(PROMPT)]
    picked = {verify_coupled(row, [], Sampling(1.0, **ALL), at).tokens for at in range(50)}
    assert len(picked) > 3


def test_coupled_token_is_the_argmax_of_its_definition() -> None:
    rng = np.random.default_rng(5)
    s = Sampling(0.7, seed=99, **ALL)
    rows = rng.standard_normal((4, 50)).astype(np.float32)
    noisy = [rows[i] / 0.7 + noise.gumbel(99, 1000 + i, np.arange(50)) for i in range(4)]
    right = [int(x.argmax()) for x in noisy]
    assert verify_coupled(rows, right[:3], s, 1000).tokens == tuple(right)


# ------------------------------------------------------------------------------ the emitted law


def check_law(sample: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> None:
    """Chi-square of a sample against a law; cells expected fewer than 8 times become one."""
    n = sample.total()
    assert sample.keys() <= law.keys()
    cells = [(sample[k], n * p) for k, p in law.items() if n * p >= 8]
    rest = (n - sum(o for o, _ in cells), n - sum(e for _, e in cells))
    if rest[1] >= 8:
        cells.append(rest)
    x, k = -math.log(ALARM), len(cells) - 1
    assert sum((o - e) ** 2 / e for o, e in cells) < k + 2 * math.sqrt(k * x) + 2 * x


def true_law(mock: MockTarget, prompt: Sequence[int], sampling: Sampling, n: int) -> dict[tuple[int, ...], float]:
    """The law of the next n tokens: all paths, by the chain rule."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(n):
        longer = {}
        for path, probability in law.items():
            p = sampling.distribution(mock.row([*prompt, *path]))
            for token, more in zip(p.ids.tolist(), p.probs.tolist(), strict=True):
                longer[(*path, token)] = probability * more
        law = longer
    return law


@pytest.mark.parametrize("method", ["coupled", "rejection"])
@pytest.mark.parametrize("chain", [ALL, {"top_k": 3, "top_p": 0.9, "min_p": 0.05}], ids=["all", "cut"])
def test_law_of_three_tokens(method: str, chain: dict[str, Any]) -> None:
    """Drafts of two tokens: position one, two and three are accepted, refused and the bonus."""
    mock = MockTarget(4, peak=1.0, seed=11)
    propose = from_counts([{0: 5, 1: 2, 2: 2, 3: 1}, {0: 1, 2: 3, 3: 2}])
    sample: Counter[tuple[int, ...]] = Counter()
    first: Counter[int] = Counter()
    n = 4000
    for seed in range(n):
        verifier = Verifier(Sampling(1.0, seed=seed, **chain), method)
        tokens, accepted = speculate(mock, PROMPT_4, 3, verifier, propose)
        sample[tuple(tokens)] += 1
        first[accepted[0]] += 1
    assert all(first[k] > n / 10 for k in range(3))  # every case was really met
    check_law(sample, true_law(mock, PROMPT_4, Sampling(1.0, **chain), 3))


PROMPT_4 = [3, 1, 2]

P = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
Q = {0: 1, 1: 2, 2: 5, 4: 2}  # token 4 is outside the vocabulary: a drafter may know tokens p lacks
Q_LAW = {t: c / 10 for t, c in Q.items()}
ALPHA = 0.1 + 0.2 + 0.2  # sum min(p, q)


def rejection_verdicts(n: int) -> Iterator[tuple[int, Verdict]]:
    """(drafted token, verdict) of n passes with one drafted token."""
    for seed in range(n):
        s = Sampling(1.0, seed=seed, **ALL)
        token = rejection_choice(s, 50)(0, Q)
        yield token, verify_rejection([P, P], [token], [Q_LAW], s, 50)


def test_rejection_accepts_with_probability_sum_of_min() -> None:
    n = 20_000
    tolerance = math.sqrt(math.log(2 / ALARM) / (2 * n))  # 0.022
    drafted: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    after_refusal: Counter[tuple[int, ...]] = Counter()
    for token, verdict in rejection_verdicts(n):
        drafted[token] += 1
        accepted[token] += verdict.accepted
        if not verdict.accepted:
            after_refusal[verdict.tokens] += 1
    assert abs(accepted.total() / n - ALPHA) < tolerance
    for token, q in Q_LAW.items():
        assert abs(drafted[token] / n - q) < tolerance
        # accepted: q min(1, p/q) = min(p, q)
        p = math.exp(P[token]) if token < 4 else 0.0
        assert abs(accepted[token] / n - min(p, q)) < tolerance
    check_law(after_refusal, {(0,): 0.6, (1,): 0.2, (3,): 0.2})  # norm(max(0, p - q))


@pytest.mark.parametrize("peak", [0.5, 1.5])
def test_rejection_alpha_over_contexts(peak: float) -> None:
    """alpha = E[sum min(p, q)] over the contexts that generation meets."""
    mock = MockTarget(8, peak=peak, seed=2)
    counts = {t: t + 1 for t in range(8)}
    q = np.arange(1, 9) / 36
    s = Sampling(1.0, seed=3, **ALL)
    hits, expected, n = 0, 0.0, 6000
    tokens = list(PROMPT)
    for _ in range(n):
        rows = [mock.row(tokens)] * 2
        token = rejection_choice(s, len(tokens))(0, counts)
        verdict = verify_rejection(rows, [token], [dict(enumerate(q.tolist()))], s, len(tokens))
        hits += verdict.accepted
        expected += float(np.minimum(s.distribution(rows[0]).probs, q).sum())
        tokens.append(verdict.tokens[0])
    # hits - expected is a martingale with steps within an interval of length 1: Azuma-Hoeffding
    assert abs(hits - expected) / n < math.sqrt(math.log(2 / ALARM) / (2 * n))  # 0.040


def test_coupled_acceptance_of_a_drafter_with_the_same_noise() -> None:
    p, q = np.exp(P), np.array([1, 2, 5, 2]) / 10
    n, hits = 20_000, 0
    for seed in range(n):
        s = Sampling(1.0, seed=seed, **ALL)
        token = coupled_choice(s, 50)(0, {0: 1, 1: 2, 2: 5, 3: 2})
        hits += verify_coupled([P, P], [token], s, 50).accepted
    exact = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(4))
    d = np.abs(p - q).sum() / 2
    assert exact >= (1 - d) / (1 + d)
    assert abs(hits / n - exact) < math.sqrt(math.log(2 / ALARM) / (2 * n))


def drop_unless(token: int) -> Callable[[Draft], Draft]:
    return lambda draft: draft if draft.tokens[0] == token else NO_DRAFT


def test_a_draft_cut_after_a_look_at_its_tokens() -> None:
    """Keeping a drawn token only if it is 0 biases rejection, unless q says that it was certain.

    Coupled verification does not care. This is the contract that the length policy has to keep.
    """
    counts, law = {0: 1, 1: 1}, {0: 0.5, 1: 0.5}
    biased, point, coupled = (Counter[tuple[int, ...]]() for _ in range(3))
    for seed in range(4000):
        s = Sampling(1.0, seed=seed, **ALL)
        drawn = rejection_choice(s, 9)(0, counts)
        kept = drop_unless(0)(Draft((drawn,), (law,)))
        biased[verify_rejection([P, P], kept.tokens, kept.q, s, 9).tokens[:1]] += 1
        sure = certain(kept.tokens)
        point[verify_rejection([P, P], sure.tokens, sure.q, s, 9).tokens[:1]] += 1
        guess = coupled_choice(s, 9)(0, counts)
        kept = drop_unless(0)(certain([guess]))
        coupled[verify_coupled([P, P], kept.tokens, s, 9).tokens[:1]] += 1
    right: dict[tuple[int, ...], float] = {(x,): float(np.exp(P[x])) for x in range(4)}
    check_law(point, right)
    check_law(coupled, right)
    with pytest.raises(AssertionError):
        check_law(biased, right)


def test_no_uniform_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    used: Counter[tuple[int, int, int]] = Counter()

    def recorded(seed: int, position: int, stream: int) -> float:
        used[seed, position, stream] += 1
        return noise.uniform(seed, position, stream)

    class Recorder:
        uniform = staticmethod(recorded)

    monkeypatch.setattr(verify_module, "noise", Recorder)
    mock = MockTarget(8, peak=1.0)
    propose = from_counts([{t: 1 + (t + i) % 8 for t in range(8)} for i in range(4)])
    speculate(mock, PROMPT, 300, Verifier(Sampling(1.0), "rejection"), propose)
    assert len(used) > 800
    assert used.most_common(1)[0][1] == 1


# ------------------------------------------------------------------------------------- details


@pytest.mark.parametrize("method", ["greedy", "coupled", "rejection"])
def test_no_row_past_the_first_refusal_is_touched(method: str) -> None:
    verifier = Verifier(Sampling(0.0 if method == "greedy" else 0.5, top_k=1), method)
    row = np.array([0, 9, 0, 0], np.float32)
    read: list[int] = []

    def rows() -> Iterator[NDArray[np.float32]]:
        for i in range(5):
            read.append(i)
            yield row if i < 3 else np.full(4, np.nan, np.float32)

    assert verifier.verify(rows(), certain([1, 1, 2, 1]), 7) == Verdict((1, 1, 1))
    assert read == [0, 1, 2]
    read.clear()
    assert verifier.verify(rows(), certain([1, 1]), 7).accepted == 2  # rows 3, 4: padding, unread
    assert read == [0, 1, 2]
    read.clear()
    assert verifier.verify(rows(), NO_DRAFT, 7) == Verdict((1,))
    assert read == [0]
    with pytest.raises(BadLogits):
        verifier.verify(rows(), certain([1, 1, 1]), 7)
    with pytest.raises(ValueError, match="needs 3 rows"):
        verifier.verify([row, row], certain([1, 1]), 7)


def test_greedy_ties_go_to_the_lowest_id() -> None:
    rows = np.array([[1, 3, 3], [2, 2, 2], [0, 0, 1]], np.float32)
    assert verify_greedy(rows, [1, 0]) == Verdict((1, 0, 2))
    assert verify_greedy(rows, [2, 0]) == Verdict((1,))


def test_rejection_accepts_a_certain_draft_the_target_is_certain_of() -> None:
    row = np.array([0, 100, 0], np.float32)
    for position in range(200):
        verdict = verify_rejection([row, row], [1], [{1: 1.0}], Sampling(0.5), position)
        assert verdict == Verdict((1, 1))


def test_rejection_survives_a_residual_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """p = q but for rounding, and a refusal by that rounding: the token comes from p."""
    s = Sampling(1.0, **ALL)
    row = np.zeros(3, np.float32)
    q = {0: 1 / 3 + 1e-9, 1: 1 / 3, 2: 1 / 3}
    for u in (2.0**-53, 1 - 2.0**-53):
        uniforms = iter([1 - 2.0**-53, u])
        monkeypatch.setattr(noise, "uniform", lambda *_, u=uniforms: next(u))
        verdict = verify_rejection([row, row], [0], [q], s, 0)
        assert verdict == Verdict((0 if u < 0.5 else 2,))


@pytest.mark.parametrize("q", [(), ({0: 1.0},), ({1: 0.5},), ({1: 0.5, 2: 0.6},), ({1: 1.0},) * 2])
def test_rejection_checks_q(q: tuple[dict[int, float], ...]) -> None:
    row = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match=r"distributions q|not drawn from its q"):
        verify_rejection([row, row], [1], q, Sampling(1.0), 0)


def test_choices_of_the_drafter() -> None:
    s = Sampling(1.0, seed=4)
    counts = {9: 3, 4: 1, 7: 2}
    for position in range(20):
        for offset in range(3):
            g = noise.gumbel(4, position + offset, np.array([9, 4, 7]))
            best = [9, 4, 7][int(np.argmax(np.log([3, 1, 2]) + g))]
            assert coupled_choice(s, position)(offset, counts) == best
    assert coupled_choice(s, 0)(0, {5: 2}) == rejection_choice(s, 0)(0, {5: 2}) == 5


def test_verifier_is_chosen_by_name_and_temperature() -> None:
    assert Verifier(Sampling()).name == "greedy"
    assert Verifier(Sampling(), "greedy").name == "greedy"
    assert Verifier(Sampling(), "rejection").name == "greedy"
    assert Verifier(Sampling()).choose(3) is None
    assert Verifier(Sampling(0.5)).name == "coupled"
    assert Verifier(Sampling(0.5), "rejection").name == "rejection"
    with pytest.raises(ValueError, match="must be one of: greedy, coupled, rejection"):
        Verifier(Sampling(0.5), "typical")
    with pytest.raises(ValueError, match=r"'greedy', but temperature is 0\.5"):
        Verifier(Sampling(0.5), "greedy")


# --------------------------------------------------------------------------- the mock's own traps


def test_mock_target_keeps_its_contract() -> None:
    mock = MockTarget(300, n_ctx=10, n_batch=4, slack=1, eog={299})
    seen: list[tuple[int, int]] = []
    logits = mock.prefill([1, 2, 3, 4, 5], progress=lambda *at: seen.append(at))
    assert seen == [(4, 5), (5, 5)]
    assert (logits == mock.row([4, 5])).all()
    rows = mock.evaluate([6, 7])
    assert np.isnan(logits).all()  # a view of the buffer, gone with the next pass
    assert (rows == [mock.row([5, 6]), mock.row([6, 7])]).all()
    mock.rollback(6)
    assert (mock.tokens, mock.passes, mock.batches) == ([1, 2, 3, 4, 5, 6], 1, [2])
    mock.prefill([1, 2, 3, 9, 9, 9])
    mock.prefill([1, 2, 3, 9, 9, 9])
    mock.prefill([1, 2, 3, 9, 9, 9], aligned=True)
    assert mock.prefilled == [5, 3, 1, 2]
    with pytest.raises(ValueError, match="n_batch is 4"):
        mock.evaluate([1] * 5)
    with pytest.raises(ValueError, match="rollback to 7"):
        mock.rollback(7)
    with pytest.raises(ValueError, match="vocabulary of 300"):
        mock.evaluate([300])
    mock.evaluate([1, 1, 1])
    mock.evaluate([1, 1])  # 11 of 10 + 1: padding
    with pytest.raises(ValueError, match="is full"):
        mock.evaluate([1])
    with pytest.raises(ValueError, match="do not fit into 10"):
        mock.prefill([1] * 11)
    text = "añ €"
    assert b"".join(map(mock.piece, mock.tokenize(text))).decode() == text
    assert (mock.piece(299), mock.piece(298), mock.is_eog(299)) == (b"", b"<298>", True)
    stiff = MockTarget(fail_rollback=True)
    stiff.prefill([1, 2])
    with pytest.raises(RuntimeError, match="cannot be rolled back"):
        stiff.rollback(1)
    stiff.prefill([1, 3])
    assert stiff.prefilled == [2, 2]


def test_plain_generate_stops_at_the_end() -> None:
    mock = MockTarget(12, n_ctx=20)
    verifier = Verifier(Sampling())
    whole = plain_generate(mock, PROMPT, 100, verifier)
    assert len(whole) == 16  # 15 fit after the prompt, and the last one need not be evaluated
    ending = MockTarget(12, eog={whole[2]})
    assert plain_generate(ending, PROMPT, 100, verifier) == whole[: whole.index(whole[2]) + 1]
