"""The loop on a mock target: the tokens of greedy decoding, every kind of end, and a cache that always holds what
was emitted.

The clock is a mock too, so the cost policy decides the same in every run. Sampling, grammars and logprobs are in
`test_decoder_sampling`, the laws of sampled text in `test_decoder_laws`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.decoder_loop import CLOCK, Oracle, cheap, drive, model
from support.mock_target import MockTarget, plain_generate

from ngramspec.cost.calibration import Calibration
from ngramspec.cost.given import GivenCurve
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.decoding.speculation import Speculation
from ngramspec.decoding.step import Stats
from ngramspec.drafting import DRAFTERS, REMEMBERING, make_drafter
from ngramspec.drafting.draft import NO_DRAFT, Chooser, Draft
from ngramspec.drafting.price import TokenPrice
from ngramspec.errors import PromptError, TargetError
from ngramspec.exactness.choice import Exact
from ngramspec.policies.simple import FixedPolicy
from ngramspec.sampling.distribution import BadLogits
from ngramspec.sampling.settings import Sampling

POLICIES = ("fixed", "heuristic", "cost")


@pytest.fixture(autouse=True, scope="module")
def mock_clock() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ngramspec.decoding.decoder.time", CLOCK)
        patch.setattr("ngramspec.cost.measure.time", CLOCK)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calibration")


def looping(n: int = 60, **options: Any) -> tuple[MockTarget, list[int], list[int]]:
    """A model, a prompt from whose n-grams its greedy continuation can be guessed, and that continuation."""
    mock = model(12, **options)
    text = [1, 2, 3, *plain_generate(model(12), [1, 2, 3], 120, Sampling())]
    return mock, text[:63], text[63 : 63 + n]


# --------------------------------------------------------------------------- the same tokens


@settings(max_examples=120, deadline=None, derandomize=True)
@given(data=st.data())
def test_greedy_output_is_plain_output(data: st.DataObject, folder: Path) -> None:
    n_vocab = data.draw(st.integers(3, 60))
    options = {
        "peak": data.draw(st.sampled_from([0.5, 3.0, 8.0])),
        "seed": data.draw(st.integers(0, 50)),
        "eog": data.draw(st.sets(st.integers(0, n_vocab - 1), max_size=2)),
        "seconds": data.draw(st.sampled_from([cheap, lambda n: 1e-3 * n, lambda n: 1e-3 * (5 if n == 3 else 1.3)])),
    }
    draft_max = data.draw(st.integers(1, 15))
    drafter = data.draw(st.sampled_from(tuple(DRAFTERS)))
    decoder = SpeculativeDecoder(
        model(n_vocab, **options),
        drafter=make_drafter(drafter, memory=drafter in REMEMBERING),
        policy=data.draw(st.sampled_from(POLICIES)),
        draft_max=draft_max,
        calibration_folder=folder,
    )
    for _ in range(2):
        prompt = data.draw(st.lists(st.integers(0, n_vocab - 1), min_size=1, max_size=40))
        n = data.draw(st.integers(1, 60))
        emitted, steps = drive(decoder, prompt, max_tokens=n)
        assert emitted == plain_generate(model(n_vocab, **options), prompt, n, Sampling())
        assert max(len(s.drafted) for s in steps) <= draft_max


@pytest.mark.parametrize("policy", POLICIES)
def test_drafts_that_are_right_save_passes(policy: str, tmp_path: Path) -> None:
    mock, prompt, text = looping()
    oracle = Oracle(text)
    decoder = SpeculativeDecoder(mock, drafter=oracle, policy=policy, draft_max=3, calibration_folder=tmp_path)
    emitted, steps = drive(decoder, prompt, max_tokens=49)
    assert emitted == text[:49]
    passes = len(steps) - 1
    assert passes == 12  # 48 tokens, 4 at a time
    assert all(s.accepted == 3 for s in steps[1:])
    assert oracle.begun == [prompt]
    assert oracle.seen == emitted
    assert all(1 <= limit <= 3 for limit in oracle.limits)


@pytest.mark.parametrize("policy", POLICIES)
def test_drafts_that_are_wrong_change_nothing(policy: str, tmp_path: Path) -> None:
    mock, prompt, text = looping()
    for wrong in (1, 2, 3, 5):
        oracle = Oracle(text, wrong)
        decoder = SpeculativeDecoder(mock, drafter=oracle, policy=policy, draft_max=7, calibration_folder=tmp_path)
        assert drive(decoder, prompt, max_tokens=50)[0] == text[:50]
        assert oracle.seen == text[:50]


def test_a_drafter_that_ignores_the_limit_is_cut(tmp_path: Path) -> None:
    class Chatty(Oracle):
        def propose(
            self, limit: int, choose: Chooser | None = None, *, blind: bool = False, price: TokenPrice | None = None
        ) -> Draft:
            return super().propose(60, choose, blind=blind, price=price)

    for policy in POLICIES:
        mock, prompt, text = looping(n_ctx=100)
        decoder = SpeculativeDecoder(
            mock, drafter=Chatty(text), policy=policy, draft_max=40, calibration_folder=tmp_path
        )
        assert drive(decoder, prompt, max_tokens=20)[0] == text[:20]
        assert drive(decoder, prompt, max_tokens=99)[0] == text[:37]


def test_nothing_to_draft_is_plain_decoding(tmp_path: Path) -> None:
    for policy in POLICIES:
        mock, prompt, _ = looping()
        decoder = SpeculativeDecoder(mock, drafter=Oracle([]), policy=policy, calibration_folder=tmp_path)
        _, steps = drive(decoder, prompt, max_tokens=20)
        assert {s.batch for s in steps[1:]} == {1}
        assert not any(s.drafted or s.source for s in steps)


# --------------------------------------------------------------------------- every kind of end


def everything_still_works(decoder: SpeculativeDecoder, prompt: Sequence[int], text: Sequence[int]) -> None:
    assert drive(decoder, prompt, max_tokens=40)[0] == list(text[:40])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_consumer_may_leave_at_any_step(policy: str, tmp_path: Path) -> None:
    mock, prompt, text = looping()
    decoder = SpeculativeDecoder(mock, policy=policy, draft_max=10, calibration_folder=tmp_path)
    for leave in (1, 2, 3, 4):
        steps = decoder.generate(prompt, max_tokens=60)
        emitted = [t for _ in range(leave) for t in next(steps).tokens]
        steps.close()
        assert mock.tokens == [*prompt, *emitted[:-1]]
        steps = decoder.generate(prompt, max_tokens=60)
        emitted = [t for _ in range(leave) for t in next(steps).tokens]
        with pytest.raises(KeyError):
            steps.throw(KeyError("of the consumer's"))
        assert mock.tokens == [*prompt, *emitted[:-1]]
    everything_still_works(decoder, prompt, text)


def test_a_generator_that_never_starts_does_nothing(tmp_path: Path) -> None:
    mock, prompt, text = looping()
    decoder = SpeculativeDecoder(mock, calibration_folder=tmp_path)
    drive(decoder, prompt, max_tokens=10)
    before = list(mock.tokens)
    steps = decoder.generate([5, 6, 7], max_tokens=10)
    steps.close()
    del steps
    assert mock.tokens == before
    everything_still_works(decoder, prompt, text)


class Faulty(MockTarget):
    """Goes wrong once, at evaluate number `at`: "before", "after" the tokens are in, or with nan "logits"."""

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


@pytest.mark.parametrize("how", ["before", "after", "logits"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_target_that_fails_once(policy: str, how: str, tmp_path: Path) -> None:
    _, prompt, text = looping()
    error = {"before": TargetError, "after": KeyboardInterrupt, "logits": BadLogits}[how]
    for wait in (1, 2, 5):
        mock = Faulty(12, peak=6.0, seconds=cheap, clock=CLOCK)
        decoder = SpeculativeDecoder(mock, policy=policy, draft_max=10, calibration_folder=tmp_path)
        drive(decoder, prompt, max_tokens=5)  # measures
        mock.how, mock.at = how, mock.calls + wait
        emitted: list[int] = []
        with pytest.raises(error):  # noqa: PT012 - what came before it counts
            for step in decoder.generate(prompt, max_tokens=60):
                emitted += step.tokens
        assert emitted == text[: len(emitted)]
        assert mock.tokens == [*prompt, *emitted[:-1]]
        everything_still_works(decoder, prompt, text)


@pytest.mark.parametrize("wait", [1, 2, 3, 12])
def test_a_failure_while_measuring(wait: int, tmp_path: Path) -> None:
    _, prompt, text = looping()
    for how, error in (("before", TargetError), ("after", KeyboardInterrupt)):
        mock = Faulty(12, peak=6.0, seconds=cheap, clock=CLOCK)
        mock.how, mock.at = how, wait
        decoder = SpeculativeDecoder(mock, calibration_folder=tmp_path / f"{how}{wait}")
        steps = decoder.generate(prompt, max_tokens=60)
        assert next(steps).tokens == (text[0],)
        with pytest.raises(error):
            next(steps)
        assert mock.tokens == prompt
        everything_still_works(decoder, prompt, text)


@pytest.mark.parametrize("method", ["propose", "accept"])
def test_a_drafter_that_fails_once(method: str, tmp_path: Path) -> None:
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


def test_a_second_generation_does_not_disturb_the_first(tmp_path: Path) -> None:
    # One cache cannot hold two texts: the first generator must say so, never go on with wrong text.
    mock, prompt, text = looping()
    decoder = SpeculativeDecoder(mock, calibration_folder=tmp_path)
    other = plain_generate(model(12), [5, 6, 7], 40, Sampling())
    first = decoder.generate(prompt, max_tokens=60)
    emitted = list(next(first).tokens)
    second = decoder.generate([5, 6, 7], max_tokens=40)
    got = [*next(second).tokens, *next(second).tokens]
    with pytest.raises(RuntimeError):
        emitted += next(first).tokens
    first.close()
    assert mock.tokens == [5, 6, 7, *got[:-1]]
    for step in second:
        got += step.tokens
    assert got == other
    everything_still_works(decoder, prompt, text)


def test_an_abandoned_generation_does_not_disturb_the_next(tmp_path: Path) -> None:
    mock, prompt, _ = looping()
    decoder = SpeculativeDecoder(mock, calibration_folder=tmp_path)
    long_prompt = [3] * 100
    other = plain_generate(model(12), long_prompt, 40, Sampling())
    first = decoder.generate(prompt, max_tokens=60)
    next(first)
    second = decoder.generate(long_prompt, max_tokens=40)
    got = list(next(second).tokens)
    first.close()
    assert got + [t for step in second for t in step.tokens] == other


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("at", range(1, 12))
def test_end_token_inside_an_accepted_draft(policy: str, at: int, tmp_path: Path) -> None:
    _, prompt, text = looping()
    end = text[at]
    mock, *_ = looping(eog={end})
    expected = text[: text.index(end) + 1]
    oracle = Oracle(text)
    decoder = SpeculativeDecoder(mock, drafter=oracle, policy=policy, draft_max=11, calibration_folder=tmp_path)
    emitted, steps = drive(decoder, prompt, max_tokens=60)
    assert emitted == expected
    assert oracle.seen in ([], expected)  # nothing past the end
    assert steps[-1].stop == "eog"
    assert steps[-1].pieces[-1] == ""
    if policy == "fixed" and len(expected) > 1:
        assert len(steps) == 2
        assert steps[-1].accepted == len(steps[-1].tokens) or len(expected) == 13


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("at", range(0, 12))
def test_stop_string_inside_an_accepted_draft(policy: str, at: int, tmp_path: Path) -> None:
    mock, prompt, text = looping()
    whole = b"".join(map(mock.piece, text)).decode()
    stop = whole[at : at + 2]
    cut = whole.index(stop)
    decoder = SpeculativeDecoder(mock, drafter=Oracle(text), policy=policy, draft_max=11, calibration_folder=tmp_path)
    emitted, steps = drive(decoder, prompt, max_tokens=60, stop=[stop, "never this"])
    assert emitted == text[: cut + 2]  # up to the token that completed it
    assert "".join(s.text for s in steps) == whole[:cut]
    assert (steps[-1].stop, steps[-1].stop_string) == ("stop", stop)


def test_text_held_for_a_stop_string_is_released_at_the_end(tmp_path: Path) -> None:
    mock, prompt, text = looping()
    whole = b"".join(map(mock.piece, text)).decode()
    decoder = SpeculativeDecoder(mock, drafter=Oracle(text), policy="fixed", draft_max=5, calibration_folder=tmp_path)
    for n in range(1, 16):
        _, steps = drive(decoder, prompt, max_tokens=n, stop=[whole[n - 1] + "\0"])
        assert "".join(s.text for s in steps) == whole[:n]
        assert steps[-1].stop == "length"


@pytest.mark.parametrize("policy", POLICIES)
def test_max_tokens_is_exact(policy: str, tmp_path: Path) -> None:
    mock, prompt, text = looping()
    decoder = SpeculativeDecoder(mock, drafter=Oracle(text), policy=policy, draft_max=7, calibration_folder=tmp_path)
    for n in range(1, 30):
        emitted, steps = drive(decoder, prompt, max_tokens=n)
        assert emitted == text[:n]
        assert steps[-1].stop == "length"
        assert all(s.accepted < len(s.tokens) for s in steps)  # no draft token past the end was paid for


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("room", [1, 2, 3, 5, 17])
def test_the_context_ends(policy: str, room: int, tmp_path: Path) -> None:
    _, prompt, text = looping()
    mock, *_ = looping(n_ctx=len(prompt) + room)
    decoder = SpeculativeDecoder(mock, drafter=Oracle(text), policy=policy, calibration_folder=tmp_path)
    emitted, steps = drive(decoder, prompt, max_tokens=10**9)
    assert emitted == text[: len(emitted)]
    assert room <= len(emitted) <= room + 1  # the last token needs no room in the cache
    assert steps[-1].stop == "context"
    assert drive(decoder, prompt, max_tokens=room)[1][-1].stop == "length"
    assert len(mock.tokens) <= mock.n_ctx


def test_what_cannot_be_done_fails_at_the_call(tmp_path: Path) -> None:
    mock = model(n_ctx=40)
    decoder = SpeculativeDecoder(mock, calibration_folder=tmp_path)
    for prompt in ([], [1] * 40, [1] * 41):
        with pytest.raises(PromptError):
            decoder.generate(prompt, max_tokens=1)
    for n in (0, -1):
        with pytest.raises(ValueError, match="max_tokens"):
            decoder.generate([1], max_tokens=n)
    with pytest.raises(ValueError, match="empty"):
        decoder.generate([1], max_tokens=1, stop=["a", ""])
    with pytest.raises(ValueError, match="sequence of strings"):
        decoder.generate([1], max_tokens=1, stop="END")
    with pytest.raises(ValueError, match="verify"):
        decoder.generate([1], max_tokens=1, verify="typical")
    assert mock.tokens == mock.batches == []
    with pytest.raises(ValueError, match="drafter"):
        SpeculativeDecoder(mock, drafter="psychic", calibration_folder=tmp_path)
    with pytest.raises(ValueError, match="policy"):
        SpeculativeDecoder(mock, policy="bold", calibration_folder=tmp_path)
    with pytest.raises(ValueError, match="draft_max"):
        SpeculativeDecoder(mock, draft_max=0, calibration_folder=tmp_path)
    with pytest.raises(ValueError, match="draft_max"):  # it would be ignored
        SpeculativeDecoder(mock, policy=FixedPolicy(4), draft_max=8, calibration_folder=tmp_path)


# --------------------------------------------------------------------------- targets with limits


@pytest.mark.parametrize("exact", ["off", "on"])
def test_a_target_that_cannot_roll_back_decodes_plainly(exact: Exact, tmp_path: Path) -> None:
    _, prompt, text = looping()
    mock, *_ = looping(fail_rollback=True)  # raises if it is asked to
    decoder = SpeculativeDecoder(mock, exact=exact, calibration_folder=tmp_path)
    emitted, steps = drive(decoder, prompt, max_tokens=40)
    assert emitted == text[:40]
    assert mock.rollbacks == 0
    assert set(mock.batches) == {1}
    assert not any(s.drafted for s in steps)
    sampling = Sampling(1.0, seed=3)
    emitted, _ = drive(decoder, prompt, max_tokens=40, sampling=sampling)
    assert emitted == plain_generate(model(12), prompt, 40, sampling)


def test_batches_are_padded_to_a_cheaper_size(tmp_path: Path) -> None:
    costs = {1: 1.0, 2: 1.6, 3: 4.0, 4: 1.7}
    mock, prompt, text = looping(seconds=lambda n: 1e-3 * costs.get(n, 2.0 * n))
    decoder = SpeculativeDecoder(mock, drafter=Oracle(text, wrong=5), draft_max=2, calibration_folder=tmp_path)
    decoder.calibration.ensure_curve(mock)
    mock.batches.clear()
    emitted, steps = drive(decoder, prompt, max_tokens=50)
    assert emitted == text[:50]
    assert set(mock.batches) <= {1, 2, 4}
    padded = [s for s in steps if s.batch > 1 + len(s.drafted) > 1]
    assert len(padded) > 5
    assert all(s.batch == 4 for s in padded)


def test_no_batch_is_larger_than_the_target_takes(tmp_path: Path) -> None:
    for policy in POLICIES:
        mock, prompt, text = looping(max_batch=16)  # as many as the measuring needs
        decoder = SpeculativeDecoder(
            mock, drafter=Oracle(text), policy=policy, draft_max=40, calibration_folder=tmp_path
        )
        assert drive(decoder, prompt, max_tokens=60)[0] == text[:60]
        assert max(mock.batches) <= 16


# --------------------------------------------------------------------------- exact mode


def three_kernels(size: int, depth: int) -> int:
    return 0 if size == 1 else 1 if size in (2, 3, 4, 5, 8) else 2


def exact_model(**options: Any) -> MockTarget:
    return model(40, peak=1.5, kernels=three_kernels, noise=0.3, n_batch=16, max_batch=16, **options)


def test_exact_text_does_not_depend_on_drafts(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    differ = drafted = 0
    for case in range(25):
        greedy = case % 2 == 0
        sampling = Sampling(0.0 if greedy else 0.8, top_k=5, seed=case)
        prompt = [int(t) for t in rng.integers(0, 4, 50)]
        stray = [int(t) for t in rng.integers(0, 4, 33)]

        def text(exact: bool, folder: Path, before: Sequence[int] = (), **options: Any) -> list[int]:
            nonlocal drafted
            mock = exact_model(seed=case)  # noqa: B023
            decoder = SpeculativeDecoder(mock, exact="on" if exact else "off", calibration_folder=folder, **options)
            if before:
                drive(decoder, before, max_tokens=20)
            if exact:
                decoder.calibration.ensure_exact(mock)
            mock.batches.clear()
            emitted, steps = drive(decoder, prompt, max_tokens=40, sampling=sampling)  # noqa: B023
            if exact:
                allowed = decoder.calibration.exact_sizes
                assert allowed == (2, 3, 4, 5, 8)
                used = {s.batch for s in steps[1:]}
                assert used <= set(allowed)
                drafted += sum(len(s.drafted) for s in steps)
            return emitted

        exact = tmp_path / f"exact{case}"
        texts = [
            text(True, exact, drafter=None),
            text(True, exact, policy="fixed", draft_max=3),
            text(True, exact, policy="heuristic", before=stray),
            text(True, exact, policy="cost", before=prompt[:40]),
            text(True, exact, policy="cost", before=[*prompt[:-2], *stray]),
        ]
        assert all(t == texts[0] for t in texts)
        loose = tmp_path / f"loose{case}"
        differ += text(False, loose, drafter=None) != text(False, loose, policy="fixed", draft_max=7)
    assert drafted > 500
    assert differ > 5  # the mock is inexact enough to tell


def test_exact_mode_remembers_its_sizes(tmp_path: Path) -> None:
    mock = exact_model()
    drive(SpeculativeDecoder(mock, exact="on", calibration_folder=tmp_path), [1, 2, 3], max_tokens=5)
    again = exact_model(seconds=lambda n: 1e-3 * n**2)  # another class would be chosen today
    decoder = SpeculativeDecoder(again, exact="on", calibration_folder=tmp_path)
    drive(decoder, [1, 2, 3], max_tokens=20)
    assert decoder.calibration.exact_sizes == (2, 3, 4, 5, 8)


# --------------------------------------------------------------------------- around it


def test_the_next_turn_reuses_the_cache(tmp_path: Path) -> None:
    mock, prompt, _ = looping()
    decoder = SpeculativeDecoder(mock, calibration_folder=tmp_path)
    emitted, _ = drive(decoder, prompt, max_tokens=20)
    drive(decoder, [*prompt, *emitted, 4, 5], max_tokens=5)
    assert mock.prefilled == [len(prompt), 3]  # the last emitted token was not in the cache


def test_progress_is_reported(tmp_path: Path) -> None:
    mock = model(n_batch=16)
    seen: list[tuple[int, int]] = []
    decoder = SpeculativeDecoder(mock, drafter=None, calibration_folder=tmp_path)
    drive(decoder, [1] * 40, max_tokens=2, progress=lambda *at: seen.append(at))
    assert seen == [(16, 40), (32, 40), (40, 40)]


def test_steps_carry_the_times(tmp_path: Path) -> None:
    mock, prompt, _ = looping()
    decoder = SpeculativeDecoder(mock, calibration_folder=tmp_path)
    _, steps = drive(decoder, prompt, max_tokens=40)
    stats = Stats()
    for step in steps:
        stats.add(step)
    for step in steps[1:]:
        assert step.seconds == pytest.approx(cheap(step.batch), rel=0.02)
        assert step.plain_seconds == pytest.approx(1e-3, rel=0.05)
        assert 0 < step.draft_seconds < 1e-4 or not step.drafted
    assert stats.generated == 40
    assert stats.tokens == 39
    assert stats.passes == len(steps) - 1
    assert stats.estimated_gain == pytest.approx(0.039 / (stats.seconds + stats.draft_seconds), rel=0.05)
    assert (stats.estimated_gain or 0) > 1.5


def test_plain_decoding_measures_nothing(tmp_path: Path) -> None:
    mock = model()
    decoder = SpeculativeDecoder(mock, drafter=None, calibration_folder=tmp_path)
    _, steps = drive(decoder, [1, 2], max_tokens=10)
    assert mock.batches == [1] * 9
    assert all(s.plain_seconds == s.draft_seconds == 0 for s in steps)
    assert NO_DRAFT.tokens == steps[3].drafted


def test_real_passes_refresh_the_curve(tmp_path: Path) -> None:
    speed = [1.0]
    mock, prompt, _ = looping(seconds=lambda n: speed[0] * cheap(n))
    decoder = SpeculativeDecoder(mock, draft_max=4, calibration_folder=tmp_path)
    drive(decoder, prompt, max_tokens=20)
    speed[0] = 3.0  # throttled
    for _ in range(25):
        _, steps = drive(decoder, prompt, max_tokens=50)
    assert steps[-1].plain_seconds == pytest.approx(3e-3, rel=0.1)


def test_what_is_passed_in_leaves_nothing_else_to_say() -> None:
    mock, curve = model(12), GivenCurve({1: 1.0})
    with pytest.raises(ValueError, match="calibration that is passed in"):
        SpeculativeDecoder(mock, curve=curve, calibration=Calibration())
    for more in ({"drafter": None}, {"drafter": "suffix"}, {"policy": "fixed"}, {"draft_max": 3}):
        with pytest.raises(ValueError, match="speculation that is passed in"):
            SpeculativeDecoder(mock, speculation=Speculation(None, FixedPolicy()), **more)


def test_a_calibration_is_shared_until_a_decoder_goes_its_own_way() -> None:
    mock, known = model(12), Calibration()
    one, other = (SpeculativeDecoder(mock, calibration=known, exact="off") for _ in range(2))
    drive(one, [1, 2, 3], max_tokens=9)
    assert known.curve is not None
    assert other.calibration is known
    other.calibrate(known)
    assert other.calibration.curve is not None
    assert other.calibration.curve is not known.curve
    assert other.calibration.curve.to_json() == known.curve.to_json()
    before = known.curve.to_json()
    other.calibration.curve.observe(5, 3.0)
    assert known.curve.to_json() == before != other.calibration.curve.to_json()
