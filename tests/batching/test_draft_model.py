"""Tests of a draft model in the engine: it changes no text, reading a prompt is prefill, and its errors stay apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from support.ear import ask, run_engine
from support.grid import grid
from support.mock_shared import MockShared
from support.mock_target import Clock, MockTarget, plain_generate

from ngramspec.batching.request import Done
from ngramspec.cost.times import PassTimes
from ngramspec.data import TargetError
from ngramspec.drafting.draft_model.hybrid import HybridDrafter
from ngramspec.drafting.draft_model.model import ModelDrafter
from ngramspec.drafting.mixture.drafter import TextIndexSet
from ngramspec.sampling.settings import Sampling

N = 400
"""Size of the vocabulary, large enough that texts do not repeat by chance."""

PASS = 1e-3
SLOPE = 0.05


def seconds(n: int) -> float:
    """Return the duration of a pass of the target."""
    return PASS * (1 + SLOPE * (n - 1))


def fast(n: int) -> float:
    return 0.05 * seconds(n)


@contextmanager
def drafted(sequences: int, blur: float = 0.0) -> Iterator[Any]:
    """Run an engine on a target, with a fast mock of it as its draft model, whose logits are blurred."""
    clock = Clock(1e-7)
    options: dict[str, Any] = {"clock": clock, "n_vocab": N, "peak": 6.0}
    target = MockShared(sequences, seconds=seconds, **options)
    small = MockShared(sequences, seconds=fast, reading=fast, **options)
    for sequence in small.sequences:

        def blurred(context: Sequence[int], row: Any = sequence.row) -> Any:
            rng = np.random.default_rng((7, *context[-2:]))
            return row(context) + (blur * rng.standard_normal(N)).astype(np.float32)

        sequence.row = blurred  # type: ignore[method-assign]
    model = ModelDrafter(small.sequences[0], clock=clock.perf_counter, shared_model=small)
    times = PassTimes({1: 1.0, 64: seconds(64) / PASS})
    drafter = HybridDrafter(model, TextIndexSet())
    with run_engine(target, times=times, drafter=drafter, cache_room=1 << 24) as engine:
        yield SimpleNamespace(target=target, small=small, engine=engine)


def prompts(n: int) -> list[list[int]]:
    return [[(31 * i + 7 * j * (i + 2)) % N for j in range(20 + 5 * i)] for i in range(n)]


def alone(prompt: Sequence[int], tokens: int = 60, sampling: Sampling | None = None) -> list[int]:
    return plain_generate(MockTarget(N, peak=6.0), prompt, tokens, sampling or Sampling())


@grid(sequences=(1, 3), temperature=(0.9, 0.0), blur=(2.0, 0.0))
def test_draft_model_keeps_texts_of_plain_decoding(sequences: int, temperature: float, blur: float) -> None:
    with drafted(sequences, blur=blur) as made:
        asked = [(prompt, Sampling(temperature, seed=i)) for i, prompt in enumerate(prompts(5))]
        ears = [ask(made.engine, prompt, sampling=sampling) for prompt, sampling in asked]
        for ear in ears:
            assert ear.wait().reason == "length"
        # These are the next turns, whose beginnings are in the sequences' caches.
        more = [ask(made.engine, [*prompt, *ear.tokens, 5], 20) for (prompt, _), ear in zip(asked, ears, strict=True)]
        for ear in more:
            assert ear.wait().n_cached > 0
    for ear, later, (prompt, sampling) in zip(ears, more, asked, strict=True):
        assert ear.tokens == alone(prompt, sampling=sampling)
        assert later.tokens == alone([*prompt, *ear.tokens, 5], 20)
    assert all(sequence.batches for sequence in made.small.sequences)
    assert sum(len(done) for done in made.target.passes) < 0.8 * 5 * 80


def test_draft_model_failure_ends_only_its_request() -> None:
    with drafted(2) as made:
        broken = made.small.sequences[1]

        def fails(_: Sequence[int], **__: Any) -> Any:
            raise TargetError("no memory for the draft model")

        broken.prefill = broken.evaluate = fails
        ears = [ask(made.engine, prompt, 200) for prompt in prompts(2)]
        ends = [ear.wait() for ear in ears]
        assert [type(end) for end in ends] == [Done, TargetError]
        assert ears[0].tokens == alone(prompts(1)[0], 200)
        assert ears[1].tokens == alone(prompts(2)[1], 200)[: len(ears[1].tokens)]
