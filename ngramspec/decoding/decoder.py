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
from ngramspec.backend import Asked, Headed, Logits, Model, Progress, Vocabulary
from ngramspec.cost.calibration import Calibration
from ngramspec.cost.curve import CostCurve
from ngramspec.decoding.generation import Generation
from ngramspec.decoding.speculation import Speculation
from ngramspec.decoding.step import Step
from ngramspec.drafting import DEFAULT, make_drafter
from ngramspec.drafting.draft import Drafter
from ngramspec.exactness.auto import Decided, Footing
from ngramspec.exactness.choice import EXACT, Exact
from ngramspec.policies import make_policy
from ngramspec.policies.policy import Policy
from ngramspec.sampling.settings import Sampling


class SpeculativeDecoder:
    """Generates with drafts, and gives the text that the target gives without.

    Args:
        target: the loaded model. One whose KV cache cannot be rolled back is decoded plainly.
        vocabulary: what its tokens mean; None: the target offers that too.
        drafter: a name, a drafter, or None for plain decoding.
        policy: a name or a policy: how much to draft.
        draft_max: most tokens in a draft; None leaves it to the policy named.
        exact: "on": every pass uses batch sizes of one kernel class, so that the text depends on model, prompt,
            sampling and seed alone, bit for bit (see `ngramspec.cost.kernels`). Load the target with `exact="on"`
            too: it then picks the settings under which this costs least. "auto": as was decided when the target was
            loaded (see `ngramspec.exactness.choice`); where drafts may change last bits, tokens that rounding could
            have decided are counted in `Step.close_calls`. "off": neither.
        calibration_folder: where measurements are kept; None for the user's cache folder.
        curve: cost of a pass by batch size, if it is known: nothing is then measured, and nothing kept on disk.
        calibration: measurements of the target, which the decoder adds to; None: what the folder holds.
        speculation: the drafting side of the loop, in place of `drafter`, `policy` and `draft_max`.
        clock: tells the seconds that passes and drafting take; None is `time.perf_counter`.

    Attributes:
        calibration: what was measured of the target.
        speculation: the drafting side of the loop, drafter and policy included.
        footing: how requests are decoded, as far as exactness goes; with "on" from the first one on.

    Raises:
        ValueError: an unknown drafter, policy or `exact`, a `draft_max` below 1, or one beside a policy object; a
            curve beside a calibration, or a drafter or policy beside a speculation; no vocabulary.
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
        speculation: Speculation | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if draft_max is not None and not isinstance(policy, str):
            raise ValueError("draft_max goes with a policy's name; a policy that is passed in has its own")
        if curve is not None and calibration is not None:
            raise ValueError("a curve is all that is known of a target; a calibration that is passed in has its own")
        if speculation is not None and (drafter, policy, draft_max) != (DEFAULT, "cost", None):
            raise ValueError("a speculation that is passed in has its own drafter and policy")
        if exact not in EXACT:
            raise ValueError(f"exact is {exact!r}, but must be one of: {', '.join(EXACT)}")
        if vocabulary is None:
            if not isinstance(target, Vocabulary):
                raise ValueError("the target is a model only: pass its vocabulary too")
            vocabulary = target
        self.target = target
        self.vocabulary = vocabulary
        self.speculation = speculation or Speculation(
            make_drafter(drafter) if isinstance(drafter, str) else drafter,
            make_policy(policy, draft_max) if isinstance(policy, str) else policy,
        )
        if not target.can_rollback or (exact == "on" and not target.exact_rollback):
            self.speculation.drafter = None
        self._asked = target if isinstance(target, Asked) else None
        self.exact = exact
        self.footing = target.footing if exact == "auto" and isinstance(target, Decided) else Footing()
        if calibration is None:
            calibration = Calibration.load(target, calibration_folder) if curve is None else Calibration.given(curve)
        self.calibration = calibration
        self._clock = clock or time.perf_counter
        self._generations = 0

    @property
    def drafter(self) -> Drafter | None:
        """What guesses the tokens; None for plain decoding."""
        return self.speculation.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter | None) -> None:
        self.speculation.drafter = drafter

    @property
    def policy(self) -> Policy:
        """What decides how many tokens to draft."""
        return self.speculation.policy

    def calibrate(self, known: Calibration) -> None:
        """Start from measurements of the target.

        The decoder works on a copy, which it alone adds to and which is not kept on disk.
        """
        curve = CostCurve.from_json(known.curve.to_json()) if known.curve is not None else None
        self.calibration = replace(known, path=None, curve=curve)

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        sampling: Sampling | None = None,
        verify: str | Acceptance | Verifier | None = None,
        stop: Sequence[str] = (),
        logprobs: int | None = None,
        detail: bool = False,
        progress: Progress | None = None,
    ) -> Generator[Step]:
        """Continue `prompt`, one `Step` per target pass (the first step is the prefill's token).

        Args:
            prompt: token ids, fewer than the context holds.
            max_tokens: most tokens to emit, at least 1; the context's end may come first.
            sampling: how tokens are chosen; None is greedy.
            verify: how drafts are accepted (see `Acceptance`), or the method's name; or a verifier, which then knows
                its own sampling.
            stop: strings that end the text, which then stops right before them.
            logprobs: report the logprobs of each emitted token and of this many of the likeliest; None: no logprobs.
            detail: report how each token was decided on; not with a verifier that is passed in.
            progress: of the prefill.

        Raises:
            PromptError: the prompt is empty, or fills the context.
            ValueError: `max_tokens` below 1, `logprobs` below 0, an empty stop string, a `verify` that is unknown or
                contradicts `sampling`, a logit bias of an unknown token, or `sampling` or `detail` beside a
                verifier that is passed in.
            GrammarError: the grammar is not one; during the generation: it leaves no token to choose.
            BadLogits: during the generation, at a nan in the target's logits. Before this error or a GrammarError,
                all that plain decoding would have emitted is emitted.
            TargetError: llama.cpp failed; the cache still holds what was emitted.
            RuntimeError: another generation began on this decoder before this one ended.
        """
        # Checked here, not at the first `next`: a wrong call must fail where it is made.
        generation = Generation(
            prompt,
            self.vocabulary,
            n_ctx=self.target.n_ctx,
            n_vocab=self.target.n_vocab,
            max_tokens=max_tokens,
            sampling=sampling,
            verify=verify,
            stop=stop,
            logprobs=logprobs,
            detail=detail,
            # Where nothing is drafted, or all sizes agree, nothing is close.
            counts_calls=self.footing.bound > 0 and self.drafter is not None,
        )
        return self._run(generation, progress)

    def _settle(self) -> Footing:
        """Prepare the target for a request, and tell how it is decoded."""
        if isinstance(self.target, Headed):
            # So that plain decoding on a target with a head is as fast as on one without.
            self.target.feeds_head = self.drafter is not None
        if self.exact == "on":
            sizes = None
            if self.target.can_rollback and self.target.exact_rollback:
                sizes = self.calibration.ensure_exact(self.target)
            self.footing = Footing(sizes, aligned=True, same=True)
        return self.footing

    def read(self, prompt: Sequence[int], progress: Progress | None = None) -> Logits:
        """Make the target's cache hold a prompt, as `generate` would; see `Target.prefill`.

        Args:
            prompt: of the request.
            progress: of the prefill.
        """
        self._settle()
        return self.target.prefill(prompt, aligned=self.footing.aligned, progress=progress)

    def _run(self, generation: Generation, progress: Progress | None) -> Generator[Step]:
        target, speculation, clock = self.target, self.speculation, self._clock
        number = self._generations = self._generations + 1
        footing = self._settle()

        # 1. Prefill, for the drafter too; the target's logits give the first token.
        began = clock()
        generation.begin(speculation)
        rows = target.prefill(generation.prompt, aligned=footing.aligned, progress=progress)[np.newaxis]
        try:
            step = generation.first(rows, speculation)
            ended = clock()
            step.seconds = ended - began
            yield step
            if generation.stop is None:
                self._prepare(footing, generation.last, generation.left)

            while generation.stop is None:
                # 2. Ask for a draft, as much of it as pays and fits.
                began = clock()
                owed = target.owed
                plan = speculation.plan(generation.left, generation.chooser(), owed=owed)
                # So that the draft can be taken back. Where tokens are owed, there is a checkpoint already.
                if target.replays and plan.sent.tokens and not owed:
                    target.checkpoint()
                asked = clock()
                if number != self._generations or len(target.tokens) != generation.settled:
                    raise RuntimeError("another generation began on this target before this one ended")

                # 3. One pass over the last token, the draft, and what pads it to its size.
                if plan.questions and self._asked is not None:
                    rows = self._asked.ask(generation.batch(plan), [(q.fork, q.path) for q in plan.questions])
                else:
                    rows = target.evaluate(generation.batch(plan))
                seconds = clock() - asked

                # 4. What of the draft is kept, and what is not is taken back.
                bound = 0.0 if plan.size in footing.harmless else footing.bound
                step = generation.take(plan, rows, speculation, batch=owed + plan.size, seconds=seconds, bound=bound)
                overhead = asked - began
                if len(target.tokens) > generation.settled:
                    overhead += self._take_back(generation.settled)

                # 5. Learn.
                speculation.learn(step, overhead)
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
                self.drafter.keep()

    def _prepare(self, footing: Footing, first: int, left: int) -> None:
        """Ready the drafting side for the passes after the prefill, whose token is `first`."""
        curve = self.calibration.curve if footing.same else None
        if self.drafter is not None:
            curve = self.calibration.ensure_curve(self.target, left)
            self.speculation.first(first)
        most = self.target.max_batch
        sizes: Sequence[int] = range(1, most + 1)
        if footing.sizes is not None:
            # Larger ones that agree would be right as well, but slow to take back.
            sizes = tuple(size for size in footing.sizes if size <= most) or footing.sizes[:1]
        leaves = self._asked.leaves if self._asked is not None else 0
        self.speculation.prepare(curve, sizes, self.calibration.replay, leaves)

    def _take_back(self, length: int) -> float:
        """Roll the target back; the seconds that it took."""
        began = self._clock()
        self.target.rollback(length)
        return self._clock() - began
