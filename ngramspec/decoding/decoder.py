"""`SpeculativeDecoder`: generates one text at a time with a drafter, a policy, a target and a verifier.

    for step in decoder.generate(prompt, max_tokens=200):
        print(step.text, end="")

One decoder serves many requests on one target. Between passes, the KV cache holds the prompt and all emitted tokens
except the last, whatever was drafted, accepted or rejected. That is also true after a caller stops early.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ngramspec import leaves
from ngramspec.backend import ExactnessMode, Logits, Progress, Runner, Vocabulary
from ngramspec.cost.bits import EXACT, Exact, KernelClasses
from ngramspec.cost.store import StoredTimes
from ngramspec.cost.times import PassTimes
from ngramspec.decoding.loop import DecodingLoop, Pass
from ngramspec.decoding.text import Drafts, Text
from ngramspec.drafting import DEFAULT, make_drafter
from ngramspec.drafting.draft import Drafter
from ngramspec.policies import make_policy
from ngramspec.policies.policy import Policy
from ngramspec.request import Request
from ngramspec.steps import Step


class SpeculativeDecoder:
    """Generates text with drafts, and emits the text that the target emits without them.

    Args:
        target: The loaded model, whose first sequence is used. If it cannot be rolled back, nothing is drafted.
        vocabulary: Meaning of its tokens; `None` means the target's vocabulary.
        drafter: Name of a drafter, a drafter, or `None` for plain decoding.
        policy: Name of a policy, or a policy, which chooses the draft length.
        draft_max: Maximum number of tokens in a draft; `None` means the default of the named policy.
        exact: With "on", all passes use batch sizes of one kernel class, so that the text depends only on model,
            prompt, sampling and seed, bit for bit (see `ngramspec.cost.bits`). Load the target with `exact="on"`
            too, which chooses the settings that make this cheapest. "auto" follows the decision that was made when the
            target was loaded (see `ngramspec.cost.bits`); if drafts may change last bits, tokens that rounding
            could have decided are counted in `Step.close_calls`. "off" does neither.
        calibration_folder: Folder of what is learned about the target; `None` means the user's cache folder.
        times: Costs of its passes, which are then not stored on disk; `None` means those in the folder.
        kernels: What is known about its kernel classes; `None` means what is in the folder.
        clock: Returns the time in seconds; `None` means `time.perf_counter`.

    Raises:
        ValueError: a name is unknown, or arguments contradict each other.
    """

    def __init__(
        self,
        target: Runner,
        *,
        vocabulary: Vocabulary | None = None,
        drafter: str | Drafter | None = DEFAULT,
        policy: str | Policy = "cost",
        draft_max: int | None = None,
        exact: Exact = "auto",
        calibration_folder: Path | None = None,
        times: PassTimes | None = None,
        kernels: KernelClasses | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if draft_max is not None and not isinstance(policy, str):
            raise ValueError("draft_max requires the name of a policy; a Policy object has its own")
        if exact not in EXACT:
            raise ValueError(f"exact must be one of {', '.join(EXACT)}, got {exact!r}")
        if vocabulary is None:
            vocabulary = target.vocabulary
            if not isinstance(vocabulary, Vocabulary):
                raise ValueError("the target has no vocabulary; pass the argument vocabulary")
        self.target, self.vocabulary = target, vocabulary
        sequence = self.sequence = target.sequences[0]
        self._clock = clock or time.perf_counter
        if not sequence.can_rollback or (exact == "on" and not sequence.exact_rollback):
            drafter = None
        self.set_drafter(
            make_drafter(drafter, vocabulary=vocabulary) if isinstance(drafter, str) else drafter,
            make_policy(policy, draft_max) if isinstance(policy, str) else policy,
        )
        self.exact = exact
        # The mode of requests; with "on", it is set before the first request.
        self.exactness = target.exactness if exact == "auto" else ExactnessMode()
        self._stored: StoredTimes | None = None
        if times is None:
            self._stored = StoredTimes(sequence, calibration_folder)
            times = self._stored.times
        self.times = times
        self.kernels = kernels or KernelClasses.load(sequence, calibration_folder)
        self._generations = 0

    def set_drafter(self, drafter: Drafter | None, policy: Policy) -> None:
        """Draft from now on with a drafter, as much as a policy says; `None` means plain decoding."""
        self.policy = policy
        self.loop = DecodingLoop(policy, self._clock)
        self.drafts = Drafts(drafter, policy)

    @property
    def drafter(self) -> Drafter | None:
        return self.drafts.drafter

    def generate(
        self, prompt: Sequence[int] | Request, *, progress: Progress | None = None, **fields: Any
    ) -> Generator[Step]:
        """Continue a prompt. Yield one `Step` per target pass; the first step is the prefill's token.

        Args:
            prompt: Token ids, or a whole `Request`.
            progress: Called during the prefill.
            fields: The other fields of `Request`, such as `max_tokens`; `None` means the default of a field.

        Raises:
            PromptError: the prompt is empty, or fills the context.
            ValueError: an argument is out of its range, or contradicts another, or the drafter.
            GrammarError: the grammar is invalid; during the generation: it leaves no token to choose.
            BadLogits: during the generation, at a nan in the target's logits. Before this error or a GrammarError,
                all that plain decoding would have emitted is emitted.
            TargetError: llama.cpp failed; the cache still holds what was emitted.
            RuntimeError: another generation began on this decoder before this one ended.
        """
        if isinstance(prompt, Request):
            request = replace(prompt, **fields)
        else:
            request = Request(prompt, **{name: value for name, value in fields.items() if value is not None})
        # Checked here and not at the first `next`, so that a wrong call fails immediately.
        if request.prediction and self.drafter is not None and self.drafter.prediction is None:
            raise ValueError(f"the drafter {self.drafter.name!r} does not support prediction; use 'mixture'")
        # If nothing is drafted, or all sizes agree, rounding decides nothing.
        counts_calls = self.exactness.max_logit_shift > 0 and self.drafter is not None
        return self._run(Text(request, self.vocabulary, self.sequence, counts_calls=counts_calls), progress)

    def _prepare_target(self) -> ExactnessMode:
        """Prepare the target for a request, and return how it is decoded."""
        # Without drafts it would slow decoding down for nothing.
        self.target.feeds_head = self.drafter is not None
        if self.exact == "on":
            sizes = None
            if self.sequence.can_rollback and self.sequence.exact_rollback:
                sizes = self.kernels.ensure_exact(self.sequence)
            self.exactness = ExactnessMode(sizes, aligned=True, bit_identical=True)
        return self.exactness

    def read(self, prompt: Sequence[int], progress: Progress | None = None) -> Logits:
        """Fill the target's cache with a prompt, as `generate` does; see `Model.prefill`."""
        self._prepare_target()
        return self.sequence.prefill(prompt, aligned=self.exactness.aligned, progress=progress)

    def _run(self, text: Text, progress: Progress | None) -> Generator[Step]:
        sequence, clock = self.sequence, self._clock
        number = self._generations = self._generations + 1
        exactness = self._prepare_target()

        # The prefill, for the drafter too; the target's logits give the first token.
        began = clock()
        is_traced = text.request.return_decisions
        self.loop.policy = leaves.with_trace(self.policy) if is_traced else self.policy
        self.loop.policy.begin()
        text.begin(self.drafts, sequence)
        rows = sequence.prefill(text.prompt, aligned=exactness.aligned, progress=progress)[np.newaxis]
        try:
            first = text.first(rows)
            end = clock()
            first.seconds = end - began
            yield first
            if text.stop is not None:
                return
            self._prepare_loop(exactness, text)
            loop, texts, ahead = self.loop, (text,), sequence.returns_early
            following: Pass | None = None
            while True:
                if number != self._generations or (following is None and len(sequence.tokens) != text.settled):
                    raise RuntimeError("another generation was started on this target before this one ended")
                current = following or loop.submit(texts)
                loop.commit(current)
                # On a GPU the next pass runs while this one is reported, and while the reader uses its text.
                following = loop.submit_ahead(texts, current) if ahead and text.is_growing else None
                (step,) = loop.report(current)
                if step is not None:
                    before, end = end, clock()
                    step.elapsed = end - before
                    yield step
                if text.error is not None:
                    raise text.error
                if text.stop is not None:
                    return
        finally:
            if number == self._generations and len(sequence.tokens) > text.settled:
                sequence.rollback(text.settled)
            if self._stored is not None:
                self._stored.save()
            if self.drafter is not None:
                self.drafter.save_state()

    def _prepare_loop(self, exactness: ExactnessMode, text: Text) -> None:
        """Prepare the loop for the passes after the prefill."""
        max_batch = self.sequence.max_batch
        sizes: Sequence[int] = range(1, max_batch + 1)
        if exactness.sizes is not None:
            # Larger ones that agree would be right as well, but slow to roll back.
            sizes = tuple(size for size in exactness.sizes if size <= max_batch) or exactness.sizes[:1]
        times = None
        if self.drafter is not None:
            times = self.times.for_plain(sizes[0])
            self.drafts.first(text.last)
        if self.sequence.leaves and type(self.loop) is DecodingLoop:
            self.loop = leaves.choose_loop(self.loop, self.sequence, self.drafter, times, sizes)
        self.loop.exactness = exactness
        self.loop.prepare(times, sizes)
