"""An engine that responds from a script: a replacement of `ngramspec.batching.engine.Engine` without a model.

Each request gets a separate thread, which sends the listener the events of an engine: `Started`, `Prefilled`, steps
with the scripted text, `Done`. A real `Text` makes the pieces, so that limits, stop strings and rules end a response as
in an engine. Samplers are not applied: the script may contain tokens that a rule forbids.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from support.cli_runner import PATIENCE

from ngramspec.acceptance.rules import Rows, Verdict
from ngramspec.backend import ModelBase, Vocabulary
from ngramspec.batching.request import Done, Listener, Prefilled, Report, Scored, Slot, Started
from ngramspec.cost.times import PassTimes
from ngramspec.data import NGramSpecError
from ngramspec.decoding.text import Drafts, Plan, Text
from ngramspec.drafting.draft import Chooser, Draft
from ngramspec.request import Request
from ngramspec.sampling.distribution import Logprobs
from ngramspec.steps import Stats, Step

SLOTS = 4


@dataclass
class Script:
    """The response to a request."""

    text: str = "Hello, world"  # text of the response, before stop strings and limits apply
    ends: bool = True  # whether the model ends the response after the text; otherwise it repeats the text
    step: int = 1  # number of tokens in a step; in all steps but the first, all but the last are accepted drafts
    start_error: NGramSpecError | ValueError | None = None  # error sent to the listener before the request starts
    error: NGramSpecError | ValueError | None = None  # error sent to the listener after `after` steps
    after: int = 1
    n_cached: int = 0  # number of prompt tokens that are in the cache
    is_surprising: bool = False  # true if passes take another time than expected
    begin: threading.Event | None = None  # event to await before the prefill; `None` means no waiting
    go: threading.Semaphore | None = None  # semaphore to await before each step; `None` means no waiting


@dataclass
class FakeTicket:
    """A request to the scripted engine."""

    request: Request
    cancellation: threading.Event = field(default_factory=threading.Event)
    end: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancellation.set()

    def wait(self, ready: Callable[[float], bool]) -> None:
        """Wait until `ready` returns True or the request is cancelled; cancel it after `PATIENCE` seconds."""
        for _ in range(round(PATIENCE / 0.01)):
            if ready(0.01) or self.cancellation.is_set():
                return
        self.cancel()


class ScriptedVerifier:
    """Verifier that accepts the next tokens of the script."""

    fixed_length = False
    tokens: tuple[int, ...] = ()

    def choose(self, position: int) -> Chooser | None:
        return None

    def verify(self, rows: Rows, draft: Draft, position: int) -> Verdict:
        return Verdict(self.tokens, len(self.tokens) - 1)


class FakeService:
    """A scripted engine; a function may return the script for each request."""

    def __init__(
        self, vocabulary: Vocabulary, script: Script | Callable[[Request], Script], *, n_ctx: int = 512
    ) -> None:
        self.vocabulary, self.script, self.n_ctx = vocabulary, script, n_ctx
        self.tickets: list[FakeTicket] = []
        self.stats = Stats()
        self.scales: tuple[float, ...] = ()
        self.times = PassTimes()
        self._threads: list[threading.Thread] = []

    @property
    def requests(self) -> list[Request]:
        return [ticket.request for ticket in self.tickets]

    def prompt_text(self, number: int = 0) -> str:
        """Return the text of the prompt of a request."""
        return b"".join(map(self.vocabulary.piece, self.requests[number].prompt)).decode()

    def submit(self, request: Request, listener: Listener, rank: int = 0) -> FakeTicket:
        script = self.script(request) if callable(self.script) else self.script
        ticket = FakeTicket(request)
        self.tickets.append(ticket)
        thread = threading.Thread(target=self._work, args=(ticket, script, listener), daemon=True)
        self._threads.append(thread)
        thread.start()
        return ticket

    def _work(self, ticket: FakeTicket, script: Script, listener: Listener) -> None:
        try:
            self._answer(ticket, script, listener)
        finally:
            ticket.end.set()

    def _answer(self, ticket: FakeTicket, script: Script, listener: Listener) -> None:
        request, stats = ticket.request, Stats()
        if script.start_error is not None:
            listener(script.start_error)
            return
        listener(Started((request.slot or 0) % SLOTS, script.n_cached, len(request.prompt)))
        if script.begin is not None:
            ticket.wait(script.begin.wait)
        listener(Prefilled(len(request.prompt), len(request.prompt)))

        if request.scored:
            top = request.logprobs or 0
            scores = [Logprobs(t, -2.0, tuple((t + i, -2.0 - i) for i in range(top))) for t in request.prompt[1:]]
            listener(Scored(tuple(scores)))

        def done(reason: str) -> Done:
            return Done(reason, stats, script.n_cached, 0.5, 0.25)  # type: ignore[arg-type]

        if request.max_tokens == 0:
            listener(done("prefilled"))
            return
        scripted_request = Request(
            request.prompt,
            request.max_tokens,
            acceptance=ScriptedVerifier(),
            stop=request.stop,
            rules=request.rules,
            controls=request.controls,
        )
        model = ModelBase()
        model.n_ctx, model.n_vocab = self.n_ctx, self.vocabulary.n_vocab
        text = Text(scripted_request, self.vocabulary, model)
        text.begin(Drafts(None), model)
        for number, tokens in enumerate(self._steps(script)):
            if script.go is not None:
                ticket.wait(partial(script.go.acquire, True))
            if ticket.cancellation.is_set():
                listener(done("cancelled"))
                return
            if script.error is not None and number == script.after:
                listener(script.error)
                return
            step = self._step(script, request, text, tokens, first=number == 0)
            stats.add(step)
            self.stats.add(step)
            listener(step)
            if step.stop is not None:
                listener(done(step.stop))
                return

    def _steps(self, script: Script) -> Sequence[list[int]]:
        tokens = self.vocabulary.tokenize(script.text, add_bos=False)
        if script.ends:
            end = next(token for token in range(self.vocabulary.n_vocab) if self.vocabulary.is_eog(token))
            tokens = [*tokens, end]
        else:
            tokens = tokens * (self.n_ctx // len(tokens) + 1)
        return [tokens[i : i + script.step] for i in range(0, len(tokens), script.step)]

    def _step(self, script: Script, request: Request, text: Text, tokens: list[int], *, first: bool) -> Step:
        assert isinstance(text.verifier, ScriptedVerifier)
        text.verifier.tokens = tuple(tokens)
        draft = Draft(() if first else tuple(tokens[1:]))
        step = text.commit(Plan(draft, draft, len(tokens), ends=False), np.empty((len(tokens), 0), np.float32))
        assert step is not None
        step.drafted = draft.tokens[: max(0, len(step.tokens) - 1)]
        step.accepted = len(step.drafted)
        step.batch = 0 if first else len(step.tokens)
        step.seconds, step.cost, step.is_surprising = 0.01, 1.0, script.is_surprising
        if request.logprobs is not None:
            likely = range(request.logprobs)
            step.logprobs = tuple(
                Logprobs(t, -0.5, tuple((t if i == 0 else i, -0.5 - i) for i in likely)) for t in step.tokens
            )
        return step

    def run_between_passes(self, work: Callable[[Callable[[], int]], Generator[object, None, Any]]) -> Future[Any]:
        future, steps = Future[Any](), work(lambda: 64)
        try:
            while True:
                next(steps)
        except StopIteration as end:
            future.set_result(end.value)
        except Exception as error:
            future.set_exception(error)
        return future

    def report(self) -> Report:
        busy = sum(not ticket.end.is_set() for ticket in self.tickets)
        slots = tuple(Slot(i, 7, self.tickets[-1].request if i < busy else None, i, 5, 0, 2) for i in range(SLOTS))
        prompts = sum(len(ticket.request.prompt) for ticket in self.tickets)
        return Report(slots, max(0, busy - SLOTS), self.stats, prompts, 0, self.stats.passes, self.stats.passes)

    def stop(self, drain: float = 0.0) -> None:
        for thread in self._threads:
            thread.join(drain)
        for ticket in self.tickets:
            ticket.cancel()
        for thread in self._threads:
            thread.join()
