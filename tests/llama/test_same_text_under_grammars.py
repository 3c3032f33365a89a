"""Tests on the demo model and on a tiny one that drafts change no text under a grammar with `exact="on"`."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import pytest
from support.cli_runner import DEMO
from support.forced_calls import MARKS, forced_calls
from support.json_texts import whole_schema
from support.tiny_models import add_vocabulary, write_model

from ngramspec.data import GrammarError
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting import DRAFTERS
from ngramspec.grammars.json_schema import schema_grammar
from ngramspec.grammars.lark import choice_grammar, pattern_grammar
from ngramspec.llama.target import Target
from ngramspec.sampling.settings import Sampling

NAMES = tuple(name for name in DRAFTERS if name != "memory")  # "memory" drafts only from earlier answers.

SAMPLERS: tuple[dict[str, Any], ...] = (
    *({"temperature": 0.0}, {}, {"repeat_penalty": 1.2, "presence_penalty": 0.3}, {"mirostat": 2}),
    {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
)
GRAMMARS = (
    'root ::= "{" ws pair ("," ws pair)* "}"\npair ::= "\\"" [a-z]{1,5} "\\":" ws value\n'
    'value ::= [0-9]{1,4} | root\nws ::= " "?',
    'root ::= line{3,}\nline ::= [A-Z] [a-z ]{3,20} ".\\n"',
    'root ::= ("a" | "ab") ("bc" | "c" root) | "x" root "y"',
)
PROMPTS = ("Give me JSON: ", '[{"name": "red", "size": 5}, {"name": "green", "size": ', "The list of all words:\n")


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with Target(DEMO, ctx_size=512, threads=1, exact="on") as opened:
        yield opened


def text_of(decoder: SpeculativeDecoder, prompt: list[int], sampling: Sampling) -> tuple[list[int], str, int]:
    """Return the tokens of a text, the error that ended it, and the number of accepted drafts."""
    tokens: list[int] = []
    accepted, ended = 0, ""
    try:
        for step in decoder.generate(prompt, max_tokens=48, sampling=sampling):
            tokens += step.tokens
            accepted += step.accepted
    except GrammarError as error:
        ended = str(error)
    return tokens, ended, accepted


@pytest.mark.parametrize(
    ("seeds", "minimum"), [(range(6), 10), pytest.param(range(100, 600), 1500, marks=pytest.mark.exhaustive)]
)
def test_drafts_under_grammars_keep_text_in_exact_mode(seeds: range, minimum: int, target: Target) -> None:
    """Compare random combinations of grammar, sampler, seed and drafter."""
    accepted = 0
    decoders = {
        name: SpeculativeDecoder(
            target, drafter=name, policy="fixed" if name else "cost", draft_max=7 if name else None, exact="on"
        )
        for name in (None, *NAMES)
    }
    for seed in seeds:
        rng = random.Random(seed)
        grammar = rng.choice(
            [*GRAMMARS, pattern_grammar(r"\d{3}-[a-z]{2,9}( \w+)*"), choice_grammar(["red", "reed", "blue sky"])]
        )
        if rng.random() < 0.6:
            with suppress(GrammarError):  # a few random schemas contradict themselves
                grammar = schema_grammar(json.dumps(whole_schema(rng)))
        sampling = Sampling(**{"temperature": 0.8, "seed": seed, "grammar": grammar} | rng.choice(SAMPLERS))
        prompt = target.vocabulary.tokenize(rng.choice(PROMPTS))
        drafter = rng.choice(NAMES)
        plain = text_of(decoders[None], prompt, sampling)
        drafted = text_of(decoders[drafter], prompt, sampling)
        assert plain[:2] == drafted[:2], (seed, drafter, sampling)
        accepted += drafted[2]
    assert accepted > minimum


@pytest.fixture(scope="module")
def marked_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """Return a tiny model whose control tokens are the marks of all families and of reasoning."""
    path = write_model(
        tmp_path_factory.mktemp("model") / "marks.gguf", "llama", vocabulary=partial(add_vocabulary, controls=MARKS)
    )
    with Target(path, ctx_size=512, threads=1, exact="on") as opened:
        yield opened


@pytest.mark.parametrize(
    ("temperature", "every"),
    [(0.0, 4), (0.8, 5), *(pytest.param(value, 1, marks=pytest.mark.exhaustive) for value in (0.0, 0.8))],
)
def test_drafts_under_grammars_with_forced_control_tokens_keep_text(
    temperature: float, every: int, marked_target: Target
) -> None:
    """The grammars are control tokens next to text, and every n-th of the forced calls."""
    controls = marked_target.vocabulary.controls
    a, b, c = (controls[mark] for mark in MARKS[:3])
    grammars = [
        f'root ::= <[{a}]> <[{b}]> "ab" <[{c}]> "abc" <[{a}]> <[{b}]>',
        f'root ::= (<[{a}]> "x" [0-9] <[{b}]> | "ab" !<[{c}]>){{9}}',
        *islice(forced_calls(controls), 0, None, every),
    ]
    plain, drafting = (
        SpeculativeDecoder(marked_target, drafter=drafter, policy=policy, draft_max=draft_max, exact="on")
        for drafter, policy, draft_max in ((None, "cost", None), ("suffix", "fixed", 7))
    )
    prompt = marked_target.vocabulary.tokenize("abc")
    accepted = 0
    for grammar in grammars:
        sampling = Sampling(temperature, seed=1, grammar=grammar)
        drafted = text_of(drafting, prompt, sampling)
        assert drafted[:2] == text_of(plain, prompt, sampling)[:2], grammar
        assert drafted[1] == "", grammar
        accepted += drafted[2]
    assert accepted > 5 * len(grammars)
