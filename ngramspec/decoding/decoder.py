"""`SpeculativeDecoder`: the loop that joins drafter, policy, target and verifier.

    for step in decoder.generate(prompt, max_tokens=200):
        print(step.text, end="")

One decoder serves many requests on one target. Between passes the KV cache holds the prompt and every emitted
token but the last, whatever was drafted, accepted or refused; a consumer that stops early leaves it so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ngramspec.acceptance.rules import Judgement
from ngramspec.acceptance.verifier import Acceptance, Verification, Verifier
from ngramspec.backend import Logits, Model, Progress, Switching, Vocabulary
from ngramspec.cost.calibration import Calibration
from ngramspec.cost.curve import CostCurve
from ngramspec.decoding.speculation import Speculation
from ngramspec.decoding.step import Detail, Step, StopReason
from ngramspec.decoding.text import GenerationText
from ngramspec.drafting import DEFAULT, make_drafter
from ngramspec.drafting.draft import NO_DRAFT, Draft, Drafter
from ngramspec.drafting.grammar import GrammarGuide
from ngramspec.errors import PromptError
from ngramspec.exactness.auto import ExactAuto, Footing
from ngramspec.exactness.choice import EXACT, Exact
from ngramspec.exactness.close_calls import CloseCalls
from ngramspec.policies import make_policy
from ngramspec.policies.policy import Policy, smallest
from ngramspec.sampling.logprobs import Logprobs, logprobs
from ngramspec.sampling.settings import Sampling


class SpeculativeDecoder:
    """Generates with drafts, and gives the text that the target gives without.

    Args:
        target: the loaded model. One that cannot roll its memory back is decoded plainly.
        vocabulary: what its tokens mean; None: the target offers that too.
        drafter: a name, a drafter, or None for plain decoding.
        policy: a name or a policy: how much to draft.
        draft_max: most tokens in a draft; None leaves it to the policy named.
        exact: "on": every pass uses batch sizes of one kernel class, so that the text depends on model, prompt,
            sampling and seed alone, bit for bit (see `ngramspec.cost.kernels`). Load the target with `exact="on"`
            too: it then picks the settings under which this costs least. "auto": so it is for requests that take
            at most 5 % longer by it (see `ngramspec.exactness.choice`); in others, tokens that rounding could have
            decided are counted in `Step.close_calls`. "off": neither.
        calibration_folder: where measurements are kept; None for the user's cache folder.
        curve: cost of a pass by batch size, if it is known: nothing is then measured, and nothing kept on disk.
        clock: tells the seconds that passes and drafting take; None is `time.perf_counter`.

    Attributes:
        speculation: the drafting side of the loop, drafter and policy included.
        footing: how the last request was decoded, as far as exactness goes.

    Raises:
        ValueError: an unknown drafter, policy or `exact`, a `draft_max` below 1, or one beside a policy object;
            no vocabulary.
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
        clock: Callable[[], float] | None = None,
    ) -> None:
        if draft_max is not None and not isinstance(policy, str):
            raise ValueError("draft_max goes with a policy's name; a policy that is passed in has its own")
        if exact not in EXACT:
            raise ValueError(f"exact is {exact!r}, but must be one of: {', '.join(EXACT)}")
        if vocabulary is None:
            if not isinstance(target, Vocabulary):
                raise ValueError("the target is a model only: pass its vocabulary too")
            vocabulary = target
        self.target = target
        self.vocabulary = vocabulary
        drafter = make_drafter(drafter) if isinstance(drafter, str) else drafter
        # A pass that evaluates tokens again is of another size, and so perhaps of another kernel class.
        drafts = target.can_rollback and not (exact == "on" and target.replays)
        self.speculation = Speculation(
            drafter if drafts else None,
            make_policy(policy, draft_max) if isinstance(policy, str) else policy,
        )
        self.exact = exact
        self.footing = Footing()
        self._folder = calibration_folder
        self.calibration = Calibration.load(target, calibration_folder) if curve is None else Calibration.given(curve)
        # Where nothing is to be measured, nothing says what exactness would cost.
        measurable = exact == "auto" and curve is None and isinstance(target, Switching) and target.can_rollback
        self._setting = target.setting if isinstance(target, Switching) else ""
        self._calibrations: dict[str, Calibration] = {}
        self.auto = ExactAuto(target, calibration_folder) if measurable and isinstance(target, Switching) else None
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

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        sampling: Sampling | None = None,
        verify: str | Acceptance | Verification | None = None,
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
            verify: how drafts are accepted (see `Acceptance`), or the method's name; or whatever else decides on
                the tokens, which then knows its own sampling.
            stop: strings that end the text, which then stops right before them.
            logprobs: report those of the emitted tokens, and of so many of the likeliest ones; None: no logprobs.
            detail: report how each token was decided on; not with a verifier that is passed in.
            progress: of the prefill.

        Raises:
            PromptError: the prompt is empty, or fills the context.
            ValueError: `max_tokens` below 1, `logprobs` below 0, an empty stop string, a `verify` that is unknown or
                contradicts `sampling`, a logit bias of an unknown token, or `sampling` or `detail` beside a
                verifier that is passed in.
            GrammarError: the grammar is not one; during the generation: it leaves no token to choose.
            BadLogits: during the generation, at a nan in the target's logits. What plain decoding emits before either
                is emitted.
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
        text = GenerationText(self.vocabulary, stop, min(max_tokens, room), out_of)
        if logprobs is not None and not 0 <= logprobs <= self.target.n_vocab:
            raise ValueError(f"logprobs is {logprobs}, but must be 0 to {self.target.n_vocab}, the vocabulary's size")
        watched: list[Judgement] | None = [] if detail else None
        guide: GrammarGuide | None = None
        calls: CloseCalls | None = None
        if verify is None or isinstance(verify, str | Acceptance):
            sampler = self.vocabulary.sampler(sampling or Sampling())
            # Where nothing is drafted, or all sizes agree, nothing is close.
            calls = CloseCalls(sampler) if self.auto is not None and self.drafter is not None else None
            verify = Verifier(calls or sampler, verify, watched.append if watched is not None else None)
            (calls or sampler).begin(prompt)
            if sampler.grammar is not None:
                guide = GrammarGuide(sampler.grammar)
        elif sampling is not None or detail:
            raise ValueError("sampling and detail go with a method's name; a verifier that is passed in has its own")
        report = StepReport(logprobs, watched)
        return self._run(list(prompt), verify, text, guide, calls, report, progress)

    def _stand(self, prompt: Sequence[int], tokens: int) -> Footing:
        """Settle how a request is decoded, and open the target's context for it."""
        if self.exact == "on":
            sizes = None
            if self.target.can_rollback and not self.target.replays:
                known = self.calibration.ensure_exact(self.target)
                # Larger ones of the class would be right as well, but slow to take back.
                sizes = tuple(n for n in known if n <= self.target.max_batch) or known[:1]
            return Footing(sizes, aligned=True, same=True)
        if self.auto is None:
            return Footing()
        footing = self.auto.begin(prompt, tokens, drafts=self.drafter is not None)
        # Another decoder on this target may have changed it too.
        if self.auto.target.setting != self._setting:
            self._calibrations[self._setting] = self.calibration
            self._setting = self.auto.target.setting
            shelved = self._calibrations.get(self._setting)
            self.calibration = shelved or Calibration.load(self.target, self._folder)
        return footing

    def read(self, prompt: Sequence[int], max_tokens: int, progress: Progress | None = None) -> Logits:
        """Make the target's cache hold a prompt as `generate` does, under the settings it takes; see `Target.prefill`.

        Args:
            prompt, max_tokens: of the request.
            progress: of the prefill.
        """
        self.footing = self._stand(prompt, max_tokens)
        return self.target.prefill(prompt, aligned=self.footing.aligned, progress=progress)

    def _run(
        self,
        prompt: list[int],
        verifier: Verification,
        text: GenerationText,
        guide: GrammarGuide | None,
        calls: CloseCalls | None,
        report: StepReport,
        progress: Progress | None,
    ) -> Generator[Step]:
        target, speculation, clock = self.target, self.speculation, self._clock
        generation = self._generations = self._generations + 1

        footing = self.footing = self._stand(prompt, text.left)
        sizes: Sequence[int] = footing.sizes or range(1, target.max_batch + 1)

        # 1. Prefill, for the drafter too; the target's logits give the first token.
        began = clock()
        speculation.begin(prompt)
        rows = target.prefill(prompt, aligned=footing.aligned, progress=progress)[np.newaxis]
        settled = len(prompt)
        try:
            last = verifier.verify(rows, NO_DRAFT, settled).tokens[0]
            speculation.see(prompt[-1], NO_DRAFT, rows)
            pieces = text.take((last,))
            yield Step(
                (last,),
                pieces,
                seconds=clock() - began,
                stop=text.stop,
                stop_string=text.stop_string,
                logprobs=report.logprobs(rows, (last,)),
                detail=report.detail(settled, NO_DRAFT),
            )
            curve = self.calibration.curve if footing.same else None
            if speculation.drafter is not None and text.stop is None:
                curve = self.calibration.ensure_curve(target, text.left)
                speculation.first(last)
            speculation.prepare(curve, sizes, self.calibration.replay)

            while text.stop is None:
                # 2. Ask for a draft, as much of it as pays and fits.
                began = clock()
                draft, size = speculation.plan(
                    text.left,
                    verifier.choose(settled + 1),
                    blind=verifier.blind,
                    shape=partial(guide.shape, blind=verifier.blind) if guide is not None else None,
                    owed=target.owed,
                )
                judged, sent, ends = self._cut(draft, guide if verifier.blind else None)
                draft, size = sent, size if len(sent) == len(draft) else smallest(1 + len(sent), sizes)
                owed = self._secure(draft)
                asked = clock()
                if generation != self._generations or len(target.tokens) != settled:
                    raise RuntimeError("another generation began on this target before this one ended")

                # 3. One pass over the last token, the draft, and what pads it to its size.
                rows = target.evaluate([last, *draft.tokens, *[last] * (size - 1 - len(draft))])
                seconds = clock() - asked

                # 4. The accepted prefix and one token of the target's, up to the text's end: plain decoding would
                #    not have seen the logits behind it.
                if calls is not None and size not in footing.harmless:
                    calls.arm(footing.bound)
                verdict = verifier.verify(rows[: len(draft) + (not ends)], judged, settled + 1)
                speculation.see(last, draft, rows, len(verdict.tokens) - 1)
                pieces = text.take(verdict.tokens)
                tokens = verdict.tokens[: len(pieces)]
                told = report.logprobs(rows, tokens), report.detail(settled + 1, judged)
                overhead = asked - began + self._take_back(settled + len(tokens))
                settled, last = settled + len(tokens), tokens[-1]

                # 5. Learn.
                if guide is not None:
                    guide.learn(len(draft), verdict.accepted, tokens)
                done = speculation.learn(tokens, draft, owed + size, seconds, overhead)
                entropy, gamma = speculation.gauge or (None, None)
                yield Step(
                    tokens,
                    pieces,
                    drafted=draft.tokens,
                    accepted=min(verdict.accepted, len(tokens)),
                    batch=owed + size,
                    seconds=seconds,
                    draft_seconds=done.draft_seconds,
                    plain_seconds=done.plain_seconds,
                    source=draft.source if draft.tokens else "",
                    stop=text.stop,
                    stop_string=text.stop_string,
                    entropy=entropy,
                    gamma=gamma,
                    logprobs=told[0],
                    detail=told[1],
                    close_calls=calls.take() if calls is not None else 0,
                )
                if verdict.error is not None and text.stop is None:
                    raise verdict.error
        finally:
            if generation == self._generations and len(target.tokens) > settled:
                target.rollback(settled)
            self.calibration.save()

    def _secure(self, draft: Draft) -> int:
        """See to it that the draft can be taken back; how many tokens its pass evaluates again before its own."""
        owed = self.target.owed
        # Where some are owed, the state before them is a checkpoint.
        if self.target.replays and draft.tokens and not owed:
            self.target.checkpoint()
        return owed

    def _take_back(self, length: int) -> float:
        """Roll the target back; the seconds that it took."""
        began = self._clock()
        self.target.rollback(length)
        return self._clock() - began

    def _cut(self, draft: Draft, guide: GrammarGuide | None) -> tuple[Draft, Draft, bool]:
        """(what of a draft is judged, what of it is sent, whether that ends the text): nothing is past the end.

        With a guide, the first token that the grammar forbids is judged, since its q says what it is to be
        refused for, and not sent.
        """
        end = next((i for i, token in enumerate(draft.tokens, 1) if self.vocabulary.is_eog(token)), None)
        draft = draft if end is None else draft.head(end)
        legal = len(draft) if guide is None else guide.legal(draft)
        return draft.head(legal + 1), draft.head(legal), legal == end


class StepReport:
    """What a step tells besides, where it was asked for."""

    def __init__(self, logprobs: int | None, watched: list[Judgement] | None) -> None:
        self._count = logprobs
        self._watched = watched

    def logprobs(self, rows: Logits, tokens: Sequence[int]) -> tuple[Logprobs, ...]:
        if self._count is None:
            return ()
        return tuple(logprobs(row, token, self._count) for row, token in zip(rows, tokens, strict=False))

    def detail(self, position: int, judged: Draft) -> Detail | None:
        if self._watched is None:
            return None
        judgements = tuple(self._watched)
        self._watched.clear()
        return Detail(position, judged, judgements)
