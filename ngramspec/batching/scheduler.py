"""`Slots`: which sequence a request works in; `Scheduler`: whether prompts or answers come next; `Writer`: the passes
that answers grow by; `warm_up`.

A sequence comes to hold what is known of a prompt: what it holds already, what another sequence holds, or what
`PromptCache` kept in RAM. Where prompts and texts wait, prompts are read first for half a second, so that their texts
join those that are being written: a pass costs little more with them. After that reading and writing get the same time.
Prompts take turns among each other, so that a short one does not wait for a long one. Embeddings and the like get no
more time than answers do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np

from ngramspec.batching.request import ActiveRequest
from ngramspec.cost.calibration import Calibration
from ngramspec.cost.measure import SHARED_ORDER
from ngramspec.decoding.loop import Pass
from ngramspec.decoding.shared_loop import SharedLoop
from ngramspec.decoding.text import Text
from ngramspec.errors import NGramSpecError, TargetError
from ngramspec.exactness.decision import UNMEASURED, ExactnessMode
from ngramspec.policies.cost import CostPolicy
from ngramspec.shared_model import SequenceModel, SharedModel
from ngramspec.steps import Step
from ngramspec.tokens import common_prefix
from ngramspec.user_class import UserCodeError

WORTH = 32
"""Fewest tokens for which a state is saved or restored: evaluating them takes about as long."""

COPIED = 16
"""Fewest tokens that are copied from another sequence: on 2 cores SmolLM2 reads so many in 50 ms, and copies them in 1
to 30, by what the other sequence holds. Chats often share a system prompt that is no longer."""


class PromptCache:
    """States of texts, the least recently used first: these go when there are more than `room` bytes of them.

    A text that another one begins with is not kept twice.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._states: dict[tuple[int, ...], bytes] = {}

    @property
    def size(self) -> int:
        return sum(map(len, self._states.values()))

    def put(self, tokens: Sequence[int], state: bytes) -> None:
        """Keep a state, unless it is larger than all the room there is."""
        for known in [known for known in self._states if common_prefix(known, tokens) == len(known)]:
            del self._states[known]
        if len(state) <= self.room:
            self._states[tuple(tokens)] = state
        while self.size > self.room:
            del self._states[next(iter(self._states))]

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether a text that begins with these tokens is kept."""
        return any(common_prefix(known, tokens) == len(tokens) for known in self._states)

    def best(self, prompt: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """The text with the most tokens in common with a prompt from its start, and how many those are."""
        common = ((common_prefix(known, prompt), known) for known in self._states)
        most, best = max(common, key=lambda found: found[0], default=(0, ()))
        return best, most

    def take(self, tokens: tuple[int, ...]) -> bytes:
        """The state of a text, which is not kept any longer."""
        return self._states.pop(tokens)


class Slots:
    """The sequences of a model, and the texts that left them.

    Args:
        room: most bytes of the states of texts that left their sequence.
        apart: whether sequences whose numbers do not follow each other are evaluated one after the other.
        scales: Scales of the LoRA adapters of requests that do not set their own.
    """

    def __init__(
        self,
        sequences: Sequence[SequenceModel],
        room: int = 0,
        *,
        apart: bool = False,
        scales: tuple[float, ...] = (),
    ) -> None:
        self._sequences = list(sequences)
        self._room = room
        self._scales = scales
        self._scales_of = {sequence.number: scales for sequence in sequences}  # under which its tokens were evaluated
        self._apart = apart
        self._free = list(sequences)  # the least recently used first
        self._cache = PromptCache(room)

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    def take(
        self, prompt: Sequence[int], preferred: int | None = None, scales: tuple[float, ...] | None = None
    ) -> SequenceModel:
        """A free sequence, that numbered `preferred` if it is free, made to hold what is known of a prompt's start.

        `scales` are those of the LoRA adapters; tokens that were evaluated with others are not known.
        """
        scales = self._scales if scales is None else scales
        sequence = self._choose(prompt, preferred, scales)
        self._fill(sequence, prompt, scales)
        self._free.remove(sequence)
        return sequence

    def set_scales(self, scales: tuple[float, ...]) -> None:
        """Set the scales of requests that do not set their own. Only states of these are kept in RAM."""
        if scales != self._scales:
            self._scales, self._cache = scales, PromptCache(self._room)

    def normalise(self, sequence: SequenceModel) -> SequenceModel:
        """Clear a sequence whose tokens were evaluated with other scales than requests have that do not set any."""
        if self._scales_of[sequence.number] != self._scales:
            sequence.clear()
            self._scales_of[sequence.number] = self._scales
        return sequence

    def _common(self, sequence: SequenceModel, prompt: Sequence[int], scales: tuple[float, ...]) -> int:
        """Number of tokens at the start of a prompt that a sequence holds, evaluated with these scales."""
        return common_prefix(sequence.tokens, prompt) if self._scales_of[sequence.number] == scales else 0

    def _fill(self, sequence: SequenceModel, prompt: Sequence[int], scales: tuple[float, ...]) -> None:
        """Make a sequence hold what is known of a prompt, wherever that is."""
        here = self._common(sequence, prompt, scales)
        self._leave(sequence, here)
        if self._scales_of[sequence.number] != scales:
            sequence.clear()
            self._scales_of[sequence.number] = scales
        others = ((self._common(other, prompt, scales), other) for other in self._sequences if other is not sequence)
        # Of several the one that holds least: all that it holds may be copied.
        there, other = max(others, key=lambda x: (x[0], -len(x[1].tokens)), default=(0, sequence))
        tokens, saved = self._cache.best(prompt) if scales == self._scales else ((), 0)
        if saved > there and saved >= here + WORTH:
            state = self._cache.take(tokens)
            with suppress(TargetError):
                sequence.restore(tokens, state)
                self._cache.put(tokens, state)  # it was of use: it is the last to go
        elif there >= here + COPIED:
            sequence.adopt(other, there)

    def give_back(self, sequence: SequenceModel) -> None:
        """A request left a sequence, which goes on holding its text."""
        self._free.append(sequence)

    def _choose(self, prompt: Sequence[int], preferred: int | None, scales: tuple[float, ...]) -> SequenceModel:
        for sequence in self._free:
            if sequence.number == preferred:
                return sequence
        # One whose text goes on: most of what it holds is the prompt's beginning.
        common = {sequence.number: self._common(sequence, prompt, scales) for sequence in self._free}
        going_on = [sequence for sequence in self._free if 2 * common[sequence.number] > len(sequence.tokens)]
        if going_on:
            return max(going_on, key=lambda sequence: common[sequence.number])
        return min(self._free, key=lambda sequence: (self._gaps(sequence), len(sequence.tokens) > 0))

    def _gaps(self, sequence: SequenceModel) -> int:
        """How many idle sequences would lie between those at work and this one, where each makes passes dearer."""
        free = {other.number for other in self._free}
        busy = [other.number for other in self._sequences if other.number not in free or other is sequence]
        return max(busy) - min(busy) + 1 - len(busy) if self._apart else 0

    def _leave(self, sequence: SequenceModel, common: int) -> None:
        """Save what a sequence holds, if its next text goes on from far before the end of it."""
        tokens = tuple(sequence.tokens)
        if self._scales_of[sequence.number] != self._scales:
            return
        if len(tokens) - common >= WORTH and self._cache.room and not self._cache.holds(tokens):
            with suppress(TargetError):
                self._cache.put(tokens, sequence.saved())


# --------------------------------------------------------------------------- turns and passes


T = TypeVar("T")

PAUSE = 0.25
"""Seconds that a chunk of a prompt may keep answers waiting, where the chunks can be chosen, once both take turns."""

AHEAD = 0.5  # seconds of reading that answers may wait for, beyond the time that they had themselves
LONGEST = 1.0  # maximum seconds that a text waits for chunks of prompts, unless a single chunk takes longer
FORGET = 0.98  # weight of the expected time of a chunk after a faster chunk: chunks late in a prompt are slower
LEAST = 32  # fewest tokens of such a chunk: fewer cost nearly as much time

DEPTH = 64  # tokens of context on which batches are timed
TOKENS = 4000  # what measuring is worth: as much as for one text of so many tokens


class Scheduler:
    """Shares time between prompts and answers."""

    def __init__(self) -> None:
        self._ahead = self._beside = 0.0
        self._chunk_seconds = 0.0  # expected maximum time of a chunk while texts wait
        self._texts_wait = False
        self._order: list[object] = []  # prompts that had a turn, the last turn last
        self._per_token = 0.0

    def reads(self, readers: Sequence[T], writers: Sequence[object]) -> T | None:
        """The prompt to read a chunk of now; None: it is the answers' turn.

        Args:
            readers: prompts that are not read to their end, in the order in which they came.
            writers: texts that are being written.
        """
        self._texts_wait = bool(writers)
        if not readers or not writers:
            self._ahead = 0.0
        if not readers or self._ahead > AHEAD or 0 < self._ahead > LONGEST - self._chunk_seconds:
            return None
        self._order = [reader for reader in self._order if reader in readers]
        chosen = min(readers, key=lambda reader: self._order.index(reader) if reader in self._order else -1)
        self._order = [reader for reader in self._order if reader is not chosen] + [chosen]
        return chosen

    def read(self, tokens: int, seconds: float) -> None:
        """A chunk of so many tokens was read."""
        self._ahead += seconds
        if self._texts_wait:
            self._chunk_seconds = max(seconds, FORGET * self._chunk_seconds)
        if tokens:
            self._per_token = seconds / tokens

    def wrote(self, seconds: float, *, are_alone: bool = False) -> None:
        """A pass was made for the answers; `are_alone`: no prompt waits."""
        self._ahead = 0.0 if are_alone else max(0.0, self._ahead - seconds)
        self._beside -= seconds

    def goes_aside(self, writers: Sequence[object]) -> bool:
        """Whether it is the turn of work for no request, while texts are being written."""
        if not writers:
            self._beside = 0.0
        return self._beside <= 0

    def went_aside(self, seconds: float) -> None:
        """A step of such work was done."""
        self._beside = max(0.0, self._beside) + seconds

    def chunk(self, most: int, *, short: bool = False) -> int:
        """Tokens of a chunk that answers wait for, at most `most`; `short`: without what they may wait longer."""
        if not self._per_token:
            return min(most, LEAST)
        seconds = PAUSE if short else max(PAUSE, AHEAD - self._ahead)
        return max(1, min(most, max(LEAST, int(seconds / self._per_token))))


Result = tuple[ActiveRequest, Step | None, NGramSpecError | ValueError | None]
"""A request, the step that a pass made of its text, and the error that ended it."""


class Writer:
    """Makes passes over the texts of requests that share a model.

    Args:
        calibration: what was measured of the model, with a curve.
        exactness: which batch sizes may be used.
        drafts: whether anything is drafted.
        draft_max: most tokens in a draft.

    Attributes:
        passes: how many there were.
        busy: the sum of texts in each.
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
        self._ahead: Pass | None = None  # a pass that was submitted ahead
        self._ahead_requests: Sequence[ActiveRequest] = ()
        self.passes = self.busy = 0

    def begin(self) -> None:
        self._loop.begin()

    def measure_again(self) -> None:
        """Measure costs that were measured while other programs ran, if these are gone."""
        sequence = self._model.sequences[0]
        if self._calibration.is_provisional and sequence.conditions.is_quiet:
            self._calibration.ensure_curve(sequence, TOKENS, SHARED_ORDER)
            self._prepare()
            self._calibration.save()

    def _prepare(self) -> None:
        known = self._calibration
        self._loop.prepare(self._curve, self._sizes, known.restore, is_provisional=known.is_provisional)

    @property
    def is_ahead(self) -> bool:
        """True if a pass was submitted whose outcome `step` has not returned yet."""
        return self._ahead is not None

    def step(self, requests: Sequence[ActiveRequest], *, can_go_ahead: bool = False) -> Sequence[Result]:
        """Make a pass over the texts whose turn it is. Return what came of it for each of their requests.

        If `can_go_ahead`, the next pass over the same texts may be submitted as soon as the outcome of this one is
        known, so that a GPU works on it meanwhile. The next call then returns its outcome.
        """
        loop, current, wanted = self._loop, self._ahead, len(requests)
        if current is not None:
            requests, self._ahead = self._ahead_requests, None
        elif len(requests) > self._together:
            at = self._turn % len(requests)
            requests = [*requests[at:], *requests[:at]][: self._together]
            self._turn += self._together
        if current is None:
            try:
                current = loop.submit(_texts(requests))
            except (TargetError, UserCodeError) as error:
                if len(requests) == 1:
                    return [(requests[0], None, error)]
                # Each alone: only those end that cannot be helped.
                return [result for request in requests for result in self.step((request,))]
        self.passes += 1
        self.busy += len(requests)
        loop.commit(current)
        # A request that is not in this pass must be in the next one.
        if can_go_ahead and wanted <= len(requests) and self._model.returns_early:
            self._submit_ahead(requests)
        results: list[Result] = []
        for request, step in zip(requests, loop.report(current), strict=True):
            if request.sequence is not None:
                assert request.text is not None
                results.append((request, step, request.text.error))
        return results

    def _submit_ahead(self, requests: Sequence[ActiveRequest]) -> None:
        growing = [
            request
            for request in requests
            if request.text is not None and not (request.text.stop or request.text.error or request.text.is_released)
        ]
        if growing:
            with suppress(TargetError, UserCodeError):  # the next step meets it again
                self._ahead, self._ahead_requests = self._loop.submit(_texts(growing)), growing


def _texts(requests: Sequence[ActiveRequest]) -> list[Text]:
    texts: list[Text] = []
    for request in requests:
        assert request.text is not None
        texts.append(request.text)
    return texts


def warm_up(model: SharedModel, *, exact: bool, folder: Path | None = None) -> tuple[Calibration, ExactnessMode]:
    """Measure a model whose sequences are empty, or take up what was measured before.

    Args:
        exact: whether texts must be the same bit for bit whatever is drafted, and whoever else is in a pass.
        folder: where measurements are kept; None for the user's cache folder.
    """
    if hasattr(model, "feeds_head"):
        # Plain passes hand out nothing, and whether a head pays is for the first texts to show.
        model.feeds_head = False
    sequence = model.sequences[0]
    known = Calibration.load(sequence, folder)
    tokens = np.random.default_rng(0).integers(0, sequence.n_vocab, min(DEPTH, sequence.n_ctx // 2))
    sequence.prefill([int(token) for token in tokens])
    known.ensure_curve(sequence, TOKENS, SHARED_ORDER)
    exactness = ExactnessMode(bound=UNMEASURED)
    if exact and sequence.can_rollback and sequence.exact_rollback:
        whole = known.ensure_exact(sequence, together=True)
        sizes = tuple(size for size in whole if size <= sequence.max_batch) or (1,)
        exactness = ExactnessMode(sizes, aligned=not known.ensure_reading(sequence), same=True)
    elif exact:
        exactness = ExactnessMode((1,), aligned=True, same=True)
    sequence.clear()
    if hasattr(model, "feeds_head"):
        model.feeds_head = True
    known.save()
    return known, exactness
