"""`Generation`: one text as it grows, whoever evaluates the passes that make it grow.

    generation = Generation(prompt, vocabulary, n_ctx=..., n_vocab=..., max_tokens=200)
    generation.begin(proposer)
    step = generation.first(rows, proposer)             # the prefill's logits give the first token
    while generation.stop is None:
        plan = ...                                      # what to send
        rows = ...                                      # of a pass over generation.batch(plan)
        step = generation.take(plan, rows, proposer)

`SpeculativeDecoder` grows one at a time, `ngramspec.batching` several together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ngramspec.acceptance.rules import TokenDecision
from ngramspec.acceptance.verifier import Acceptance, RuleVerifier, Verifier
from ngramspec.backend import Logits, Vocabulary
from ngramspec.decoding.emission import Emission
from ngramspec.decoding.speculation import NO_PLAN, Plan, Proposer
from ngramspec.decoding.step import Step, StopReason
from ngramspec.decoding.text import GenerationText
from ngramspec.drafting.draft import NO_DRAFT, Chooser
from ngramspec.drafting.grammar import GrammarGuide
from ngramspec.errors import GrammarError, PromptError
from ngramspec.exactness.close_calls import CloseCalls
from ngramspec.sampling.distribution import BadLogits
from ngramspec.sampling.settings import Sampling


class Generation:
    """The text that follows a prompt, as far as it is settled.

    Args:
        prompt: token ids, fewer than n_ctx.
        vocabulary: what they mean.
        n_ctx: most tokens of prompt and text.
        n_vocab: length of a row of logits.
        counts_calls: count the tokens that rounding could have decided (`Step.close_calls`).
        piece: the bytes that a token is shown as; None: as `vocabulary` says.

    The rest, and what is raised, is as in `SpeculativeDecoder.generate`.

    Attributes:
        prompt: as above.
        settled: tokens of prompt and text, without the last one, which no pass has evaluated yet.
        last: that one.
        error: what ended the text behind the tokens of the last step; None while nothing did.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        vocabulary: Vocabulary,
        *,
        n_ctx: int,
        n_vocab: int,
        max_tokens: int,
        sampling: Sampling | None = None,
        verify: str | Acceptance | Verifier | None = None,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        detail: bool = False,
        counts_calls: bool = False,
        piece: Callable[[int], bytes] | None = None,
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}, but must be at least 1")
        if not prompt:
            raise PromptError("the prompt is empty: there is nothing to continue")
        room = n_ctx - len(prompt)
        if room < 1:
            raise PromptError(
                f"the prompt has {len(prompt)} tokens, but the context holds {n_ctx} and needs room for an answer"
            )
        out_of: StopReason = "length" if max_tokens <= room else "context"
        self._text = GenerationText(piece or vocabulary.piece, vocabulary.is_eog, stop, min(max_tokens, room), out_of)
        if logprobs is not None and not 0 <= logprobs <= n_vocab:
            raise ValueError(f"logprobs is {logprobs}, but must be 0 to {n_vocab}, the vocabulary's size")
        watched: list[TokenDecision] | None = [] if detail else None
        self._guide: GrammarGuide | None = None
        self._calls: CloseCalls | None = None
        if verify is None or isinstance(verify, str | Acceptance):
            sampler = vocabulary.sampler(sampling or Sampling())
            self._calls = CloseCalls(sampler) if counts_calls else None
            verify = RuleVerifier(self._calls or sampler, verify, watched.append if watched is not None else None)
            (self._calls or sampler).begin(prompt)
            if sampler.grammar is not None:
                self._guide = GrammarGuide(sampler.grammar)
        elif sampling is not None or detail:
            raise ValueError("sampling and detail go with a method's name; a verifier that is passed in has its own")
        self.prompt = list(prompt)
        self._sampling = sampling
        self._is_eog = vocabulary.is_eog
        self._verifier = verify
        self._emission = Emission(self._text, logprobs, watched, self._calls)
        self.settled = len(self.prompt)
        self.last = self.prompt[-1]
        self.error: BadLogits | GrammarError | None = None

    @property
    def left(self) -> int:
        """Most tokens that may still be emitted."""
        return self._text.left

    @property
    def stop(self) -> StopReason | None:
        """Why the text ended; None while it grows."""
        return self._text.stop

    def begin(self, proposer: Proposer) -> None:
        """Let a proposer draft for this text."""
        if proposer.drafter is not None and self._sampling is not None:
            proposer.drafter.follow(self._sampling)
        proposer.begin(self.prompt, guide=self._guide, is_eog=self._is_eog, blind=self._verifier.blind)

    def chooser(self) -> Chooser | None:
        """What the drafter is to pick with now."""
        return self._verifier.choose(self.settled + 1)

    def first(self, rows: Logits, proposer: Proposer) -> Step:
        """The step of the prefill's token.

        Args:
            rows: the logits after the prompt, shape (1, n_vocab).
            proposer: is shown them.
        """
        verdict = self._verifier.verify(rows, NO_DRAFT, self.settled)
        proposer.see(self.last, NO_DRAFT, rows)
        step = self._emission.step(verdict, rows, NO_PLAN, self.settled)
        self.last = step.tokens[-1]
        return step

    def batch(self, plan: Plan) -> list[int]:
        """The tokens that a pass evaluates: the last one, the draft, and what pads it to its size, with questions."""
        padding = plan.size - 1 - len(plan.sent) - len(plan.questions)
        return [self.last, *plan.sent.tokens, *[self.last] * padding]

    def take(
        self, plan: Plan, rows: Logits, proposer: Proposer, *, batch: int, seconds: float, bound: float = 0.0
    ) -> Step:
        """The step that comes of a pass: the accepted prefix and one token of the target's, up to the text's end.

        Args:
            plan: what was sent.
            rows: the pass's logits, at least one for the last token and each of the draft.
            proposer: is shown them.
            batch, seconds: as in `Pass`.
            bound: how far the size of this pass may have moved a logit; 0: not at all.
        """
        if self._calls is not None and bound:
            self._calls.arm(bound)
        # Plain decoding would not have seen the logits behind the text's end.
        verdict = self._verifier.verify(rows[: len(plan.sent) + (not plan.ends)], plan.judged, self.settled + 1)
        proposer.see(self.last, plan.sent, rows, len(verdict.tokens) - 1)
        step = self._emission.step(verdict, rows, plan, self.settled + 1, batch=batch, seconds=seconds)
        self.settled += len(step.tokens)
        self.last = step.tokens[-1]
        self.error = verdict.error if self._text.stop is None else None
        if plan.questions and self._text.stop is None:
            proposer.hear(self._answers(plan, rows[plan.size - len(plan.questions) :], len(step.tokens) - 1))
        return step

    def _answers(self, plan: Plan, rows: Logits, fork: int) -> list[int]:
        """What the target said behind the last token, where it was asked."""
        asked = {
            question.path: row for question, row in zip(plan.questions, rows, strict=True) if question.fork == fork
        }
        path: tuple[int, ...] = (self.last,)
        said: list[int] = []
        while path in asked:
            token = self._verifier.answer(asked[path], self.settled + 1 + len(said))
            if token is None:
                break
            said.append(token)
            path = (*path, token)
        return said
