"""Tests of `ReasoningBudget`: blocks of reasoning are closed if and only if their budget is used up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from support.mock_target import MockTarget
from support.numpy_sampler import NumpySampler

from ngramspec.sampling.sampler import BudgetSampler
from ngramspec.sampling.settings import Sampling
from ngramspec.sampling.text_rules import ReasoningCounter, budget_for

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
    budget = budget_for(limit, message, tags, words, words.piece, prompt=words.of(*prompt), start=start)
    assert budget is not None
    asked = 0

    def can_close(tokens: Sequence[int]) -> bool:
        nonlocal asked
        asked += 1
        return asked > forbidden_until

    counter, left = ReasoningCounter(budget, can_close), words.of(*text)
    while left or counter.closing:
        forced = bool(counter.closing)
        token = counter.closing[0] if forced else left.pop(0)
        piece = words.piece(token).decode("utf-8", "replace")
        written.append(f"[{piece}]" if forced else piece)
        counter.accept(token)
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
    assert budget_for(5, "", {}, LETTERS, LETTERS.piece) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_budget_sampler_draws_closing_tokens_for_any_settings(temperature: float) -> None:
    budget = budget_for(1, "", {"b": "cd"}, LETTERS, LETTERS.piece)
    assert budget is not None
    sampling = Sampling(temperature, logit_bias=((2, -np.inf),), top_k=1)
    sampler = BudgetSampler(NumpySampler(sampling, 16), budget)
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
