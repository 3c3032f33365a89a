"""The decoding loop on a mock target and a mock clock, with a check of its contract at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.mock_target import Clock, MockTarget

from ngramspec.backend import Model
from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting.draft import Ask, Draft, Drafter
from ngramspec.steps import Step

CLOCK = Clock()


def pass_seconds(size: int) -> float:
    """Return the duration of a pass on a machine on which a draft token costs a tenth of a pass."""
    return 1e-3 * (1 + 0.1 * (size - 1))


def make_model(n_vocab: int = 60, kind: type[MockTarget] = MockTarget, **options: Any) -> MockTarget:
    return kind(n_vocab, **{"peak": 6.0, "seconds": pass_seconds, "clock": CLOCK, **options})


class Coin(MockTarget):
    """A target over four tokens whose distribution does not depend on the context."""

    probabilities = (0.45, 0.05, 0.45, 0.05)

    def row(self, context: Sequence[int]) -> NDArray[np.float32]:
        return np.log(self.probabilities).astype(np.float32)


def milliseconds() -> float:
    """Return the time of the mock clock in the unit of a given cost curve: the duration of a pass over one token."""
    return 1e3 * CLOCK.perf_counter()


def make_decoder(target: Model, *, slope: float = 0.1, **options: Any) -> SpeculativeDecoder:
    """Return a decoder with a given cost curve (each further token costs `slope`) that stores nothing on disk."""
    return SpeculativeDecoder(
        target, times=make_fixed_curve({1: 1.0, 64: 1 + 63 * slope}), clock=milliseconds, **options
    )


def drive(
    decoder: SpeculativeDecoder, prompt: Sequence[int], *, max_tokens: int, **options: Any
) -> tuple[list[int], list[Step]]:
    """Generate, and check the contract of every step and of the cache after it."""
    target = decoder.target
    name = decoder.drafter.name if decoder.drafter else ""
    output: list[int] = []
    steps: list[Step] = []
    for step in decoder.generate(prompt, max_tokens=max_tokens, **options):
        assert not steps or steps[-1].stop is None
        steps.append(step)
        output += step.tokens
        cached, settled = target.sequences[0].tokens, [*prompt, *output[:-1]]
        assert cached[: len(settled)] == settled
        assert len(cached) == len(settled) or target.sequences[0].returns_early  # The next pass was submitted.
        assert len(step.pieces) == len(step.tokens) > 0
        assert step.text == "".join(step.pieces)
        assert step.tokens[: step.accepted] == step.drafted[: step.accepted]
        assert step.draft_remainder == step.drafted[step.accepted :]
        # The target adds one token after the accepted ones, unless the generation ended inside the accepted draft.
        assert len(step.tokens) - step.accepted == (0 if step.stop and step.accepted == len(step.tokens) else 1)
        assert (step.batch == 0) == (len(steps) == 1)
        assert step.batch >= 1 + len(step.drafted) or len(steps) == 1
        assert step.source in ((name, "grammar", f"{name}+grammar", "reasoning") if step.drafted else ("",))
        assert (step.stop_string is not None) == (step.stop == "stop")
        assert not any(decoder.vocabulary.is_eog(token) for token in step.drafted[:-1])
    assert steps[-1].stop is not None
    assert len(output) <= max_tokens
    assert target.sequences[0].tokens == [*prompt, *output[:-1]]
    return output, steps


class Oracle(Drafter):
    """Drafter that knows the text and is correct except at every `wrong`-th position."""

    name = "ngram"

    def __init__(self, text: Sequence[int], wrong: int = 0) -> None:
        self.text = list(text)
        self.wrong = wrong
        self.context: list[int] = []
        self.prompts: list[list[int]] = []
        self.limits: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self.prompts.append(list(prompt))
        self.context = []

    def propose(self, ask: Ask) -> Draft:
        self.limits.append(ask.limit)
        start = len(self.context)
        tokens = [
            (t + 1) % 12 if self.wrong and (start + i) % self.wrong == 0 else t
            for i, t in enumerate(self.text[start : start + ask.limit])
        ]
        n = len(tokens)
        return Draft(tuple(tokens), tuple({t: 1.0} for t in tokens), (3,) * n, (9,) * n, (0.9,) * n, self.name)

    def accept(self, tokens: Sequence[int]) -> int:
        self.context += tokens
        return 0
