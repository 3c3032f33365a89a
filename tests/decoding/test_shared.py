"""Tests of passes over several texts: idle sequences between theirs, and the costs of each text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.decoder_loop import Oracle
from support.mock_shared import MockShared
from support.mock_target import plain_generate

from ngramspec.backend import ExactnessMode
from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.decoding.loop import DecodingLoop
from ngramspec.decoding.text import Drafts, Text
from ngramspec.policies.cost import CostPolicy
from ngramspec.request import Request
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Step


class Recorder(CostPolicy):
    """Policy that records the steps of whole passes."""

    def for_n_sequences(self, texts: int) -> CostPolicy:
        self.recorded: list[Step] = []
        shared = super().for_n_sequences(texts)
        shared.record = self.recorded.append  # type: ignore[method-assign]
        return shared


class Guesser(Oracle):
    """Drafter that knows the text and calls three of its guesses right."""

    def accept(self, tokens: Sequence[int]) -> int:
        super().accept(tokens)
        return 3


def make_pass(model: MockShared, numbers: Sequence[int], slope: float, **exactness: Any) -> tuple[Recorder, list[Step]]:
    """Make a pass over texts in these sequences, of which all after the first end after three more tokens."""
    policy = Recorder(4)
    loop = DecodingLoop(policy, model.clock.perf_counter, model)
    loop.exactness = ExactnessMode(**exactness)
    loop.prepare(make_fixed_curve({1: 1.0, 64: 1.0 + 63 * slope}), range(1, 65))
    texts = []
    for number in numbers:
        sequence, prompt = model.sequences[number], [number, 1, 2]
        request = Request(prompt, 4 if number else 50)
        text = Text(request, sequence, n_ctx=sequence.n_ctx, n_vocab=sequence.n_vocab)
        text.begin(Drafts(Guesser(plain_generate(MockShared(1).sequences[0], prompt, 50, Sampling()))), sequence)
        text.first(sequence.prefill(prompt)[np.newaxis])
        text.drafts.first(text.last)
        texts.append(text)
    current = loop.submit(texts)
    loop.commit(current)
    return policy, [step for step in loop.report(current) if step is not None]


@pytest.mark.parametrize(("slope", "sizes", "filled"), [(0.1, None, True), (1.0, None, False), (0.1, (1, 2), False)])
def test_idle_sequence_between_two_texts_joins_if_that_is_cheaper(
    slope: float, sizes: tuple[int, ...] | None, filled: bool
) -> None:
    """Without the one between, texts in separate caches take two batches."""
    model = MockShared(3, split=True)
    model.sequences[1].prefill([7, 8, 9])
    make_pass(model, (0, 2), slope, sizes=sizes)
    assert {number for number, _ in model.passes[-1]} == ({0, 1, 2} if filled else {0, 2})
    assert model.sequences[1].tokens == [7, 8, 9]


def test_texts_share_the_costs_of_their_pass() -> None:
    model = MockShared(2)
    policy, steps = make_pass(model, (0, 1), 0.001)
    (whole,) = policy.recorded
    assert [step.batch for step in steps] == [5, 3]
    assert whole.batch == 8
    assert whole.tokens == (*steps[0].tokens, *steps[1].tokens)
    assert (whole.accepted, whole.correct_guesses) == (6, 3)
    assert [step.seconds for step in steps] == pytest.approx([5 / 8 * whole.seconds, 3 / 8 * whole.seconds])
    assert [step.draft_seconds for step in steps] == [whole.draft_seconds / 2] * 2
    # A plain pass gives each text a token, so it costs each of them one.
    assert [step.cost for step in steps] == pytest.approx([2 * 5 / 8 * whole.cost, 2 * 3 / 8 * whole.cost])
    assert [step.draft_cost for step in steps] == [whole.draft_cost] * 2
