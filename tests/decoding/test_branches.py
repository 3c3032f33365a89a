"""Tests of branches next to drafts: their selection, their cost and the use of their answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.decoder_loop import drive, make_decoder, make_model
from support.llama_chain import make_chain

from ngramspec.acceptance.verifier import Acceptance, RuleVerifier
from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.cost.times import PassTimes
from ngramspec.decoding.branches import BranchFinder, BranchingLoop, SideBranch, choose_branches
from ngramspec.drafting.draft import NO_DRAFT, Ask, Draft, MarginalCost
from ngramspec.drafting.mixture.drafter import MixtureDrafter
from ngramspec.policies.cost import CostPolicy
from ngramspec.sampling.settings import Sampling

NOTHING = MarginalCost(0.0, [0.0] * 65)


def taught() -> MixtureDrafter:
    """Return a drafter of a text in which 1 2 continues with 3 5 6 or 4 7 8; the text ends with 1 2."""
    rng = random.Random(1)
    drafter = MixtureDrafter()
    drafter.begin([1, 2])
    for _ in range(80):
        drafter.propose(Ask(12))
        drafter.accept([*rng.choice([[3, 5, 6], [4, 7, 8]]), 1, 2])
    return drafter


def asked(
    drafter: MixtureDrafter, draft: Draft, sent: int, limit: int = 30, leaves: int = 8, price: MarginalCost = NOTHING
) -> list[SideBranch]:
    return BranchFinder(drafter.guesser).find(draft.acceptance_probs, sent, limit, leaves, price)


def test_branch_finder_returns_alternatives_that_pay() -> None:
    drafter = taught()
    draft = drafter.propose(Ask(3))
    assert draft.tokens in ((3, 5, 6), (4, 7, 8))
    other = {3: (4, 7, 8), 4: (3, 5, 6)}[draft.tokens[0]]
    found = {(q.fork, q.path): q.probability for q in asked(drafter, draft, 3)}
    assert {(0, other[:i]) for i in (1, 2, 3)} <= set(found)
    assert found[0, other[:1]] == pytest.approx(1 - draft.acceptance_probs[0], abs=0.1)
    # If the whole draft is sent, the guess after it is a question too.
    assert (3, (1,)) in found
    # If only a part is sent, the rest of the draft is a question.
    draft = drafter.propose(Ask(3))
    assert (1, draft.tokens[1:2]) in {(q.fork, q.path) for q in asked(drafter, draft, 1)}
    draft = drafter.propose(Ask(3))
    paying = asked(drafter, draft, 3, price=MarginalCost(1.0, [0.2] * 65))
    assert paying
    assert min(q.probability for q in paying) >= 0.2
    assert not asked(drafter, draft, 3, price=MarginalCost(1.0, [0.9] * 65))


@pytest.mark.parametrize("leaves", [1, 2, 5])
def test_branch_finder_orders_by_probability_within_limits(leaves: int) -> None:
    rng = random.Random(2)
    drafter, silent = MixtureDrafter(), MixtureDrafter()
    prompt = [rng.randrange(4) for _ in range(200)]
    for each in (drafter, silent):
        each.begin(prompt)
    for _ in range(60):
        length = rng.randrange(1, 20)
        draft = drafter.propose(Ask(length))
        assert draft == silent.propose(Ask(length)), "what was asked taught nothing"
        sent = rng.randint(0, len(draft))
        found = asked(drafter, draft, sent, limit := rng.randint(1, 40), leaves)
        assert len(found) <= limit
        assert [q.probability for q in found] == sorted((q.probability for q in found), reverse=True)
        seen: set[tuple[int, tuple[int, ...]]] = set()
        for fork, path, _ in found:
            assert fork <= sent
            assert fork == sent or path[0] != draft.tokens[fork]
            assert len(path) == 1 or (fork, path[:-1]) in seen
            assert (fork, path) not in seen
            seen.add((fork, path))
        ends = [1 for fork, path in seen if not any(f == fork and p[:-1] == path for f, p in seen)]
        assert len(ends) <= leaves
        for fork in range(sent):
            beside = sum(q.probability for q in found if q.fork == fork and len(q.path) == 1)
            assert beside <= np.prod(draft.acceptance_probs[:fork]) * (1 - draft.acceptance_probs[fork]) + 1e-9
        truth = [rng.randrange(4) for _ in range(rng.randint(1, 4))]
        assert drafter.accept(truth) == silent.accept(truth)


@pytest.mark.parametrize("how", ["greedy", "coupled", "blind"])
def test_mixture_drafts_known_answers_until_they_are_wrong(how: str) -> None:
    drafter, loop = taught(), BranchingLoop(CostPolicy())
    choose = None if how == "greedy" else (lambda _at, law: max(law, key=lambda token: law[token]))
    for turn in range(40):
        drafter.accept([3])
        drafter.known_prefix, drafter.prefix_probability = (77, 78), loop._trust.value
        draft = drafter.propose(Ask(6, choose, fixed_length=how == "blind", price=NOTHING))
        assert draft.tokens[:2] == (77, 78)
        assert len(draft.acceptance_probs) >= 2
        if choose is not None:
            assert draft.q[:2] == ({77: 1.0}, {78: 1.0})
        if turn == 0:
            assert min(draft.acceptance_probs[:2]) > 0.9
        answers = drafter.known_prefix
        assert drafter.accept([77, 5]) == 1
        loop.judge(answers, [77, 5])
        assert drafter.propose(Ask(6)).tokens[:1] != (77,)
        drafter.accept([1, 2])
    # Half of the answers were correct.
    assert draft.acceptance_probs[0] == draft.acceptance_probs[1] < 0.85
    drafter.known_prefix = (77,)
    drafter.begin([1, 2])
    assert drafter.propose(Ask(6)).tokens[:1] != (77,)


def times_of(cost: Callable[[int], float]) -> PassTimes:
    return make_fixed_curve({n: cost(n) for n in range(1, 17)})


def test_choose_branches_keeps_branches_worth_their_cost() -> None:
    questions = [SideBranch(0, (i,), p) for i, p in enumerate((0.5, 0.2, 0.05))]

    def paying(questions: list[SideBranch], length: int, size: int, times: PassTimes, sizes: Any) -> tuple[int, int]:
        price = CostPolicy().price(times, sizes)
        assert price is not None
        return choose_branches(questions, length, size, price, times, sizes)

    flat, steep = times_of(lambda n: 1 + 1e-6 * n), times_of(lambda n: 0.4 + 0.6 * n)
    sizes = range(1, 17)
    assert paying(questions, 3, 4, flat, sizes) == (3, 7)
    assert paying(questions, 3, 4, steep, sizes) == (0, 4)
    # A row costs 0.05. If a token known a pass ahead saves 0.8 passes, probabilities of 0.5 and 0.2 pay.
    assert paying(questions, 3, 4, times_of(lambda n: 0.95 + 0.05 * n), sizes) == (2, 6)
    # Padding costs nothing, both in the present batch and up to the next allowed size.
    assert paying(questions, 3, 8, steep, (1, 8, 16)) == (3, 8)
    assert paying(questions, 3, 5, steep, sizes) == (1, 5)
    assert paying(questions, 6, 7, flat, range(1, 9)) == (1, 8)
    # The cost must not exceed the expected gain, and a change of the batch size has a cost.
    assert paying(questions, 3, 4, times_of(lambda n: 1.0 + 0.9 * (n > 4)), sizes) == (0, 4)
    switching = make_fixed_curve({1: 1.0, 16: 1.0}, switch=0.9)
    switching.observe(4, 1.9)
    assert paying(questions, 3, 4, switching, sizes) == (0, 4)


@pytest.mark.parametrize(
    ("slope", "policy", "some"), [(0.04, "cost", True), (0.06, "cost", False), (0.04, "fixed", False)]
)
def test_decoder_sends_branches_only_with_cheap_tokens_and_cost_policy(slope: float, policy: str, some: bool) -> None:
    target = make_model(4, seconds=lambda n: 1e-3 * (1 + slope * (n - 1)))
    decoder = make_decoder(target, slope=slope, policy=policy)
    drive(decoder, [1, 2, 3, 1, 2], max_tokens=200, sampling=Sampling(0.9, seed=1))
    assert (target.questions > 0) == some


def test_branching_loop_answer_equals_next_token_without_emitting() -> None:
    def text(sampling: Sampling, how: Acceptance | str | None = None) -> Any:
        return SimpleNamespace(verifier=RuleVerifier(make_chain(sampling, 6), how))

    answer = BranchingLoop(CostPolicy()).answer
    row = np.random.default_rng(2).standard_normal(6).astype(np.float32)
    for sampling in (Sampling(), Sampling(0.9, seed=3), Sampling(repeat_penalty=1.5)):
        asked = text(sampling)
        asked.verifier.sampler.begin([int(row.argmax())])
        answers = [answer(asked, row, position) for position in range(20)]
        for position in (0, 7, 19):
            fresh = text(sampling).verifier
            fresh.sampler.begin([int(row.argmax())])
            assert fresh.verify([row], NO_DRAFT, position).tokens == (answers[position],)
    assert len(set(answers)) == 1 != len({answer(text(Sampling(0.9)), row, position) for position in range(20)})
    # Rejection draws again at every verification, so the answer is the most likely token.
    assert answer(text(Sampling(0.9), "rejection"), row, 4) == row.argmax()
    assert answer(text(Sampling(0.9, xtc_probability=0.5)), row, 4) is None
    assert answer(text(Sampling()), np.full(6, np.nan, np.float32), 4) is None
