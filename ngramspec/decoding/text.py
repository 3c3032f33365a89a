"""`Text`: one growing sequence. It verifies the tokens of a pass, turns them into text, and decides when it ends.

`Drafts` are its drafts, and `TextStream` its characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from encodings import utf_8
from types import MappingProxyType
from typing import NamedTuple

from ngramspec import leaves
from ngramspec.acceptance.rules import TokenDecision, Verdict
from ngramspec.acceptance.verifier import Acceptance, RuleVerifier, Verifier
from ngramspec.backend import Logits, Model, Vocabulary
from ngramspec.data import NGramSpecError
from ngramspec.drafting.acceptance_estimator import AcceptanceEstimator
from ngramspec.drafting.draft import NO_DRAFT, Ask, Chooser, Draft, Drafter, MarginalCost
from ngramspec.policies.policy import Policy, smallest
from ngramspec.request import GREEDY, Request
from ngramspec.sampling.distribution import distribution_logprobs, logprobs
from ngramspec.sampling.sampler import CloseCalls, RecordingSampler, Sampler, TokenBanSampler
from ngramspec.steps import Step, StopReason
from ngramspec.tokens import TokenTable, ending_tokens


class Drafts:
    """Drafts for the texts of one sequence, one text at a time.

    `drafter` proposes the tokens; `None` means plain decoding. `policy` gets the logits of each pass, if it wants them.
    """

    # All that the drafter proposed for the current pass, sent or not, with estimates; `None` if it was not asked.
    proposal: Draft | None = None
    is_estimated = False  # whether the proposal has estimates from `estimator`
    guide: leaves.GrammarGuide | None = None  # what the text's grammar says of the next tokens; `None`: any may follow
    ends: Mapping[int, bool] | None = None  # whether a token ends the text; `None`: none does
    # Returns the tokens that must come next to close reasoning; `None` means that there never are any.
    closing: Callable[[], Sequence[int]] | None = None
    fixed_length = False  # as in `Ask`

    def __init__(self, drafter: Drafter | None, policy: Policy | None = None) -> None:
        self.drafter = drafter
        self.is_slow = drafter is not None and drafter.is_slow  # a model drafts, whose passes take time too
        self.observer = policy if policy is not None and policy.wants_logits else None
        self.estimator = AcceptanceEstimator()  # for drafters that make no estimates

    def begin(
        self,
        prompt: Sequence[int],
        *,
        guide: leaves.GrammarGuide | None = None,
        ends: Mapping[int, bool] | None = None,
        closing: Callable[[], Sequence[int]] | None = None,
        fixed_length: bool = False,
    ) -> None:
        self.guide, self.ends, self.closing, self.fixed_length = guide, ends, closing, fixed_length
        self.proposal, self.is_estimated = None, False
        self.estimator.begin()
        if self.drafter is not None:
            self.drafter.begin(prompt)

    def first(self, token: int) -> None:
        """Show the drafter the prefill's token, for which nothing was drafted."""
        if self.drafter is not None:
            self.drafter.accept((token,))

    def propose(self, limit: int, choose: Chooser | None, price: MarginalCost | None) -> Draft:
        """Return a draft with estimates, as the grammar allows it; see `Ask`."""
        assert self.drafter is not None
        self.proposal = None
        if self.closing is not None and (tokens := tuple(self.closing()[:limit])):
            # These tokens cannot fail.
            q = tuple({token: 1.0} for token in tokens)
            return self._shape(Draft(tokens, q, acceptance_probs=(1.0,) * len(tokens), source="reasoning"), limit)
        draft = self.drafter.propose(Ask(limit, choose, fixed_length=self.fixed_length, price=price))
        if draft.tokens and not draft.acceptance_probs:
            draft = self.estimator.add_estimates(draft, limit, fixed_length=self.fixed_length)
            self.is_estimated = True
        self.proposal = draft
        return draft if self.guide is None else self._shape(draft, limit)

    def _shape(self, draft: Draft, limit: int) -> Draft:
        return draft if self.guide is None else self.guide.shape(draft, limit, fixed_length=self.fixed_length)


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


class DraftedText:
    """A text that passes are made over; `sequence` holds it without its last token."""

    last: int  # that token
    tokens_left: int  # maximum number of tokens that may still be emitted

    def __init__(self, drafts: Drafts, sequence: Model) -> None:
        self.drafts, self.sequence = drafts, sequence

    def choose(self) -> Chooser | None:
        """Return what the drafter picks tokens with in the next draft."""
        return None

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

    With `counts_calls`, the tokens that rounding could have decided are counted (`Step.close_calls`).
    """

    def __init__(self, request: Request, vocabulary: Vocabulary, model: Model, *, counts_calls: bool = False) -> None:
        request.check(model)
        room = model.n_ctx - len(request.prompt)
        self.request = request
        self.prompt = list(request.prompt)
        # Number of tokens of prompt and text without the last one, which no pass has evaluated yet.
        self.settled = len(self.prompt) - 1
        self.last = self.prompt[-1]
        self.tokens_left = min(request.max_tokens, room)
        self.stop: StopReason | None = None  # why the text ended; `None` while it grows
        self.error: NGramSpecError | ValueError | None = None  # what ended the text after the tokens of the last step
        self.is_released = False  # whether the sequence may hold another text, because the request was cancelled
        self._limit_reason: StopReason = "length" if request.max_tokens <= room else "context"
        ends, is_eog = request.rules.stop_token_ids, vocabulary.is_eog
        self._ends: TokenTable[bool] = TokenTable(lambda token: token in ends or is_eog(token))
        shown, piece, display = request.controls, vocabulary.piece, vocabulary.display_piece
        self._pieces: TokenTable[bytes] = TokenTable(lambda token: display(token) if token in shown else piece(token))
        self._stream = TextStream(request.stop, request.rules.min_tokens, vocabulary.controls if request.stop else {})
        self._pieces.update({token: raw for token, raw in self._stream.pieces.items() if token not in shown})
        self._guide: leaves.GrammarGuide | None = None
        self._budget: leaves.BudgetSampler | None = None  # limits reasoning
        self._calls: CloseCalls | None = None
        self._recorder: RecordingSampler | None = None
        self._decisions: list[TokenDecision] = []  # since the last step
        self._has_records = counts_calls or request.logprobs is not None or request.return_decisions
        self.verifier = self._make_verifier(vocabulary, model.n_vocab, counts_calls)

    def _make_verifier(self, vocabulary: Vocabulary, n_vocab: int, counts_calls: bool) -> Verifier:
        """Return the verifier, with the samplers that apply the request's rules and observe its draws."""
        request, acceptance = self.request, self.request.acceptance
        if acceptance is not None and not isinstance(acceptance, str | Acceptance):
            if request.sampling is not GREEDY or request.return_decisions:
                raise ValueError("sampling and return_decisions cannot be combined with a verifier, which has its own")
            return acceptance
        rules = request.rules
        sampler: Sampler = vocabulary.sampler(request.sampling)
        if rules.min_tokens or rules.bad_words:
            too_early = {*ending_tokens(vocabulary), *rules.stop_token_ids} if rules.min_tokens else ()
            sampler = TokenBanSampler(sampler, rules, [token for token in too_early if 0 <= token < n_vocab])
        if rules.reasoning is not None:
            sampler = self._budget = leaves.BudgetSampler(sampler, rules.reasoning)
        how = acceptance if isinstance(acceptance, Acceptance) else Acceptance(acceptance)
        how.rule(sampler.sampling, rules.restriction)
        if counts_calls:
            sampler = self._calls = CloseCalls(sampler)
        if request.post_sampling and request.logprobs is not None:
            # Outermost, because counting close calls draws a second time.
            sampler = self._recorder = RecordingSampler(sampler)
        verifier = RuleVerifier(sampler, how, self._decisions.append if request.return_decisions else None)
        sampler.begin(request.prompt)
        if sampler.grammar is not None:
            self._guide = leaves.GrammarGuide(sampler.grammar)
        return verifier

    @property
    def is_growing(self) -> bool:
        """True if the text continues after the passes so far."""
        return not (self.stop or self.error or self.is_released)

    def begin(self, drafts: Drafts, sequence: Model) -> None:
        """Let the text be drafted for; `sequence` holds the prompt before the first step."""
        self.drafts, self.sequence, budget = drafts, sequence, self._budget
        if drafts.drafter is not None:
            if isinstance(self.verifier, RuleVerifier):
                drafts.drafter.set_sampling(self.request.sampling)
            if drafts.drafter.prediction is not None:
                drafts.drafter.prediction = self.request.prediction
        drafts.begin(
            self.prompt,
            guide=self._guide,
            ends=self._ends,
            closing=None if budget is None else lambda: budget.closing,
            fixed_length=self.verifier.fixed_length,
        )

    def choose(self) -> Chooser | None:
        return self.verifier.choose(self.settled + 1)

    # ------------------------------------------------------------------ the tokens of a pass

    def first(self, rows: Logits) -> Step:
        """Emit the prefill's token; `rows` are the logits after the prompt, shape (1, n_vocab)."""
        step = self.commit(no_draft(0), rows)
        if step is None:
            assert self.error is not None
            self.settled += 1  # the cache keeps the whole prompt
            raise self.error
        return step

    def commit(self, plan: Plan, rows: Logits, bound: float = 0.0) -> Step | None:
        """Emit the accepted tokens of a draft and one token of the target's, up to the end of the text.

        `rows` are the logits of the pass, at least one row for the last token and each token of the draft, and `bound`
        is how far the size of this pass may have moved a logit. `None` means that no token could be chosen, for the
        reason in `error`.
        """
        if bound and self._calls is not None:
            self._calls.arm(bound)
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
            # Nearly all pieces are whole characters after whole ones, for which the decoder is five times as slow.
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
        if self._has_records:
            self._add_records(step, rows, plan.verified_draft)
        return step

    def _add_records(self, step: Step, rows: Logits, verified_draft: Draft) -> None:
        """Add what the request wants to know about the tokens of a step; `rows` are the logits of its pass."""
        if self._calls is not None:
            step.close_calls = self._calls.take()
        top = self.request.logprobs
        if self._recorder is not None and top is not None:
            pairs = zip(self._recorder.pop_distributions(), step.tokens, strict=False)
            step.logprobs = tuple(distribution_logprobs(p, token, top) for p, token in pairs)
        elif top is not None:
            step.logprobs = tuple(logprobs(row, token, top) for row, token in zip(rows, step.tokens, strict=False))
        if self.request.return_decisions:
            step.verified_draft, step.decisions = verified_draft, tuple(self._decisions)
            self._decisions.clear()


class TextStream:
    """Turns the byte pieces of successive tokens into text that ends before the first stop string.

    What comes out is final: no broken character is released and rolled back, no part of a stop string is shown.
    Bytes that can never become valid UTF-8 read U+FFFD. A character still incomplete when the text ends is dropped: it
    was cut off by the end (of the token budget, say), not wrong.

    Example (stop "END"):
        push(b"caf\\xc3") -> "caf"      half a character is held back
        push(b"\\xa9 E")  -> "é "       "E" could begin "END"
        push(b"NDE")     -> ""         the text ended before "END"; `stop_string` is "END"

    Control tokens have no text, but a stop string may name some. `pieces` contains the bytes to push for these by their
    ids; nothing of them is shown.

    Time of a push: O(piece * stop strings), plus O(longest stop string squared) for the held-back suffix.
    """

    def __init__(
        self, stop: Sequence[str] = (), min_tokens: int = 0, controls: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Start an empty text; in its first `min_tokens` tokens, stop strings do not count.

        `controls` are the ids of the control tokens by their names. A ValueError means that a stop string is empty, or
        that `stop` is itself a string.
        """
        if isinstance(stop, str):
            raise ValueError(f"stop must be a sequence of strings, not the string {stop!r}")
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        names = sorted((name for name in controls if any(name in text for text in stop)), key=len, reverse=True)
        # Halves of surrogate pairs, which no text contains, stand for control tokens.
        marks = {name: chr(0xD800 + i) for i, name in enumerate(names)}
        self.pieces = {controls[name]: b"\xff" + name.encode() for name in names}
        self._marks = {self.pieces[controls[name]]: mark for name, mark in marks.items()}
        self._hidden = dict.fromkeys(map(ord, marks.values()))
        pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._stops = {pattern.sub(lambda match: marks[match[0]], text): text for text in stop} | {s: s for s in stop}
        # Longest first, so that the first of equal positions is the longest.
        self.stop = tuple(sorted(self._stops, key=len, reverse=True))
        self.decoder = utf_8.IncrementalDecoder(errors="replace")
        self._suffix = ""
        self._min_tokens_left = min_tokens
        # The stop string that ended the text: the one that begins first. If several begin at the same place, it is the
        # longest one that is complete by then. Waiting for a longer one would cost passes and give the same text.
        self.stop_string: str | None = None

    def push(self, piece: bytes) -> str:
        """Return the text that a token's bytes release; empty after a stop string."""
        if self.stop_string is not None:
            return ""
        text = self._suffix + (self._marks.get(piece) or self.decoder.decode(piece))
        if not self.stop or self._min_tokens_left > 0:
            self._min_tokens_left -= 1
            return text.translate(self._hidden)
        open_at = _find_partial_match(text, self.stop)
        stop_at = self._find(text)
        # An unfinished stop string that begins before a finished one still wins if it completes: "abcd" over "bc" after
        # "abc". So the finished one counts only when nothing that began earlier is still open.
        if stop_at is not None and stop_at[0] <= open_at:
            return self._cut(text, *stop_at)
        self._suffix = text[open_at:]
        return text[:open_at].translate(self._hidden)

    def finish(self) -> str:
        """Return the text that was held back, when the text ends for another reason.

        A complete stop string may have waited for one that began earlier. It then ends the text here.
        """
        text, self._suffix = self._suffix, ""
        self.decoder.reset()
        stop_at = self._find(text)
        return text.translate(self._hidden) if stop_at is None else self._cut(text, *stop_at)

    def _cut(self, text: str, at: int, stop: str) -> str:
        self.stop_string = self._stops[stop]
        self._suffix = ""
        return text[:at].translate(self._hidden)

    def _find(self, text: str) -> tuple[int, str] | None:
        """Return the position and the text of the earliest stop string, the longest of those."""
        matches = [(at, stop) for stop in self.stop if (at := text.find(stop)) >= 0]
        return min(matches, key=lambda match: match[0], default=None)


def _find_partial_match(text: str, marks: Sequence[str]) -> int:
    """Return the index at which the longest incomplete mark at the end of a text begins, or len(text)."""
    longest = max(map(len, marks), default=1)
    for at in range(max(0, len(text) - longest + 1), len(text)):
        if any(mark.startswith(text[at:]) for mark in marks):
            return at
    return len(text)
