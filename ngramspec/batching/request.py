"""`ActiveRequest`: a request that the engine works on, and the events that it reports.

A prompt is read into a sequence chunk by chunk, then its text is written token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from ngramspec.backend import Logits, Model, SequenceModel, Vocabulary
from ngramspec.data import NGramSpecError
from ngramspec.decoding.text import Drafts, Text
from ngramspec.request import Request
from ngramspec.sampling.distribution import Logprobs, logprobs
from ngramspec.steps import Stats, Step, StopReason


class Started(NamedTuple):
    """A request left the queue."""

    slot: int  # number of the assigned slot
    n_cached: int  # tokens of the prompt that need not be evaluated again
    prompt_tokens: int


class Prefilled(NamedTuple):
    """A chunk of the prompt was evaluated: `done` of `total` tokens, including those in the cache."""

    done: int
    total: int


class Scored(NamedTuple):
    """The log-probabilities of a prompt's tokens except the first."""

    logprobs: tuple[Logprobs, ...]


class Done(NamedTuple):
    """A request ended; nothing follows."""

    # Why the text ended; "cancelled" after `ActiveRequest.cancel`, "prefilled" after `max_tokens` 0.
    reason: StopReason | Literal["cancelled", "prefilled"]
    stats: Stats  # counters over its passes
    n_cached: int  # tokens of the prompt that were not evaluated again
    prompt_seconds: float  # time from leaving the queue to the prompt's logits
    seconds: float  # time from the prompt's logits to the end


Event = Started | Prefilled | Scored | Step | Done | NGramSpecError | ValueError
"""An event of a request. An error ends the request; without `Started` before it, the request was invalid."""

Listener = Callable[[Event], None]
"""Receives all events of a request, in order, on the engine's thread. It must return at once and not raise."""


@dataclass(frozen=True, slots=True)
class Slot:
    number: int  # from 0 on
    n_tokens: int  # number of tokens in its cache
    request: Request | None = None  # the running request; `None` if the slot is idle
    number_of_request: int = -1  # counts requests from 0 on
    n_prefilled: int = 0  # tokens of its prompt that are in the cache
    n_cached: int = 0  # tokens of its prompt that were in the cache before
    n_generated: int = 0  # tokens that it emitted
    new_line: bool = False  # whether its text has a line end


@dataclass(frozen=True, slots=True)
class Report:
    """Current state of the engine, and counters since its start."""

    slots: tuple[Slot, ...]  # one for each
    waiting: int  # requests in the queue
    stats: Stats  # of all passes of all requests, ended or not
    prompt_tokens: int  # tokens of prompts that were evaluated; cached ones do not count
    cached_tokens: int  # tokens of prompts that were in the cache
    passes: int  # batches evaluated
    busy: int  # sum of busy slots over those batches
    max_held: int = 0  # maximum number of tokens that a slot held


class ActiveRequest:
    """A request from the queue to its end, as `Engine.submit` returns it."""

    def __init__(self, request: Request, listener: Listener, clock: Callable[[], float]) -> None:
        self.request = request
        self.number = 0  # counts requests from 0 on
        self.turn = 0.0  # time that orders the waiting requests
        self.scales: tuple[float, ...] = ()  # of the LoRA adapters
        self.cancelled = False  # whether the request ends before the next pass
        self.text: Text | None = None  # `None` until the request is checked, and if it only fills the cache
        self.sequence: SequenceModel | None = None  # the assigned sequence; `None` in the queue and after the end
        self.reader: Generator[int, None, Logits] | None = None  # evaluates its prompt; `None` before and after that
        self.n_prefilled = self.n_cached = 0  # tokens of the prompt that the sequence holds, and that it held before
        self.answer: list[int] = []  # the tokens that it emitted
        self.new_line = False  # whether its text has a line end so far
        self.stats = Stats()  # counters over its passes
        self._listener, self._clock = listener, clock
        self._began = self._prompt_end = self._last_step = clock()

    @property
    def is_complete(self) -> bool:
        """True if its prompt was evaluated, and its text has ended or does not exist."""
        return self.reader is None and (self.text is None or self.text.stop is not None)

    def cancel(self) -> None:
        """End the request before the next pass, with a `Done` event. May be called from any thread."""
        self.cancelled = True

    def prepare(self, vocabulary: Vocabulary, model: Model, *, counts_calls: bool) -> None:
        """Check the request, and prepare its text; the arguments and errors are those of `Text`."""
        request = replace(self.request, max_tokens=self.request.max_tokens or 1)
        text = Text(request, vocabulary, model, counts_calls=counts_calls)
        self.text = text if self.request.max_tokens else None

    def start(self, sequence: SequenceModel, drafts: Drafts, *, aligned: bool, max_chunk: Callable[[], int]) -> None:
        """Begin to read the prompt into a sequence; `aligned`, `max_chunk`: see `SequenceModel.reading`."""
        self.sequence, self._drafts = sequence, drafts
        if not self.request.cache_prompt:
            sequence.clear()
        self._began = self._clock()
        reading = sequence.reading(self.request.prompt, aligned=aligned, max_chunk=max_chunk)
        self.reader = self._scoring(sequence) if self.request.scored else reading
        self.n_prefilled = self.n_cached = next(self.reader)
        self.tell(Started(sequence.number, self.n_cached, len(self.request.prompt)))
        if self.text is not None:
            self.text.begin(drafts, sequence)

    def _scoring(self, sequence: SequenceModel) -> Generator[int, None, Logits]:
        """Evaluate all of the prompt, as `SequenceModel.reading` does, with the logits after each token."""
        prompt, top = self.request.prompt, self.request.logprobs or 0
        scores: list[Logprobs] = []
        sequence.clear()
        while True:
            done = len(sequence.tokens)
            yield done
            rows = sequence.evaluate(prompt[done : done + sequence.max_batch])
            scores += [logprobs(row, token, top) for row, token in zip(rows, prompt[done + 1 :], strict=False)]
            if len(sequence.tokens) == len(prompt):
                self.tell(Scored(tuple(scores)))
                row: Logits = rows[-1]
                return row

    def read(self) -> Step | None:
        """Evaluate a chunk of the prompt. After the last chunk, return the step of the first token if there is a text.

        A TargetError means that the pass failed, a BadLogits or GrammarError that no token can be chosen.
        """
        assert self.reader is not None
        try:
            self.n_prefilled = next(self.reader)
            self.tell(Prefilled(self.n_prefilled, len(self.request.prompt)))
            return None
        except StopIteration as end:
            row: Logits = end.value
        self.reader = None
        self.n_prefilled = len(self.request.prompt)
        self._prompt_end = self._clock()
        self.tell(Prefilled(self.n_prefilled, self.n_prefilled))
        if self.text is None:
            return None
        step = self.text.first(row[np.newaxis])
        step.seconds = self._prompt_end - self._began
        self._drafts.first(step.tokens[0])
        return step

    def count(self, step: Step) -> None:
        now = self._clock()
        if step.batch:
            step.elapsed = now - self._last_step
        self._last_step = now
        self.stats.add(step)

    def emit(self, step: Step) -> None:
        self.answer += step.tokens
        self.new_line = self.new_line or "\n" in step.text
        self.tell(step)

    def finish(self, error: NGramSpecError | ValueError | None = None) -> None:
        """End the request. Its sequence keeps the tokens of prompt and text."""
        text, sequence = self.text, self.sequence
        if self.reader is not None:
            self.reader.close()
            self.reader = None
        elif text is not None and sequence is not None and len(sequence.tokens) > text.settled:
            sequence.rollback(text.settled)
        if text is not None:
            text.is_released = True
        self.sequence = None
        if error is not None:
            self.tell(error)
            return
        now = self._clock()
        read = self._prompt_end if sequence is not None and self._prompt_end >= self._began else now
        stop = text.stop if text is not None else None
        reason = stop or ("cancelled" if self.cancelled else "prefilled")
        self.tell(Done(reason, self.stats, self.n_cached, read - self._began, now - read))

    def tell(self, event: Event) -> None:
        """Pass an event to the listener. If the listener fails, its client has left, and the request is cancelled."""
        try:
            self._listener(event)
        except Exception:
            self.cancelled = True
