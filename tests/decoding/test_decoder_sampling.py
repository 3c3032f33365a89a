"""The loop and every way of sampling: for one seed the text and its logprobs are those of plain decoding.

Whatever the settings, drafter, policy and length of drafts. The laws of what is sampled are in `test_decoder_laws`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.decoder_loop import Oracle, drive, model, unmeasured
from support.mock_target import MockTarget, plain_generate
from support.vocabulary_files import END, FIRST_WORD, WORDS

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.decoding.step import Stats
from ngramspec.drafting import DRAFTERS, REMEMBERING, make_drafter
from ngramspec.drafting.draft import NO_DRAFT
from ngramspec.errors import GrammarError
from ngramspec.memory import Memory
from ngramspec.policies import POLICIES
from ngramspec.sampling.distribution import BadLogits
from ngramspec.sampling.settings import SAMPLERS, Sampling

if TYPE_CHECKING:
    from ngramspec.llama.vocabulary import Vocabulary

OPEN: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}

SAMPLINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "cold": {"temperature": 0.1},
    "hot": {"temperature": 2.0},
    "open": {**OPEN, "temperature": 1.0},
    "greedy": {"temperature": 0.0},
    "penalties": {"repeat_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1, "repeat_last_n": 20},
    "rewards": {"repeat_penalty": 0.8, "frequency_penalty": -0.1, "repeat_last_n": 5},
    "greedy, penalties": {"temperature": 0.0, "repeat_penalty": 1.3, "frequency_penalty": 0.1},
    "biases": {"logit_bias": ((2, 2.0), (4, -math.inf), (1, -0.5))},
    "greedy, biases": {"temperature": 0.0, "logit_bias": ((2, 2.0), (4, -math.inf))},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    "mirostat 1": {"mirostat": 1, "mirostat_tau": 2.0},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 2.0},
    "dynatemp": {"dynatemp_range": 0.5, "dynatemp_exponent": 1.5},
    "typical": {"typical_p": 0.6},
    "top-n-sigma": {"top_n_sigma": 1.0, "temperature": 1.5},
    "backwards": {"samplers": tuple(reversed(SAMPLERS)), "repeat_penalty": 1.2, "xtc_probability": 0.3},
}
"""What needs no vocabulary; beside temperature 0.8."""

WITH_WORDS: dict[str, dict[str, Any]] = {
    "dry": {"dry_multiplier": 1.0, "dry_allowed_length": 1, "dry_sequence_breakers": ("c",)},
    "greedy, dry": {"temperature": 0.0, "dry_multiplier": 2.0, "dry_allowed_length": 1},
    "infill": {"samplers": ("top_k", "top_p", "infill", "temperature"), "top_p": 0.9},
    "infill last": {"samplers": ("penalties", "top_k", "temperature", "infill"), "repeat_penalty": 1.2, "top_k": 12},
    "greedy, infill": {"samplers": ("top_k", "infill", "temperature"), "temperature": 0.0, "top_k": 7},
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

SPOKEN = (*range(FIRST_WORD, FIRST_WORD + len(WORDS)), *(3 + byte for byte in {*"".join(WORDS).encode(), *b",23"}))
"""What the mock that speaks a vocabulary says; the end of the text is added where it may end."""


def speaking(vocabulary: Vocabulary, *, ends: bool = False, **options: Any) -> MockTarget:
    words = (*SPOKEN, END) if ends else SPOKEN
    return model(vocabulary=vocabulary, words=words, **{"peak": 2.0, **options})


def check_logprobs(mock: MockTarget, prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[Any]) -> None:
    """Of every token, by the definition, from the model's own logits."""
    assert len(logprobs) == len(tokens)
    for i, (token, told) in enumerate(zip(tokens, logprobs, strict=True)):
        row = mock.row([*prompt, *tokens[:i]]).astype(np.float64)
        right = row - math.log(math.fsum(np.exp(row[row > -np.inf])))
        assert told.token == token
        assert told.logprob == pytest.approx(right[token], abs=1e-5)
        best = np.argsort(-row, kind="stable")[: len(told.top)]
        assert [t for t, _ in told.top] == best.tolist()
        assert [p for _, p in told.top] == pytest.approx(right[best].tolist(), abs=1e-5)


DRAFTED: dict[str, int] = {}


@pytest.mark.parametrize("drafter", DRAFTERS)
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_a_seed_gives_the_same_text_whatever_is_drafted(
    drafter: str, data: st.DataObject, word_vocabulary: Vocabulary
) -> None:
    """1,000 random cases over all drafters. Match is coupled verification of drafts that do not know the noise."""
    options = {"peak": data.draw(st.sampled_from([1.0, 4.0, 8.0])), "seed": data.draw(st.integers(0, 6))}
    name = data.draw(st.sampled_from([*SAMPLINGS, *WITH_WORDS]))
    settings = {"temperature": 0.8, "seed": data.draw(st.integers(0, 2**64 - 1)), **(SAMPLINGS | WITH_WORDS)[name]}
    sampling = Sampling(**settings)

    def mock() -> MockTarget:
        if name in WITH_WORDS:
            return speaking(word_vocabulary, ends=ends, **options)
        return model(n_vocab, eog={5} if ends else (), **options)

    n_vocab = data.draw(st.sampled_from([6, 12, 300]))
    ends = data.draw(st.booleans())
    some = SPOKEN[:5] if name in WITH_WORDS else range(5)
    prompt = data.draw(st.lists(st.sampled_from(some), min_size=1, max_size=8))
    # What the model would say after it belongs to the prompt, so that something can be guessed.
    if "grammar" not in settings:
        prompt += plain_generate(mock(), prompt, data.draw(st.integers(1, 30)), sampling)
        prompt += prompt[: data.draw(st.integers(0, 3))]
    expected = plain_generate(mock(), prompt, 24, sampling)
    memory = None
    if drafter in REMEMBERING:
        memory = Memory()
        memory.remember([*prompt, *expected])
    decoder = unmeasured(
        mock(),
        drafter=make_drafter(drafter, memory=memory),
        policy=data.draw(st.sampled_from(tuple(POLICIES))),
        draft_max=data.draw(st.integers(1, 15)),
    )
    verify = data.draw(st.sampled_from([None, "match", "greedy" if sampling.greedy else "coupled"]))
    emitted, steps = drive(decoder, prompt, max_tokens=24, sampling=sampling, verify=verify, logprobs=2)
    assert emitted == expected
    check_logprobs(mock(), prompt, emitted, [told for step in steps for told in step.logprobs])
    DRAFTED[drafter] = DRAFTED.get(drafter, 0) + sum(step.accepted for step in steps)


def test_drafts_were_accepted_in_those_cases() -> None:
    assert all(accepted > 300 for accepted in DRAFTED.values()), DRAFTED


@pytest.mark.parametrize("name", [*SAMPLINGS, *WITH_WORDS])
def test_every_setting_at_every_draft_length(name: str, word_vocabulary: Vocabulary) -> None:
    """Drafts that are right but at every third position: accepted ones, refused ones, and the token after all."""
    sampling = Sampling(**{"temperature": 0.8, "seed": 11} | (SAMPLINGS | WITH_WORDS)[name])

    def mock() -> MockTarget:
        return speaking(word_vocabulary) if name in WITH_WORDS else model(12, peak=2.0)

    prompt = [*SPOKEN[:4], *SPOKEN[:4]] if name in WITH_WORDS else [1, 2, 3, 1, 2, 3]
    plain, steps = drive(unmeasured(mock(), drafter=None), prompt, max_tokens=40, sampling=sampling, logprobs=3)
    assert plain == plain_generate(mock(), prompt, 40, sampling)
    logprobs = [told for step in steps for told in step.logprobs]
    check_logprobs(mock(), prompt, plain, logprobs)
    for draft_max in (1, 2, 3, 7):
        for wrong in (0, 3):
            oracle = Oracle(plain, wrong)
            decoder = unmeasured(mock(), drafter=oracle, policy="fixed", draft_max=draft_max)
            emitted, steps = drive(decoder, prompt, max_tokens=40, sampling=sampling, verify="match", logprobs=3)
            assert emitted == plain
            assert [told for step in steps for told in step.logprobs] == logprobs
            if "grammar" not in name and name != "forced":  # which puts forced text in place of a wrong token
                assert max(step.accepted for step in steps) == (draft_max if not wrong else min(draft_max, 2))


def test_coupled_guesses_use_the_noise_of_their_position() -> None:
    class Coin(MockTarget):
        """Tokens 0 and 2 with probability 0.45 each, 1 and 3 with 0.05 each, whatever came before."""

        def row(self, context: Sequence[int]) -> NDArray[np.float32]:
            return np.log([0.45, 0.05, 0.45, 0.05]).astype(np.float32)

    # Two independent draws agree with probability 0.41; the same noise on similar counts far more often.
    stats = Stats()
    prompt = np.random.default_rng(4).choice(4, 400, p=[0.45, 0.05, 0.45, 0.05]).tolist()
    for seed in range(10):
        decoder = unmeasured(Coin(4), policy="fixed", draft_max=1)
        for step in drive(decoder, prompt, max_tokens=100, sampling=Sampling(1.0, **OPEN, seed=seed))[1]:
            stats.add(step)
    assert stats.drafted > 400
    assert (stats.acceptance_rate or 0) > 0.6


def test_rejection_is_reproducible() -> None:
    sampling = Sampling(1.0, **OPEN, seed=9)
    texts = [
        drive(
            unmeasured(model(6, peak=2.0), policy="fixed"),
            [1, 2, 1, 2, 1],
            max_tokens=40,
            sampling=sampling,
            verify="rejection",
        )[0]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]


# ------------------------------------------------------------------------------------- grammars


def test_forbidden_tokens_are_not_sent(word_vocabulary: Vocabulary) -> None:
    """Neither coupled nor rejection sends a token that the grammar forbids; the text is legal all along."""
    a, b, c = range(FIRST_WORD, FIRST_WORD + 3)
    grammar = 'root ::= ("a" "b"? | "c")*'
    prompt = [a, b, c, b, b, a, a, c, b, b, a, b, c, b]  # whose n-grams suggest what is forbidden
    sent = forbidden = 0
    for method in ("coupled", "match", "rejection"):
        for seed in range(40):
            mock = speaking(word_vocabulary, peak=0.5)
            decoder = unmeasured(mock, drafter="ngram", policy="fixed", draft_max=4)
            sampling = Sampling(1.0, seed=seed, grammar=grammar, **OPEN)
            here = word_vocabulary.grammar(grammar)
            for step in decoder.generate(prompt, max_tokens=20, sampling=sampling, verify=method, detail=True):
                assert step.detail
                ahead = here.copy()
                for token in step.drafted:
                    assert ahead.allows(token)
                    ahead.accept(token)
                unsent = step.judged.tokens[len(step.drafted) :]
                assert len(unsent) <= (method == "rejection")
                assert not any(map(ahead.allows, unsent))
                sent += len(step.drafted)
                forbidden += len(unsent)
                for token in step.tokens:
                    assert here.allows(token)
                    here.accept(token)
    assert sent > 300
    assert forbidden > 20


@pytest.mark.parametrize("method", ["coupled", "rejection", "match"])
def test_forced_text_is_a_free_draft(method: str, word_vocabulary: Vocabulary) -> None:
    """Where the grammar leaves one token there is a draft of it, with nothing in the context to guess it from."""
    sampling = Sampling(1.0, seed=3, grammar='root ::= ("a,{a,{a,{a," [bc])+', **OPEN)
    letters = (*range(FIRST_WORD, FIRST_WORD + 3), 3 + ord(","), 3 + ord("{"))
    mock = model(vocabulary=word_vocabulary, words=letters, peak=0.5)
    decoder = unmeasured(mock, drafter="suffix", policy="fixed", draft_max=8)
    emitted, steps = drive(decoder, [7], max_tokens=60, sampling=sampling, verify=method)
    text = b"".join(map(word_vocabulary.piece, emitted)).decode()
    assert text.startswith(("a,{a,{a,{a,b", "a,{a,{a,{a,c"))
    stats = Stats()
    for step in steps:
        stats.add(step)
    assert any(step.source == "grammar" for step in steps)
    assert stats.tokens_per_pass > 3


def test_an_end_inside_a_draft(word_vocabulary: Vocabulary) -> None:
    """Nothing after it is sent, and the text ends with it, for every method."""
    a = FIRST_WORD
    prompt = [a, END, a, END, a, END, a]
    for method in ("coupled", "rejection", "match"):
        met = 0
        for seed in range(60):
            mock = model(vocabulary=word_vocabulary, words=(a, END), peak=0.3)
            sampling = Sampling(1.0, seed=seed, grammar='root ::= "a"*', **OPEN)
            decoder = unmeasured(mock, drafter="ngram", policy="fixed", draft_max=5)
            emitted, steps = drive(decoder, prompt, max_tokens=15, sampling=sampling, verify=method)
            assert END not in emitted[:-1]
            met += sum(END in step.drafted for step in steps)
            if method != "rejection":
                assert emitted == plain_generate(mock, prompt, 15, sampling)
        assert met > 10


# --------------------------------------------------------------------------- details of judgements


@pytest.mark.parametrize("method", ["coupled", "match", "rejection", "greedy"])
def test_details_tell_the_whole_story(method: str) -> None:
    sampling = Sampling(0.0 if method == "greedy" else 1.0, seed=5, **OPEN)
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    decoder = unmeasured(model(6, peak=1.0), drafter="ngram", policy="fixed", draft_max=3)
    options: dict[str, Any] = {"max_tokens": 60, "sampling": sampling, "verify": method}
    emitted, steps = drive(decoder, prompt, detail=True, **options)
    told: list[int] = []
    position = len(prompt)
    for step in steps:
        assert step.detail
        assert step.position == position
        assert step.judged.tokens == step.drafted
        guesses = [j for j in step.detail if j.accepted is not None]
        assert [j.token for j in guesses] == list(step.drafted[: len(guesses)])
        assert sum(bool(j.accepted) for j in guesses) >= step.accepted
        told += [j.token for j in step.detail if j.accepted is not False][: len(step.tokens)]
        assert all(0 <= j.p <= 1 for j in step.detail)
        position += len(step.tokens)
    assert told == emitted
    again = unmeasured(model(6, peak=1.0), drafter="ngram", policy="fixed", draft_max=3)
    plain, steps = drive(again, prompt, **options)
    assert plain == emitted
    assert all(step.detail == () and step.judged == NO_DRAFT and step.logprobs == () for step in steps)


# ------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"sampling": Sampling(1.0, logit_bias=((12, 1.0),))}, "logit bias of token 12, but the vocabulary has"),
        ({"sampling": Sampling(1.0, dry_multiplier=1.0)}, "DRY needs a vocabulary"),
        ({"sampling": Sampling(1.0), "verify": "greedy"}, "'greedy', but temperature is 1.0"),
        ({"verify": Acceptance(typical=True)}, "typical acceptance needs a temperature above 0"),
        ({"sampling": Sampling(1.0, mirostat=2), "verify": "rejection"}, "mirostat draws its tokens itself"),
        ({"logprobs": -1}, "logprobs is -1, but must be 0 to 12"),
        ({"logprobs": 13}, "logprobs is 13, but must be 0 to 12"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(settings: dict[str, Any], reason: str) -> None:
    mock = model(12)
    with pytest.raises(ValueError, match=reason):
        unmeasured(mock).generate([1], max_tokens=1, **settings)
    assert mock.tokens == []


def test_a_grammar_that_is_none_fails_at_the_call(word_vocabulary: Vocabulary) -> None:
    mock = speaking(word_vocabulary)
    with pytest.raises(GrammarError, match="does not parse"):
        unmeasured(mock).generate([1], max_tokens=1, sampling=Sampling(grammar="root ::= ("))
    assert mock.tokens == []


@pytest.mark.parametrize("method", ["coupled", "match", "rejection"])
def test_a_dead_end_is_an_error_with_its_position(method: str, word_vocabulary: Vocabulary) -> None:
    """The model's only tokens are a and b, and the grammar comes to want a c; what was emitted stands."""
    a, b = FIRST_WORD, FIRST_WORD + 1
    mock = model(vocabulary=word_vocabulary, words=(a, b), peak=0.5)
    sampling = Sampling(1.0, seed=1, grammar='root ::= "a" "b" "a" "b" "c"', **OPEN)
    decoder = unmeasured(mock, drafter="ngram", policy="fixed", draft_max=3)
    prompt = [a, b, a, b, a, b]
    emitted: list[int] = []
    with pytest.raises(GrammarError, match=r"^at position 10 of the text: the grammar comes to a dead end"):  # noqa: PT012
        for step in decoder.generate(prompt, max_tokens=20, sampling=sampling, verify=method):
            emitted += step.tokens
    assert emitted == [a, b, a, b]
    assert mock.tokens == [*prompt, *emitted[:-1]]


@pytest.mark.parametrize("length", range(3, 13))
@pytest.mark.parametrize("name", ["greedy", "defaults", "penalties", "mirostat 2"])
def test_nan_is_an_error_with_its_position_behind_all_that_came_before_it(name: str, length: int) -> None:
    """The logits after so many tokens are broken, wherever in a pass that is."""

    class Broken(MockTarget):
        def row(self, context: Sequence[int]) -> NDArray[np.float32]:
            row = super().row(context)
            if len(context) == length:
                row[5] = np.nan
            return row

    prompt = [1, 2, 3]
    sampling = Sampling(**{"temperature": 0.8} | SAMPLINGS[name])
    text = plain_generate(MockTarget(12), prompt, 20, sampling)
    for draft_max, policy in ((1, "fixed"), (4, "fixed"), (4, "entropy")):
        mock = Broken(12)
        decoder = unmeasured(mock, drafter=Oracle(text), policy=policy, draft_max=draft_max)
        emitted: list[int] = []
        with pytest.raises(BadLogits, match=rf"^at position {length} of the text: the logit of token 5 is nan"):  # noqa: PT012
            for step in decoder.generate(prompt, max_tokens=20, sampling=sampling, logprobs=1, detail=True):
                emitted += step.tokens
                assert step.stop is None
                assert len(step.logprobs) == len(step.tokens)
        assert emitted == text[: length - len(prompt)]
        assert mock.tokens == [*prompt, *emitted[:-1]]
        # A text that ends before has nothing to do with it.
        if emitted:
            assert drive(decoder, prompt, max_tokens=len(emitted), sampling=sampling)[0] == emitted


def test_what_follows_an_end_does_not_matter(word_vocabulary: Vocabulary) -> None:
    """Plain decoding never sees the logits behind the end of the text: broken ones must not matter to a draft."""
    a = FIRST_WORD

    class Broken(MockTarget):
        def row(self, context: Sequence[int]) -> NDArray[np.float32]:
            row = super().row(context)
            return np.full_like(row, np.nan) if context[-1] == END else row

    for sampling, method in (
        (Sampling(), "greedy"),
        (Sampling(1.0, **OPEN), "coupled"),
        (Sampling(1.0, **OPEN), "match"),
        (Sampling(1.0, **OPEN), "rejection"),
        (Sampling(1.0, grammar='root ::= "a"*', **OPEN), "coupled"),
    ):
        for seed in range(20):
            mock = Broken(vocabulary=word_vocabulary, words=(a, END), peak=0.3, seed=seed)
            oracle = Oracle([a, END, a, a])
            decoder = unmeasured(mock, drafter=oracle, policy="fixed", draft_max=3)
            seeded = replace(sampling, seed=seed)
            emitted, _ = drive(decoder, [a, a], max_tokens=4, sampling=seeded, verify=method)
            assert END not in emitted[:-1]
