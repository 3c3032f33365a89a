"""`Text`: one growing sequence. It verifies the tokens of a pass, turns them into text, and decides when it ends."""

from __future__ import annotations

from ngramspec.acceptance.rules import Verdict
from ngramspec.acceptance.verifier import RuleVerifier
from ngramspec.backend import Logits, Model, Vocabulary
from ngramspec.decoding.drafts import DraftedText, Drafts, Plan, no_draft
from ngramspec.decoding.sampler_stack import SamplerStack
from ngramspec.decoding.stream import TextStream
from ngramspec.drafting.draft import NO_DRAFT, Chooser
from ngramspec.errors import NGramSpecError, PromptError
from ngramspec.request import Request
from ngramspec.steps import Step, StopReason
from ngramspec.tokens import TokenTable

_PREFILL = no_draft(0)


class Text(DraftedText):
    """The text that follows a prompt, as far as it is final.

    Args:
        request: The text to continue.
        vocabulary: Meaning of its tokens.
        n_ctx: Maximum number of tokens of prompt and text.
        n_vocab: Length of a row of logits.
        counts_calls: Count the tokens that rounding could have decided (`Step.close_calls`).

    Attributes:
        settled: Number of tokens of prompt and text without the last one, which no pass has evaluated yet.
        stop: Why the text ended; `None` while it grows.
        error: What ended the text after the tokens of the last step; `None` if nothing did.
        is_released: Whether the sequence may hold another text, because the request was cancelled.

    Raises:
        PromptError, ValueError, GrammarError: See `SpeculativeDecoder.generate`.
    """

    def __init__(
        self, request: Request, vocabulary: Vocabulary, *, n_ctx: int, n_vocab: int, counts_calls: bool = False
    ) -> None:
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {request.max_tokens}")
        if not request.prompt:
            raise PromptError("the prompt is empty")
        room = n_ctx - len(request.prompt)
        if room < 1:
            raise PromptError(
                f"the prompt has {len(request.prompt)} tokens and leaves no room for an answer in the context of"
                f" {n_ctx}"
            )
        top = request.logprobs
        if top is not None and not 0 <= top <= n_vocab:
            raise ValueError(f"logprobs must be 0 to {n_vocab}, the size of the vocabulary, got {top}")
        self.request = request
        self.prompt = list(request.prompt)
        self.settled = len(self.prompt)
        self.last = self.prompt[-1]
        self.tokens_left = min(request.max_tokens, room)
        self.stop: StopReason | None = None
        self.error: NGramSpecError | ValueError | None = None
        self.is_released = False
        self._limit_reason: StopReason = "length" if request.max_tokens <= room else "context"
        ends, is_eog = request.rules.stop_token_ids, vocabulary.is_eog
        self._ends: TokenTable[bool] = TokenTable(lambda token: token in ends or is_eog(token))
        piece = getattr(vocabulary, "shown", vocabulary.piece) if request.controls else vocabulary.piece
        self._pieces: TokenTable[bytes] = TokenTable(piece)
        self._stream = TextStream(request.stop, request.rules.min_tokens)
        self._samplers = SamplerStack(request, vocabulary, n_vocab, counts_calls=counts_calls)
        self.verifier = self._samplers.verifier

    def begin(self, drafts: Drafts, sequence: Model) -> None:
        """Let the text be drafted for; `sequence` holds the prompt before the first step."""
        self.drafts, self.sequence, budget = drafts, sequence, self._samplers.budget
        if drafts.drafter is not None:
            if isinstance(self.verifier, RuleVerifier):
                drafts.drafter.set_sampling(self.request.sampling)
            if drafts.drafter.prediction is not None:
                drafts.drafter.prediction = self.request.prediction
        drafts.begin(
            self.prompt,
            guide=self._samplers.guide,
            ends=self._ends,
            closing=None if budget is None else lambda: budget.closing,
            fixed_length=self.verifier.fixed_length,
        )

    def choose(self) -> Chooser | None:
        return self.verifier.choose(self.settled + 1)

    # ------------------------------------------------------------------ the tokens of a pass

    def first(self, rows: Logits) -> Step:
        """Emit the prefill's token; `rows` are the logits after the prompt, shape (1, n_vocab)."""
        verdict = self.verifier.verify(rows, NO_DRAFT, self.settled)
        self.drafts.observe_logits(self.last, NO_DRAFT, rows)
        step = self._emit(verdict, rows, _PREFILL, self.settled)
        self.last = step.tokens[-1]
        return step

    def commit(self, plan: Plan, rows: Logits, bound: float = 0.0) -> Step | None:
        """Emit the accepted tokens of a draft and one token of the target's, up to the end of the text.

        Args:
            plan: What was sent.
            rows: Logits of the pass, at least one row for the last token and each token of the draft.
            bound: How far the size of this pass may have moved a logit; 0 means not at all.

        Returns:
            The step; `None` if no token could be chosen, for the reason in `error`.
        """
        if bound and self._samplers.calls is not None:
            self._samplers.calls.arm(bound)
        draft, position = plan.draft, self.settled + 1
        # Plain decoding would not have seen the logits after the end of the text.
        n_rows = len(draft.tokens) + (not plan.ends)
        try:
            verdict = self.verifier.verify(
                rows if len(rows) == n_rows else rows[:n_rows], plan.verified_draft, position
            )
        except (NGramSpecError, ValueError) as error:
            self.error = error
            return None
        if self.drafts.drafter is not None:
            self.drafts.observe_logits(self.last, draft, rows, len(verdict.tokens) - 1)
        step = self._emit(verdict, rows, plan, position)
        self.settled += len(step.tokens)
        self.last = step.tokens[-1]
        if self.stop is None:
            self.error = verdict.error
        return step

    def _emit(self, verdict: Verdict, rows: Logits, plan: Plan, position: int) -> Step:
        """Return the step of a verdict's tokens up to the end of the text; `position`: index of its first token."""
        tokens, stream, ends = verdict.tokens, self._stream, self._ends
        # The stop reason has three sources. At the same token, the end of generation comes before a limit. A complete
        # stop string comes before both, because the text ends before it.
        stop: StopReason | None = None
        count = 0
        for token in tokens:
            count += 1
            if ends[token]:
                stop = "eog"
                break
            if count >= self.tokens_left:
                stop = self._limit_reason
                break
        # A token that ends the text is not part of it.
        pieces = stream.push_all(map(self._pieces.__getitem__, tokens[: count - (stop == "eog")]))
        if stream.stop_string is not None:
            count, stop = len(pieces), "stop"
        elif stop is not None:
            if stop == "eog":
                pieces.append("")
            pieces[-1] += stream.finish()
            if stream.stop_string is not None:
                stop = "stop"
        self.stop = stop
        self.tokens_left -= count
        tokens, draft_tokens = tokens[:count], plan.draft.tokens
        step = Step(
            tokens,
            tuple(pieces),
            drafted=draft_tokens,
            accepted=min(verdict.accepted, count),
            source=plan.draft.source if draft_tokens else "",
            position=position,
            stop=stop,
        )
        if stop == "stop":
            step.stop_string = stream.stop_string
        samplers = self._samplers
        if samplers.calls is not None:
            step.close_calls = samplers.calls.take()
        if self.request.logprobs is not None:
            step.logprobs = samplers.logprobs(tokens, rows, self.request.logprobs)
        if self.request.return_decisions:
            step.verified_draft, step.decisions = plan.verified_draft, tuple(samplers.decisions)
            samplers.decisions.clear()
        return step
