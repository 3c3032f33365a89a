"""`Scheduler` shares time between prompts and texts; `Writer` makes the passes over the texts of running requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ngramspec.backend import ExactnessMode, SharedModel
from ngramspec.batching.request import ActiveRequest
from ngramspec.cost.bits import DEFAULT_LOGIT_SHIFT, KernelClasses
from ngramspec.cost.times import PassTimes
from ngramspec.data import NGramSpecError, TargetError, UserCodeError
from ngramspec.decoding.loop import DecodingLoop, Pass
from ngramspec.policies.cost import CostPolicy
from ngramspec.steps import Step

T = TypeVar("T")

SHARE = 3.0  # time of prompts, divided by that of texts, while both wait: ended prompts share the passes of texts
PAUSE = 0.5  # seconds that a chunk of a prompt may delay texts, if its size can be chosen; smaller ones are slower
AHEAD = 0.5  # seconds by which prompts may exceed their share while texts wait
LONGEST = 1.0  # maximum seconds that a text waits for chunks of prompts, unless a single chunk takes longer
FORGET = 0.98  # weight of the expected time of a chunk after a faster chunk: chunks late in a prompt are slower
MIN_CHUNK = 32  # minimum number of tokens of such a chunk: smaller ones take nearly as long

Result = tuple[ActiveRequest, Step | None, NGramSpecError | ValueError | None]
"""A request, the step of its text in a pass, and the error that ended it."""


class Scheduler:
    """Decides whether a chunk of a prompt or a pass over the texts comes next.

    If prompts and texts wait, prompts are evaluated first for half a second, so that their texts can join the others: a
    pass costs little more with them. After that, prompts get `SHARE` times as much time as texts. Prompts take turns,
    so that a short one does not wait for a long one. Embeddings and other work without a slot get at most as much time
    as texts.
    """

    def __init__(self) -> None:
        self._lead_seconds = self._task_seconds = 0.0
        self._chunk_seconds = 0.0  # expected maximum time of a chunk while texts wait
        self._texts_wait = False
        self._order: list[object] = []  # prompts that had a turn, the last turn last
        self.read_seconds = 0.0  # time of a token in a chunk; 0 if it is not known

    def reads(self, readers: Sequence[T], writers: Sequence[object]) -> T | None:
        """Return the prompt of which a chunk comes next; `None` means that it is the turn of the texts.

        `readers` are prompts that are not evaluated completely, in order of arrival, and `writers` texts.
        """
        self._texts_wait = bool(writers)
        if not readers or not writers:
            self._lead_seconds = 0.0
        if not readers or self._lead_seconds > AHEAD or 0 < self._lead_seconds > LONGEST - self._chunk_seconds:
            return None
        self._order = [reader for reader in self._order if reader in readers]
        next_reader = min(readers, key=lambda reader: self._order.index(reader) if reader in self._order else -1)
        self._order = [reader for reader in self._order if reader is not next_reader] + [next_reader]
        return next_reader

    def read(self, tokens: int, seconds: float) -> None:
        """Note that a chunk of `tokens` tokens was evaluated in `seconds`."""
        self._lead_seconds += seconds
        if self._texts_wait:
            self._chunk_seconds = max(seconds, FORGET * self._chunk_seconds)
        if tokens >= MIN_CHUNK or (tokens and not self.read_seconds):
            self.read_seconds = seconds / tokens

    def record_pass(self, seconds: float, *, are_alone: bool = False) -> None:
        """Note a pass over the texts; `are_alone`: no prompt waits."""
        self._lead_seconds = 0.0 if are_alone else max(0.0, self._lead_seconds - SHARE * seconds)
        self._task_seconds -= seconds

    def is_turn_of_task(self, writers: Sequence[object]) -> bool:
        """Return True if it is the turn of work that needs no slot, while texts are being decoded."""
        if not writers:
            self._task_seconds = 0.0
        return self._task_seconds <= 0

    def record_task(self, seconds: float) -> None:
        """Note a step of such work."""
        self._task_seconds = max(0.0, self._task_seconds) + seconds

    def chunk(self, max_tokens: int) -> int:
        """Return the size of a chunk that texts wait for, at most `max_tokens`."""
        if not self.read_seconds:
            return min(max_tokens, MIN_CHUNK)
        return max(1, min(max_tokens, max(MIN_CHUNK, int(PAUSE / self.read_seconds))))


class Writer:
    """Makes passes over the texts of requests that share a model. The arguments are those of `Engine`."""

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
        self.policy = CostPolicy(draft_max)
        self._loop = DecodingLoop(self.policy, clock, model)
        self._loop.exactness = exactness
        self._loop.prepare(times, sizes if drafts or exactness.sizes else (1,))
        # As many texts may share a pass as there is an allowed size for, and for every smaller number.
        self._together = next(n for n in range(1, len(sizes) + 2) if n + 1 not in sizes or 1 not in sizes)
        self._turn = 0
        self._next_pass: Pass | None = None  # a pass that was submitted ahead
        self._next_requests: Sequence[ActiveRequest] = ()
        self.passes = self.busy = 0  # number of passes, and sum of the numbers of texts in each

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
            growing = [(request, request.text) for request in requests if request.text and request.text.is_growing]
            if growing:
                self._next_requests, texts = zip(*growing, strict=True)
                self._next_pass = loop.submit_ahead(texts, current)
        results: list[Result] = []
        for request, step in zip(requests, loop.report(current), strict=True):
            if request.sequence is not None and request.text is not None:
                results.append((request, step, request.text.error))
        return results


def choose_sizes(model: SharedModel, *, exact: bool, folder: Path | None = None) -> ExactnessMode:
    """Return the batch sizes of a model with empty sequences, and what they guarantee.

    If `exact`, texts must be bit for bit the same, whatever is drafted and however many texts share a pass. The logits
    are then compared, unless the folder (`None` means the user's cache folder) contains results.
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
