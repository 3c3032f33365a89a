"""Tests of beam search on the mock target: its results with and without drafts, and its number of passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mock_branching import MockBranchingTarget
from support.mock_target import Clock

from ngramspec.beams.search import BeamSearch, Hypothesis
from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.cost.store import StoredTimes
from ngramspec.data import ModelError, PromptError
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.sampling.distribution import BadLogits, logprobs

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
Found = tuple[tuple[int, ...], float, bool]


def reference(
    target: MockBranchingTarget, prompt: Sequence[int], beams: int, steps: int, stop: bytes | None = None
) -> list[Found]:
    """Return the hypotheses by the definition, without cache or tree, over every token of every text."""
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(steps):
        results = []
        for rank, (score, text) in enumerate(live):
            row = target.row([*prompt, *text])
            for token, logprob in logprobs(row, 0, target.n_vocab).top:
                if token not in target.suppress_tokens:
                    results.append((-(score + logprob), rank, -float(row[token]), token, text))
        best = sorted(results)[:beams]
        live = []
        for negative, _, _, token, text in best:
            longer = (*text, token)
            written = b"".join(target.piece(t) for t in longer)
            ended = target.is_eog(token) or (stop is not None and stop in written)
            (finished if ended else live).append((-negative, longer))
        finished = sorted(finished, key=lambda found: -found[0])[:beams]
        if len(finished) == beams:
            live = [one for one in live if one[0] > finished[-1][0]]
        if not live:
            break
    found = [(text, score, True) for score, text in finished] + [(text, score, False) for score, text in live]
    return sorted(found, key=lambda one: -one[1])[:beams]


def search(target: MockBranchingTarget, beams: int, drafts: bool = False, **options: Any) -> BeamSearch:
    """Return a completed search; with drafts, it sends as many as fit, unless the options contain times."""
    of_search = {name: options.pop(name) for name in ("draft_max", "clock") if name in options}
    stored = StoredTimes(target.sequences[0])
    stored.times = options.pop("times", make_fixed_curve({1: 1.0}))
    of_search = {"stored": stored if drafts else None, "clock": Clock(0.0).perf_counter, **of_search}
    made = BeamSearch(target, beams, **of_search)
    for _ in made.run(options.pop("prompt", PROMPT), **options):
        pass
    return made


def told(hypotheses: Sequence[Hypothesis]) -> list[Found]:
    return [(one.tokens, one.score, one.stop in ("eog", "stop")) for one in hypotheses]


MOCK = st.fixed_dictionaries(
    {
        "n_vocab": st.integers(10, 14),
        "peak": st.sampled_from([0.3, 2.0, 5.0, 12.0]),
        "eog": st.sets(st.integers(0, 13), max_size=3),
        "decimals": st.sampled_from([None, 0]),
        "seed": st.integers(0, 1000),
    }
)
BEAMS, TOKENS = st.integers(1, 6), st.integers(1, 30)


@given(
    mock=MOCK,
    beams=BEAMS,
    max_tokens=TOKENS,
    draft_max=st.integers(1, 16),
    limits=st.fixed_dictionaries(
        {
            "max_batch": st.sampled_from([6, 12, 64]),
            "windowed": st.booleans(),
            "suppressed": st.sets(st.integers(0, 9), max_size=3),
        }
    ),
    spare=st.integers(0, 20),
)
def test_beam_search_with_drafts_returns_reference_hypotheses(
    mock: dict[str, Any], beams: int, max_tokens: int, draft_max: int, limits: dict[str, Any], spare: int
) -> None:
    n_ctx = len(PROMPT) + beams * max_tokens  # fills the last cell
    target = MockBranchingTarget(**mock, **limits, n_ctx=n_ctx, n_seq=beams + 1 + spare)
    expected = reference(target, PROMPT, beams, max_tokens)
    plain = search(target, beams, max_tokens=max_tokens)
    assert told(plain.hypotheses()) == expected
    assert not {token for tokens, *_ in expected for token in tokens} & limits["suppressed"]
    assert plain.stats.passes == plain.stats.tokens
    assert plain.stats.drafted == plain.stats.accepted == 0
    drafted = search(target, beams, True, max_tokens=max_tokens, draft_max=draft_max)
    assert told(drafted.hypotheses()) == expected
    assert drafted.stats.tokens == plain.stats.tokens
    assert drafted.stats.passes <= plain.stats.passes
    assert drafted.stats.accepted <= drafted.stats.drafted
    assert drafted.stats.passes == len(target.batches) - plain.stats.passes
    assert target.is_clean
    assert target.tokens == PROMPT


@given(mock=MOCK, beams=BEAMS, max_tokens=TOKENS, stop=st.sampled_from(["b", "cd", "ee", "abc"]), drafts=st.booleans())
def test_beam_search_with_stop_string_finishes_hypothesis(
    mock: dict[str, Any], beams: int, max_tokens: int, stop: str, drafts: bool
) -> None:
    target = MockBranchingTarget(**mock)
    expected = reference(target, PROMPT, beams, max_tokens, stop.encode())
    found = search(target, beams, drafts, max_tokens=max_tokens, stop=[stop]).hypotheses()
    assert told(found) == expected
    for one in found:
        written = b"".join(map(target.piece, one.tokens)).decode()
        assert one.text == written.partition(stop)[0]
        assert (one.stop == "stop") == (stop in written)


@pytest.mark.parametrize("drafts", [False, True])
def test_beam_search_with_control_token_in_stop_string_hides_its_name(
    demo_vocabulary: Vocabulary, drafts: bool
) -> None:
    names = {token: name for name, token in demo_vocabulary.controls.items() if not demo_vocabulary.is_eog(token)}
    token = min(names)
    words = [token, *demo_vocabulary.tokenize("abcdefgh", add_bos=False)]
    target = MockBranchingTarget(vocabulary=demo_vocabulary, words=words)
    found = search(target, 6, drafts, max_tokens=12, stop=[names[token]]).hypotheses()
    assert any(token in one.tokens for one in found)
    for one in found:
        written = [demo_vocabulary.piece(t) for t in one.tokens if not demo_vocabulary.is_eog(t)]
        assert one.text.encode() == b"".join(written)
        assert (one.stop == "stop") == (one.tokens[-1] == token) == (token in one.tokens)


def test_beam_search_with_repeated_prompt_saves_decode_calls() -> None:
    """Only the prompt's n-grams can draft: the target repeats the prompt, and its rows are new."""
    rng = np.random.default_rng(0)
    text = [int(token) for token in rng.permutation(60)]

    class Copy(MockBranchingTarget):
        def row(self, context: Sequence[int]) -> Any:
            row = np.zeros(self.n_vocab, np.float32)
            row[text[(text.index(context[-1]) + 1) % 60]] = 9.0
            return row

    target = Copy(64)
    found = search(target, 1, True, prompt=[*text, *text[:5]], max_tokens=50)
    assert found.hypotheses()[0].tokens == tuple((text * 2)[5:55])
    assert found.stats.passes <= 5
    assert found.stats.accepted == found.stats.drafted


def timed(dearest: float, beams: int) -> BeamSearch:
    """Return a search with a known cost of passes: 1 s, times the given factor over 64 tokens."""
    times, clock = make_fixed_curve({1: 1.0, 64: dearest}), Clock(1e-5)
    target = MockBranchingTarget(24, peak=6.0, seed=5, seconds=times.ratio, clock=clock)
    return search(target, beams, True, max_tokens=120, times=times, clock=clock.perf_counter)


@pytest.mark.parametrize(
    ("beams", "drafted"), [(1, [190, 135, 94, 0]), (2, [986, 258, 122, 0]), (4, [1208, 390, 156, 0])]
)
def test_beam_search_with_expensive_tokens_shortens_drafts(beams: int, drafted: list[int]) -> None:
    """The numbers of draft tokens depend on every constant of `BeamPlan`."""
    dear = (1.0, 3.0, 20.0, 64.0)
    found = [timed(dearest, beams).stats for dearest in dear]
    passes = [stats.passes for stats in found]
    assert passes == sorted(passes)
    assert passes[2] <= found[2].tokens
    assert [stats.drafted for stats in found] == drafted
    for stats, dearest in zip(found, dear, strict=True):
        plain = stats.tokens * make_fixed_curve({1: 1.0, 64: dearest}).ratio(beams)
        assert stats.seconds <= 1.001 * plain  # Reading the clock takes some time.


def test_beam_search_draft_max_limits_draft_depth() -> None:
    target = MockBranchingTarget(24, peak=12.0, seed=5)
    for draft_max in (1, 3):
        found = search(target, 2, True, max_tokens=60, draft_max=draft_max)
        assert 1.0 < found.stats.tokens / found.stats.passes <= 1 + draft_max
        assert max(target.batches[-found.stats.passes :]) <= 2 * (1 + draft_max)


def test_beam_search_ends_when_no_beam_can_improve() -> None:
    class Ends(MockBranchingTarget):
        """Token 0 ends a text, at first with probability 0.6; otherwise the text continues with 1 with certainty."""

        def row(self, context: Sequence[int]) -> Any:
            row = np.full(self.n_vocab, -math.inf, np.float32)
            row[[0, 1]] = np.log([0.6, 0.4]) if len(context) == 1 else np.log([0.001, 0.999])
            return row

    found = search(Ends(3, eog=[0]), 1, prompt=[2], max_tokens=50)
    assert [one.tokens for one in found.hypotheses()] == [(0,)]
    assert found.stats.passes == 0
    # With two beams, the other one continues until it ends too or the context is full.
    found = search(Ends(3, eog=[0]), 2, prompt=[2], max_tokens=50)
    assert [one.tokens for one in found.hypotheses()] == [(0,), (1,) * 50]
    assert [one.stop for one in found.hypotheses()] == ["eog", "length"]
    assert found.hypotheses()[1].score == pytest.approx(math.log(0.4) + 49 * math.log(0.999), abs=1e-4)


def test_beam_search_without_max_tokens_stops_at_context() -> None:
    target = MockBranchingTarget(12, n_ctx=len(PROMPT) + 3 * 17 + 2)
    found = search(target, 3, True)
    assert {len(one.tokens) for one in found.hypotheses()} == {17}
    assert {one.stop for one in found.hypotheses()} == {"context"}
    found = search(target, 1, max_tokens=1000)
    assert [len(one.tokens) for one in found.hypotheses()] == [53]
    assert found.hypotheses()[0].stop == "context"


def test_beam_search_rejects_prompt_beyond_context_immediately() -> None:
    target = MockBranchingTarget(12, n_ctx=100)
    with pytest.raises(PromptError) as error:
        BeamSearch(target, 4).run(PROMPT, max_tokens=21)
    assert str(error.value) == (
        "4 beams of 21 tokens after a prompt of 20 tokens can need a context of 104 tokens, but it has 100;"
        " try -c 104 or -n 20 or fewer beams"
    )
    assert target.tokens == []
    search(target, 4, True, max_tokens=20)
    with pytest.raises(PromptError, match=r"an answer after a prompt of 100 tokens .* try -c 105$"):
        BeamSearch(target, 1).run([1] * 100, max_tokens=5)
    with pytest.raises(PromptError, match=r"4 beams of 1 tokens .* try -c 103 or fewer beams$"):
        BeamSearch(target, 4).run([1] * 99)
    with pytest.raises(PromptError, match="empty"):
        BeamSearch(target, 4).run([], max_tokens=5)


def test_beam_search_rejects_unusable_stop_strings_and_models() -> None:
    with pytest.raises(ValueError, match="stop string"):
        BeamSearch(MockBranchingTarget(), 2).run(PROMPT, stop=[""])
    with pytest.raises(ModelError, match="recurrent"):
        BeamSearch(MockBranchingTarget(fail_rollback=True), 2)


def test_beam_search_with_nan_logits_raises_bad_logits() -> None:
    target = MockBranchingTarget(broken=lambda context: len(context) > 25)
    with pytest.raises(BadLogits, match="nan"), np.errstate(invalid="ignore"):
        search(target, 2, True, max_tokens=20)
    assert target.is_clean


@pytest.mark.parametrize("passes", [0, 1, 7])
def test_beam_search_after_interruption_returns_current_hypotheses(passes: int) -> None:
    target = MockBranchingTarget(16, peak=2.0)
    made = BeamSearch(target, 3)
    assert made.hypotheses() == []
    run = made.run(PROMPT, max_tokens=30)
    for _ in range(1 + passes):
        next(run)
    found = made.hypotheses()
    assert [(one.tokens, one.score) for one in found] == [one[:2] for one in reference(target, PROMPT, 3, 1 + passes)]
    assert {one.stop for one in found} == {None}
    run.close()
    assert made.hypotheses() == found
    assert target.is_clean
    assert target.tokens == PROMPT
