"""Tests that drafts change no text, for all drafters, draft lengths and acceptance methods.

With the same seed, greedy, coupled and match emit exactly the tokens of plain decoding. This applies to every setting
and every kind of end. It applies both to caches that are cut after a refusal and to passes that are evaluated again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.all_drafters import ALL_DRAFTERS, USER, make_any
from support.decoder_loop import Oracle, drive, make_decoder, make_model
from support.grid import grid
from support.llama_chain import INFILL, SETTINGS
from support.mock_target import Blurred, MockTarget, plain_generate
from support.model_files import END, FIRST_WORD, WORDS

from ngramspec.decoding.text import TextStream
from ngramspec.llama.vocabulary import Vocabulary
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

Speak = Callable[..., MockTarget]
"""(options of `MockTarget`) -> a target; equal options give equal targets."""


def speaking(vocabulary: Vocabulary, *, eog: Sequence[int] = (), **options: Any) -> MockTarget:
    words = (*SPOKEN, END) if eog else SPOKEN
    return make_model(vocabulary=vocabulary, words=words, **{"peak": 2.0, **options})


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
        drafter=guesses
        or make_any(drafter, lambda: speak(kind=Blurred, **options), [*prompt, *tokens[:9], *tokens[10:]]),
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
