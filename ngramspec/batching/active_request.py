"""`ActiveRequest`: its prompt is read into a sequence chunk by chunk, then its text is written token by token."""

from __future__ import annotations

from collections.abc import Callable, Generator

import numpy as np

from ngramspec.backend import Logits, Vocabulary
from ngramspec.batching.request import Done, Event, Failed, Listener, Prefilled, Request, Scored, Started
from ngramspec.decoding.drafts import Drafts
from ngramspec.decoding.generation import Generation
from ngramspec.errors import NGramSpecError
from ngramspec.sampling.distribution import Logprobs, logprobs
from ngramspec.shared_model import SequenceModel
from ngramspec.steps import Stats, Step


class ActiveRequest:
    """A request on its way from the queue to its end. What `Engine.submit` returns.

    Args:
        request: what was asked.
        listener: is told of every event.
        clock: tells the seconds that it takes.

    Attributes:
        prefilled: tokens of the prompt that the sequence holds.
        cached: how many of them were there before.
        number: counts requests from 0 on.
        new_line: whether its text has a line end so far.
        cancelled: whether it is to end before the next pass.
    """

    def __init__(self, request: Request, listener: Listener, clock: Callable[[], float]) -> None:
        self.request = request
        # the text; None until the request is checked, and where none is asked for
        self.generation: Generation | None = None
        self.sequence: SequenceModel | None = None  # that it works in; None while it waits and after its end
        self.prefilled = self.cached = self.number = 0
        self.new_line = self.cancelled = False
        self.stats = Stats()  # counters over its passes
        self.answer: list[int] = []  # the tokens that it emitted
        self._listener = listener
        self._clock = clock
        self.reader: Generator[int, None, Logits] | None = None  # of its prompt; None: it is not read, or to its end
        self._began = self._read = self._stepped = self._clock()

    def cancel(self) -> None:
        """End it before the next pass; `Done` with the reason "cancelled" follows. May be called from any thread."""
        self.cancelled = True

    def prepare(
        self,
        vocabulary: Vocabulary,
        shown: Callable[[int], bytes],
        *,
        n_ctx: int,
        n_vocab: int,
        counts_calls: bool,
    ) -> None:
        """Check the request, and ready what chooses its tokens.

        Raises:
            NGramSpecError, ValueError: the request is wrong.
        """
        request = self.request
        generation = Generation(
            request.prompt,
            vocabulary,
            n_ctx=n_ctx,
            n_vocab=n_vocab,
            max_tokens=max(1, request.max_tokens),
            sampling=request.sampling,
            stop=request.stop,
            logprobs=request.logprobs,
            counts_calls=counts_calls,
            piece=shown if request.controls else None,
            rules=request.rules,
        )
        self.generation = generation if request.max_tokens else None

    def start(self, sequence: SequenceModel, drafts: Drafts, *, aligned: bool, most: Callable[[], int]) -> None:
        """Begin to read the prompt, in a sequence that was made to hold what is known of it.

        Args:
            sequence: to work in.
            drafts: made for this text from here on.
            aligned, most: see `SequenceModel.reading`.
        """
        self.sequence, self._drafts = sequence, drafts
        if not self.request.cache_prompt:
            sequence.clear()
        self._began = self._clock()
        reading = sequence.reading(self.request.prompt, aligned=aligned, most=most)
        self.reader = self._scoring(sequence) if self.request.scored else reading
        self.prefilled = self.cached = next(self.reader)
        self.tell(Started(sequence.number, self.cached, len(self.request.prompt)))
        if self.generation is not None:
            if drafts.drafter is not None:
                drafts.drafter.predicted = self.request.prediction
            self.generation.begin(drafts, sequence)

    def _scoring(self, sequence: SequenceModel) -> Generator[int, None, Logits]:
        """`SequenceModel.reading` of all of the prompt, with the logits after each token."""
        prompt, top = self.request.prompt, self.request.logprobs or 0
        found: list[Logprobs] = []
        sequence.clear()
        while True:
            done = len(sequence.tokens)
            yield done
            rows = sequence.evaluate(prompt[done : done + sequence.max_batch])
            found += [logprobs(row, token, top) for row, token in zip(rows, prompt[done + 1 :], strict=False)]
            if len(sequence.tokens) == len(prompt):
                self.tell(Scored(tuple(found)))
                row: Logits = rows[-1]
                return row

    def read(self) -> Step | None:
        """Read a chunk of the prompt; the first token's step after the last one, if a text was asked for.

        Raises:
            TargetError: the pass failed.
            BadLogits, GrammarError: no token could be chosen.
        """
        assert self.reader is not None
        try:
            self.prefilled = next(self.reader)
            self.tell(Prefilled(self.prefilled, len(self.request.prompt)))
            return None
        except StopIteration as end:
            row: Logits = end.value
        self.reader = None
        self.prefilled = len(self.request.prompt)
        self._read = self._clock()
        self.tell(Prefilled(self.prefilled, self.prefilled))
        if self.generation is None:
            return None
        step = self.generation.first(row[np.newaxis])
        step.seconds = self._read - self._began
        self._drafts.first(step.tokens[0])
        return step

    def count(self, step: Step) -> None:
        """Count a step that was made now."""
        now = self._clock()
        if step.batch:
            step.elapsed = now - self._stepped
        self._stepped = now
        self.stats.add(step)

    def emit(self, step: Step) -> None:
        self.answer += step.tokens
        self.new_line = self.new_line or any("\n" in piece for piece in step.pieces)
        self.tell(step)

    def finish(self, error: NGramSpecError | ValueError | None = None) -> None:
        """End it, and leave in its sequence what was read and written."""
        generation, sequence = self.generation, self.sequence
        if self.reader is not None:
            self.reader.close()
            self.reader = None
        elif generation is not None and sequence is not None and len(sequence.tokens) > generation.settled:
            sequence.rollback(generation.settled)
        self.sequence = None
        if error is not None:
            self.tell(Failed(error))
            return
        now = self._clock()
        read = self._read if sequence is not None and self._read >= self._began else now
        stop = generation.stop if generation is not None else None
        reason = stop or ("cancelled" if self.cancelled else "prefilled")
        self.tell(Done(reason, self.stats, self.cached, read - self._began, now - read))

    def tell(self, event: Event) -> None:
        """Tell the listener; one that fails has nobody behind it any more."""
        try:
            self._listener(event)
        except Exception:
            self.cancelled = True
