"""Tests of reasoning budgets: drafts change no text, and no acceptance method exceeds a budget."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from support.decoder_loop import Oracle, drive, make_decoder, make_model
from support.grid import grid
from support.mock_target import MockTarget, plain_generate

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.sampling.settings import Sampling, TextRules, budget_for

PROMPT = [1, 2, 3]
LIMIT = 4
MESSAGE = "zzyx"
END = "w"


def target(peak: float = 6.0) -> MockTarget:
    return make_model(26, peak=peak)


def rules(start: str, limit: int = LIMIT) -> TextRules:
    return TextRules(reasoning=budget_for(limit, MESSAGE, {start: END}, target()))


def common_letter(sampling: Sampling) -> str:
    """Return a frequent letter of a text without a budget, so that it often starts a block."""
    text = plain_generate(target(), PROMPT, 200, sampling)
    return Counter(letter for token in text if (letter := chr(97 + token)) != END).most_common(1)[0][0]


def text_of(rule: TextRules, sampling: Sampling, drafter: Any, acceptance: Any = None) -> tuple[str, int]:
    """Return a text and the number of accepted draft tokens."""
    decoder = make_decoder(target(), drafter=drafter, policy="fixed", draft_max=8)
    tokens, steps = drive(decoder, PROMPT, max_tokens=200, sampling=sampling, acceptance=acceptance, rules=rule)
    return "".join(chr(97 + token) for token in tokens), sum(step.accepted for step in steps)


def check(text: str, start: str) -> None:
    """Assert that each block ends within its budget, or is closed right after it."""
    blocks = re.findall(f"{start}(.*?)(?:{END}|$)", text)
    assert len(blocks) > 3
    assert any(block[LIMIT:] == MESSAGE for block in blocks)
    for block in blocks[:-1]:
        assert len(block) < LIMIT or block[LIMIT:] == MESSAGE


@grid(
    temperature=(0.0, 0.9),
    acceptance=(None, "match", "rejection", Acceptance(typical=True)),
    drafter=("ngram", "mixture"),
)
def test_reasoning_budget_with_drafts_is_enforced_and_keeps_text(
    temperature: float, acceptance: Any, drafter: str
) -> None:
    if temperature == 0 and acceptance is not None:
        acceptance = "greedy"
    sampling = Sampling(temperature, seed=3)
    start = common_letter(sampling)
    text, accepted = text_of(rules(start), sampling, drafter, acceptance)
    check(text, start)
    assert accepted > 0
    if acceptance in (None, "greedy", "match"):
        assert text == text_of(rules(start), sampling, None, acceptance)[0]


def test_reasoning_budget_truncates_draft_beyond_it() -> None:
    sampling = Sampling(0.0)
    free = plain_generate(target(), PROMPT, 200, sampling)
    start = common_letter(sampling)
    rule = rules(start)
    # This drafter proposes the text without a budget, which is wrong after the end of the first budget.
    assert text_of(rule, sampling, Oracle(free))[0] == text_of(rule, sampling, None)[0]


def test_reasoning_budget_drafts_closing_tokens() -> None:
    decoder = make_decoder(target(), drafter="ngram", policy="fixed", draft_max=8)
    rule = rules(common_letter(Sampling(0.0)))
    _, steps = drive(decoder, PROMPT, max_tokens=60, sampling=Sampling(0.0), rules=rule)
    for most in range(20, 60):  # the closing tokens never exceed `max_tokens`
        for step in drive(decoder, PROMPT, max_tokens=most, sampling=Sampling(0.0), rules=rule)[1]:
            assert not step.drafted or step.position - len(PROMPT) + len(step.drafted) < most
    drafts = ["".join(chr(97 + token) for token in step.drafted) for step in steps if step.source == "reasoning"]
    assert f"{MESSAGE}{END}" in drafts
    assert all(f"{MESSAGE}{END}".endswith(draft) for draft in drafts[:-1])  # `max_tokens` may cut the last one.
    assert all(step.accepted == len(step.drafted) for step in steps if step.source == "reasoning")


def test_reasoning_budget_rejects_lenience_at_temperature_0() -> None:
    acceptance = Acceptance(lenience=0.5)
    decoder = make_decoder(target(), drafter="ngram")
    with pytest.raises(ValueError, match="lenience at temperature 0 cannot be combined with a reasoning budget"):
        decoder.generate(PROMPT, max_tokens=9, sampling=Sampling(0.0), acceptance=acceptance, rules=rules("a"))
    sampled, _ = text_of(rules(start := common_letter(Sampling(0.9))), Sampling(0.9), "ngram", acceptance)
    check(sampled, start)
