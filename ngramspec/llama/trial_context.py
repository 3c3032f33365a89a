"""`TrialContext`: a small context of a loaded model, to measure one of its settings in for `exact="auto"` and `tune`.

Whether kernels tell batch sizes apart depends on the length of the context, and a trial must not cost seconds. So the
context is made long without evaluating most of it: in a second context llama.cpp's passes are stopped at their first
operation, which gives their cells positions and no contents (zeros), and the cells are copied. Attention takes the same
time over zeros. They can be summed in any order, though, so some tokens of every stretch are real, and the caller
evaluates the last ones before those that it compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as llama

from ngramspec.backend import Logits
from ngramspec.errors import TargetError
from ngramspec.exactness.trial import random_tokens
from ngramspec.llama.cache import Cache, is_recurrent
from ngramspec.llama.passes import Passes
from ngramspec.llama.sequence import CacheSequence, append
from ngramspec.llama.weights import Adapter, open_context

STRETCH, OF_STRETCH = 128, 4
"""In a long context so many tokens of each stretch are real; kernels split it into stretches no shorter than that."""


class TrialContext:
    """See `ngramspec.exactness.trial.Trial`.

    Args:
        model: its handle.
        params: of the context, for one sequence, in micro-batches of at least 16 tokens; a batch holds STRETCH tokens
            in any case.
        adapters: the model's.

    Raises:
        TargetError: the machine lacks the memory for it; here and in the methods: llama.cpp failed.
    """

    def __init__(self, model: Any, params: Any, adapters: Sequence[Adapter]) -> None:
        self._model, self._params, self._adapters = model, params, adapters
        params.n_batch = max(params.n_batch, STRETCH)
        params.n_rs_seq = 0
        self._recurrent = is_recurrent(model)
        self._kept = 0
        self._ctx, self._passes, self._sequence = self._open(params)
        self.n_vocab, self.micro_batch = self._passes.n_vocab, int(params.n_ubatch)

    def _open(self, params: Any) -> tuple[Any, Passes, CacheSequence]:
        context = open_context(self._model, params, self._adapters)
        if not context:
            raise TargetError("there is no memory for a second context to measure in")
        cache = Cache(context, recurrent=self._recurrent, window=0)
        passes = Passes(context, [cache], self, n_batch=params.n_batch)
        return context, passes, CacheSequence(passes, cache, n_ctx=params.n_ctx)

    def use_threads(self, single: int, batch: int) -> None:
        """Take so many CPU threads from now on: for passes over one token, and for larger ones."""
        llama.llama_set_n_threads(self._ctx, single, batch)

    def start(self, depth: int, *, contents: bool = True) -> None:
        self._sequence.clear()
        if depth:
            self._sequence.restore([0] * depth, self._hollow(depth, OF_STRETCH if contents else 0))

    def _hollow(self, depth: int, count: int) -> bytes:
        """The state of a context of so many tokens, of which the first `count` of each stretch are real."""
        stopping = False

        @llama.ggml_backend_sched_eval_callback  # type: ignore[untyped-decorator]
        def stop(_tensor: Any, asked: bool, _data: Any) -> bool:
            # Who asks to see a tensor and then says no ends the pass.
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
        self._kept = len(self._sequence.tokens)
        self._sequence.checkpoint()

    def back(self) -> None:
        self._sequence.rollback(self._kept)
        if self._sequence.owed:
            raise TargetError("llama.cpp did not take tokens back")

    def evaluate(self, tokens: Sequence[int], rows: int = 1) -> Logits:
        # As in decoding, a pass that could hold a draft computes the logits after all of its tokens; one of a prefill
        # its last token's only.
        asked = len(tokens) if rows > 1 else 1
        append(self._passes, [(self._sequence, tokens, asked)])
        return self._passes.logits(asked)[:rows].copy()

    def close(self) -> None:
        self._passes.close()

    def __enter__(self) -> TrialContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
