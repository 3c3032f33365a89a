"""`TrialContext`: a small context of a loaded model, to measure one of its settings in for `exact="auto"` and `tune`.

    with target.trial("fast") as trial:
        trial.begin(1024)                   # of context
        trial.seconds(8)                    # of a pass over 8 tokens
        trial.identity(1024).agreeing       # the sizes of passes that agree bit for bit with single tokens

Whether kernels tell batch sizes apart depends on the length of the context, and a trial must not cost seconds. So the
context is made long without evaluating most of it: in a second context llama.cpp's passes are stopped at their first
operation, which gives their cells positions and no contents (zeros), and the cells are copied. Attention takes the same
time over zeros. They can be summed in any order, though, so some tokens of every stretch are real, and the caller
evaluates the last ones before those that it compares.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np

from ngramspec.backend import Logits
from ngramspec.errors import TargetError
from ngramspec.exactness.decision import DEPTHS, MOST, SIZES, Identity
from ngramspec.llama.cache import Cache, is_recurrent
from ngramspec.llama.passes import Passes
from ngramspec.llama.sequence import CacheSequence, append
from ngramspec.llama.weights import Adapter, open_context
from ngramspec.machine import LEAST_READ

STRETCH, OF_STRETCH = 128, 4
"""In a long context so many tokens of each stretch are real; kernels split it into stretches no shorter than that."""

REAL, COMPARED = 13, 8
"""How many real tokens stand before the compared ones, and how many are compared: the first ones of each batch. 13 is
no multiple of anything: some architectures (DeepSeek 4) treat the tokens that complete a block of the context apart."""

READ = 9 * LEAST_READ + SIZES[-1]  # tokens of a text that are read to see how far rounding goes: past 512 cells
ROOM = DEPTHS[1] + 2 * LEAST_READ + SIZES[-1]  # size of a context in which all of that has room


class TrialContext:
    """A context of one sequence, in which what is evaluated is rolled back to what was kept.

    Its batches hold STRETCH tokens or more, whatever `params` says. Raises TargetError where the machine lacks the
    memory for it; its methods do where llama.cpp failed.

    Attributes:
        deadline: When measuring must end, by `time.perf_counter`. Later decode calls raise `TargetError`.
    """

    def __init__(self, model: Any, params: Any, adapters: Sequence[Adapter]) -> None:
        self._model, self._params, self._adapters = model, params, adapters
        params.n_batch = max(params.n_batch, STRETCH)
        params.n_rs_seq = 0
        self._recurrent = is_recurrent(model)
        self._kept = 0
        self.deadline = math.inf
        self._ctx, self._passes, self._sequence = self._open(params)
        self.n_vocab, self.micro_batch = self._passes.n_vocab, int(params.n_ubatch)

    def _open(self, params: Any) -> tuple[Any, Passes, CacheSequence]:
        context = open_context(self._model, params, self._adapters)
        if not context:
            raise TargetError("not enough memory for a second context to measure in")
        cache = Cache(context, recurrent=self._recurrent, window=0)
        passes = Passes(context, [cache], self, n_batch=params.n_batch)
        return context, passes, CacheSequence(passes, cache, n_ctx=params.n_ctx)

    def use_threads(self, single: int, batch: int) -> None:
        """Take so many CPU threads from now on: for passes over one token, and for larger ones."""
        llama.llama_set_n_threads(self._ctx, single, batch)

    # ------------------------------------------------------------------ measuring

    def begin(self, depth: int) -> None:
        """Keep `depth` tokens of context, of which only the time of later passes must be right, and two real ones."""
        self.start(depth, contents=False)
        self.evaluate(random_tokens(self.n_vocab, depth, 2))
        self.keep()

    def seconds(self, size: int) -> float:
        """Of a pass over so many tokens, or from LEAST_READ on of reading them; they are rolled back."""
        tokens = random_tokens(self.n_vocab, size, size)
        began = time.perf_counter()
        if size < LEAST_READ:
            # Asked for two rows, it computes those of all tokens, as a pass with a draft does.
            self.evaluate(tokens, min(2, size))
        else:
            self.read(tokens, self.micro_batch)
        seconds = time.perf_counter() - began
        self.back()
        return seconds

    def single(self) -> float:
        """Seconds of a pass over one token, to tell what measuring will take."""
        self.begin(0)
        self.seconds(1)
        return self.seconds(1)

    def identity(self, depth: int) -> Identity:
        """Compare sizes of passes bit by bit, after a context of `depth` tokens and a few real ones."""
        text = random_tokens(self.n_vocab, depth, REAL + SIZES[-1])
        self.start(depth)
        self.evaluate(text[:REAL])
        self.keep()
        found = self._by_size(text[REAL:])

        def agreeing(with_size: int) -> tuple[int, ...]:
            return tuple(n for n in SIZES if _equal(found[n], found[with_size]))

        return Identity(agreeing(1), tuple(n for n in agreeing(MOST) if n > 1))

    def rounding(self, text: Sequence[int]) -> float:
        """The largest difference of one logit between passes and single tokens, in a text such as people write.

        It is repeated as need be; contents that no text has exaggerate.
        """
        text = [*text] * -(-READ // len(text))
        self.start(0)
        self.read(text[: READ - SIZES[-1]], LEAST_READ)
        self.keep()
        found = self._by_size(text[READ - SIZES[-1] : READ])
        return max(float(np.abs(rows - found[1][: len(rows)]).max()) for rows in found.values())

    def _by_size(self, tail: Sequence[int]) -> dict[int, Logits]:
        """Logits after the first `COMPARED` tokens on top of what was kept, by the size of the pass."""
        singles = np.concatenate([self.evaluate([token]) for token in tail[:COMPARED]])
        self.back()
        found = {1: singles}
        for size in SIZES[1:]:
            found[size] = self.evaluate(tail[:size], min(size, COMPARED))
            self.back()
        return found

    # ------------------------------------------------------------------ what is held

    def start(self, depth: int, *, contents: bool = True) -> None:
        """Hold `depth` tokens and nothing else. Without `contents` only the time of later passes must be right."""
        self._sequence.clear()
        if depth:
            self._sequence.restore([0] * depth, self._hollow(depth, OF_STRETCH if contents else 0))

    def _hollow(self, depth: int, count: int) -> bytes:
        """The state of a context of so many tokens, of which the first `count` of each stretch are real."""
        stopping = False

        @llama.ggml_backend_sched_eval_callback  # type: ignore[untyped-decorator]
        def stop(_tensor: Any, asked: bool, _data: Any) -> bool:
            # Requesting a tensor and then returning false ends the pass.
            return stopping and asked

        params = type(self._params).from_buffer_copy(self._params)
        params.cb_eval = stop
        _, passes, sequence = self._open(params)
        text = random_tokens(self.n_vocab, 1, depth)
        try:
            for start in range(0, depth, STRETCH):
                # A recurrent state that nothing was written to says nothing about one in use.
                real = start + (STRETCH if self._recurrent else count)
                stopping = False
                if real > start:
                    append(passes, [(sequence, text[start:real], 1)])
                stopping = True
                if not self._recurrent:
                    append(passes, [(sequence, text[real : start + STRETCH], 1)])
            return sequence.saved()
        finally:
            passes.close()

    def keep(self) -> None:
        """Mark what is held now: every later `back` returns to it."""
        self._kept = len(self._sequence.tokens)
        self._sequence.checkpoint()

    def back(self) -> None:
        self._sequence.rollback(self._kept)
        if self._sequence.owed:
            raise TargetError("llama.cpp did not roll back tokens")

    def read(self, tokens: Sequence[int], chunk: int) -> None:
        """Append tokens, so many in a pass."""
        for start in range(0, len(tokens), chunk):
            self.evaluate(tokens[start : start + chunk])

    def evaluate(self, tokens: Sequence[int], rows: int = 1) -> Logits:
        """Append tokens in one pass; logits after the first `rows` of them, or after the last for 1."""
        if time.perf_counter() > self.deadline:
            raise TargetError("measuring takes too long")
        # As in decoding, a pass that could hold a draft computes the logits after all of its tokens; one of a prefill
        # its last token's only.
        asked = len(tokens) if rows > 1 else 1
        append(self._passes, [(self._sequence, tokens, asked)])
        return self._passes.fetch(asked)[:rows].copy()

    def close(self) -> None:
        self._passes.close()

    def __enter__(self) -> TrialContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def random_tokens(n_vocab: int, seed: int, count: int) -> list[int]:
    """Random tokens; kernels are chosen by shape, not by content."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, n_vocab, count)]


def _equal(a: Logits, b: Logits) -> bool:
    rows = min(len(a), len(b))
    return a[:rows].tobytes() == b[:rows].tobytes()
