"""`Writer`: makes the passes over the texts of running requests; `choose_sizes` finds the sizes of exact passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ngramspec.backend import ExactnessMode, SharedModel
from ngramspec.batching.request import ActiveRequest
from ngramspec.cost.bits import DEFAULT_LOGIT_SHIFT, KernelClasses
from ngramspec.cost.times import PassTimes
from ngramspec.data import NGramSpecError, TargetError
from ngramspec.decoding.loop import Pass
from ngramspec.decoding.shared_loop import SharedLoop
from ngramspec.policies.cost import CostPolicy
from ngramspec.steps import Step
from ngramspec.user_class import UserCodeError

Result = tuple[ActiveRequest, Step | None, NGramSpecError | ValueError | None]
"""A request, the step of its text in a pass, and the error that ended it."""


class Writer:
    """Makes passes over the texts of requests that share a model.

    The arguments are those of `Engine`; `drafts` is False if nothing is drafted.
    """

    def __init__(
        self,
        model: SharedModel,
        times: PassTimes,
        exactness: ExactnessMode,
        *,
        drafts: bool,
        draft_max: int,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        sizes: Sequence[int] = exactness.sizes or range(1, model.max_rows + 1)
        self._loop = SharedLoop(model, sizes[-1], CostPolicy(draft_max), clock)
        self._loop.exactness = exactness
        self._loop.prepare(times, sizes if drafts or exactness.sizes else (1,))
        # As many texts may share a pass as there is an allowed size for, and for every smaller number.
        self._together = next(n for n in range(1, len(sizes) + 2) if n + 1 not in sizes or 1 not in sizes)
        self._turn = 0
        self._next_pass: Pass | None = None  # a pass that was submitted ahead
        self._next_requests: Sequence[ActiveRequest] = ()
        self.passes = self.busy = 0  # number of passes, and sum of the numbers of texts in each

    def begin(self) -> None:
        self._loop.policy.begin()

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


def choose_sizes(model: SharedModel, *, exact: bool, folder: Path | None = None) -> ExactnessMode:
    """Return the batch sizes of a model with empty sequences, and what they guarantee.

    Args:
        model: Model whose logits are compared if they were not before.
        exact: Whether texts must be bit for bit the same, whatever is drafted and however many texts share a pass.
        folder: Folder of the results; `None` means the user's cache folder.
    """
    if not exact:
        return ExactnessMode(max_logit_shift=DEFAULT_LOGIT_SHIFT)
    sequence = model.sequences[0]
    if not (sequence.can_rollback and sequence.exact_rollback):
        return ExactnessMode((1,), aligned=True, bit_identical=True)
    # Plain passes need no hidden states, and the first texts will show whether a head pays.
    model.feeds_head = False
    kernels = KernelClasses.load(sequence, folder)
    whole = kernels.ensure_exact(sequence, together=True)
    sizes = tuple(size for size in whole if size <= sequence.max_batch) or (1,)
    exactness = ExactnessMode(sizes, aligned=not kernels.ensure_chunk_invariance(sequence), bit_identical=True)
    sequence.clear()
    model.feeds_head = True
    return exactness
