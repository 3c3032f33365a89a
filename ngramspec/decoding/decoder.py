"""`SpeculativeDecoder`: the loop that joins drafter, policy, target and verifier.

    for step in decoder.generate(prompt, max_tokens=200):
        print(step.text, end="")

One decoder serves many requests on one target. Between passes the KV cache holds the prompt and every emitted
token but the last, whatever was drafted, accepted or refused; a consumer that stops early leaves it so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ngramspec.acceptance.verifier import Acceptance, Verifier
from ngramspec.backend import Logits, Model, Progress, Vocabulary
from ngramspec.cost.calibration import Calibration
from ngramspec.cost.curve import CostCurve
from ngramspec.decoding.drafts import Drafts
from ngramspec.decoding.generation import Generation
from ngramspec.decoding.questions import AskingSpeculation
from ngramspec.drafting import DEFAULT, make_drafter
from ngramspec.drafting.draft import Drafter
from ngramspec.exactness.decision import EXACT, Exact, ExactnessMode
from ngramspec.policies import make_policy
from ngramspec.policies.policy import Policy
from ngramspec.sampling.sampler import NO_RULES, TextRules
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Step


class SpeculativeDecoder:
    """Generates with drafts, and gives the text that the target gives without.

    Args:
        target: the loaded model. One whose KV cache cannot be rolled back is decoded plainly.
        vocabulary: what its tokens mean; None: the target offers that too.
        drafter: a name, a drafter, or None for plain decoding.
        policy: a name or a policy: how much to draft.
        draft_max: most tokens in a draft; None leaves it to the policy named.
        exact: "on": every pass uses batch sizes of one kernel class, so that the text depends on model, prompt,
            sampling and seed alone, bit for bit (see `ngramspec.cost.measure`). Load the target with `exact="on"`
            too: it then picks the settings under which this costs least. "auto": as was decided when the target was
            loaded (see `ngramspec.exactness.decision`); where drafts may change last bits, tokens that rounding could
            have decided are counted in `Step.close_calls`. "off": neither.
        calibration_folder: where measurements are kept; None for the user's cache folder.
        curve: cost of a pass by batch size, if it is known: nothing is then measured, and nothing kept on disk.
        calibration: measurements of the target, which the decoder adds to; None: what the folder holds.
        clock: tells the seconds that passes and drafting take; None is `time.perf_counter`.

    Raises ValueError for names that are unknown, and for arguments that contradict each other.
    """

    def __init__(
        self,
        target: Model,
        *,
        vocabulary: Vocabulary | None = None,
        drafter: str | Drafter | None = DEFAULT,
        policy: str | Policy = "cost",
        draft_max: int | None = None,
        exact: Exact = "auto",
        calibration_folder: Path | None = None,
        curve: CostCurve | None = None,
        calibration: Calibration | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if draft_max is not None and not isinstance(policy, str):
            raise ValueError("draft_max requires the name of a policy; a Policy object has its own")
        if curve is not None and calibration is not None:
            raise ValueError("curve cannot be combined with calibration, which has its own curve")
        if exact not in EXACT:
            raise ValueError(f"exact must be one of {', '.join(EXACT)}, got {exact!r}")
        if vocabulary is None:
            if not isinstance(target, Vocabulary):
                raise ValueError("the target has no vocabulary; pass the argument vocabulary")
            vocabulary = target
        self.target = target
        self.vocabulary = vocabulary
        self._clock = clock or time.perf_counter
        if not target.can_rollback or (exact == "on" and not target.exact_rollback):
            drafter = None
        self.set_drafter(
            make_drafter(drafter) if isinstance(drafter, str) else drafter,
            make_policy(policy, draft_max) if isinstance(policy, str) else policy,
        )
        self.exact = exact
        decided: ExactnessMode | None = getattr(target, "exactness", None)  # when it was loaded
        # the mode of requests; with "on" from the first one on
        self.exactness = decided if decided is not None and exact == "auto" else ExactnessMode()
        if calibration is None:
            calibration = Calibration.load(target, calibration_folder) if curve is None else Calibration.given(curve)
        self.calibration = calibration
        self._generations = 0

    def set_drafter(self, drafter: Drafter | None, policy: Policy) -> None:
        """Draft from here on with a drafter (None: not at all), as much as a policy says."""
        self.speculation = AskingSpeculation(policy, self._clock)
        self.drafts = Drafts(drafter, policy)

    @property
    def drafter(self) -> Drafter | None:
        return self.drafts.drafter

    @property
    def policy(self) -> Policy:
        return self.speculation.policy

    def calibrate(self, known: Calibration) -> None:
        """Start from a copy of these measurements of the target, which is not kept on disk."""
        curve = CostCurve.from_json(known.curve.to_json()) if known.curve is not None else None
        self.calibration = replace(known, path=None, curve=curve)

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        sampling: Sampling | None = None,
        acceptance: str | Acceptance | Verifier | None = None,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        return_decisions: bool = False,
        prediction: Sequence[int] = (),
        piece: Callable[[int], bytes] | None = None,
        rules: TextRules = NO_RULES,
        progress: Progress | None = None,
    ) -> Generator[Step]:
        """Continue `prompt`, one `Step` per target pass (the first step is the prefill's token).

        Args:
            prompt: token ids, fewer than the context holds.
            max_tokens: most tokens to emit, at least 1; the context's end may come first.
            sampling: how tokens are chosen; None is greedy.
            acceptance: How drafts are accepted: an `Acceptance`, the name of a method, or a verifier, which has its
                own sampling.
            stop: strings that end the text, which then stops right before them.
            logprobs: report the logprobs of each emitted token and of this many of the likeliest; None: no logprobs.
            return_decisions: report how each token was decided on; not with a verifier that is passed in.
            prediction: token ids of a text that the answer is likely to copy, such as the file that it changes: what it
                is drafted from first. A wrong one changes no text.
            piece: the bytes that a token is shown as; None: as the vocabulary says.
            rules: Rules of the text, such as the budget of its reasoning.
            progress: of the prefill.

        Raises:
            PromptError: the prompt is empty, or fills the context.
            ValueError: an argument is out of its range, or contradicts another, or the drafter.
            GrammarError: the grammar is not one; during the generation: it leaves no token to choose.
            BadLogits: during the generation, at a nan in the target's logits. Before this error or a GrammarError,
                all that plain decoding would have emitted is emitted.
            TargetError: llama.cpp failed; the cache still holds what was emitted.
            RuntimeError: another generation began on this decoder before this one ended.
        """
        # Checked here, not at the first `next`: a wrong call must fail where it is made.
        if prediction and self.drafter is not None and self.drafter.prediction is None:
            raise ValueError(f"the drafter {self.drafter.name!r} does not support prediction; use 'mixture'")
        generation = Generation(
            prompt,
            self.vocabulary,
            n_ctx=self.target.n_ctx,
            n_vocab=self.target.n_vocab,
            max_tokens=max_tokens,
            sampling=sampling,
            acceptance=acceptance,
            stop=stop,
            logprobs=logprobs,
            return_decisions=return_decisions,
            piece=piece,
            rules=rules,
            # Where nothing is drafted, or all sizes agree, nothing is close.
            counts_calls=self.exactness.bound > 0 and self.drafter is not None,
        )
        return self._run(generation, prediction, progress)

    def _settle(self) -> ExactnessMode:
        """Prepare the target for a request, and tell how it is decoded."""
        if hasattr(self.target, "feeds_head"):
            # Without drafts it would slow decoding for nothing.
            self.target.feeds_head = self.drafter is not None
        if self.exact == "on":
            sizes = None
            if self.target.can_rollback and self.target.exact_rollback:
                sizes = self.calibration.ensure_exact(self.target)
            self.exactness = ExactnessMode(sizes, aligned=True, same=True)
        return self.exactness

    def read(self, prompt: Sequence[int], progress: Progress | None = None) -> Logits:
        """Make the target's cache hold a prompt, as `generate` would; see `Target.prefill`."""
        self._settle()
        return self.target.prefill(prompt, aligned=self.exactness.aligned, progress=progress)

    def _run(self, generation: Generation, prediction: Sequence[int], progress: Progress | None) -> Generator[Step]:
        target, clock = self.target, self._clock
        number = self._generations = self._generations + 1
        exactness = self._settle()

        # The prefill, for the drafter too; the target's logits give the first token.
        began = clock()
        self.speculation.begin()
        if self.drafter is not None and self.drafter.prediction is not None:
            self.drafter.prediction = prediction
        generation.begin(self.drafts, target)
        rows = target.prefill(generation.prompt, aligned=exactness.aligned, progress=progress)[np.newaxis]
        try:
            first = generation.first(rows)
            ended = clock()
            first.seconds = ended - began
            yield first
            if generation.stop is None:
                was_known = self.calibration.curve is not None and not self.calibration.is_provisional
                self._prepare(exactness, generation)
                if not was_known:
                    ended = clock()  # the measurement, which is made once, is not part of the speed
            texts, make = (generation,), self.speculation.step
            while generation.stop is None:
                if number != self._generations or len(target.tokens) != generation.settled:
                    raise RuntimeError("another generation was started on this target before this one ended")
                (step,) = make(texts)
                if step is not None:
                    before, ended = ended, clock()
                    step.elapsed = ended - before
                    yield step
                if generation.error is not None:
                    raise generation.error
        finally:
            if number == self._generations and len(target.tokens) > generation.settled:
                target.rollback(generation.settled)
            self.calibration.save()
            if self.drafter is not None:
                self.drafter.save_state()

    def _prepare(self, exactness: ExactnessMode, generation: Generation) -> None:
        """Ready the drafting side for the passes after the prefill."""
        curve = self.calibration.curve if exactness.same else None
        if self.drafter is not None:
            curve = self.calibration.ensure_curve(self.target, generation.left)
            self.drafts.first(generation.last)
        most = self.target.max_batch
        sizes: Sequence[int] = range(1, most + 1)
        if exactness.sizes is not None:
            # Larger ones that agree would be right as well, but slow to take back.
            sizes = tuple(size for size in exactness.sizes if size <= most) or exactness.sizes[:1]
        self.speculation.exactness = exactness
        self.speculation.prepare(curve, sizes, self.calibration.restore, is_provisional=self.calibration.is_provisional)
