"""`Engine`: answers several requests at once on one model. One thread owns the model; requests come from any thread.

    engine = Engine(model, vocabulary, shown=vocabulary.shown, drafter=MixtureDrafter(recall), calibration=known)
    ticket = engine.submit(Request(prompt, max_tokens=200), print)
    engine.stop(drain=10)

A pass evaluates the last token of every text that is being written, with what the budget gives its draft; between
passes come chunks of prompts that are still being read. Texts that end leave their tokens in their lane, for whoever
goes on from there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress

from ngramspec.backend import Lane, SharedModel, Vocabulary
from ngramspec.batching.job import Job
from ngramspec.batching.lanes import Lanes
from ngramspec.batching.prompt_cache import PromptCache
from ngramspec.batching.request import ClosedError, Listener, Report, Request, Slot
from ngramspec.batching.turns import Turns
from ngramspec.batching.writing import Writing
from ngramspec.cost.calibration import Calibration
from ngramspec.decoding.speculation import Proposer
from ngramspec.decoding.step import Stats
from ngramspec.drafting.mixture.drafter import MixtureDrafter
from ngramspec.drafting.recall import Recall
from ngramspec.errors import NGramSpecError, TargetError
from ngramspec.exactness.auto import Footing

KEPT_SECONDS = 60.0
"""How often what the drafter learnt is written down, where requests end that often; it takes 10 to 80 milliseconds."""


class Engine:
    """Answers requests, several at once. See `ngramspec.batching.request.Service`.

    Args:
        model: whose lanes are worked in; nobody else uses it until `stop` returned.
        vocabulary: what its tokens mean.
        shown: the bytes that a token is shown as where control tokens are to be seen.
        calibration: what was measured of the model, with a curve.
        footing: batch sizes that may be used, and whether prompts must be read aligned.
        drafter: drafts for the first lane, and others beside it for the rest; None: plain decoding.
        draft_max: most tokens in a draft.
        memory: hears every answer, so that later ones are drafted from it; None: nobody does.
        cache_room: bytes for texts that left their lane.
        crashed: told of an error that nobody expected, with which all requests at work ended.
        clock: tells the seconds that passes and drafting take.
        executor: of one thread, on which the engine then runs until `stop`; None: a thread of its own. It should be the
            thread that measured the model: OpenMP keeps a pool of threads for each thread that ever made a pass, and
            once there are more of them than cores, passes take a third longer.

    Attributes:
        n_ctx: most tokens of a request, prompt and answer together.
    """

    def __init__(
        self,
        model: SharedModel,
        vocabulary: Vocabulary,
        *,
        shown: Callable[[int], bytes],
        calibration: Calibration,
        footing: Footing | None = None,
        drafter: MixtureDrafter | None = None,
        draft_max: int = 63,
        memory: Recall | None = None,
        cache_room: int = 0,
        crashed: Callable[[BaseException], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        executor: Executor | None = None,
    ) -> None:
        self.n_ctx = model.n_ctx
        self._model, self._vocabulary, self._shown = model, vocabulary, shown
        self._footing = footing or Footing()
        self._memory = memory
        self._crashed = crashed
        self._clock = clock
        self._calibration = calibration
        self._writing = Writing(
            model, calibration, self._footing, drafts=drafter is not None, draft_max=draft_max, clock=clock
        )
        self._drafter, self._kept = drafter, clock()
        self._proposers = {
            lane.number: Proposer(None if drafter is None else drafter.beside() if lane.number else drafter)
            for lane in model.lanes
        }
        ends = model.lanes[0], model.lanes[-1]
        apart = len(model.lanes) > 2 and len(model.batches([1, 1], ends)) > 1
        self._lanes = Lanes(model.lanes, PromptCache(cache_room), apart=apart)
        self._turns = Turns()
        self._wake = threading.Condition()
        self._queue: deque[Job] = deque()
        self._working: list[Job] = []
        self._closing: float | None = None
        self._stats = Stats()
        self._prompt_tokens = self._cached_tokens = 0
        self._ended: Future[None] = Future()
        if executor is not None:
            executor.submit(self._run)
        else:
            threading.Thread(target=self._run, name="engine", daemon=True).start()

    # ------------------------------------------------------------------ from any thread

    def submit(self, request: Request, listener: Listener) -> Job:
        """Queue a request; see `Service.submit`."""
        job = Job(request, listener, self._clock)
        with self._wake:
            closed = self._closing is not None
            if not closed:
                self._queue.append(job)
                self._wake.notify()
        if closed:
            job.finish(ClosedError("the server is shutting down"))
        return job

    def report(self) -> Report:
        """What the engine does now; see `Report`."""
        with self._wake:
            busy = {job.lane.number: job for job in self._working if job.lane is not None}
            slots = tuple(self._slot(lane, busy.get(lane.number)) for lane in self._model.lanes)
            stats = Stats()
            for counted in (self._stats, *(job.stats for job in self._working)):
                stats.merge(counted)
            return Report(
                slots,
                len(self._queue),
                stats,
                self._prompt_tokens,
                self._cached_tokens,
                self._writing.passes,
                self._writing.busy,
            )

    def stop(self, drain: float = 0.0) -> None:
        """Take no more requests, and end those at work; see `Service.stop`."""
        with self._wake:
            self._closing = min(time.monotonic() + drain, self._closing or float("inf"))
            self._wake.notify()
        self._ended.result()

    def _slot(self, lane: Lane, job: Job | None) -> Slot:
        if job is None:
            return Slot(lane.number, False, 0, 0, 0, len(lane.tokens))
        return Slot(lane.number, True, len(job.request.prompt), job.prefilled, job.stats.generated, len(lane.tokens))

    # ------------------------------------------------------------------ on the engine's thread

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._queue or self._working or self._closing is not None):
                    self._wake.wait()
                if self._closing is not None:
                    late = time.monotonic() >= self._closing
                    for job in (*self._queue, *self._working) if late else ():
                        job.cancel()
                    if not self._queue and not self._working:
                        break
            try:
                self._drop_cancelled()
                self._admit()
                self._work()
            except Exception as error:
                self._recover(error)
        self._calibration.save()
        if self._drafter is not None:
            self._drafter.keep()
        self._ended.set_result(None)

    def _drop_cancelled(self) -> None:
        with self._wake:
            dropped = [job for job in self._queue if job.cancelled]
            for job in dropped:
                self._queue.remove(job)
        for job in dropped:
            job.finish()
        for job in [job for job in self._working if job.cancelled]:
            self._end(job)

    def _admit(self) -> None:
        """Give waiting requests the lanes that are free, in the order in which they came."""
        while self._lanes.any_free:
            with self._wake:
                if not self._queue:
                    return
                job = self._queue.popleft()
            model, request = self._model, job.request
            try:
                job.prepare(
                    self._vocabulary,
                    self._shown,
                    n_ctx=self.n_ctx,
                    n_vocab=model.lanes[0].n_vocab,
                    counts_calls=self._drafter is not None and self._footing.bound > 0,
                )
            except (NGramSpecError, ValueError) as error:
                job.finish(error)
                continue
            with self._wake:
                self._working.append(job)
            # Who wants nothing of the cache gets no copy of what is known, only to clear it.
            lane = self._lanes.take(request.prompt if request.cache_prompt else (), request.slot)
            try:
                job.start(lane, self._proposers[lane.number], aligned=self._footing.aligned, most=self._chunk)
            except TargetError as error:
                self._end(job, error)
                continue
            self._writing.begin()
            with self._wake:
                self._cached_tokens += job.cached

    def _chunk(self) -> int:
        """Most tokens of the next chunk of a prompt."""
        most = self._model.max_tokens
        return self._turns.chunk(most) if any(not job.reading for job in self._working) else most

    def _work(self) -> None:
        """One pass: a chunk of a prompt, or a token and a draft for the texts whose turn it is."""
        readers = [job for job in self._working if job.reading]
        writers = [job for job in self._working if not job.reading]
        reader = self._turns.reads(readers, writers)
        if reader is not None:
            self._read(reader)
        elif writers:
            began = self._clock()
            steps, ended = self._writing.step(writers)
            self._turns.wrote(self._clock() - began)
            with self._wake:  # whoever wants a report waits until all is counted
                for job, step in steps:
                    job.count(step)
            for job, step in steps:
                job.emit(step)
            for job, error in ended:
                self._end(job, error)

    def _read(self, job: Job) -> None:
        began, before = self._clock(), job.prefilled
        try:
            step = job.read()
        except (NGramSpecError, ValueError) as error:
            self._end(job, error)
            return
        self._turns.read(job.prefilled - before, self._clock() - began)
        with self._wake:
            self._prompt_tokens += job.prefilled - before
            if step is not None:
                job.count(step)
        if step is not None:
            job.emit(step)
        generation = job.generation
        if not job.reading and (generation is None or generation.stop is not None):
            self._end(job)

    def _end(self, job: Job, error: NGramSpecError | ValueError | None = None) -> None:
        """A job leaves its lane."""
        with self._wake:
            self._working.remove(job)
            self._stats.merge(job.stats)
        lane = job.lane
        job.finish(error)
        if lane is not None:
            self._lanes.give_back(lane)
        if self._drafter is not None and self._clock() - self._kept > KEPT_SECONDS:
            self._drafter.keep()
            self._kept = self._clock()
        if self._memory is not None:
            self._memory.hear([token for token in job.answer if not self._vocabulary.is_eog(token)])

    def _recover(self, error: Exception) -> None:
        """Something failed that should not: what is at work ends, and the next request finds empty lanes."""
        if self._crashed is not None:
            self._crashed(error)
        for job in self._working[:]:
            self._end(job, TargetError(f"the request failed inside ngramspec ({type(error).__name__})"))
        for lane in self._model.lanes:
            # The next request tells if they are of no more use.
            with suppress(Exception):
                lane.clear()
