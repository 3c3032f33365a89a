"""`Emission`: the steps of one generation, each made of a verdict on its pass."""

from __future__ import annotations

from collections.abc import Sequence

from ngramspec.acceptance.rules import TokenDecision, Verdict
from ngramspec.backend import Logits
from ngramspec.decoding.speculation import Plan
from ngramspec.decoding.step import Step
from ngramspec.decoding.text import GenerationText
from ngramspec.exactness.close_calls import CloseCalls
from ngramspec.sampling.logprobs import Logprobs, logprobs


class Emission:
    """What one generation emits, and whatever else was asked for.

    Args:
        text: grows by every step.
        logprobs: report the logprobs of each emitted token and of this many of the likeliest; None: no logprobs.
        judgements: a list that the verifier adds to; each step hands it out as `Step.detail`; None: no detail.
        calls: counts close calls; None: they are not counted.
    """

    def __init__(
        self,
        text: GenerationText,
        logprobs: int | None,
        judgements: list[TokenDecision] | None,
        calls: CloseCalls | None,
    ) -> None:
        self.text = text
        self.calls = calls
        self._top = logprobs
        self._judgements = judgements

    def step(
        self, verdict: Verdict, rows: Logits, plan: Plan, position: int, *, batch: int = 0, seconds: float = 0.0
    ) -> Step:
        """The step that comes of a pass: what was accepted, up to the end of the text.

        Args:
            verdict: on the pass.
            rows: its logits, of shape (n, n_vocab); at least one for each token of the verdict.
            plan: what the pass was made of.
            position: absolute index of the first token that it decided.
            batch, seconds: as in `Pass`.
        """
        pieces = self.text.take(verdict.tokens)
        tokens = verdict.tokens[: len(pieces)]
        step = Step(
            tokens,
            pieces,
            drafted=plan.sent.tokens,
            accepted=min(verdict.accepted, len(tokens)),
            batch=batch,
            seconds=seconds,
            source=plan.sent.source if plan.sent.tokens else "",
            close_calls=self.calls.take() if self.calls is not None else 0,
            position=position,
            stop=self.text.stop,
            stop_string=self.text.stop_string,
            logprobs=self._logprobs(rows, tokens),
        )
        if self._judgements is not None:
            step.judged, step.detail = plan.judged, tuple(self._judgements)
            self._judgements.clear()
        return step

    def _logprobs(self, rows: Logits, tokens: Sequence[int]) -> tuple[Logprobs, ...]:
        if self._top is None:
            return ()
        return tuple(logprobs(row, token, self._top) for row, token in zip(rows, tokens, strict=False))
