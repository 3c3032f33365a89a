"""Tests of `recycle` and `lookahead`, which read logits: their drafts against brute force, and the received logits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from support.mock_target import MockTarget, rows_to

from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting import make_drafter
from ngramspec.drafting.acceptance_estimator import MIN_CHAIN_PROB
from ngramspec.drafting.baselines import target_logits
from ngramspec.drafting.baselines.target_logits import (
    LONGEST,
    WINDOW,
    LookaheadDrafter,
    RecycleDrafter,
    SuccessorDrafter,
    top_two,
)
from ngramspec.drafting.draft import Ask, Draft
from ngramspec.instruments.replay.replay import Replay

FREE = make_fixed_curve({1: 1.0, 64: 1.0})
NAN = float("nan")
SEEDS = st.integers(0, 10**6)


@given(row=arrays.arrays(np.float32, st.integers(1, 40), elements=st.floats(-30, 30, width=32)))
def test_top_two_returns_two_most_likely_tokens(row: NDArray[np.float32]) -> None:
    likely = top_two(row)
    order = sorted(range(row.size), key=lambda token: -row[token])
    assert next(iter(likely)) == int(row.argmax())
    assert sum(likely.values()) == pytest.approx(1)
    assert min(likely.values()) > 0
    assert sorted((row[t] for t in likely), reverse=True) == [row[t] for t in order[: len(likely)]]
    assert len(likely) == min(2, row.size)
    if len(likely) == 2:
        (a, p), (b, q) = likely.items()
        assert np.log(p / q) == pytest.approx(float(row[a]) - float(row[b]), abs=1e-6)


def test_observe_logits_ignores_nan_and_infinite_values() -> None:
    inf = float("inf")
    for values, likely in (
        ([1, NAN, 3], {}),
        ([1, inf, 3], {}),
        ([-inf, -inf], {}),
        ([-inf, 2, -inf], {1: 1.0}),
    ):
        assert top_two(np.array(values, np.float32)) == likely
    drafter: SuccessorDrafter = RecycleDrafter()
    drafter.begin([1])
    drafter.observe_logits([1], rows_to([2]))
    drafter.observe_logits([1], np.full((1, 12), NAN, np.float32))
    assert drafter.propose(Ask(1)).tokens == (2,)
    drafter = LookaheadDrafter()
    drafter.begin([5])
    rows = rows_to([1, 2, 3])
    rows[1] = NAN
    drafter.observe_logits([5, 7, 8], rows)
    drafter.accept([1])
    assert drafter.propose(Ask(2)).tokens == (1, 3), "nothing is expected at the first position"


@given(seed=SEEDS, n_vocab=st.integers(3, 9))
def test_recycle_drafts_chain_of_latest_best_successors(seed: int, n_vocab: int) -> None:
    """It learns from all evaluated tokens, refused or not, in this request or an earlier one with the same model."""
    rng = np.random.default_rng(seed)
    drafter, successor = RecycleDrafter(), dict[int, int]()
    for request in range(4):
        text = rng.integers(n_vocab, size=3).tolist()
        drafter.begin(text)
        for turn in range(10):
            draft = drafter.propose(Ask(8))
            chain = [text[-1]]
            while chain[-1] in successor and len(chain) <= 8:
                chain.append(successor[chain[-1]])
            assert [text[-1], *draft.tokens] == chain[: 1 + len(draft)]
            assert len(draft) == len(chain) - 1 or (draft and np.prod(draft.acceptance_probs) < MIN_CHAIN_PROB)
            assert draft.match_lengths == (1,) * len(draft)
            if (request, turn) == (2, 0):  # another model
                n_vocab, successor = n_vocab + 1, {}
            sent = [text[-1], *draft.tokens, *rng.integers(n_vocab, size=2).tolist()]
            rows = rng.standard_normal((len(sent), n_vocab)).astype(np.float32)
            drafter.observe_logits(sent, rows)
            successor |= dict(zip(sent, rows.argmax(axis=1).tolist(), strict=True))
            text += rng.integers(n_vocab, size=2).tolist()
            drafter.accept(text[-2:])


def test_recycle_with_repeated_successor_increases_probability() -> None:
    chances = []
    for times in (1, 2, 4):
        drafter = RecycleDrafter()
        for _ in range(times):
            drafter.observe_logits([1], rows_to([2]))
        drafter.begin([1])
        chances += drafter.propose(Ask(1)).acceptance_probs
    assert chances == sorted(set(chances))


def expected_window(
    evaluated: Sequence[tuple[Sequence[int], int]], trajectory: Sequence[int], text: Sequence[int], limit: int
) -> Draft:
    """Return the expected draft by the rule.

    Each token is the latest that followed the longest known context, by the pairs (text, next token) in `evaluated`.
    Without such a context, it comes from the trajectory; after its end, the last token is repeated.
    """
    text, match, start = list(text), [], len(text)
    while text and len(match) < min(limit, WINDOW):
        for length in range(min(LONGEST, len(text)), 0, -1):
            found = [best for before, best in evaluated if list(before[-length:]) == text[-length:]]
            if found:
                break
        else:
            length, found = 0, [*trajectory, *[text[-1]] * WINDOW][len(match) : len(match) + 1]
        match.append(length)
        text.append(found[-1])
    return Draft(tuple(text[start:]), (), tuple(match), source="lookahead")


@given(seed=SEEDS, limit=st.integers(1, 20), n_vocab=st.integers(3, 12))
def test_lookahead_drafts_tokens_of_reference_rule(seed: int, limit: int, n_vocab: int) -> None:
    """The prompt enters the pool once its model is known; the pool outlives the request, the trajectory does not."""
    rng = np.random.default_rng(seed)
    drafter, evaluated = LookaheadDrafter(), list[tuple[list[int], int]]()
    for request in range(4):
        text = rng.integers(n_vocab, size=rng.integers(1, 12)).tolist()
        drafter.begin(text)
        trajectory: list[int] = []
        for turn in range(6):
            draft = drafter.propose(Ask(limit))
            expected = expected_window(evaluated, trajectory, text, limit)
            assert (draft.tokens, draft.match_lengths) == (expected.tokens, expected.match_lengths)
            if (request, turn) == (2, 0):  # another model
                n_vocab, evaluated = n_vocab + 1, []
            if turn == 0:
                evaluated += [(text[:i], token) for i, token in enumerate(text)]
            sent = [text[-1], *draft.tokens]
            rows = rng.standard_normal((len(sent), n_vocab)).astype(np.float32)
            drafter.observe_logits(sent, rows)
            best = rows.argmax(axis=1).tolist()
            evaluated += [([*text, *sent[1 : 1 + i]], token) for i, token in enumerate(best)]
            emitted = [*draft.tokens[: rng.integers(len(draft) + 1)], int(rng.integers(n_vocab))]
            drafter.accept(emitted)
            trajectory = best[len(emitted) :]
            text += emitted


def test_lookahead_trusts_long_contexts() -> None:
    drafter = LookaheadDrafter()
    drafter.begin([5, 6])
    drafter.observe_logits([6, 7, 8, 9], rows_to([1, 4, 4, 2]))
    drafter.accept([1])
    chances = []
    for prompt in ([10], [7], [6, 7], [5, 6, 7]):
        drafter.begin(prompt)
        chances.append(drafter.propose(Ask(1)).acceptance_probs[0])
    assert drafter.propose(Ask(1)).tokens == (4,)
    assert chances == sorted(set(chances))


def test_lookahead_pool_keeps_size_within_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_logits, "MAX_POOL", 30)
    drafter, rng = LookaheadDrafter(), random.Random(0)
    drafter.begin([0])
    for _ in range(50):
        tokens = [drafter._tail[-1], *(rng.randrange(12) for _ in range(6))]
        drafter.observe_logits(tokens, rows_to([rng.randrange(12) for _ in tokens]))
        drafter.accept(tokens[1:3])
        assert len(drafter._pool) <= 30
    assert len(drafter._pool) == 30
    assert tuple(tokens[-LONGEST:]) in drafter._pool


class Reader(RecycleDrafter):
    """Drafter that records the logits it receives and always drafts the same token."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[int, ...], NDArray[np.float32], int]] = []

    def propose(self, ask: Ask) -> Draft:
        return Draft((5,) * ask.limit, acceptance_probs=(0.9,) * ask.limit, source=self.name)

    def observe_logits(self, tokens: Sequence[int], rows: NDArray[np.float32], n_accepted: int = 0) -> None:
        self.seen.append((tuple(tokens), rows.copy(), n_accepted))


def test_decoder_passes_logits_of_rejected_positions_to_drafter(tmp_path: Path) -> None:
    mock, reader = MockTarget(12, peak=6.0), Reader()
    decoder = SpeculativeDecoder(
        mock, drafter=reader, policy="fixed", draft_max=3, times=FREE, calibration_folder=tmp_path
    )
    context = [1, 2]
    steps = list(decoder.generate(context, max_tokens=30))
    refused = 0
    for step, (tokens, rows, accepted) in zip(steps, reader.seen, strict=True):
        assert accepted == step.accepted
        assert tokens == (context[-1], *step.drafted)
        assert rows.tolist() == [mock.row([*context, *step.drafted[:i]]).tolist() for i in range(len(tokens))]
        refused += len(step.draft_remainder)
        context += step.tokens
    assert refused > 20


def test_replay_rejects_drafter_that_needs_logits() -> None:
    with pytest.raises(ValueError, match="'recycle' needs a model's logits"):
        Replay(make_drafter("recycle"), curve=FREE)
