"""Tests of the entries of the loss budget; `test_never_slower.py` tests what it allows."""

from __future__ import annotations

import pytest
from support.passes import make_step

from ngramspec.policies.loss_budget import LossBudget


def test_forget_inherited_loss_keeps_own_loss() -> None:
    budget, fresh = LossBudget(), LossBudget()
    budget.record(make_step(1, 4, 0, 2.5, 0.0), drafting=True)
    budget.begin()
    for each in (budget, fresh):
        each.record(make_step(1, 2, 0, 1.5, 0.0), drafting=True)
    assert budget.remaining < fresh.remaining - 1
    for _ in range(2):
        budget.forget_inherited_loss()
        assert budget.remaining == pytest.approx(fresh.remaining, abs=0.02)


def test_loss_budget_book_adds_saved_time_and_subtracts_cost() -> None:
    budget = LossBudget()
    budget.record(make_step(1, 4, 0, 1.4, 0.1), drafting=True)
    assert budget.remaining == pytest.approx(1.0 - 1.5 + LossBudget.ALLOWANCE * 1.5 + LossBudget.CREDIT)


@pytest.mark.parametrize("texts", [1, 3])
def test_loss_budget_charges_slow_plain_call_only_after_a_draft(texts: int) -> None:
    """This pass costs half a plain pass more than expected."""
    after, alone = LossBudget(texts), LossBudget(texts)
    for budget, drafting in ((after, True), (alone, False)):
        budget.record(make_step(texts, 0, 0, 1.0, 0.0), drafting)
        budget.record(make_step(texts, 0, 0, 1.5, 0.0), drafting=False)
    assert alone.remaining - after.remaining == pytest.approx(0.5)


def test_loss_budget_of_new_text_contains_little_earlier_gain() -> None:
    budget = LossBudget()
    for _ in range(50):
        budget.record(make_step(4, 3, 3, 1.5, 0.0), drafting=True)
    assert budget.remaining > 10
    budget.begin()
    assert budget.remaining == pytest.approx(LossBudget.CREDIT + LossBudget.START)


@pytest.mark.parametrize(("n_accepted", "pays"), [(2, False), (3, True)])
def test_can_draft_after_many_unverified_drafts_requires_net_gain(n_accepted: int, pays: bool) -> None:
    """Every second draft is accepted and saves one or two passes; the other one loses one."""
    budget, n_calls = LossBudget(), 0
    for _ in range(50):
        for right in (n_accepted, 0):
            budget.record(make_step(1 + right, 3, right, 2.0, 0.0), drafting=True)
            for _ in range(4):
                draft_cost = 0.04 if budget.can_draft() else 0.0
                n_calls += draft_cost > 0
                budget.record(make_step(1, 0, 0, 1.0, draft_cost), drafting=False)
    assert (n_calls == 400) == pays
    assert pays or n_calls < 200
