"""Tests that a request is drafted from its earlier answer or a prediction, from the first decode call on."""

from __future__ import annotations

import pytest
from support.ear import Ear, run_engine
from support.mock_shared import MockShared
from support.mock_target import MockTarget, plain_generate

from ngramspec.batching.request import Done
from ngramspec.cost.fixed_curves import CURVES, make_fixed_curve
from ngramspec.drafting.mixture.drafter import MixtureDrafter, TextIndexSet
from ngramspec.request import Request
from ngramspec.sampling.settings import Sampling

PROMPT = list(range(100, 140))
LENGTH, VOCABULARY = 96, 2048


def asks(*requests: Request) -> list[tuple[int, int, int]]:
    """Return the numbers of draft tokens, accepted tokens and decode calls of each request, one after the other."""
    times, memory = make_fixed_curve(CURVES["cpu-1.5b-q4_0"][0]), TextIndexSet()
    model = MockShared(1, n_vocab=VOCABULARY, seconds=times.ratio)
    counts = []
    with run_engine(model, times=times, drafter=MixtureDrafter(memory), memory=memory) as engine:
        for request in requests:
            ear = Ear()
            engine.submit(request, ear)
            assert isinstance(ear.wait(), Done)
            steps = [step for step in ear.steps if step.batch]
            counts.append((sum(len(step.drafted) for step in steps), sum(step.accepted for step in steps), len(steps)))
    return counts


def misleading(last: int) -> Request:
    """Return a request whose prompt repeats a text that the answer leaves after its first token."""
    start = [last, last + 1]
    first = int(MockTarget(VOCABULARY).row(start).argmax())
    return Request([*start, first, *range(1000, 1008)] * 6 + start, 8)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=5)])
def test_engine_with_repeated_request_drafts_earlier_answer(sampling: Sampling) -> None:
    request = Request(PROMPT, LENGTH, sampling=sampling)
    first, *repeated = asks(request, request, request)
    assert first == (0, 0, LENGTH - 1)
    # The loss budget allows 3 tokens first, and more after each success, up to its limit.
    assert repeated == [(90, 90, 5)] * 2


def test_engine_after_losses_elsewhere_drafts_repeated_request_fully() -> None:
    request = Request(PROMPT, LENGTH)
    _, *others, repeated = asks(request, *[misleading(200 + 20 * i) for i in range(4)], request)
    assert others == [(3, 0, 7)] * 3 + [(0, 0, 7)]  # the budget is used up
    assert repeated == (90, 90, 5)


def test_engine_with_other_seed_does_not_draft_earlier_answer() -> None:
    one, other = [Request(PROMPT, LENGTH, sampling=Sampling(2.0, seed=seed)) for seed in (1, 2)]
    assert asks(one, other)[1] == (0, 0, LENGTH - 1)


def test_engine_with_prediction_drafts_it_from_first_token() -> None:
    answer = plain_generate(MockTarget(VOCABULARY), PROMPT, LENGTH, Sampling())
    predicted, other = asks(Request(PROMPT, LENGTH, prediction=answer), Request([7, 8, 9], LENGTH))
    assert predicted == (86, 86, 9)
    assert other == (0, 0, LENGTH - 1)
