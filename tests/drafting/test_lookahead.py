"""Windows of guesses, the n-grams that come of them, and the loop that pays for their rows or does not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.mock_target import Clock, MockTarget, plain_generate
from support.successors import check_blind_drafts, rows_to

from ngramspec.cost.given import CURVES, GivenCurve
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.decoding.step import Stats
from ngramspec.drafting import lookahead, make_drafter
from ngramspec.drafting.lookahead import LONGEST, WINDOW, LookaheadDrafter
from ngramspec.drafting.price import TokenPrice
from ngramspec.sampling.settings import Sampling

FREE = GivenCurve({1: 1.0, 64: 1.0})


def after_a_pass() -> LookaheadDrafter:
    """The docstring's: 5 6 is the text, 7 8 9 was sent, the target would have 1 4 4 2."""
    drafter = LookaheadDrafter()
    drafter.begin([5, 6])
    drafter.see([6, 7, 8, 9], rows_to([1, 4, 4, 2]))
    drafter.accept([1])
    return drafter


# --------------------------------------------------------------------------- what it drafts


def test_behind_an_unknown_token_comes_the_trajectory() -> None:
    draft = after_a_pass().propose(63)
    assert draft.tokens == (4, 4, 2, *[2] * (WINDOW - 3))
    assert draft.match == (0,) * WINDOW
    assert not draft.q
    assert draft.source == LookaheadDrafter.name == make_drafter("lookahead").name == "lookahead"


def test_the_trajectory_starts_behind_what_was_emitted() -> None:
    drafter = LookaheadDrafter()
    drafter.begin([5])
    drafter.see([5, 7, 8, 9], rows_to([7, 10, 3, 4]))
    drafter.accept([7, 10])
    assert drafter.propose(3).tokens == (3, 4, 4)
    drafter.see([10], rows_to([11]))
    drafter.accept([11])
    assert drafter.propose(3).tokens == (11, 11, 11), "a pass without a draft has no rows beyond its own"


def test_the_longest_context_of_the_pool_counts() -> None:
    drafter = after_a_pass()
    drafter.see([1, 6, 7], rows_to([3, 3, 11]))
    drafter.accept([6, 7])
    # After 7 came 4, then 11: in the text 1 6 7 the latter, in 5 6 7 the former.
    assert drafter.propose(1).tokens == (11,)
    drafter.begin([5, 6, 7])
    draft = drafter.propose(3)
    assert (draft.tokens[0], draft.match[0]) == (4, 3)
    drafter.begin([8, 6, 7])
    draft = drafter.propose(1)
    assert (draft.tokens, draft.match) == ((11,), (2,))
    drafter.see([7], rows_to([10]))
    assert drafter.propose(1).tokens == (10,), "the latest logits count"


def test_the_prompt_is_in_the_pool_as_soon_as_its_model_is_known() -> None:
    drafter = LookaheadDrafter()
    for n_vocab in (12, 13):
        drafter.begin([1, 2, 3, 9, 2, 4, 5, 9, 1, 2])
        drafter.see([2], rows_to([9], n_vocab))
        drafter.accept([5])
        draft = drafter.propose(4)
        assert draft.tokens == (9, 1, 2, 9), "what followed 5, then 5 9, then 5 9 1; after 9 1 2 come 9, by the logits"
        assert draft.match == (1, 2, 3, 3)


def test_the_longer_the_context_the_surer() -> None:
    draft = after_a_pass()
    chances = []
    for prompt in ([10], [7], [6, 7], [5, 6, 7]):
        draft.begin(prompt)
        chances.append(draft.propose(1).chances[0])
    assert chances == sorted(set(chances))


def test_only_a_price_ends_a_draft_before_the_window() -> None:
    drafter = after_a_pass()
    assert len(drafter.propose(63)) == len(drafter.propose(63, price=TokenPrice(1.0, [0.0] * 64))) == WINDOW
    assert len(drafter.propose(4)) == 4
    draft = drafter.propose(63, price=TokenPrice(1.0, [0.04] * 64))
    reach = np.cumprod(draft.chances)
    assert reach[-1] < 0.04
    assert (reach[:-1] >= 0.04).all()


def test_a_request_ends_the_trajectory_and_another_model_the_pool() -> None:
    drafter = after_a_pass()
    drafter.begin([5, 6, 7])
    assert drafter.propose(2).tokens == (4, 4)
    drafter.begin([1])
    assert drafter.propose(2).tokens == (1, 1)
    drafter.see([1], rows_to([2], n_vocab=9))
    drafter.begin([5, 6, 7])
    assert drafter.propose(2).tokens == (7, 7)


def test_without_a_text_there_is_nothing_to_draft() -> None:
    drafter = LookaheadDrafter()
    drafter.begin([])
    assert len(drafter.propose(4)) == len(drafter.propose(4, blind=True)) == 0
    assert drafter.accept([]) == 0
    drafter.accept([3])
    assert drafter.propose(2).tokens == (3, 3)


def test_rows_that_are_no_numbers_teach_nothing() -> None:
    drafter = LookaheadDrafter()
    drafter.begin([5])
    rows = rows_to([1, 2, 3])
    rows[1] = float("nan")
    drafter.see([5, 7, 8], rows)
    drafter.accept([1])
    assert drafter.propose(2).tokens == (1, 3), "nothing is expected at the first position"


def test_the_pool_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "POOLED", 30)
    drafter, rng = LookaheadDrafter(), random.Random(0)
    drafter.begin([0])
    for _ in range(50):
        tokens = [drafter._tail[-1], *(rng.randrange(12) for _ in range(6))]
        drafter.see(tokens, rows_to([rng.randrange(12) for _ in tokens]))
        drafter.accept(tokens[1:3])
        assert len(drafter._pool) <= 30
    assert len(drafter._pool) == 30
    assert tuple(tokens[-LONGEST:]) in drafter._pool


# --------------------------------------------------------------------------- the laws that guesses are drawn from


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), limit=st.integers(1, 20))
def test_q_is_the_law_drawn_from_and_a_blind_estimate_does_not_look_at_the_draw(seed: int, limit: int) -> None:
    rng = random.Random(seed)
    drafter = LookaheadDrafter()
    drafter.begin([1])
    for _ in range(12):
        drafter.propose(3)
        tokens = [drafter._tail[-1], *(rng.randrange(5) for _ in range(3))]
        drafter.see(tokens, np.array([[rng.gauss(0, 2) for _ in range(5)] for _ in tokens], np.float32))
        drafter.accept(tokens[1 : 1 + rng.randrange(1, 3)])
    check_blind_drafts(drafter, limit, rng)


# --------------------------------------------------------------------------- the loop


def decoder_on(mock: MockTarget, folder: Path, drafter: str = "lookahead", policy: str = "fixed") -> SpeculativeDecoder:
    return SpeculativeDecoder(mock, drafter=drafter, policy=policy, curve=FREE, calibration_folder=folder)


@pytest.mark.parametrize("policy", ["fixed", "cost"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=3)], ids=["greedy", "sampled"])
def test_the_text_is_the_targets(tmp_path: Path, policy: str, sampling: Sampling) -> None:
    mock = MockTarget(40, peak=5.0)
    decoder = decoder_on(mock, tmp_path, policy=policy)
    drafted = Stats()
    for prompt in ([1, 2], [7, 8, 9], [1, 2]):
        tokens: list[int] = []
        for step in decoder.generate(prompt, max_tokens=80, sampling=sampling):
            drafted.add(step)
            tokens += step.tokens
        assert tokens == plain_generate(mock, prompt, 80, sampling)
    assert drafted.accepted > 30


def per_pass(mock: MockTarget, folder: Path, drafter: str) -> float:
    """Tokens per pass, where every pass costs the same."""
    stats = Stats()
    for step in decoder_on(mock, folder, drafter, "cost").generate([3, 4], max_tokens=500):
        stats.add(step)
    return stats.tokens_per_pass


def test_a_window_of_the_targets_guesses_saves_passes(tmp_path: Path) -> None:
    # The next token follows from the last one, or from that and the one before: a row behind a wrong guess is
    # mostly right about its own position's follower, and a context of two tokens knows more than one.
    class Chain(MockTarget):
        def row(self, context: Sequence[int]) -> NDArray[np.float32]:
            row = np.zeros(self.n_vocab, np.float32)
            before = context[-2] if context[-1] % 3 == 0 else 0
            row[(7 * context[-1] + 31 * before + 1) % self.n_vocab] = 5.0
            if len(context) % 40 == 0:
                row[(context[-1] + 11) % self.n_vocab] = 9.0
            return row

    ours, recycled = (per_pass(Chain(211), tmp_path, name) for name in ("lookahead", "recycle"))
    assert ours > 1.2 * recycled
    assert ours > 2


def timed(folder: Path, curve: str, peak: float, policy: str) -> tuple[float, Stats]:
    """Time of a sampled text in passes over one token, asking included, and what was counted."""
    cost, clock, stats = GivenCurve(CURVES[curve][0]), Clock(tick=1e-4), Stats()
    mock = MockTarget(peak=peak, seconds=cost.ratio, clock=clock)
    decoder = SpeculativeDecoder(
        mock, drafter="lookahead", policy=policy, curve=cost, calibration_folder=folder, clock=clock.perf_counter
    )
    for step in decoder.generate([1, 2], max_tokens=700, sampling=Sampling(temperature=1.0, seed=1)):
        stats.add(step)
    return clock.now, stats


@pytest.mark.parametrize(
    ("curve", "peak"), [("cpu-1.5b-q4_0", 1.0), ("cpu-1.5b-q4_k_m", 1.0), ("moe-glm-4.5-air", 2.0)]
)
def test_where_rows_are_dear_the_default_policy_leaves_it_alone(tmp_path: Path, curve: str, peak: float) -> None:
    dear, drafted = timed(tmp_path, curve, peak, "fixed")
    assert dear > 1.4 * drafted.tokens, "the rows are not worth their time"
    seconds, stats = timed(tmp_path, curve, peak, "cost")
    # What the policy promises: ALLOWANCE of the time and CREDIT passes are lost at most, and OVERHEAD of it by asking.
    assert seconds < 1.008 * stats.tokens + 2.0
    assert stats.drafted < drafted.drafted / 8
