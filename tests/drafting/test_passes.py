"""Tests of drafts for several texts at once: their requests to the draft model share a pass if that pays."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.decoder_loop import CLOCK, milliseconds
from support.mock_shared import MockShared
from support.mock_target import Clock

from ngramspec.data import TargetError
from ngramspec.drafting.draft import Draft, MarginalCost
from ngramspec.drafting.draft_model.draft_model import DraftModel
from ngramspec.drafting.draft_model.hybrid import HybridDrafter
from ngramspec.drafting.draft_model.model import ModelDrafter
from ngramspec.drafting.draft_model.passes import (
    Drafting,
    ModelPasses,
    PassRequest,
    draft_batch,
    draft_single,
)
from ngramspec.drafting.mixture.drafter import MixtureDrafter

N = 40
FREE = MarginalCost(1.2, [0.1] * 12, texts=3)


def model_of(sequences: int, **options: Any) -> MockShared:
    return MockShared(sequences, n_vocab=N, peak=4.0, clock=CLOCK, **options)


def drafters_of(kind: type, small: MockShared) -> list[Any]:
    first = kind(small.sequences[0], clock=milliseconds, shared_model=small)
    if kind is DraftModel:
        first = HybridDrafter(first)
    return [first, *(first.clone_for_sequence() for _ in small.sequences[1:])]


def request(passes: ModelPasses, sequence: Any, tokens: Sequence[int], gain: float = math.inf) -> PassRequest:
    return PassRequest(passes, sequence, len(sequence.tokens), tokens, len(tokens), gain)


@pytest.mark.parametrize("kind", [ModelDrafter, DraftModel])
@pytest.mark.parametrize(
    ("sampled", "options"),
    [(True, {}), (False, {}), (False, {"split": True}), (True, {"drafts_alone": True, "replays": True})],
)
def test_draft_together_returns_drafts_of_separate_drafting(kind: type, sampled: bool, options: dict[str, Any]) -> None:
    """Passes have no price here, so no request is declined."""
    smalls = [model_of(3, **options), model_of(3, **options)]
    sets = [drafters_of(kind, small) for small in smalls]
    assert all(drafter.drafts_stepwise for drafters in sets for drafter in drafters)
    assert not MixtureDrafter.drafts_stepwise
    rng = random.Random(3)
    texts = [[rng.randrange(5) for _ in range(20 + i)] for i in range(3)]
    for drafters in sets:
        for drafter, text in zip(drafters, texts, strict=True):
            drafter.begin(text)

    def choose(offset: int, law: Any) -> int:
        return sorted(law)[offset % len(law)]

    chooser = choose if sampled else None
    lengths = set()
    for _ in range(20):
        together = draft_batch([drafter.propose_stepwise(6, chooser, price=FREE) for drafter in sets[0]], FREE)
        alone = [drafter.propose(6, chooser, price=FREE) for drafter in sets[1]]
        assert [draft.tokens for draft in together] == [draft.tokens for draft in alone]
        assert [draft.acceptance_probs for draft in together] == [draft.acceptance_probs for draft in alone]
        lengths.update(map(len, alone))
        for i, draft in enumerate(alone):
            emitted = [*draft.tokens[: rng.randrange(len(draft) + 1)], rng.randrange(5)]
            for drafters in sets:
                drafters[i].accept(emitted)
    assert len(lengths) > 2
    assert bool(smalls[0].passes) == (not options)
    assert sum(map(len, smalls[0].passes)) >= 1.5 * len(smalls[0].passes)


def test_draft_together_after_model_error_raises() -> None:
    small = model_of(2, fails=lambda parts: len(parts) == 2)
    passes = ModelPasses(milliseconds, small)

    def drafting(sequence: Any) -> Drafting:
        yield request(passes, sequence, [1])
        return Draft()

    assert draft_single(drafting(small.sequences[0])) == Draft()
    with pytest.raises(TargetError, match="because of `fails`"):
        draft_batch([drafting(sequence) for sequence in small.sequences], FREE)


def test_draft_together_splits_batches_beyond_maximum_size() -> None:
    small = model_of(4, max_batch=8)
    passes = ModelPasses(milliseconds, small)
    rows: dict[int, Any] = {}

    def drafting(sequence: Any, length: int) -> Drafting:
        found = yield request(passes, sequence, [3] * length)
        assert found is not None
        rows[sequence.number] = found.copy()  # The rows are valid until the next pass.
        return Draft((length,))

    lengths = (3, 5, 8, 1)
    drafts = draft_batch([drafting(*pair) for pair in zip(small.sequences, lengths, strict=True)], FREE)
    assert [draft.tokens[0] for draft in drafts] == list(lengths)
    assert small.passes == [[(0, 3), (1, 5)]]
    assert [list(sequence.tokens) for sequence in small.sequences] == [[3] * length for length in lengths]
    for sequence, length in zip(small.sequences, lengths, strict=True):
        assert np.array_equal(rows[sequence.number][-1], sequence.row([3] * length))


def paced(sequences: int, one: float, each: float, **options: Any) -> tuple[ModelPasses, MockShared]:
    small = model_of(sequences, **options)
    passes = ModelPasses(Clock().perf_counter, small)
    passes.record_time(1, one)
    passes.record_time(5, one + 4 * each)
    return passes, small


@given(
    asked=st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(1, 4)), min_size=1, max_size=6),
    one=st.floats(0.01, 3.0),
    part=st.floats(0.0, 1.0),
    worth=st.floats(0.5, 8.0),
)
def test_worthwhile_returns_most_valuable_set_of_requests(
    asked: list[tuple[float, int]], one: float, part: float, worth: float
) -> None:
    """Compare the choice with all subsets."""
    passes, small = paced(6, one, part * one)
    requests = {
        text: request(passes, small.sequences[text], [0] * rows, gain) for text, (gain, rows) in enumerate(asked)
    }
    price = MarginalCost(worth, [0.1] * 12, seconds=1.0, texts=len(asked))

    def value(texts: Sequence[int]) -> float:
        tokens = sum(requests[text].rows for text in texts)
        return sum(requests[text].gain for text in texts) - (worth * passes.read_seconds(tokens) if texts else 0.0)

    best = max(value(texts) for count in range(len(asked) + 1) for texts in combinations(requests, count))
    chosen = passes.select_requests(requests, price)
    assert value(chosen) == pytest.approx(best, abs=1e-9)
    assert passes.select_requests(requests, None) == list(requests)


def test_worthwhile_includes_mandatory_requests_at_any_cost() -> None:
    passes, small = paced(3, 50.0, 1.0)
    gains = (math.inf, 0.5, math.inf)
    requests = {text: request(passes, small.sequences[text], [0], gain) for text, gain in enumerate(gains)}
    assert sorted(passes.select_requests(requests, MarginalCost(1.0, [0.1], seconds=1.0))) == [0, 2]


@pytest.mark.parametrize("options", [{"split": True}, {"drafts_alone": True}])
def test_worthwhile_without_shared_batches_returns_all_requests(options: dict[str, Any]) -> None:
    passes, small = paced(3, 50.0, 1.0, **options)
    requests = {text: request(passes, small.sequences[text], [0], 0.5) for text in range(3)}
    assert not passes.joint
    assert passes.select_requests(requests, MarginalCost(1.0, [0.1], seconds=1.0)) == [0, 1, 2]
    assert list(passes.group_requests([0, 1, 2], requests)) == [[0], [1], [2]]


def test_draft_together_after_declined_request_continues_without_model() -> None:
    """Two requests together justify a pass, but one alone does not."""
    passes, small = paced(2, 1.0, 0.0)

    def drafting(sequence: Any, gain: float) -> Drafting:
        rows = yield request(passes, sequence, [1], gain)
        return Draft((int(rows is not None),))

    price = MarginalCost(1.0, [0.1], seconds=1.0, texts=2)
    for gains, granted in (((0.6, 0.6), [1, 1]), ((0.6, 0.0), [0, 0]), ((0.0, 1.1), [0, 1])):
        drafts = draft_batch([drafting(*pair) for pair in zip(small.sequences, gains, strict=True)], price)
        assert [draft.tokens[0] for draft in drafts] == granted


def test_hybrid_after_declined_request_drafts_with_n_grams(monkeypatch: pytest.MonkeyPatch) -> None:
    small = model_of(2)
    drafters = drafters_of(DraftModel, small)
    copiers = [MixtureDrafter(), MixtureDrafter()]
    for drafter in (*drafters, *copiers):
        drafter.begin([*range(5, 25), 1, 2, 3, 4, 1, 2, 3, 4, 1, 2])
    bare = [copier.propose(3, price=FREE).tokens for copier in copiers]
    with monkeypatch.context() as declining:
        declining.setattr(ModelPasses, "select_requests", lambda *_: [])
        drafts = draft_batch([drafter.propose_stepwise(3, price=FREE) for drafter in drafters], FREE)
    assert [draft.tokens for draft in drafts] == bare
    assert not small.passes
    for drafter in drafters:
        drafter.accept([30])  # The n-grams do not know this token.
    draft_batch([drafter.propose_stepwise(3, price=FREE) for drafter in drafters], FREE)
    assert len(small.passes[0]) == 2
    assert small.sequences[0].tokens[:31] == [*range(5, 25), 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 30]
