"""`SpeculativeDecoder`: the loop that joins drafter, policy, target and verifier.

    for step in decoder.generate(prompt, max_tokens=200):
        print(step.text, end="")

One decoder serves many requests on one target. Between passes the KV cache holds the prompt and every emitted
token but the last, whatever was drafted, accepted or refused; a consumer that stops early leaves it so.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np

from ngramspec.calibration import Calibration
from ngramspec.cost import CostCurve
from ngramspec.draft import NO_DRAFT, Draft, Drafter
from ngramspec.drafting import make_drafter
from ngramspec.errors import PromptError
from ngramspec.policy import Pass, Policy, make_policy, smallest
from ngramspec.protocol import Progress, TargetProtocol
from ngramspec.sampling import Sampling
from ngramspec.stats import Step, StopReason
from ngramspec.text import TextStream
from ngramspec.verify import Verifier


class SpeculativeDecoder:
    """Generates with drafts, and gives the text that the target gives without.

    Args:
        target: the loaded model. One that cannot roll its memory back is decoded plainly.
        drafter: a name, a drafter, or None for plain decoding.
        policy: a name or a policy: how much to draft.
        draft_max: most tokens in a draft; None leaves it to the policy named.
        exact: every pass uses batch sizes of one kernel class, so that the text depends on model, prompt,
            sampling and seed alone, bit for bit (see `ngramspec.probe`). Load the target with `exact=True`
            too: it then picks the settings under which this costs least.
        calibration_folder: where measurements are kept; None for the user's cache folder.

    Raises:
        ValueError: an unknown drafter or policy name, a `draft_max` below 1, or one beside a policy object.
    """

    def __init__(
        self,
        target: TargetProtocol,
        *,
        drafter: str | Drafter | None = "ngram",
        policy: str | Policy = "cost",
        draft_max: int | None = None,
        exact: bool = False,
        calibration_folder: Path | None = None,
    ) -> None:
        if draft_max is not None and not isinstance(policy, str):
            raise ValueError("draft_max goes with a policy's name; a policy that is passed in has its own")
        self.target = target
        self.drafter = make_drafter(drafter) if isinstance(drafter, str) else drafter
        self.policy = make_policy(policy, draft_max) if isinstance(policy, str) else policy
        self.exact = exact
        self.calibration = Calibration.load(target, calibration_folder)
        if not target.can_rollback:
            self.drafter = None
        self._generations = 0

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        sampling: Sampling | None = None,
        verify: str | None = None,
        stop: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> Generator[Step]:
        """Continue `prompt`, one `Step` per target pass (the first step is the prefill's token).

        Args:
            prompt: token ids, fewer than the context holds.
            max_tokens: most tokens to emit, at least 1; the context's end may come first.
            sampling: how tokens are chosen; None is greedy.
            verify: "coupled" (default) or "rejection" at a temperature above 0.
            stop: strings that end the text, which then stops right before them.
            progress: of the prefill.

        Raises:
            PromptError: the prompt is empty, or fills the context.
            ValueError: `max_tokens` below 1, an empty stop string, or an unknown `verify`.
            TargetError: llama.cpp failed; the cache still holds what was emitted.
            RuntimeError: another generation began on this decoder before this one ended.
        """
        # Checked here, not at the first `next`: a wrong call must fail where it is made.
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}, but must be at least 1")
        if not prompt:
            raise PromptError("the prompt is empty: there is nothing to continue")
        room = self.target.n_ctx - len(prompt)
        if room < 1:
            raise PromptError(
                f"the prompt has {len(prompt)} tokens, but the context holds {self.target.n_ctx}"
                " and needs room for an answer"
            )
        out_of: StopReason = "length" if max_tokens <= room else "context"
        text = _Text(self.target, stop, min(max_tokens, room), out_of)
        return self._run(list(prompt), Verifier(sampling or Sampling(), verify), text, progress)

    def _run(self, prompt: list[int], verifier: Verifier, text: _Text, progress: Progress | None) -> Generator[Step]:
        target, drafter, policy = self.target, self.drafter, self.policy
        generation = self._generations = self._generations + 1
        sizes: Sequence[int] = range(1, target.max_batch + 1)
        if self.exact and target.can_rollback:
            sizes = self.calibration.ensure_exact(target)

        # 1. Prefill, for the drafter too; the target's logits give the first token.
        began = time.perf_counter()
        if drafter is not None:
            drafter.begin(prompt)
        rows = target.prefill(prompt, aligned=self.exact, progress=progress)[np.newaxis]
        settled = len(prompt)
        try:
            last = verifier.verify(rows, NO_DRAFT, settled).tokens[0]
            pieces = text.take((last,))
            yield Step(
                (last,),
                pieces,
                seconds=time.perf_counter() - began,
                stop=text.stop,
                stop_string=text.stop_string,
            )
            curve = self.calibration.curve if self.exact else None
            if drafter is not None and text.stop is None:
                curve = self.calibration.ensure_curve(target, text.left)
                drafter.accept((last,))

            plain = curve.padded(sizes)[1][0] if curve else smallest(1, sizes)
            while text.stop is None:
                # 2. Ask for a draft, and keep as much of it as pays and fits.
                began = time.perf_counter()
                limit = min(policy.limit(), text.left - 1, sizes[-1] - 1) if drafter else 0
                draft, size = NO_DRAFT, plain
                if limit > 0:
                    draft, size = self._ask(limit, verifier, settled + 1, curve, sizes)
                asked = time.perf_counter()
                if generation != self._generations or len(target.tokens) != settled:
                    raise RuntimeError("another generation began on this target before this one ended")

                # 3. One pass over the last token, the draft, and what pads it to its size.
                rows = target.evaluate([last, *draft.tokens, *[last] * (size - 1 - len(draft))])
                evaluated = time.perf_counter()

                # 4. The accepted prefix and one token of the target's, up to the text's end.
                verdict = verifier.verify(rows[: len(draft) + 1], draft, settled + 1)
                pieces = text.take(verdict.tokens)
                tokens = verdict.tokens[: len(pieces)]
                target.rollback(settled + len(tokens))
                settled += len(tokens)
                last = tokens[-1]

                # 5. Learn.
                draft_seconds = asked - began if limit > 0 else 0.0
                seconds = evaluated - asked
                plain_seconds = curve.seconds(plain) if curve else 0.0
                if drafter is not None:
                    guessed = drafter.accept(tokens)
                    policy.record(Pass(len(tokens), len(draft), guessed, seconds, draft_seconds, plain_seconds))
                if curve is not None:
                    curve.observe(size, seconds)
                yield Step(
                    tokens,
                    pieces,
                    drafted=draft.tokens,
                    accepted=min(verdict.accepted, len(tokens)),
                    batch=size,
                    seconds=seconds,
                    draft_seconds=draft_seconds,
                    plain_seconds=plain_seconds,
                    source=draft.source,
                    stop=text.stop,
                    stop_string=text.stop_string,
                )
        finally:
            if generation == self._generations and len(target.tokens) > settled:
                target.rollback(settled)
            self.calibration.save()

    def _ask(
        self, limit: int, verifier: Verifier, position: int, curve: CostCurve | None, sizes: Sequence[int]
    ) -> tuple[Draft, int]:
        """The part of the drafter's proposal that the policy wants to send, and the size of the batch for it."""
        assert self.drafter is not None
        draft = self.drafter.propose(limit, verifier.choose(position), blind=verifier.name == "rejection")
        length, size = self.policy.plan(draft, curve, sizes)
        return (draft.head(length) if length else NO_DRAFT), size


class _Text:
    """The text of one generation: its pieces, and when and why it ends."""

    def __init__(self, target: TargetProtocol, stop: Sequence[str], limit: int, out_of: StopReason) -> None:
        self._target = target
        self._stream = TextStream(stop)
        self._out_of = out_of
        self.left = limit
        self.stop: StopReason | None = None

    @property
    def stop_string(self) -> str | None:
        return self._stream.stopped

    def take(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """One piece of text per token, up to the token that ends the text."""
        pieces = []
        for token in tokens:
            self.left -= 1
            eog = self._target.is_eog(token)
            piece = "" if eog else self._stream.push(self._target.piece(token))
            if not eog and self.left > 0 and self._stream.stopped is None:
                pieces.append(piece)
                continue
            if self._stream.stopped is None:
                piece += self._stream.finish()
            self.stop = "stop" if self._stream.stopped else "eog" if eog else self._out_of
            pieces.append(piece)
            break
        return tuple(pieces)
