"""Tests of the loop on a mock target: interruptions, limited targets, exact mode, the cache, grammars and decisions.

The cache always contains the emitted tokens. The clock is a mock too, so the cost policy decides the same in every run.
`test_same_text` and `test_same_distribution` test that drafts change neither the text nor its distribution.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.cli_runner import DEMO, run_process
from support.decoder_loop import CLOCK, Coin, Oracle, drive, make_decoder, make_model, milliseconds, pass_seconds
from support.mock_target import MockTarget, plain_generate
from support.model_files import END, FIRST_WORD

from ngramspec.cost.bits import Exact
from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.data import GrammarError, PromptError, TargetError
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting.draft import NO_DRAFT, Ask, Draft
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.policies.policy import FixedPolicy
from ngramspec.sampling.distribution import BadLogits
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats


@pytest.fixture(autouse=True, scope="module")
def mock_clock() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ngramspec.decoding.decoder.time", CLOCK)
        yield


def looping(n: int = 60, **options: Any) -> tuple[MockTarget, list[int], list[int]]:
    """Return a model, a prompt whose n-grams predict its greedy continuation, and that continuation."""
    mock = make_model(12, **options)
    text = [1, 2, 3, *plain_generate(make_model(12), [1, 2, 3], 120, Sampling())]
    return mock, text[:63], text[63 : 63 + n]


def test_decoder_with_correct_drafts_saves_decode_calls() -> None:
    for policy in ("fixed", "heuristic", "cost"):
        mock, prompt, text = looping()
        oracle = Oracle(text)
        emitted, steps = drive(make_decoder(mock, drafter=oracle, policy=policy, draft_max=3), prompt, max_tokens=49)
        assert emitted == text[:49]
        assert len(steps) - 1 == 12  # 48 tokens, 4 at a time
        assert all(s.accepted == 3 for s in steps[1:])
        assert oracle.prompts == [prompt]
        assert oracle.context == emitted
        assert all(1 <= limit <= 3 for limit in oracle.limits)


def test_decoder_with_overlong_drafts_truncates_them(tmp_path: Path) -> None:
    class Chatty(Oracle):
        def propose(self, ask: Ask) -> Draft:
            return super().propose(Ask(60, ask.choose, fixed_length=ask.fixed_length, price=ask.price))

    for policy in ("fixed", "heuristic", "cost"):
        mock, prompt, text = looping(n_ctx=100, max_batch=16)
        decoder = SpeculativeDecoder(
            mock, drafter=Chatty(text), policy=policy, draft_max=40, calibration_folder=tmp_path
        )
        assert drive(decoder, prompt, max_tokens=20)[0] == text[:20]
        assert drive(decoder, prompt, max_tokens=99)[0] == text[:37]
        assert max(mock.batches) <= 16


# --------------------------------------------------------------------------- interruptions


def everything_still_works(decoder: SpeculativeDecoder, prompt: Sequence[int], text: Sequence[int]) -> None:
    assert drive(decoder, prompt, max_tokens=40)[0] == list(text[:40])


@pytest.mark.parametrize("policy", ["fixed", "cost"])
def test_generate_when_closed_at_any_step_keeps_cache_valid(policy: str, tmp_path: Path) -> None:
    mock, prompt, text = looping()
    decoder = SpeculativeDecoder(mock, policy=policy, draft_max=10, calibration_folder=tmp_path)
    for leave in (1, 2, 3, 4):
        for error in (None, KeyError("of the consumer's")):
            steps = decoder.generate(prompt, max_tokens=60)
            emitted = [t for _ in range(leave) for t in next(steps).tokens]
            if error is None:
                steps.close()
            else:
                with pytest.raises(KeyError):
                    steps.throw(error)
            assert mock.tokens == [*prompt, *emitted[:-1]]
    everything_still_works(decoder, prompt, text)


class Faulty(MockTarget):
    """Target whose `evaluate` call number `at` fails "before" or "after" it caches tokens, or returns nan "logits"."""

    how = "before"
    at = 10**9
    calls = 0

    def evaluate(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self.calls += 1
        if self.calls != self.at:
            return super().evaluate(tokens)
        if self.how == "before":
            raise TargetError("llama_decode returned 1")
        logits = super().evaluate(tokens)
        if self.how == "after":
            raise KeyboardInterrupt
        logits[0] = np.nan
        return logits


@pytest.mark.parametrize(
    ("how", "error"), [("before", TargetError), ("after", KeyboardInterrupt), ("logits", BadLogits)]
)
def test_generate_after_target_error_keeps_decoder_usable(how: str, error: type[BaseException], tmp_path: Path) -> None:
    _, prompt, text = looping()
    for is_first, wait in ((False, 1), (False, 2), (False, 5), (True, 1), (True, 2), (True, 5)):
        mock = Faulty(12, peak=6.0, seconds=pass_seconds, clock=CLOCK)
        decoder = SpeculativeDecoder(mock, draft_max=10, calibration_folder=tmp_path / f"{is_first} {wait}")
        if not is_first:
            drive(decoder, prompt, max_tokens=5)
        mock.how, mock.at = how, mock.calls + wait
        emitted: list[int] = []
        with pytest.raises(error):  # noqa: PT012 - tests the tokens before the error
            for step in decoder.generate(prompt, max_tokens=60):
                emitted += step.tokens
        assert emitted == text[: len(emitted)]
        assert mock.tokens == [*prompt, *emitted[:-1]]
        everything_still_works(decoder, prompt, text)


@pytest.mark.parametrize("method", ["propose", "accept"])
def test_generate_after_drafter_error_keeps_decoder_usable(method: str, tmp_path: Path) -> None:
    mock, prompt, text = looping()
    oracle = Oracle(text)
    decoder = SpeculativeDecoder(mock, drafter=oracle, policy="fixed", calibration_folder=tmp_path)
    steps = decoder.generate(prompt, max_tokens=60)
    emitted = [t for _ in range(3) for t in next(steps).tokens]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, method, lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(steps)
    assert mock.tokens[: len(prompt) + len(emitted) - 1] == [*prompt, *emitted[:-1]]
    assert mock.tokens == [*prompt, *text][: len(mock.tokens)]
    everything_still_works(decoder, prompt, text)


def test_generate_during_another_generation_raises_in_the_first(tmp_path: Path) -> None:
    # One cache cannot hold two texts: the first generator must raise, and must never continue with wrong text.
    mock, prompt, text = looping()
    decoder = SpeculativeDecoder(mock, calibration_folder=tmp_path)
    other = [3] * 100
    first = decoder.generate(prompt, max_tokens=60)
    next(first)
    second = decoder.generate(other, max_tokens=40)
    got = [*next(second).tokens, *next(second).tokens]
    with pytest.raises(RuntimeError):
        next(first)
    first.close()
    assert mock.tokens == [*other, *got[:-1]]
    got += [token for step in second for token in step.tokens]
    assert got == plain_generate(make_model(12), other, 40, Sampling())
    everything_still_works(decoder, prompt, text)


@pytest.mark.parametrize(
    ("reason", "call"),
    [
        ("prompt is empty", {"prompt": []}),
        ("context of 40", {"prompt": [1] * 40}),
        ("context of 40", {"prompt": [1] * 41}),
        ("max_tokens must be at least 1, got 0", {"max_tokens": 0}),
        ("max_tokens must be at least 1, got -1", {"max_tokens": -1}),
        ("empty", {"stop": ["a", ""]}),
        ("sequence of strings", {"stop": "END"}),
        ("acceptance must be .*, got 'typical'", {"acceptance": "typical"}),
        ("the token of a logit bias must be 0 to 59, got 60", {"sampling": Sampling(1.0, logit_bias=((60, 1.0),))}),
        ("logprobs must be 0 to 60", {"logprobs": -1}),
        ("logprobs must be 0 to 60", {"logprobs": 61}),
        ("unknown drafter", {"of_decoder": {"drafter": "psychic"}}),
        ("unknown policy", {"of_decoder": {"policy": "bold"}}),
        ("draft_max must be at least 1", {"of_decoder": {"draft_max": 0}}),
        ("draft_max requires the name of a policy", {"of_decoder": {"policy": FixedPolicy(4), "draft_max": 8}}),
        ("exact must be one of auto, on, off, got True", {"of_decoder": {"exact": True}}),
    ],
)
def test_generate_rejects_invalid_arguments_immediately(reason: str, call: dict[str, Any]) -> None:
    mock, error = make_model(n_ctx=40), PromptError if "prompt" in call else ValueError
    arguments = {"prompt": [1], "max_tokens": 1, **call}
    settings = arguments.pop("of_decoder", {})
    with pytest.raises(error, match=reason):
        SpeculativeDecoder(mock, times=make_fixed_curve({1: 1.0}), **settings).generate(**arguments)
    assert mock.tokens == mock.batches == []


@pytest.mark.parametrize("exact", ["off", "on"])
def test_decoder_without_rollback_uses_plain_decoding(exact: Exact, tmp_path: Path) -> None:
    _, prompt, _ = looping()
    mock, *_ = looping(fail_rollback=True)  # `rollback` raises.
    decoder = SpeculativeDecoder(mock, exact=exact, calibration_folder=tmp_path)
    for sampling in (Sampling(), Sampling(1.0, seed=3)):
        emitted, steps = drive(decoder, prompt, max_tokens=40, sampling=sampling)
        assert emitted == plain_generate(make_model(12), prompt, 40, sampling)
        assert not any(s.drafted for s in steps)
    assert mock.rollbacks == 0
    assert set(mock.batches) == {1}


def test_decoder_pads_batches_to_cheaper_size() -> None:
    times = make_fixed_curve({1: 1.0, 2: 1.6, 3: 4.0, 4: 1.7, 5: 10.0})
    mock, prompt, text = looping(seconds=lambda n: 1e-3 * times.ratio(n))
    oracle = Oracle(text, wrong=5)
    decoder = SpeculativeDecoder(mock, drafter=oracle, draft_max=2, times=times, clock=milliseconds)
    emitted, steps = drive(decoder, prompt, max_tokens=50)
    assert emitted == text[:50]
    assert set(mock.batches) <= {1, 2, 4}
    padded = [s for s in steps if s.batch > 1 + len(s.drafted) > 1]
    assert len(padded) > 5
    assert all(s.batch == 4 for s in padded)


def three_kernels(size: int, depth: int) -> int:
    return 0 if size == 1 else 1 if size in (2, 3, 4, 5, 8) else 2


def exact_text(
    case: int, exact: bool, folder: Path, before: Sequence[int] = (), **options: Any
) -> tuple[list[int], int]:
    """Return (text, number of draft tokens) on a model that rounds differently for each class of batch sizes."""
    mock = make_model(40, peak=1.5, kernels=three_kernels, noise=0.3, n_batch=16, max_batch=16, seed=case)
    decoder = SpeculativeDecoder(mock, exact="on" if exact else "off", calibration_folder=folder, **options)
    if before:
        drive(decoder, before, max_tokens=20)
    if exact:
        decoder.kernels.ensure_exact(mock)
    sampling = Sampling(0.8 * (case % 2), top_k=5, seed=case)
    emitted, steps = drive(decoder, beginning(case), max_tokens=40, sampling=sampling)
    if exact:
        assert decoder.kernels.exact_sizes == (2, 3, 4, 5, 8)
        assert {s.batch for s in steps[1:]} <= {2, 3, 4, 5, 8}
    return emitted, sum(len(s.drafted) for s in steps)


def beginning(case: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(case).integers(0, 4, 50)]


def test_decoder_in_exact_mode_keeps_text_with_any_drafts(tmp_path: Path) -> None:
    differ = drafted = 0
    for case in range(5):
        prompt, stray = beginning(case), beginning(100 + case)[:33]
        exact = tmp_path / f"exact{case}"
        found = [
            exact_text(case, True, exact, drafter=None),
            exact_text(case, True, exact, policy="fixed", draft_max=3),
            exact_text(case, True, exact, policy="heuristic", before=stray),
            exact_text(case, True, exact, policy="cost", before=prompt[:40]),
            exact_text(case, True, exact, policy="cost", before=[*prompt[:-2], *stray]),
        ]
        assert all(text == found[0][0] for text, _ in found)
        drafted += sum(count for _, count in found)
        loose = [exact_text(case, False, tmp_path / f"loose{case}", drafter=None)[0]]
        loose.append(exact_text(case, False, tmp_path / f"loose{case}", policy="fixed", draft_max=7)[0])
        differ += loose[0] != loose[1]
    assert drafted > 100
    assert differ > 0  # The mock is inexact enough to change texts.


def test_generate_of_next_turn_prefills_only_new_tokens(tmp_path: Path) -> None:
    mock, prompt, _ = looping()
    decoder = SpeculativeDecoder(mock, calibration_folder=tmp_path)
    emitted, _ = drive(decoder, prompt, max_tokens=20)
    drive(decoder, [*prompt, *emitted, 4, 5], max_tokens=5)
    assert mock.prefill_sizes == [len(prompt), 3]  # The last emitted token was not in the cache.


def test_decoder_without_drafter_reports_progress_and_learns_no_times(tmp_path: Path) -> None:
    mock = make_model(n_batch=16)
    seen: list[tuple[int, int]] = []
    decoder = SpeculativeDecoder(mock, drafter=None, calibration_folder=tmp_path)
    _, steps = drive(decoder, [1] * 40, max_tokens=10, progress=lambda *at: seen.append(at))
    assert seen == [(16, 40), (32, 40), (40, 40)]
    assert mock.batches == [1] * 9
    assert all(s.cost == s.draft_seconds == 0 for s in steps)
    assert NO_DRAFT.tokens == steps[3].drafted


def test_generate_returns_names_of_control_tokens_on_request(demo_vocabulary: Vocabulary, tmp_path: Path) -> None:
    names = {token: name for name, token in demo_vocabulary.controls.items() if not demo_vocabulary.is_eog(token)}
    target = MockTarget(vocabulary=demo_vocabulary, words=[*names])
    decoder = SpeculativeDecoder(target, calibration_folder=tmp_path)
    for controls in (frozenset(), frozenset(names), frozenset([*names][:1])):
        tokens, steps = drive(decoder, [5, 6], max_tokens=30, controls=controls)
        assert len(set(tokens)) > 1
        text = "".join(names[token] for token in tokens if token in controls)
        assert "".join(step.text for step in steps) == text


def test_generate_steps_report_times_and_gain(tmp_path: Path) -> None:
    mock, prompt, _ = looping()
    decoder = SpeculativeDecoder(mock, calibration_folder=tmp_path)
    _, steps = drive(decoder, prompt, max_tokens=1200)
    stats = Stats()
    for step in steps:
        stats.add(step)
    for step in steps[1:]:
        assert step.seconds == pytest.approx(pass_seconds(step.batch), rel=0.02)
        assert 0 < step.draft_seconds < 1e-4 or not step.drafted
    # The first two passes showed what the next ones cost.
    assert all(step.cost == pytest.approx(1e3 * step.seconds, rel=0.05) for step in steps[3:])
    assert (stats.generated, stats.tokens, stats.passes) == (1200, 1199, len(steps) - 1)
    assert stats.estimated_gain == pytest.approx(1.199 / (stats.seconds + stats.draft_seconds), rel=0.05)
    assert (stats.estimated_gain or 0) > 1.5


LEFT_OPEN = """
import sys
from ngramspec import SpeculativeDecoder, Target
target = Target(sys.argv[1], ctx_size=256, threads=1)
steps = SpeculativeDecoder(target).generate(target.vocabulary.tokenize("def f(x):"), max_tokens=50)
next(steps)
"""


def test_generate_left_open_at_exit_prints_nothing(env: dict[str, str]) -> None:
    done = run_process(env, DEMO, command=[sys.executable, "-c", LEFT_OPEN])
    assert (done.code, done.raw, done.err) == (0, b"", "")


OPEN: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
A, B, C = range(FIRST_WORD, FIRST_WORD + 3)


def test_decoder_with_coupled_acceptance_drafts_with_noise_of_target() -> None:
    # Two independent draws agree with probability 0.41; draws with the same noise from similar counts agree more often.
    stats = Stats()
    prompt = np.random.default_rng(4).choice(4, 400, p=Coin.probabilities).tolist()
    for seed in range(10):
        decoder = make_decoder(Coin(4), policy="fixed", draft_max=1)
        for step in drive(decoder, prompt, max_tokens=100, sampling=Sampling(1.0, **OPEN, seed=seed))[1]:
            stats.add(step)
    assert stats.drafted > 400
    assert (stats.acceptance_rate or 0) > 0.6


@pytest.mark.parametrize("method", ["coupled", "rejection", "match"])
def test_decoder_with_grammar_drafts_forced_tokens(method: str, word_vocabulary: Vocabulary) -> None:
    """If the grammar allows only one token, the loop drafts it, even if nothing in the context predicts it."""
    sampling = Sampling(1.0, seed=3, grammar='root ::= ("a,{a,{a,{a," [bc])+', **OPEN)
    mock = make_model(vocabulary=word_vocabulary, words=(A, B, C, 3 + ord(","), 3 + ord("{")), peak=0.5)
    decoder = make_decoder(mock, drafter="ngram", policy="fixed", draft_max=8)
    emitted, steps = drive(decoder, [7], max_tokens=60, sampling=sampling, acceptance=method)
    text = b"".join(map(word_vocabulary.piece, emitted)).decode()
    assert text.startswith(("a,{a,{a,{a,b", "a,{a,{a,{a,c"))
    stats = Stats()
    for step in steps:
        stats.add(step)
    assert any(step.source == "grammar" for step in steps)
    assert stats.tokens_per_pass > 3


@pytest.mark.parametrize("method", ["coupled", "match", "rejection"])
def test_generate_at_grammar_dead_end_raises_with_position(method: str, word_vocabulary: Vocabulary) -> None:
    """The model's only tokens are a and b, and the grammar requires a c; the emitted tokens remain valid."""
    mock = make_model(vocabulary=word_vocabulary, words=(A, B), peak=0.5)
    sampling = Sampling(1.0, seed=1, grammar='root ::= "a" "b" "a" "b" "c"', **OPEN)
    decoder = make_decoder(mock, drafter="ngram", policy="fixed", draft_max=3)
    prompt = [A, B, A, B, A, B]
    emitted: list[int] = []
    with pytest.raises(GrammarError, match=r"^at position 10 of the text: dead end in the grammar"):  # noqa: PT012
        for step in decoder.generate(prompt, max_tokens=20, sampling=sampling, acceptance=method):
            emitted += step.tokens
    assert emitted == [A, B, A, B]
    assert mock.tokens == [*prompt, *emitted[:-1]]


@pytest.mark.parametrize("method", ["coupled", "match", "rejection", "greedy"])
def test_generate_with_return_decisions_reports_all_decisions(method: str) -> None:
    sampling = Sampling(0.0 if method == "greedy" else 1.0, seed=5, **OPEN)
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    decoder = make_decoder(make_model(6, peak=1.0), drafter="ngram", policy="fixed", draft_max=3)
    options: dict[str, Any] = {"max_tokens": 60, "sampling": sampling, "acceptance": method}
    emitted, steps = drive(decoder, prompt, return_decisions=True, **options)
    told: list[int] = []
    position = len(prompt)
    for step in steps:
        assert step.decisions
        assert step.position == position
        assert step.verified_draft.tokens == step.drafted
        guesses = [j for j in step.decisions if j.accepted is not None]
        assert [j.token for j in guesses] == list(step.drafted[: len(guesses)])
        assert sum(bool(j.accepted) for j in guesses) >= step.accepted
        told += [j.token for j in step.decisions if j.accepted is not False][: len(step.tokens)]
        assert all(0 <= j.p <= 1 for j in step.decisions)
        position += len(step.tokens)
    assert told == emitted
    again = make_decoder(make_model(6, peak=1.0), drafter="ngram", policy="fixed", draft_max=3)
    plain, steps = drive(again, prompt, **options)
    assert plain == emitted
    assert all(step.decisions == () and step.verified_draft == NO_DRAFT and step.logprobs == () for step in steps)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.8, repeat_penalty=1.3), Sampling(0.8, mirostat=2)], ids=str
)
def test_generate_with_nan_logits_raises_after_valid_tokens(sampling: Sampling) -> None:
    """The logits after `length` tokens are broken, at any position in a pass."""
    prompt = [1, 2, 3]
    text = plain_generate(MockTarget(12), prompt, 20, sampling)
    for length in range(3, 10):
        for draft_max, policy in ((1, "fixed"), (4, "fixed"), (4, "entropy")):
            mock = MockTarget(12, broken=lambda context, length=length: len(context) == length)
            decoder = make_decoder(mock, drafter=Oracle(text), policy=policy, draft_max=draft_max)
            emitted: list[int] = []
            with pytest.raises(BadLogits, match=rf"^at position {length} of the text: the logit of token 5 is nan"):  # noqa: PT012
                for step in decoder.generate(
                    prompt, max_tokens=20, sampling=sampling, logprobs=1, return_decisions=True
                ):
                    emitted += step.tokens
                    assert step.stop is None
                    assert len(step.logprobs) == len(step.tokens)
            assert emitted == text[: length - len(prompt)]
            assert mock.tokens == [*prompt, *emitted[:-1]]
            # A text that ends before that position does not fail.
            if emitted:
                assert drive(decoder, prompt, max_tokens=len(emitted), sampling=sampling)[0] == emitted


def test_generate_ignores_bad_logits_after_end_of_text(word_vocabulary: Vocabulary) -> None:
    """Plain decoding never sees the logits after the end of the text, so broken ones there must not affect a draft."""
    options: dict[str, Any] = {"vocabulary": word_vocabulary, "broken": lambda context: context[-1] == END}
    for sampling, method in (
        (Sampling(), "greedy"),
        (Sampling(1.0, **OPEN), "coupled"),
        (Sampling(1.0, **OPEN), "match"),
        (Sampling(1.0, **OPEN), "rejection"),
        (Sampling(1.0, grammar='root ::= "a"*', **OPEN), "coupled"),
    ):
        for seed in range(20):
            mock = MockTarget(**options, words=(A, END), peak=0.3, seed=seed)
            decoder = make_decoder(mock, drafter=Oracle([A, END, A, A]), policy="fixed", draft_max=3)
            seeded = replace(sampling, seed=seed)
            emitted, _ = drive(decoder, [A, A], max_tokens=4, sampling=seeded, acceptance=method)
            assert END not in emitted[:-1]
