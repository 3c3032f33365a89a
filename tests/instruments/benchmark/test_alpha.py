"""Tests of alpha by n-gram order: the drafter against plain counts, the measurement against a known distribution."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support.cli_runner import run
from support.mock_target import MockTarget

from ngramspec.instruments.benchmark.alpha import ORDERS, AlphaOfOrder, OrderDrafter
from ngramspec.sampling.settings import Sampling

HOT = Sampling(1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
TEXT = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1]


def test_order_drafter_q_equals_counts_of_followers() -> None:
    for order in ORDERS:
        drafter = OrderDrafter(order)
        drafter.begin(TEXT[:4])
        drafter.accept(TEXT[4:])
        width = order - 1
        tail = TEXT[len(TEXT) - width :]
        followers = Counter(TEXT[i + width] for i in range(len(TEXT) - width) if TEXT[i : i + width] == tail)
        draft = drafter.propose(1, lambda _offset, weights: min(weights))
        assert draft.q == (({x: n / followers.total() for x, n in followers.items()},) if followers else ())
        assert draft.tokens == ((min(followers),) if followers else ())
    # A greedy draft is the most likely chain.
    drafter = OrderDrafter(2)
    drafter.begin([*TEXT, 2])
    assert drafter.propose(3).tokens == (3, 1, 2)
    assert drafter.accept([3, 1, 5]) == 2


def measured(mock: MockTarget, sampling: Sampling, gamma: int, prompts: list[list[int]], n: int) -> list[AlphaOfOrder]:
    orders = [AlphaOfOrder(order, mock, sampling, gamma) for order in ORDERS]
    for prompt in prompts:
        for one in orders:
            one.run(prompt, max_tokens=n)
    return orders


def test_alpha_of_order_with_known_distribution_equals_theory() -> None:
    """The sum of min(p, q) is the number of q's tokens / 8.

    p is uniform over 8 tokens, and q has 4 or 5 different tokens, none with a probability below 1/5.
    """
    unigram = measured(MockTarget(8, peak=0.0), replace(HOT, seed=4), 1, [[0, 1, 2, 3]], 3)[0]
    assert unigram.n_verified == 1
    assert unigram.mean_overlap in (pytest.approx(4 / 8), pytest.approx(5 / 8))  # includes the prefill's token


# By Hoeffding, a larger deviation at this number of positions has a probability below 1e-8.
@pytest.mark.parametrize(
    ("prompts", "judged", "off"), [(2, 360, 0.17), pytest.param(8, 1500, 0.08, marks=pytest.mark.exhaustive)]
)
def test_alpha_of_order_measured_agrees_with_inferred(prompts: int, judged: int, off: float) -> None:
    starts = [[start, 1, 2] for start in range(prompts)]
    for one in measured(MockTarget(8, peak=1.5, seed=2), HOT, 3, starts, 400)[:3]:
        assert one.n_verified > judged
        assert one.mean_overlap is not None
        assert one.acceptance_rate == pytest.approx(one.mean_overlap, abs=off)


def test_alpha_of_order_with_greedy_measured_equals_inferred() -> None:
    for one in measured(MockTarget(12, peak=6.0), Sampling(), 1, [[3, 1, 4, 1, 5]], 200):
        assert one.mean_overlap == pytest.approx(one.acceptance_rate)


def test_bench_alpha_prints_and_writes_orders(env: dict[str, str], tmp_path: Path) -> None:
    report, prompt = tmp_path / "report.json", tmp_path / "prompt.txt"
    prompt.write_text("a b c d a b c d a b c d")
    quick = ["--repeat", "1", "-n", "16", "-t", "1", "--exact", "off", "--policy", "fixed"]
    done = run(env, "bench", "--alpha", *quick, "--prompts", prompt, "--json", report)
    assert done.code == 0, done.err
    assert "Alpha of n-gram counts by order: greedy, drafts of up to 4 tokens" in done.out
    rows = json.loads(report.read_text())["alpha"]
    assert [row["order"] for row in rows] == [1, 2, 3, 4]
    assert all(row["accepted"] <= row["drafted"] for row in rows)
    assert rows[0]["verified"] > 0
