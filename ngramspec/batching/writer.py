"""`Writer`: makes the passes over the texts of running requests; `warm_up` measures a model before the first one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ngramspec.batching.request import ActiveRequest
from ngramspec.cost.calibration import Calibration
from ngramspec.cost.measure import SHARED_ORDER
from ngramspec.decoding.loop import Pass
from ngramspec.decoding.shared_loop import SharedLoop
from ngramspec.errors import NGramSpecError, TargetError
from ngramspec.exactness.decision import DEFAULT_LOGIT_SHIFT, ExactnessMode
from ngramspec.policies.cost import CostPolicy
from ngramspec.shared_model import SharedModel
from ngramspec.steps import Step
from ngramspec.user_class import UserCodeError

DEPTH = 64  # tokens of context on which batches are timed
TOKENS = 4000  # effort of a measurement: as for one text of this many tokens

Result = tuple[ActiveRequest, Step | None, NGramSpecError | ValueError | None]
"""A request, the step of its text in a pass, and the error that ended it."""


class Writer:
    """Makes passes over the texts of requests that share a model.

    The arguments are those of `Engine`; `drafts` is False if nothing is drafted.
    """

    def __init__(
        self,
        model: SharedModel,
        calibration: Calibration,
        exactness: ExactnessMode,
        *,
        drafts: bool,
        draft_max: int,
        clock: Callable[[], float],
    ) -> None:
        assert calibration.curve is not None
        self._model = model
        self._calibration, self._curve = calibration, calibration.curve
        sizes: Sequence[int] = exactness.sizes or range(1, model.max_rows + 1)
        self._loop = SharedLoop(model, sizes[-1], CostPolicy(draft_max), clock)
        self._loop.exactness = exactness
        self._sizes = sizes if drafts or exactness.sizes else (1,)
        self._prepare()
        # As many texts may share a pass as there is an allowed size for, and for every smaller number.
        self._together = next(n for n in range(1, len(sizes) + 2) if n + 1 not in sizes or 1 not in sizes)
        self._turn = 0
        self._next_pass: Pass | None = None  # a pass that was submitted ahead
        self._next_requests: Sequence[ActiveRequest] = ()
        self.passes = self.busy = 0  # number of passes, and sum of the numbers of texts in each

    def begin(self) -> None:
        self._loop.policy.begin()

    def measure_again(self) -> None:
        """Measure costs that were measured while other programs ran, if these are gone."""
        sequence = self._model.sequences[0]
        if self._calibration.needs_measuring and sequence.conditions.is_quiet:
            self._calibration.ensure_curve(sequence, TOKENS, SHARED_ORDER)
            self._prepare()
            self._calibration.save()

    def _prepare(self) -> None:
        calibration = self._calibration
        self._loop.prepare(self._curve, self._sizes, calibration.restore, is_provisional=calibration.is_provisional)

    @property
    def is_ahead(self) -> bool:
        """True if a pass was submitted whose outcome `step` has not returned yet."""
        return self._next_pass is not None

    def step(self, requests: Sequence[ActiveRequest], *, can_go_ahead: bool = False) -> Sequence[Result]:
        """Make a pass over the texts whose turn it is. Return the result for each of their requests.

        If `can_go_ahead`, the next pass over the same texts may be submitted as soon as the outcome of this one is
        known, so that a GPU works on it meanwhile. The next call then returns its outcome.
        """
        loop, current, n_requests = self._loop, self._next_pass, len(requests)
        if current is not None:
            requests, self._next_pass = self._next_requests, None
        elif len(requests) > self._together:
            at = self._turn % len(requests)
            requests = [*requests[at:], *requests[:at]][: self._together]
            self._turn += self._together
        if current is None:
            try:
                current = loop.submit([request.text for request in requests if request.text is not None])
            except (TargetError, UserCodeError) as error:
                if len(requests) == 1:
                    return [(requests[0], None, error)]
                # Try each text alone, so that only those end whose own pass fails.
                return [result for request in requests for result in self.step((request,))]
        self.passes += 1
        self.busy += len(requests)
        loop.commit(current)
        # A request that is not in this pass must be in the next one.
        if can_go_ahead and n_requests <= len(requests) and self._model.returns_early:
            self._submit_ahead(requests, current)
        results: list[Result] = []
        for request, step in zip(requests, loop.report(current), strict=True):
            if request.sequence is not None and request.text is not None:
                results.append((request, step, request.text.error))
        return results

    def _submit_ahead(self, requests: Sequence[ActiveRequest], last: Pass) -> None:
        growing = [
            request
            for request in requests
            if request.text is not None and not (request.text.stop or request.text.error or request.text.is_released)
        ]
        if growing:
            texts = [request.text for request in growing if request.text is not None]
            self._next_pass, self._next_requests = self._loop.submit_ahead(texts, last), growing


def warm_up(model: SharedModel, *, exact: bool, folder: Path | None = None) -> tuple[Calibration, ExactnessMode]:
    """Measure a model, or load earlier measurements.

    Args:
        model: Model with empty sequences.
        exact: Whether texts must be bit for bit the same, whatever is drafted and however many texts share a pass.
        folder: Folder of the measurements; `None` means the user's cache folder.
    """
    # Plain passes need no hidden states, and the first texts will show whether a head pays.
    model.feeds_head = False
    sequence = model.sequences[0]
    calibration = Calibration.load(sequence, folder)
    tokens = np.random.default_rng(0).integers(0, sequence.n_vocab, min(DEPTH, sequence.n_ctx // 2))
    sequence.prefill([int(token) for token in tokens])
    calibration.ensure_curve(sequence, TOKENS, SHARED_ORDER)
    exactness = ExactnessMode(max_logit_shift=DEFAULT_LOGIT_SHIFT)
    if exact and sequence.can_rollback and sequence.exact_rollback:
        whole = calibration.ensure_exact(sequence, together=True)
        sizes = tuple(size for size in whole if size <= sequence.max_batch) or (1,)
        exactness = ExactnessMode(sizes, aligned=not calibration.ensure_chunk_invariance(sequence), bit_identical=True)
    elif exact:
        exactness = ExactnessMode((1,), aligned=True, bit_identical=True)
    sequence.clear()
    model.feeds_head = True
    calibration.save()
    return calibration, exactness
