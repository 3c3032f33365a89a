"""Alpha by n-gram order: the drafter against counting by hand, and the measurement against a law that is known."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from support.cli_runner import run
from support.mock_target import MockTarget

from ngramspec.benchmark.alpha import ORDERS, AlphaMeasurement, OrderDrafter
from ngramspec.sampling.settings import Sampling

TEXT = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1]


@pytest.mark.parametrize("order", ORDERS)
def test_q_is_what_followed_the_last_tokens_before(order: int) -> None:
    drafter = OrderDrafter(order)
    drafter.begin(TEXT[:4])
    drafter.accept(TEXT[4:])
    width = order - 1
    tail = TEXT[len(TEXT) - width :]
    followers = Counter(TEXT[i + width] for i in range(len(TEXT) - width) if TEXT[i : i + width] == tail)
    draft = drafter.propose(1, lambda _offset, weights: min(weights))
    assert draft.q == (({x: n / followers.total() for x, n in followers.items()},) if followers else ())
    assert draft.tokens == ((min(followers),) if followers else ())


def test_a_greedy_draft_is_the_likeliest_chain() -> None:
    drafter = OrderDrafter(2)
    drafter.begin([*TEXT, 2])
    assert drafter.propose(3).tokens == (3, 1, 2)
    assert drafter.accept([3, 1, 5]) == 2


def test_alpha_on_a_known_law() -> None:
    """p uniform over 8 tokens, q of 4 or 5 different ones, none rarer than 1/5: sum min(p, q) is their number / 8."""
    sampling = Sampling(1.0, top_k=0, top_p=1.0, min_p=0.0, seed=4)
    measurement = AlphaMeasurement(MockTarget(8, peak=0.0), sampling, gamma=1)
    for _ in measurement.run([0, 1, 2, 3], max_tokens=3):
        pass
    unigram = measurement.orders[0]
    assert unigram.judged == 1
    assert unigram.measured in (pytest.approx(4 / 8), pytest.approx(5 / 8))  # the prefill's token is counted too


def test_the_two_alphas_agree() -> None:
    mock = MockTarget(8, peak=1.5, seed=2)
    measurement = AlphaMeasurement(mock, Sampling(1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1), gamma=3)
    for start in range(8):
        for _ in measurement.run([start, 1, 2], max_tokens=400):
            pass
    for one in measurement.orders[:3]:
        assert one.judged > 1500
        assert one.measured is not None
        # Hoeffding at 1500 judged positions: off by 0.08 with probability below 5e-9.
        assert one.inferred == pytest.approx(one.measured, abs=0.08)


def test_greedy_alphas_are_the_same_count() -> None:
    mock = MockTarget(12, peak=6.0)
    measurement = AlphaMeasurement(mock, Sampling(), gamma=1)
    for _ in measurement.run([3, 1, 4, 1, 5], max_tokens=200):
        pass
    for one in measurement.orders:
        assert one.measured == pytest.approx(one.inferred)


def test_the_command_line(env: dict[str, str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["bench", "--alpha", "--limit", "1", "--category", "qa", "--repeat", "1", "-n", "24", "--json"]
    done = run(env, *arguments, str(report))
    assert done.code == 0, done.stderr
    assert "Alpha of n-gram counts by order (greedy, drafts of up to 4)" in done.out
    rows = json.loads(report.read_text())["alpha"]
    assert [row["order"] for row in rows] == [1, 2, 3, 4]
    assert all(row["accepted"] <= row["drafted"] for row in rows)
    assert rows[0]["judged"] > 0
