"""A drafter written by the recipe in `ngramspec.drafting`: without estimates of its own, the default policy drafts."""

from __future__ import annotations

import inspect
import random
import re
import textwrap
from collections.abc import Sequence
from typing import Any

import pytest
from support.mock_target import Clock, MockTarget

from ngramspec import drafting
from ngramspec.cost.given import CURVES, GivenCurve
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.decoding.speculation import Speculation
from ngramspec.drafting.chances import Record
from ngramspec.drafting.draft import NO_DRAFT, Draft, Drafter
from ngramspec.policies import make_policy
from ngramspec.policies.policy import Pass
from ngramspec.sampling.settings import Sampling
from ngramspec.tokens import common_prefix

SIZES = range(1, 65)
WORDS = 50


def recipe() -> str:
    """The class that the package's docstring shows, as source."""
    block = re.search(r"^    class Echo\(Drafter\):\n(?:    .*\n|\n)+", inspect.getdoc(drafting) or "", re.MULTILINE)
    assert block
    return textwrap.dedent(block[0])


def drafter_class() -> Any:
    names: dict[str, Any] = {"Draft": Draft, "Drafter": Drafter, "common_prefix": common_prefix}
    exec(recipe(), names)
    return names["Echo"]


class Echo(drafter_class()):  # type: ignore[misc]
    """The recipe's, of which no estimate is ever seen."""

    def propose(self, *args: Any, **kwargs: Any) -> Draft:
        draft: Draft = super().propose(*args, **kwargs)
        assert not draft.chances
        return draft


def text(p: float, length: int = 4000, seed: int = 0) -> list[int]:
    """Tokens each of which repeats the one eight back with probability p, and is another with 1 - p."""
    rng = random.Random(seed)
    tokens = [rng.randrange(WORDS) for _ in range(8)]
    while len(tokens) < length:
        same = tokens[-8]
        tokens.append(same if rng.random() < p else (same + rng.randrange(1, WORDS)) % WORDS)
    return tokens


class Run:
    """Decodes a text that is known, pass by pass, on a simulated clock on which a plain pass takes a second.

    Attributes:
        seconds: that it took, asking the drafter included.
        plain: that one token at a time would have taken.
        drafted: tokens sent.
        proposals: what the policy was shown.
    """

    def __init__(self, truth: Sequence[int], policy: str, curve: str, ask: float) -> None:
        speculation = Speculation(Echo(), make_policy(policy))
        cost = GivenCurve(CURVES[curve][0])
        speculation.prepare(cost, SIZES)
        speculation.begin(truth[:8])
        speculation.first(truth[8])
        self.seconds = 0.0
        self.drafted = 0
        self.proposals: list[Draft] = []
        at = 9
        while at < len(truth):
            draft, _, size, *_ = speculation.plan(len(truth) - at)
            asked = ask if speculation.proposal is not None else 0.0
            self.proposals += [speculation.proposal] if speculation.proposal else []
            tokens = tuple(truth[at : at + common_prefix(draft.tokens, truth[at:]) + 1])
            done = Pass(tokens, drafted=draft.tokens, accepted=len(tokens) - 1, batch=size, seconds=cost.ratio(size))
            speculation.learn(done, ask)
            self.seconds += cost.ratio(size) + asked
            self.drafted += len(draft)
            at += len(tokens)
        self.plain = (len(truth) - 9) * cost.ratio(1)


def test_the_recipe_is_ten_lines_or_so() -> None:
    assert len([line for line in recipe().splitlines() if line.strip()]) <= 12


@pytest.mark.parametrize("curve", ["flat", "apple-silicon-akunu", "cpu-1.5b-q4_0"])
@pytest.mark.parametrize("ask", [1e-5, 1e-2])
def test_the_default_policy_drafts_with_it_where_it_is_right(curve: str, ask: float) -> None:
    run = Run(text(0.97), "cost", curve, ask)
    assert run.drafted > 1000
    assert run.plain / run.seconds > 1.4


@pytest.mark.parametrize("curve", [*CURVES])
@pytest.mark.parametrize("ask", [1e-5, 1e-3, 1e-2, 0.3])
@pytest.mark.parametrize("p", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("length", [100, 4000])
def test_and_is_no_slower_than_plain_where_it_is_wrong(curve: str, ask: float, p: float, length: int) -> None:
    run = Run(text(p, length), "cost", curve, ask)
    assert run.seconds < 1.02 * run.plain + 1.0
    if length == 4000:
        assert run.seconds < 1.02 * run.plain


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8, 0.95])
def test_its_estimates_come_near_its_rate(p: float) -> None:
    run = Run(text(p, 12000), "fixed", "flat", 1e-5)
    for position in range(3):
        given = [proposal.chances[position] for proposal in run.proposals[1000:] if len(proposal) > position]
        assert len(given) > 500
        assert sum(given) / len(given) == pytest.approx(p, abs=0.06)


def test_positions_are_told_apart() -> None:
    record, rng = Record(), random.Random(1)
    for _ in range(3000):
        draft = record.estimated(Draft((1, 1, 1)), 3)
        rates = 0.9, 0.1, 0.7
        record.settle([1 if rng.random() < rate else 2 for rate in rates])
    assert draft.chances == pytest.approx((0.9, 0.1, 0.7), abs=0.15)


def test_and_matches_where_the_drafter_tells_them() -> None:
    record, rng = Record(), random.Random(2)
    for number in range(3000):
        match, rate = ((1,), 0.2) if number % 2 else ((9,), 0.9)
        draft = record.estimated(Draft((1,), match=match), 1)
        if number > 2900:
            assert draft.chances[0] == pytest.approx(rate, abs=0.2)
        record.settle([1 if rng.random() < rate else 2])


def test_a_drafters_own_estimates_stay() -> None:
    record = Record()
    own = Draft((1, 2), chances=(0.3, 0.9))
    assert record.estimated(own, 2) is own
    assert record.estimated(NO_DRAFT, 2) is NO_DRAFT
    record.settle([1, 2, 3])
    assert record.estimated(Draft((1,)), 1) == Record().estimated(Draft((1,)), 1)


def test_blind_estimates_hang_on_no_token_that_was_drawn() -> None:
    record = Record()
    for tokens in ((5, 6), (5, 7), (4, 6)):
        record.estimated(Draft(tokens), 6, blind=True)
        record.settle((5, 6, 9))
    drawn = [Draft((1,), match=(7,)), Draft((2, 3), match=(1, 2)), Draft((1,) * 6)]
    estimates = {record.estimated(draft, 6, blind=True).chances for draft in drawn}
    assert len(estimates) == 1
    assert len(next(iter(estimates))) == 6


@pytest.mark.parametrize(
    ("sampling", "rule"),
    [(Sampling(), "greedy"), (Sampling(0.8, seed=3), "coupled"), (Sampling(0.8, seed=3), "rejection")],
)
def test_in_the_loop_it_drafts_and_the_text_stays(sampling: Sampling, rule: str) -> None:
    def decode(drafter: Any) -> tuple[list[int], int, float]:
        clock, curve = Clock(), GivenCurve(CURVES["apple-silicon-akunu"][0])
        target = MockTarget(words=[5], seconds=curve.seconds, clock=clock)
        decoder = SpeculativeDecoder(target, drafter=drafter, curve=curve, clock=clock.perf_counter)
        steps = list(decoder.generate([1, 2, 3], max_tokens=400, sampling=sampling, verify=rule))
        return [token for step in steps for token in step.tokens], sum(len(step.drafted) for step in steps), clock.now

    plain, _, slow = decode(None)
    tokens, drafted, fast = decode(Echo())
    assert tokens == plain
    assert drafted > 100
    assert fast < 0.7 * slow
