"""`Engine`: answers several requests at once on one model. One thread owns the model; requests come from any thread.

    engine = Engine(model, vocabulary, drafter=MixtureDrafter(recall), stored=known)
    ticket = engine.submit(Request(prompt, max_tokens=200), print)
    engine.stop(drain=10)

A pass evaluates the last token of each running text and a draft within the shared budget. Between passes, chunks of
waiting prompts are evaluated. A sequence keeps its tokens after its text ends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any

from ngramspec.backend import ExactnessMode, SequenceModel, SharedModel, Vocabulary
from ngramspec.batching.request import ActiveRequest, Listener, Report, Slot
from ngramspec.batching.slots import Slots
from ngramspec.batching.writer import Result, Scheduler, Writer
from ngramspec.cost.store import StoredTimes
from ngramspec.data import NGramSpecError, ShutdownError, TargetError
from ngramspec.decoding.text import Drafts
from ngramspec.drafting.draft import Drafter
from ngramspec.drafting.mixture.drafter import TextIndexSet
from ngramspec.request import Request
from ngramspec.steps import Stats

CLOSED = "the server is shutting down"
RANK_SECONDS = 1.0  # seconds that each further request of a group waits longer, so that other clients come first


class Engine:
    """Answers requests, several at once. Public methods may be called from any thread, and return at once.

    The engine is the only user of `model` until `stop` returns. `stored` are the costs of its passes, which are saved
    at the end. `drafter` drafts for the first sequence and makes the drafters of the others; `None` means plain
    decoding. `memory` receives each answer, so that later ones are drafted from it. Saved texts take at most
    `cache_room` bytes. `on_crash` is called with an unexpected error, which ended all running requests. `scales` are
    those of the model's LoRA adapters at the start. `executor` has one thread, on which the engine runs until `stop`.
    It should be the thread that loaded the model (see README.md); `None` means a new thread.
    """

    def __init__(
        self,
        model: SharedModel,
        vocabulary: Vocabulary,
        *,
        stored: StoredTimes,
        exactness: ExactnessMode | None = None,
        drafter: Drafter | None = None,
        draft_max: int = 63,
        memory: TextIndexSet | None = None,
        cache_room: int = 0,
        on_crash: Callable[[BaseException], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        scales: Sequence[float] = (),
        executor: Executor | None = None,
    ) -> None:
        self.n_ctx = model.n_ctx  # maximum number of tokens of a request, prompt and response together
        self._model, self._vocabulary = model, vocabulary
        self._exactness = exactness or ExactnessMode()
        self._memory = memory
        self._on_crash = on_crash
        self._clock = clock
        self._stored, self.times = stored, stored.times
        self._writer = Writer(
            model, stored.times, self._exactness, drafts=drafter is not None, draft_max=draft_max, clock=clock
        )
        self._drafter = drafter
        self._drafts = {
            sequence.number: Drafts(
                None if drafter is None else drafter.clone_for_sequence() if sequence.number else drafter
            )
            for sequence in model.sequences
        }
        ends = model.sequences[0], model.sequences[-1]
        needs_neighbours = len(model.sequences) > 2 and len(model.batches([1, 1], ends)) > 1
        self._slots = Slots(
            model.sequences, cache_room, needs_neighbours=needs_neighbours, scales=tuple(scales), clock=clock
        )
        # Scales of the LoRA adapters for later requests without their own; may be set from any thread.
        self.scales = self._applied_scales = tuple(scales)
        self._scheduler = Scheduler()
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._queue: deque[ActiveRequest] = deque()
        self._working: list[ActiveRequest] = []
        self._errands: list[tuple[int, Callable[[SequenceModel], Any], Future[Any]]] = []
        self._tasks: deque[tuple[Generator[object, None, Any], Future[Any]]] = deque()
        self._closing: float | None = None
        self._stats = Stats()
        self._n_requests = 0
        self._prompt_tokens = self._cached_tokens = self._max_held = 0
        self._completion: Future[None] = Future()
        if executor is not None:
            executor.submit(self._run)
        else:
            threading.Thread(target=self._run, name="engine", daemon=True).start()

    def submit(self, request: Request, listener: Listener, rank: int = 0) -> ActiveRequest:
        """Queue a request; what is wrong with it is reported as an error event.

        `rank` is the number of requests that the client asked for together with this one, before it. The request waits
        as if it had arrived `RANK_SECONDS` later for each of them, so that others need not wait for them all.
        """
        active = ActiveRequest(request, listener, self._clock)
        with self._lock:
            active.scales = self.scales if request.scales is None else request.scales
            active.turn = self._clock() + RANK_SECONDS * rank
            active.number, self._n_requests = self._n_requests, self._n_requests + 1
            is_closed = self._closing is not None
            if not is_closed:
                self._queue.append(active)
                self._wake.notify()
        if is_closed:
            active.finish(ShutdownError(CLOSED))
        return active

    def on_slot(self, number: int, work: Callable[[SequenceModel], Any]) -> Future[Any]:
        """Do some work with a slot's sequence on the engine's thread, as soon as the slot is idle."""
        return self._queue_up(self._errands, (number, work))

    def run_between_passes(self, work: Callable[[Callable[[], int]], Generator[object, None, Any]]) -> Future[Any]:
        """Do work that needs no slot on the engine's thread, one step between two passes.

        A separate thread would take the processor from the passes, and OpenMP would keep further threads for it. One
        piece of work ends before the next one begins. Cancelling the future ends the work. `work` returns the steps;
        its argument is a function that returns how many tokens the next step may evaluate.
        """
        return self._queue_up(self._tasks, (work(self._chunk),))

    def _queue_up(self, works: Any, work: tuple[Any, ...]) -> Future[Any]:
        future = Future[Any]()
        with self._lock:
            if self._closing is None:
                works.append((*work, future))
                self._wake.notify()
            else:
                future.set_exception(ShutdownError(CLOSED))
        return future

    def report(self) -> Report:
        with self._lock:
            slots = [Slot(sequence.number, len(sequence.tokens)) for sequence in self._model.sequences]
            for active in self._working:
                if active.sequence is not None:
                    at, counters = active.sequence.number, (active.n_prefilled, active.n_cached, active.stats.generated)
                    slots[at] = Slot(at, slots[at].n_tokens, active.request, active.number, *counters, active.new_line)
            self._max_held = max(self._max_held, *(slot.n_tokens for slot in slots))
            stats = Stats()
            for part in (self._stats, *(active.stats for active in self._working)):
                stats.merge(part)
            read, writer = (self._prompt_tokens, self._cached_tokens), self._writer
            return Report(tuple(slots), len(self._queue), stats, *read, writer.passes, writer.busy, self._max_held)

    def stop(self, drain: float = 0.0) -> None:
        """Take no more requests, end the running ones after `drain` seconds, and return when all have ended."""
        with self._lock:
            self._closing = min(time.monotonic() + drain, self._closing or float("inf"))
            self._wake.notify()
        self._completion.result()

    def _run(self) -> None:
        """Work until the engine is stopped; this and all methods below run on the engine's thread."""
        while True:
            # Between the passes of texts there is usually nothing else to do.
            has_chores = not self._working or self._queue or self._errands or self._tasks or self._closing is not None
            if has_chores and not self._wait():
                break
            try:
                if has_chores:
                    self._slots.set_scales(self.scales)
                    self._drop_cancelled_waiting()
                    self._run_errands()
                    self._run_task()
                    self._admit()
                self._work()
            except Exception as error:
                self._recover(error)
        for _, future in self._tasks:
            if future.set_running_or_notify_cancel():
                future.set_exception(ShutdownError(CLOSED))
        self._stored.save()
        self._completion.set_result(None)

    def _wait(self) -> bool:
        """Wait until there is work; return False if all work has ended."""
        with self._lock:
            while not (self._queue or self._working or self._errands or self._tasks or self._closing is not None):
                self._wake.wait()
            if self._closing is not None:
                is_late = time.monotonic() >= self._closing
                for active in (*self._queue, *self._working) if is_late else ():
                    active.cancel()
                if not (self._queue or self._working or self._errands or (self._tasks and not is_late)):
                    return False
        return True

    def _drop_cancelled_waiting(self) -> None:
        with self._lock:
            requests = [active for active in self._queue if active.cancelled]
            for active in requests:
                self._queue.remove(active)
        for active in requests:
            active.finish()

    def _run_errands(self) -> None:
        busy = {active.sequence.number for active in self._working if active.sequence is not None}
        with self._lock:
            ready = [errand for errand in self._errands if errand[0] not in busy]
            self._errands[:] = [errand for errand in self._errands if errand[0] in busy]
        for number, work, future in ready:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(self._slots.normalise(self._model.sequences[number])))
                except Exception as error:
                    future.set_exception(error)

    def _run_task(self) -> None:
        """Do a step of the first work that needs no slot, if it is its turn."""
        if not self._tasks or not self._scheduler.is_turn_of_task(self._writers):
            return
        steps, future = self._tasks[0]
        began, value, failure = self._clock(), None, None
        if not future.cancelled():
            try:
                next(steps)
                return
            except StopIteration as end:
                value = end.value
            except Exception as error:
                failure = error
            finally:
                self._scheduler.record_task(self._clock() - began)
        steps.close()
        self._tasks.popleft()
        # Until here it can be cancelled, and from here on it cannot.
        if future.set_running_or_notify_cancel():
            future.set_result(value) if failure is None else future.set_exception(failure)

    def _admit(self) -> None:
        """Give free sequences to waiting requests, by turn and then in order of arrival."""
        while self._queue and self._slots.free:
            with self._lock:
                active = min(self._queue, key=lambda waiting: waiting.turn)
                self._queue.remove(active)
            request, counts_calls = active.request, self._drafter is not None and self._exactness.max_logit_shift > 0
            try:
                active.prepare(self._vocabulary, self._model.sequences[0], counts_calls=counts_calls)
            except (NGramSpecError, ValueError) as error:
                active.finish(error)
                continue
            with self._lock:
                self._working.append(active)
            # A request that does not use the cache gets no copy of known tokens.
            prompt = request.prompt if request.cache_prompt else ()
            self._slots.read_seconds = self._scheduler.read_seconds
            sequence = self._slots.take(prompt, request.slot, active.scales)
            try:
                active.start(
                    sequence, self._drafts[sequence.number], aligned=self._exactness.aligned, max_chunk=self._chunk
                )
            except TargetError as error:
                self._end(active, error)
                continue
            self._writer.policy.begin()
            with self._lock:
                self._cached_tokens += active.n_cached

    def _chunk(self) -> int:
        """Return the maximum size of the next chunk of a prompt."""
        max_tokens = self._model.max_tokens
        return self._scheduler.chunk(max_tokens) if self._writers else max_tokens

    @property
    def _writers(self) -> list[ActiveRequest]:
        return [active for active in self._working if active.reader is None]

    def _work(self) -> None:
        """Make one pass: a chunk of a prompt, or a token and a draft for the texts whose turn it is."""
        readers, writers = [], []
        for active in self._take_turns() if self.scales and self._working else tuple(self._working):
            if active.cancelled:
                self._end(active)
            elif active.reader is None:
                writers.append(active)
            else:
                readers.append(active)
        # A pass that was submitted ahead must end before a prompt takes its logits' place.
        is_ahead = self._writer.is_ahead
        reader = self._scheduler.reads(readers, writers) if readers and not is_ahead else None
        began, n_read = self._clock(), 0
        results: Sequence[Result] = ()
        if reader is not None:
            before = reader.n_prefilled
            try:
                results = [(reader, reader.read(), None)]
            except (NGramSpecError, ValueError) as error:
                results = [(reader, None, error)]
            n_read = reader.n_prefilled - before
            self._scheduler.read(n_read, self._clock() - began)
        elif writers or is_ahead:
            are_alone = not readers
            results = self._writer.step(writers, can_go_ahead=are_alone and not self.scales)
            self._scheduler.record_pass(self._clock() - began, are_alone=are_alone)
        with self._lock:  # so that a report counts all of the pass or nothing
            self._prompt_tokens += n_read
            for active, step, _ in results:
                if step is not None:
                    active.count(step)
        for active, step, failure in results:
            if step is not None:
                active.emit(step)
            if failure is not None or active.is_complete:
                self._end(active, failure)

    def _take_turns(self) -> list[ActiveRequest]:
        """Return the requests of the next pass, which have the same scales of LoRA adapters, and apply these."""
        groups = list(dict.fromkeys(active.scales for active in self._working))
        # With several groups, the one after the group of the last pass has its turn.
        turn = groups.index(self._applied_scales) + 1 if self._applied_scales in groups else 0
        scales = groups[turn % len(groups)]
        if scales != self._applied_scales:
            self._model.scale_adapters(scales)
            self._applied_scales = scales
        return [active for active in self._working if active.scales == scales]

    def _end(self, active: ActiveRequest, error: NGramSpecError | ValueError | None = None) -> None:
        with self._lock:
            self._working.remove(active)
            self._stats.merge(active.stats)
        sequence = active.sequence
        active.finish(error)
        if sequence is not None and isinstance(error, TargetError):
            # The tokens of the sequence may be the cause; the next request must not meet them again.
            with suppress(Exception):
                sequence.clear()
        if sequence is not None:
            self._max_held = max(self._max_held, len(sequence.tokens))
            self._slots.give_back(sequence)
        if self._drafter is not None:
            self._drafter.save_state()
        if self._memory is not None:
            self._memory.add_text([token for token in active.answer if not self._vocabulary.is_eog(token)])

    def _recover(self, error: Exception) -> None:
        """End all running requests after an unexpected error, and clear the sequences for the next request."""
        if self._on_crash is not None:
            self._on_crash(error)
        for active in self._working[:]:
            self._end(active, TargetError(f"internal error in ngramspec ({type(error).__name__})"))
        for sequence in self._model.sequences:
            # The next request tells if they are of no more use.
            with suppress(Exception):
                sequence.clear()
