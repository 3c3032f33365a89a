"""Tests that drafts change no text, for all drafters, draft lengths and acceptance methods.

With the same seed, greedy, coupled and match emit exactly the tokens of plain decoding. This applies to every setting
and every kind of end. It applies both to caches that are cut after a refusal and to passes that are evaluated again.
With rejection, the text has the target's distribution; `support/distributions.py` has the probability of a false alarm.
`acceptance/test_rules.py` tests the distribution of plain decoding.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decoder_loop import CLOCK, Coin, Oracle, drive, make_decoder, make_model, milliseconds, pass_seconds
from support.distributions import LegalTokens, Text, follows, make_next_distribution
from support.grid import grid
from support.llama_chain import INFILL, OPEN, SETTINGS
from support.mock_target import Blurred, LineTokenizer, MockTarget, plain_generate
from support.model_files import END, FIRST_WORD, WORDS

from ngramspec.decoding.text import TextStream
from ngramspec.drafting import DRAFTERS, REMEMBERING, make_drafter
from ngramspec.drafting.draft import Drafter
from ngramspec.drafting.draft_model.hybrid import HybridDrafter
from ngramspec.drafting.draft_model.model import ModelDrafter
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.memory.memory import Memory
from ngramspec.policies import POLICIES
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats

MIROSTAT: dict[str, dict[str, Any]] = {
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 2.0},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 2.0, "repeat_last_n": 0},
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "grammar": {"grammar": 'root ::= ("a" "b"? | "c" "\u00e9")*'},
    "greedy, grammar": {"temperature": 0.0, "grammar": 'root ::= ("ab" | "c" | "a" "bc" | "\u00e9")+'},
    "forced": {"grammar": 'root ::= ("{\\":true}" [1-9] "," )+'},
    "grammar and all": {
        "grammar": 'root ::= ("a" "b"? | "c")*',
        "repeat_penalty": 1.1,
        "dry_multiplier": 0.5,
        "xtc_probability": 0.3,
        "logit_bias": ((FIRST_WORD, 1.0),),
    },
    "mirostat 1, grammar": {"mirostat": 1, "grammar": 'root ::= ("ab" | "c" | "a")+'},
    "mirostat 2, grammar": {"mirostat": 2, "mirostat_tau": 2.0, "grammar": 'root ::= ("ab" | "c" | "a")+'},
    "greedy, grammar and penalties": {"temperature": 0.0, "repeat_penalty": 2.0, "grammar": "root ::= [abc]+"},
}
WITH_WORDS = {name: s for name, s in SETTINGS.items() if "dry_multiplier" in s} | INFILL | GRAMMARS
"""Settings that need a vocabulary, in addition to temperature 0.8."""

WITHOUT_WORDS = {name: s for name, s in SETTINGS.items() if name not in WITH_WORDS} | MIROSTAT

SPOKEN = (*range(FIRST_WORD, FIRST_WORD + len(WORDS)), *(3 + byte for byte in {*"".join(WORDS).encode(), *b",23"}))
"""Output tokens of the mock with a vocabulary; `speaking` adds the end-of-generation token if `eog` is not empty."""

USER = "user"  # a user-defined drafter, loaded from a file, that breaks all rules
GARBAGE = f"{Path(__file__).parents[1] / 'support' / 'garbage_drafter.py'}:Garbage"

ALL_DRAFTERS = (*DRAFTERS, "model", "hybrid", USER)

Speak = Callable[..., MockTarget]
"""(options of `MockTarget`) -> a target; equal options give equal targets."""


def speaking(vocabulary: Vocabulary, *, eog: Sequence[int] = (), **options: Any) -> MockTarget:
    words = (*SPOKEN, END) if eog else SPOKEN
    return make_model(vocabulary=vocabulary, words=words, **{"peak": 2.0, **options})


def made(name: str, small: Callable[[], MockTarget], known: Sequence[int] = ()) -> Drafter:
    """Return a drafter of `ALL_DRAFTERS`; `small` makes the draft model, and a memory contains the `known` text."""
    if name == "model":
        return ModelDrafter(small(), clock=milliseconds)
    if name == "hybrid":
        return HybridDrafter(ModelDrafter(small(), clock=milliseconds))
    if name not in REMEMBERING:
        return make_drafter(GARBAGE if name == USER else name, vocabulary=LineTokenizer(small().n_vocab))
    memory = Memory()
    memory.add_text(known)
    return make_drafter(name, memory=memory)


# --------------------------------------------------------------------------- the same tokens


def check_logprobs(mock: MockTarget, prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[Any]) -> None:
    """Check the log probabilities of every token against their definition by the model's logits."""
    assert len(logprobs) == len(tokens)
    for i, (token, told) in enumerate(zip(tokens, logprobs, strict=True)):
        row = mock.row([*prompt, *tokens[:i]]).astype(np.float64)
        right = row - math.log(math.fsum(np.exp(row[row > -np.inf])))
        assert told.token == token
        assert told.logprob == pytest.approx(right[token], abs=1e-5)
        best = np.argsort(-row, kind="stable")[: len(told.top)]
        assert [t for t, _ in told.top] == best.tolist()
        assert [p for _, p in told.top] == pytest.approx(right[best].tolist(), abs=1e-5)


def plain_text(
    mock: MockTarget, prompt: Sequence[int], sampling: Sampling, most: int, stops: Sequence[str]
) -> tuple[list[int], str, str, str | None]:
    """Return the result of plain decoding: tokens, text, and the reason for the end, with the stop string if any."""
    room = mock.n_ctx - len(prompt)
    tokens = plain_generate(mock, prompt, min(most, room), sampling)
    stream, text = TextStream(stops), ""
    for n, token in enumerate(tokens, 1):
        text += stream.push(mock.piece(token))
        if stream.stop_string is not None:
            return tokens[:n], text, "stop", stream.stop_string
    text += stream.finish()
    if stream.stop_string is not None:  # The stop string was complete, but a longer one had begun before it.
        return tokens, text, "stop", stream.stop_string
    return tokens, text, "eog" if mock.is_eog(tokens[-1]) else "length" if most <= room else "context", None


def check_same_text(
    draw: Callable[[st.SearchStrategy[Any]], Any],
    speak: Speak,
    some: Sequence[int],
    named: dict[str, dict[str, Any]],
    drafter: str,
    policy: str,
    rule: str,
) -> Stats:
    """Compare two runs of a random request with plain decoding, and return the statistics of its drafts."""
    samplings = [Sampling(**{"temperature": 0.8, **of}) for of in named.values()]
    sampling = draw(st.sampled_from([s for s in samplings if s.greedy == (rule == "greedy")]))
    sampling = replace(sampling, seed=draw(st.integers(0, 2**64 - 1)))
    options = {"peak": draw(st.sampled_from([4.0, 8.0, 1.0])), "seed": draw(st.integers(0, 6))}
    options["eog"] = draw(st.sampled_from([(), (5,)]))
    prompt = draw(st.lists(st.sampled_from(some), min_size=4, max_size=8))
    # The prompt contains the model's continuation, so that drafters can predict it.
    if not sampling.grammar:
        prompt += plain_generate(speak(**options), prompt, draw(st.sampled_from([30, 10, 1])), sampling)
        prompt += prompt[: draw(st.integers(0, 3))]
    most = draw(st.sampled_from([40, 1, 2, 17, 24]))
    options["n_ctx"] = len(prompt) + draw(st.sampled_from([1000, 1, 3, 16, 1000]))
    tokens, text, *_ = plain_text(speak(**options), prompt, sampling, most, ())
    start = draw(st.integers(0, max(0, len(text) - 1)))
    stops = draw(st.sampled_from([(), (), ("never this", text[start : start + 2] or "x")]))
    expected = plain_text(speak(**options), prompt, sampling, most, stops)
    replays = draw(st.booleans())
    guesses = Oracle(tokens, draw(st.sampled_from([3, 0, 1, 2, 5]))) if drafter == "oracle" else None
    decoder = make_decoder(
        speak(**options, replays=replays, leaves=0 if replays else 4),
        slope=draw(st.sampled_from([0.001, 0.1, 0.4])),
        drafter=guesses or made(drafter, lambda: speak(kind=Blurred, **options), [*prompt, *tokens[:9], *tokens[10:]]),
        policy=policy,
        draft_max=draw(st.sampled_from([7, 15, 1, 2, 4])),
    )
    decoder.target.returns_early = draw(st.booleans())
    asked: dict[str, Any] = {"max_tokens": most, "sampling": sampling, "stop": stops, "logprobs": 2}
    stats = Stats()
    for _ in range(2):  # The second run starts with the cache and the drafter of the first.
        decoder.target.batches.clear()
        emitted, steps = drive(decoder, prompt, acceptance=rule, **asked)
        assert decoder.target.batches == [step.batch for step in steps[1:]]
        text, end = "".join(step.text for step in steps), steps[-1]
        assert (emitted, text, end.stop, end.stop_string) == expected
        check_logprobs(speak(**options), prompt, emitted, [told for step in steps for told in step.logprobs])
        if guesses is not None:
            assert guesses.context in ([], emitted)  # The drafter receives no token after the end.
        for step in steps:
            # No pass evaluates tokens after the last possible one.
            assert not step.drafted or step.position - len(prompt) + len(step.drafted) < most
            stats.add(step)
    return stats


@grid(drafter=(*ALL_DRAFTERS, "oracle"), policy=POLICIES, rule=("coupled", "greedy", "match"), words=(False, True))
def test_decoder_with_seed_keeps_text_with_any_drafter(
    drafter: str, policy: str, rule: str, words: bool, word_vocabulary: Vocabulary
) -> None:
    """Test tokens without a vocabulary, and words with grammars."""
    counted = Stats()

    @given(data=st.data())
    @settings(max_examples=12)  # examples for each case of the grid
    def check(data: st.DataObject) -> None:
        n_vocab = data.draw(st.sampled_from([12, 60, 300]))
        speak: Speak = partial(speaking, word_vocabulary) if words else partial(make_model, n_vocab)
        some, named = (SPOKEN[:5], WITH_WORDS) if words else (range(5), WITHOUT_WORDS)
        counted.merge(check_same_text(data.draw, speak, some, named, drafter, policy, rule))

    check()
    if settings.default.derandomize:  # By default, the examples are always the same.
        # The cost policy soon stops a drafter that is often wrong; `recycle` guesses by the last token alone.
        n_expected = {"recycle": 0, USER: -1}.get(drafter, 5) if policy == "cost" else 5
        assert counted.accepted > n_expected, "the drafter copied too little of a prompt that contains the whole text"
        assert counted.drafted > counted.accepted, "no draft token was wrong, so rollbacks were not tested"


@pytest.mark.parametrize("name", [*WITHOUT_WORDS, *WITH_WORDS])
def test_decoder_with_each_sampling_setting_keeps_text(name: str, word_vocabulary: Vocabulary) -> None:
    """Errors at every third position cover accepted tokens, refused tokens and the token after the draft."""
    sampling = Sampling(**{"temperature": 0.8, "seed": 11} | (WITHOUT_WORDS | WITH_WORDS)[name])

    def mock() -> MockTarget:
        return speaking(word_vocabulary) if name in WITH_WORDS else make_model(12, peak=2.0)

    prompt = [*SPOKEN[:4], *SPOKEN[:4]] if name in WITH_WORDS else [1, 2, 3, 1, 2, 3]
    plain = plain_generate(mock(), prompt, 40, sampling)
    for draft_max, wrong in ((7, 0), (7, 3), (1, 0)):
        decoder = make_decoder(mock(), drafter=Oracle(plain, wrong), policy="fixed", draft_max=draft_max)
        emitted, steps = drive(decoder, prompt, max_tokens=40, sampling=sampling, acceptance="match")
        assert emitted == plain
        if not sampling.grammar:  # A grammar replaces some wrong tokens by forced text.
            assert max(step.accepted for step in steps) == (min(draft_max, 2) if wrong else draft_max)


# --------------------------------------------------------------------------- the same law


class OtherCoin(Coin):
    """Draft model with another distribution."""

    probabilities = (0.2, 0.4, 0.35, 0.05)


def texts_of(
    mock: MockTarget,  # target model
    prompt: Sequence[int],  # prompt of all texts
    sampling: Sampling,  # settings except for the seed, which is the number of the text
    drafter: Drafter | None,  # drafter of all texts; `None` means a new one for each text, without experience
    policy: str,  # name of the policy
    *,
    slope: float = 0.1,  # cost of each further token in a pass, in units of a pass over one token
    count: int = 40,  # number of texts
    length: int = 60,  # maximum number of tokens in a text
) -> tuple[list[Text], Stats]:
    """Generate texts by rejection.

    Returns:
        The texts and the statistics of their drafts.
    """
    decoder = make_decoder(mock, slope=slope, drafter=drafter, policy=policy, draft_max=4)
    texts: list[Text] = []
    stats = Stats()
    for seed in range(count):
        decoder.set_drafter(drafter or make_drafter("mixture"), decoder.policy)
        tokens: list[int] = []
        for step in decoder.generate(
            prompt, max_tokens=length, sampling=replace(sampling, seed=seed), acceptance="rejection"
        ):
            stats.add(step)
            tokens += step.tokens
        texts.append((prompt, tokens))
    return texts, stats


def zeros_and_ones() -> list[int]:
    """Return a prompt of 0 and 1 in the proportion 3 : 2, so that `Coin` often accepts 0 and rarely accepts 1.

    If estimates depended on the drawn token, a policy would only send the zeros, and 0 would be emitted too often.
    """
    rng = random.Random(36)
    return [int(rng.random() < 0.4) for _ in range(40)]


@grid(
    drafter=(*ALL_DRAFTERS, "new for each text"),
    passes=[
        ("fixed", 0.1, MockTarget),
        ("cost", 0.1, MockTarget),
        ("heuristic", 0.1, MockTarget),
        ("cost", 0.001, Coin),  # Questions are nearly free here, and their answers become drafts.
        ("entropy", 0.1, MockTarget),
        ("fixed", 0.1, Coin),
        ("cost", 0.33, Coin),
        ("threshold", 0.1, Coin),
    ],
)
def test_rejection_with_any_drafter_keeps_target_distribution(
    drafter: str, passes: tuple[str, float, type[MockTarget]]
) -> None:
    policy, slope, kind = passes
    mock = kind(4, seconds=lambda n: 1e-3 * (1 + slope * (n - 1)), clock=CLOCK, peak=1.0)
    sampling = Sampling(1.0, **OPEN)
    if policy == "heuristic":
        sampling = replace(sampling, repeat_penalty=1.3, frequency_penalty=0.05, repeat_last_n=12)
    prompt = zeros_and_ones()
    one = made(drafter, lambda: OtherCoin(4), prompt) if drafter in ALL_DRAFTERS else None
    texts, stats = texts_of(mock, prompt, sampling, one, policy, slope=slope)
    # In this case the draft model costs more time than it saves.
    assert stats.drafted > 100 or (drafter, slope) == ("model", 0.33), "too few draft tokens to test the distribution"
    assert 0.1 < (stats.acceptance_rate or 0) < 0.95
    assert follows(texts, make_next_distribution(mock, sampling))


A, B, C = range(FIRST_WORD, FIRST_WORD + 3)
BYTE_A = 3 + ord("a")
LETTERS = {A: "a", B: "b", C: "c", BYTE_A: "a"}


def loose(path: Sequence[int]) -> set[int]:
    after_a = bool(path) and LETTERS[path[-1]] == "a"
    return {A, BYTE_A, C, END} | ({B} if after_a else set())


def tight(path: Sequence[int]) -> set[int]:
    """Return the tokens that "tight" allows: it forces every other letter, and an a may be one of two tokens."""
    if len(path) % 2 == 0:
        return {A, BYTE_A, B} | ({END} if path else set())
    return {C} if LETTERS[path[-1]] == "a" else {A, BYTE_A}


CONSTRAINED: dict[str, tuple[str, LegalTokens]] = {
    "loose": ('root ::= ("a" "b"? | "c")*', loose),
    "tight": ('root ::= ("a" "c" | "b" "a")+', tight),
}


@grid(drafter=("ngram", "mixture", "suffix"), policy=("fixed", "cost", "heuristic"), grammar=CONSTRAINED)
def test_rejection_with_grammar_keeps_constrained_distribution(
    drafter: str, policy: str, grammar: str, word_vocabulary: Vocabulary
) -> None:
    mock = MockTarget(vocabulary=word_vocabulary, words=(*LETTERS, END), peak=0.7, seconds=pass_seconds, clock=CLOCK)
    text, legal = CONSTRAINED[grammar]
    # The bias makes ends rare.
    sampling = Sampling(**{"temperature": 1.0, **OPEN, "grammar": text, "top_k": 4, "logit_bias": ((END, -3.0),)})
    if policy == "heuristic":
        sampling = replace(sampling, repeat_penalty=1.3, repeat_last_n=12)
    # Its n-grams predict tokens that the grammars forbid, and the end of the text.
    prompt = random.Random(3).choices([A, B, C, BYTE_A, END], [4, 3, 2, 1, 1], k=40)
    texts, stats = texts_of(mock, prompt, sampling, make_drafter(drafter), policy, count=60, length=12)
    assert stats.drafted > 100
    assert 0.02 < (stats.acceptance_rate or 0) < 0.98
    assert follows(texts, make_next_distribution(mock, sampling, legal))
