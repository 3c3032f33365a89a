"""`Generation`: one text as it grows, whoever makes the passes over it; `TextStream`: its tokens as text.

`SpeculativeDecoder` grows one at a time, `ngramspec.batching` several together; both by `Speculation.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from encodings import utf_8

from ngramspec.acceptance.rules import TokenDecision, Verdict
from ngramspec.acceptance.verifier import Acceptance, RuleVerifier, Verifier
from ngramspec.backend import Logits, Model, Vocabulary
from ngramspec.decoding.drafts import Drafts, Plan, Text, no_draft
from ngramspec.drafting.draft import NO_DRAFT, Chooser
from ngramspec.drafting.grammar import GrammarGuide
from ngramspec.errors import NGramSpecError, PromptError
from ngramspec.sampling.distribution import logprobs, sampled_logprobs
from ngramspec.sampling.recording_sampler import RecordingSampler
from ngramspec.sampling.sampler import NO_RULES, BudgetSampler, CloseCalls, Forbidding, TextRules
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Step, StopReason
from ngramspec.tokens import begun, ending_tokens


class Generation(Text):
    """The text that follows a prompt, as far as it is settled.

    Args:
        prompt: token ids, fewer than n_ctx.
        vocabulary: what they mean.
        n_ctx: most tokens of prompt and text.
        n_vocab: length of a row of logits.
        counts_calls: count the tokens that rounding could have decided (`Step.close_calls`).
        piece: the bytes that a token is shown as; None: as `vocabulary` says.
        rules: where it may end, which words it may not hold, and how long it may reason.

    The rest, and what is raised, is as in `SpeculativeDecoder.generate`.
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
        acceptance: str | Acceptance | Verifier | None = None,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        post_sampling: bool = False,
        return_decisions: bool = False,
        counts_calls: bool = False,
        piece: Callable[[int], bytes] | None = None,
        rules: TextRules = NO_RULES,
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        if not prompt:
            raise PromptError("the prompt is empty")
        room = n_ctx - len(prompt)
        if room < 1:
            raise PromptError(
                f"the prompt has {len(prompt)} tokens and leaves no room for an answer in the context of {n_ctx}"
            )
        self._out_of: StopReason = "length" if max_tokens <= room else "context"
        own, ends = vocabulary.is_eog, rules.ends
        self._is_eog: Callable[[int], bool] = (lambda token: token in ends or own(token)) if ends else own
        self._piece = piece or vocabulary.piece
        self._stream = TextStream(stop, rules.least)
        if logprobs is not None and not 0 <= logprobs <= n_vocab:
            raise ValueError(f"logprobs must be 0 to {n_vocab}, the size of the vocabulary, got {logprobs}")
        self._top = logprobs
        judgements: list[TokenDecision] = []
        self._judgements = judgements if return_decisions else None
        self._guide: GrammarGuide | None = None
        self._budget: BudgetSampler | None = None
        self._calls: CloseCalls | None = None
        self._recorder: RecordingSampler | None = None
        if acceptance is None or isinstance(acceptance, str | Acceptance):
            sampler = vocabulary.sampler(sampling or Sampling())
            if rules.least or rules.words:
                too_early = {*ending_tokens(vocabulary), *ends} if rules.least else ()
                sampler = Forbidding(sampler, rules, [token for token in too_early if 0 <= token < n_vocab])
            if rules.reasoning is not None:
                sampler = self._budget = BudgetSampler(sampler, rules.reasoning)
            self._calls = CloseCalls(sampler) if counts_calls else None
            how = acceptance if isinstance(acceptance, Acceptance) else Acceptance(acceptance)
            how.rule(sampler.sampling, ruled=isinstance(sampler, Forbidding | BudgetSampler))
            sampler = self._calls or sampler
            if post_sampling and logprobs is not None:
                # Outermost: counting close calls draws a second time.
                sampler = self._recorder = RecordingSampler(sampler)
            acceptance = RuleVerifier(sampler, how, judgements.append if return_decisions else None)
            sampler.begin(prompt)
            if sampler.grammar is not None:
                self._guide = GrammarGuide(sampler.grammar)
        elif sampling is not None or return_decisions:
            raise ValueError("sampling and return_decisions cannot be combined with a verifier, which has its own")
        self.prompt = list(prompt)
        self._sampling = sampling
        self.verifier = acceptance
        # tokens of prompt and text, without the last one, which no pass has evaluated yet
        self.settled = len(self.prompt)
        self.last = self.prompt[-1]
        self.left = min(max_tokens, room)
        self.stop: StopReason | None = None  # why the text ended; None while it grows
        # what ended the text behind the tokens of the last step; None while nothing did
        self.error: NGramSpecError | ValueError | None = None

    def begin(self, drafts: Drafts, sequence: Model) -> None:
        """Let a text be drafted for; `sequence` holds the prompt before the first step."""
        self.drafts, self.sequence, budget = drafts, sequence, self._budget
        if drafts.drafter is not None and self._sampling is not None:
            drafts.drafter.set_sampling(self._sampling)
        drafts.begin(
            self.prompt,
            guide=self._guide,
            is_eog=self._is_eog,
            closing=None if budget is None else lambda: budget.closing,
            fixed_length=self.verifier.fixed_length,
        )

    def chooser(self) -> Chooser | None:
        return self.verifier.choose(self.settled + 1)

    def first(self, rows: Logits) -> Step:
        """The step of the prefill's token; `rows`: the logits after the prompt, shape (1, n_vocab)."""
        verdict = self.verifier.verify(rows, NO_DRAFT, self.settled)
        self.drafts.observe_logits(self.last, NO_DRAFT, rows)
        step = self._step(verdict, rows, _PREFILL, self.settled)
        self.last = step.tokens[-1]
        return step

    def take(self, plan: Plan, rows: Logits, bound: float = 0.0) -> Step | None:
        """The step that comes of a pass: the accepted prefix and one token of the target's, up to the text's end.

        None where no token could be chosen: `error` says why.

        Args:
            plan: what was sent.
            rows: the pass's logits, at least one for the last token and each of the draft.
            bound: how far the size of this pass may have moved a logit; 0: not at all.
        """
        if self._calls is not None and bound:
            self._calls.arm(bound)
        try:
            # Plain decoding would not have seen the logits behind the text's end.
            verdict = self.verifier.verify(
                rows[: len(plan.sent) + (not plan.ends)], plan.verified_draft, self.settled + 1
            )
        except (NGramSpecError, ValueError) as error:
            self.error = error
            return None
        self.drafts.observe_logits(self.last, plan.sent, rows, len(verdict.tokens) - 1)
        step = self._step(verdict, rows, plan, self.settled + 1)
        self.settled += len(step.tokens)
        self.last = step.tokens[-1]
        if self.stop is None:
            self.error = verdict.error
        return step

    def _step(self, verdict: Verdict, rows: Logits, plan: Plan, position: int) -> Step:
        """Emit the tokens of a verdict, up to the end of the text; `position`: index of its first token."""
        pieces = self._pieces(verdict.tokens)
        tokens, drafted = verdict.tokens[: len(pieces)], plan.sent.tokens
        step = Step(
            tokens,
            pieces,
            drafted=drafted,
            accepted=min(verdict.accepted, len(tokens)),
            source=plan.sent.source if drafted else "",
            close_calls=self._calls.take() if self._calls is not None else 0,
            position=position,
            stop=self.stop,
            stop_string=self._stream.stopped,
        )
        if self._top is not None and self._recorder is not None:
            distributions = self._recorder.pop_distributions()
            pairs = zip(distributions, tokens, strict=False)
            step.logprobs = tuple(sampled_logprobs(p, token, self._top) for p, token in pairs)
        elif self._top is not None:
            step.logprobs = tuple(logprobs(row, token, self._top) for row, token in zip(rows, tokens, strict=False))
        if self._judgements is not None:
            step.verified_draft, step.decisions = plan.verified_draft, tuple(self._judgements)
            self._judgements.clear()
        return step

    def _pieces(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """One piece of text per token, up to the token that ends the text."""
        pieces: list[str] = []
        stream = self._stream
        for token in tokens:
            self.left -= 1
            eog = self._is_eog(token)
            pieces.append("" if eog else stream.push(self._piece(token)))
            if eog or self.left <= 0 or stream.stopped is not None:
                if stream.stopped is None:
                    pieces[-1] += stream.finish()
                by_itself: StopReason = "stop" if stream.stopped else "eog"
                self.stop = by_itself if eog or stream.stopped else self._out_of
                break
        return tuple(pieces)


_PREFILL = no_draft(0)


# --------------------------------------------------------------------------- tokens to text


class TextStream:
    """Turns the byte pieces of successive tokens into text that ends before the first stop string.

    What comes out is final: no broken character is released and rolled back, no part of a stop string is shown.
    Bytes that can never become valid UTF-8 read U+FFFD. A character still incomplete when the text ends is dropped: it
    was cut off by the end (of the token budget, say), not wrong.

    Example (stop "END"):
        push(b"caf\\xc3") -> "caf"      half a character is held back
        push(b"\\xa9 E")  -> "é "       "E" could begin "END"
        push(b"NDE")     -> ""         the text ended before "END"; `stopped` is "END"

    Time of a push: O(piece * stop strings), plus O(longest stop string squared) for the held-back suffix.
    """

    def __init__(self, stop: Sequence[str] = (), least: int = 0) -> None:
        """Start an empty text, which ends before any of the strings `stop`; they do not count in `least` tokens.

        Raises ValueError: a stop string is empty, or `stop` is itself a string.
        """
        if isinstance(stop, str):
            raise ValueError(f"stop must be a sequence of strings, not the string {stop!r}")
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        # Longest first, so that the first of equal positions is the longest.
        self._stop = tuple(sorted(set(stop), key=len, reverse=True))
        self._decoder = utf_8.IncrementalDecoder(errors="replace")
        self._held = ""
        self._early = least
        # the stop string that ended the text: the one that begins first; of several that begin at one place, the
        # longest that is complete by then (waiting for a longer one costs passes, and gives the same text).
        self.stopped: str | None = None

    def push(self, piece: bytes) -> str:
        """The text that this token's bytes release; empty once a stop string was found."""
        if self.stopped is not None:
            return ""
        # Most pieces are whole characters behind whole characters, for which the decoder is five times as slow.
        whole = piece.isascii() and not self._decoder.buffer
        text = self._held + (piece.decode() if whole else self._decoder.decode(piece))
        if not self._stop or self._early > 0:
            self._early -= 1
            return text
        open_at = begun(text, self._stop)
        stop_at = self._find(text)
        # An unfinished stop string that begins before a finished one still wins if it completes: "abcd" over "bc" after
        # "abc". So the finished one counts only when nothing that began earlier is still open.
        if stop_at is not None and stop_at[0] <= open_at:
            return self._cut(text, *stop_at)
        self._held = text[open_at:]
        return text[:open_at]

    def finish(self) -> str:
        """What was held back, when the text ends for another reason; a stop string that was complete, and waited for
        one that began earlier, ends it here."""
        text, self._held = self._held, ""
        self._decoder.reset()
        stop_at = self._find(text)
        return text if stop_at is None else self._cut(text, *stop_at)

    def _cut(self, text: str, at: int, stop: str) -> str:
        self.stopped = stop
        self._held = ""
        return text[:at]

    def _find(self, text: str) -> tuple[int, str] | None:
        """(position, stop string) of the earliest stop string in the text, the longest of those."""
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        return min(found, key=lambda hit: hit[0], default=None)
