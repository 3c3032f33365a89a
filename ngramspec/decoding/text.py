"""`Text`: one growing sequence. It verifies the tokens of a pass, turns them into text, and decides when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ngramspec.acceptance.rules import Verdict
from ngramspec.acceptance.verifier import RuleVerifier
from ngramspec.backend import Logits, Model, Vocabulary
from ngramspec.data import NGramSpecError
from ngramspec.decoding.drafts import Drafts
from ngramspec.decoding.sampler_stack import SamplerStack
from ngramspec.decoding.stream import TextStream
from ngramspec.drafting.draft import NO_DRAFT, Chooser, Draft, MarginalCost
from ngramspec.policies.policy import smallest
from ngramspec.request import Request
from ngramspec.steps import Step, StopReason
from ngramspec.tokens import TokenTable


class Plan(NamedTuple):
    """The tokens of one text in a pass."""

    draft: Draft  # the draft in the batch; nothing in it is past the end of the text
    # The draft for the verifier: `draft`, followed by the forbidden token if a grammar cut a draft that was drawn
    # blindly. That token is rejected without being sent, and its q determines how its replacement is drawn.
    verified_draft: Draft
    size: int  # of the batch: one token more than the draft, or padded further
    ends: bool  # whether the draft's last token ends the text

    def batch(self, last: int) -> list[int]:
        """Return the tokens to evaluate: the text's last one, the draft, and the padding."""
        tokens = self.draft.tokens
        return [last, *tokens, *[last] * (self.size - 1 - len(tokens))]


def no_draft(size: int) -> Plan:
    """Return the plan that sends no draft, in a batch of `size`."""
    return Plan(NO_DRAFT, NO_DRAFT, size, ends=False)


_PREFILL = no_draft(0)


class DraftedText:
    """A text that passes are made over.

    Attributes:
        drafts: Drafts for it.
        sequence: Holds it without its last token.
        last: That token.
        tokens_left: Maximum number of tokens that may still be emitted.
    """

    last: int
    tokens_left: int

    def __init__(self, drafts: Drafts, sequence: Model) -> None:
        self.drafts, self.sequence = drafts, sequence

    def choose(self) -> Chooser | None:
        """Return what the drafter picks tokens with in the next draft."""
        return None

    def propose(self, limit: int, price: MarginalCost | None) -> Draft:
        """Return a draft with estimates, as the grammar allows it; see `Drafter.propose`."""
        drafts, drafter = self.drafts, self.drafts.drafter
        assert drafter is not None
        drafts.proposal = None
        if drafts.closing is not None and (closing := drafts.closing_draft(limit)):
            return closing
        draft = drafter.propose(limit, self.choose(), fixed_length=drafts.fixed_length, price=price)
        if drafts.guide is not None or not draft.acceptance_probs:
            return drafts.complete(draft, limit)
        drafts.proposal = draft
        return draft

    def plan(self, draft: Draft, size: int, sizes: Sequence[int]) -> Plan:
        """Plan to send a draft in a batch of `size`, or of a smaller one of `sizes`, which ascend.

        The draft is cut after the token that ends the text. One that was drawn blindly is also cut before the first
        token that the grammar forbids.
        """
        drafts, length = self.drafts, len(draft.tokens)
        n_sent = n_verified = length
        ends = False
        if drafts.ends is not None:
            for i, token in enumerate(draft.tokens, 1):
                if drafts.ends[token]:
                    n_sent = n_verified = i
                    ends = True
                    break
        if drafts.guide is not None and drafts.fixed_length:
            n_sent = drafts.guide.legal(draft.head(n_verified))
            ends = ends and n_sent == n_verified
            n_verified = min(n_verified, n_sent + 1)
        if n_sent == length:
            return Plan(draft, draft, size, ends)
        return Plan(draft.head(n_sent), draft.head(n_verified), smallest(1 + n_sent, sizes), ends)

    def observe_logits(self, draft: Draft, rows: Logits, n_accepted: int = 0) -> None:
        """Show the logits of a pass to drafter and policy, if they want them; see `Drafter.observe_logits`."""
        drafts, drafter = self.drafts, self.drafts.drafter
        if drafter is not None:
            if drafter.wants_logits:
                drafter.observe_logits((self.last, *draft.tokens), rows[: 1 + len(draft)], n_accepted)
            if drafts.observer is not None:
                drafts.observer.observe_logits(rows[n_accepted])


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
        request.check(n_ctx, n_vocab)
        room = n_ctx - len(request.prompt)
        self.request = request
        self.prompt = list(request.prompt)
        self.settled = len(self.prompt) - 1
        self.last = self.prompt[-1]
        self.tokens_left = min(request.max_tokens, room)
        self.stop: StopReason | None = None
        self.error: NGramSpecError | ValueError | None = None
        self.is_released = False
        self._limit_reason: StopReason = "length" if request.max_tokens <= room else "context"
        ends, is_eog = request.rules.stop_token_ids, vocabulary.is_eog
        self._ends: TokenTable[bool] = TokenTable(lambda token: token in ends or is_eog(token))
        shown, piece, display = request.controls, vocabulary.piece, vocabulary.display_piece
        self._pieces: TokenTable[bytes] = TokenTable(lambda token: display(token) if token in shown else piece(token))
        self._stream = TextStream(request.stop, request.rules.min_tokens, vocabulary.controls if request.stop else {})
        self._pieces.update({token: raw for token, raw in self._stream.pieces.items() if token not in shown})
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
        step = self.commit(_PREFILL, rows)
        if step is None:
            assert self.error is not None
            self.settled += 1  # the cache keeps the whole prompt
            raise self.error
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
        # Plain decoding would not have seen the logits after the end of the text.
        n_rows = len(plan.draft.tokens) + (not plan.ends)
        try:
            verdict = self.verifier.verify(rows[:n_rows], plan.verified_draft, self.settled + 1)
        except (NGramSpecError, ValueError) as error:
            self.error = error
            return None
        if self.drafts.drafter is not None:
            self.observe_logits(plan.draft, rows, len(verdict.tokens) - 1)
        step = self._emit(verdict, rows, plan)
        self.settled += len(step.tokens)
        self.last = step.tokens[-1]
        if self.stop is None:
            self.error = verdict.error
        return step

    def _emit(self, verdict: Verdict, rows: Logits, plan: Plan) -> Step:
        """Return the step of a verdict's tokens up to the end of the text."""
        stream, pieces = self._stream, list[str]()
        # The stop reason has three sources. At the same token, the end of generation comes before a limit. A complete
        # stop string comes before both, because the text ends before it.
        stop: StopReason | None = None
        for token in verdict.tokens:
            if self._ends[token]:  # not part of the text
                stop = "eog"
                pieces.append(stream.push(stream.pieces.get(token, b"")) + stream.finish())
                break
            piece = self._pieces[token]
            # Without stop strings, nearly all pieces are whole characters after whole characters.
            is_whole = not stream.stop and piece.isascii() and not stream.decoder.buffer
            pieces.append(piece.decode() if is_whole else stream.push(piece))
            if stream.stop_string is not None:
                break
            if len(pieces) >= self.tokens_left:
                stop = self._limit_reason
                pieces[-1] += stream.finish()
                break
        if stream.stop_string is not None:
            stop = "stop"
        self.stop = stop
        self.tokens_left -= len(pieces)
        tokens, draft = verdict.tokens[: len(pieces)], plan.draft
        step = Step(
            tokens,
            tuple(pieces),
            drafted=draft.tokens,
            accepted=min(verdict.accepted, len(pieces)),
            source=draft.source if draft.tokens else "",
            position=self.settled + 1,
            stop=stop,
            stop_string=stream.stop_string,
        )
        if self._samplers.has_records:
            self._samplers.add_records(step, rows, plan.verified_draft)
        return step
