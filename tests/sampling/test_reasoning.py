"""Tests of reasoning budgets: blocks end in time, drafts change no text, and no acceptance exceeds a budget."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.decoder_loop import drive, make_decoder, make_model
from support.grid import grid
from support.llama_chain import make_chain
from support.mock_target import MockTarget, plain_generate

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.sampling.reasoning import BudgetSampler, budget_for
from ngramspec.sampling.settings import Sampling, TextRules

TAGS = {"<t>\n": "</t>"}

LETTERS = MockTarget(256)


class Words:
    """Vocabulary of arbitrary strings: a token is an index into the list of all strings so far."""

    n_vocab = 1000

    def __init__(self) -> None:
        self.texts: list[bytes] = []

    def of(self, *texts: str | bytes) -> list[int]:
        raw = [text.encode() if isinstance(text, str) else text for text in texts]
        self.texts += [text for text in raw if text not in self.texts]
        return [self.texts.index(text) for text in raw]

    def tokenize(self, text: str, *, special: bool = False, add_bos: bool = True) -> list[int]:
        return self.of(*([text] if special else text))

    def piece(self, token: int) -> bytes:
        return self.texts[token]

    def display_piece(self, token: int) -> bytes:
        return self.piece(token)

    def is_eog(self, token: int) -> bool:
        return False


def closed(
    text: Sequence[str | bytes],
    limit: int,
    *,
    prompt: Sequence[str] = (),
    start: str | None = None,
    message: str = "",
    tags: Mapping[str, str] = TAGS,
    forbidden_until: int = 0,
) -> str:
    """Return the text of a model that emits `text`, with the forced tokens in brackets."""
    words, written = Words(), list[str]()
    budget = budget_for(limit, message, tags, words, prompt=words.of(*prompt), start=start)
    assert budget is not None
    inside, forbidden = Mock(), [True] * forbidden_until
    inside.grammar.count_allowed = lambda tokens: 0 if forbidden and forbidden.pop() else len(tokens)
    sampler, left = BudgetSampler(inside, budget), words.of(*text)
    sampler.begin(())
    while left or sampler.closing:
        forced = bool(sampler.closing)
        token = sampler.closing[0] if forced else left.pop(0)
        piece = words.piece(token).decode("utf-8", "replace")
        written.append(f"[{piece}]" if forced else piece)
        sampler.accept(token)
    return "".join(written)


def test_reasoning_budget_closes_blocks_after_their_limit() -> None:
    assert closed(["a", "<t>", "b", "c", "d"], 2) == "a<t>bc[</t>]d"
    assert closed(["<t>", "\n", "b", "c"], 2) == "<t>\nb[</t>]c"
    assert closed(["a", "b", "c"], 1) == "abc"
    # A limit of 0 closes a block as soon as it is opened.
    assert closed(["a", "<t>", "b"], 0) == "a<t>[</t>]b"
    # The model may close a block itself.
    assert closed(["<t>", "a", "</t>", "b", "c"], 2) == "<t>a</t>bc"
    assert closed(["<t>", "a", "b", "</t>", "c"], 2) == "<t>ab[</t>]</t>c"  # llama.cpp closes it too.
    # Each block has the whole budget, and is closed with its own tag.
    text = ["<t>", "a", "b", "c", "<t>", "d", "</t>", "e", "f", "<t>", "g", "h", "i"]
    assert closed(text, 2) == "<t>ab[</t>]c<t>d</t>ef<t>gh[</t>]i"
    tags = {"<t>": "</t>", "[T]": "[/T]"}
    assert closed(["[T]", "a", "</t>", "b"], 3, tags=tags) == "[T]a</t>b[[/T]]"


def test_reasoning_budget_of_block_open_in_prompt_counts_prompt_tokens() -> None:
    assert closed(["a", "b", "c"], 3, prompt=["x", "<t>", "\n"], start="<t>\n") == "ab[</t>]c"
    assert closed(["a", "b", "c"], 3, prompt=["<t>", "x", "<t>"], start="<t>\n") == "abc[</t>]"
    assert closed(["a", "b", "c"], 3, prompt=["x<", "t", ">\n", "so", " far"], start="<t>\n") == "a[</t>]bc"
    assert closed(["a", "b"], 3, prompt=["<t>", "so", "very", "far", "on"], start="<t>\n") == "[</t>]ab"
    assert closed(["a"], 0, prompt=["<t>", "\n"], start="<t>\n") == "[</t>]a"


def test_reasoning_budget_inserts_message_before_closing_tag() -> None:
    assert closed(["<t>", "a", "b"], 1, message="so") == "<t>a[s][o][</t>]b"
    assert closed(["<t>", "a", "</t>", "b"], 9, message="so") == "<t>a</t>b"


def test_reasoning_budget_detects_tags_across_token_borders() -> None:
    assert closed(["<", "t", ">\n", "a", "b", "c"], 2) == "<t>\nab[</t>]c"
    assert closed(["a<t", ">b", "c", "d"], 2) == "a<t>bcd[</t>]"
    assert closed(["<t>", "a", "b<", "/", "t>c", "d", "e", "f", "g"], 5) == "<t>ab</t>cdefg"
    assert closed(["<t", "<t", ">", "a", "b"], 1) == "<t<t>a[</t>]b"


def test_reasoning_budget_waits_for_whole_character_and_grammar() -> None:
    euro = "€".encode()
    assert closed(["<t>", "a", euro[:1], euro[1:2], euro[2:], "b"], 2) == "<t>a\ufffd\ufffd\ufffd[</t>]b"
    assert closed(["<t>", "a", "b", "c", "d"], 1, forbidden_until=2) == "<t>abc[</t>]d"


def test_reasoning_budget_of_model_without_reasoning_is_none() -> None:
    assert budget_for(5, "", {}, LETTERS) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_budget_sampler_draws_closing_tokens_for_any_settings(temperature: float) -> None:
    budget = budget_for(1, "", {"b": "cd"}, LETTERS)
    assert budget is not None
    sampling = Sampling(temperature, logit_bias=((2, -np.inf),), top_k=1)
    sampler = BudgetSampler(make_chain(sampling, 16), budget)
    sampler.begin([0])
    logits = np.arange(16, dtype=np.float32)
    logits[2] = np.nan

    for token in (1, 9):
        sampler.accept(token)
    for token in (2, 3):
        assert sampler.draw(logits, 1) == token
        assert sampler.distribution(logits).probability(token) == 1
        sampler.accept(token)
    logits[2] = 0
    assert sampler.draw(logits, 1) == 15


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
    acceptance=(None, "match", "rejection", Acceptance(typical=True), Acceptance(lenience=0.5)),
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
