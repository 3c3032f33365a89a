"""Trials of a loaded model in small contexts, for the comparisons of `exact="auto"` and the times of `tune`.

    with target.trials.trial("fast") as trial:
        trial.largest_agreeing(1024)        # size up to which passes agree bit for bit with single tokens
        trial.begin(1024)                   # length of the context
        trial.seconds(8)                    # time of a pass over 8 tokens

Kernels may treat batch sizes differently depending on the length of the context, and a trial must not take long. So
a long context is created without evaluating most of it. In a second context, llama.cpp's passes are stopped at their
first operation. Their cells then have positions but no contents (zeros), and are copied. Attention over zeros takes the
same time, but zeros can be summed in any order. So some tokens of every stretch are real, and the caller evaluates the
last tokens before those that it compares.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp.llama_cpp as llama
import numpy as np
import psutil

from ngramspec.backend import Logits
from ngramspec.cost.bits import COMPARED, DEPTHS
from ngramspec.cpu.thread_governor import ThreadGovernor
from ngramspec.data import TargetError
from ngramspec.llama import bindings, devices
from ngramspec.llama.cache import Cache, is_recurrent
from ngramspec.llama.passes import MAX_EVALUATE, Passes
from ngramspec.llama.sequence import CacheSequence, append
from ngramspec.llama.weights import Adapter, Weights, make_context_params, make_model_params, open_context
from ngramspec.model_settings import UNQUANTISED, ModelSettings

MIN_PREFILL = 64  # minimum size of a pass that counts as prefill, which computes logits only after its last token


class Measure(NamedTuple):
    """A pass that `tune` times."""

    size: int  # tokens of the pass; from MIN_PREFILL on the pass is a prefill, and its time is divided by its tokens
    deep: bool = False  # whether the pass follows a long context instead of a nearly empty one

    @property
    def is_prefill(self) -> bool:
        return self.size >= MIN_PREFILL

    def label(self, depth: int) -> str:
        """Return the name of the measure in a report, where the long context has `depth` tokens."""
        name = f"prefill {self.size}" if self.is_prefill else f"T({self.size})"
        return f"{name} at {depth}" if self.deep else name


SINGLE, DRAFTS, READING, LONG_READING = Measure(1), (Measure(4), Measure(8)), Measure(MIN_PREFILL), Measure(1024)
DEEP = (Measure(1, deep=True), Measure(4, deep=True), Measure(MIN_PREFILL, deep=True))

STRETCH, OF_STRETCH = 128, 4
"""Length of a stretch of a long context, and the number of real tokens in it; kernels use no shorter stretches."""

REAL, N_COMPARED = 13, 8
"""Number of real tokens before the compared ones, and of compared tokens, which are the first ones of each batch. 13 is
no multiple of a block size: DeepSeek 4 treats the tokens that complete a block of the context differently."""

READ = 9 * MIN_PREFILL + COMPARED[-1]  # number of tokens evaluated to measure rounding: more than 512 cells
ROOM = max(DEPTHS) + 2 * MIN_PREFILL + COMPARED[-1]  # size of a context that fits all of these tokens


class TrialContext(AbstractContextManager["TrialContext"]):
    """A context of one sequence, in which evaluated tokens are rolled back to a kept state.

    All methods raise TargetError if llama.cpp fails, or the machine lacks the memory for the context.
    """

    def __init__(self, model: Any, params: Any, adapters: Sequence[Adapter], *, owns_model: bool = False) -> None:
        self._owns_model = owns_model  # whether the end of the context frees the model
        self._model, self._params, self._adapters = model, params, adapters
        params.n_batch = max(params.n_batch, STRETCH)
        params.n_rs_seq = 0
        self._recurrent = is_recurrent(model)
        self._base_length = 0
        self._depth: int | None = None  # depth of the text that `_start_text` keeps; `None` means another context
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
        """Set the numbers of CPU threads for the following passes: over one token, and over more."""
        llama.llama_set_n_threads(self._ctx, single, batch)

    def follow_load(self) -> None:
        """Let the load choose the number of threads of the following passes, which must not change their bits."""
        self._passes.governor = ThreadGovernor(self._params.n_threads, self._params.n_threads_batch)

    def begin(self, depth: int) -> None:
        """Keep a context of `depth` tokens and two real ones, after which times are right but logits need not be."""
        self.start(depth, contents=False)
        self.evaluate(random_tokens(self.n_vocab, depth, 2))
        self.keep()

    def seconds(self, size: int) -> float:
        """Return the seconds of one pass over `size` tokens, or of prefilling MIN_PREFILL and more; roll them back."""
        tokens = random_tokens(self.n_vocab, size, size)
        began = time.perf_counter()
        if size < MIN_PREFILL:
            # With two rows, the pass computes the logits of all tokens, as a pass with a draft does.
            self.evaluate(tokens, min(2, size))
        else:
            self.read(tokens, self.micro_batch)
        seconds = time.perf_counter() - began
        self.back()
        return seconds

    def largest_agreeing(self, depth: int) -> int:
        """Return the last of `COMPARED` before the first whose bits differ from single tokens, after `depth` tokens."""
        largest = 1
        for size, rows, singles in self._compare_sizes(self._start_text(depth)):
            if rows.tobytes() != singles.tobytes():
                break
            largest = size
        return largest

    def threads_agree(self, depth: int) -> bool:
        """Return True if a single token and a batch have the same bits with one thread and with all threads."""
        tail = self._start_text(depth)
        bits = []
        for single, batch in ((1, 1), (self._params.n_threads, self._params.n_threads_batch)):
            self.use_threads(single, batch)
            rows = self.evaluate(tail[:1]), self.evaluate(tail[1:5], 4)
            self.back()
            bits.append(np.concatenate(rows).tobytes())
        return bits[0] == bits[1]

    def rounding(self, text: Sequence[int]) -> float:
        """Return the largest difference of a logit between passes and single tokens after a text, which is repeated."""
        text = [*text] * -(-READ // len(text))
        self.start(0)
        self.read(text[: READ - COMPARED[-1]], MIN_PREFILL)
        self.keep()
        pairs = self._compare_sizes(text[READ - COMPARED[-1] : READ])
        return max(float(np.abs(rows - singles).max()) for _, rows, singles in pairs)

    def _start_text(self, depth: int) -> Sequence[int]:
        """Keep a context of `depth` tokens and a few real ones, and return the tokens after it."""
        text = random_tokens(self.n_vocab, depth, REAL + COMPARED[-1])
        if self._depth != depth:
            self.start(depth)
            self.evaluate(text[:REAL])
            self.keep()
            self._depth = depth
        return text[REAL:]

    def _compare_sizes(self, tail: Sequence[int]) -> Iterator[tuple[int, Logits, Logits]]:
        """Yield each size of passes, its logits after the first tokens of `tail`, and those of single tokens."""
        singles = np.concatenate([self.evaluate([token]) for token in tail[:N_COMPARED]])
        self.back()
        for size in COMPARED[1:]:
            rows = self.evaluate(tail[:size], min(size, N_COMPARED))
            self.back()
            yield size, rows, singles[: len(rows)]

    def start(self, depth: int, *, contents: bool = True) -> None:
        """Replace the cached tokens by `depth` tokens; without `contents` only the time of later passes is right."""
        self._sequence.clear()
        self._depth = None
        if depth:
            self._sequence.restore([0] * depth, self._hollow(depth, OF_STRETCH if contents else 0))

    def _hollow(self, depth: int, count: int) -> bytes:
        """Return the state of a context of `depth` tokens, of which the first `count` of each stretch are real."""
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
                # A recurrent state that was never written does not represent one in use, so all its tokens are real.
                real = start + (STRETCH if self._recurrent else count)
                stopping = False
                if real > start:
                    append(passes, [(sequence, text[start:real], 1)])
                stopping = True
                if not self._recurrent:
                    append(passes, [(sequence, text[real : start + STRETCH], 1)])
            return sequence.save_state()
        finally:
            passes.close()

    def keep(self) -> None:
        """Mark the present state, to which every later `back` returns."""
        self._base_length = len(self._sequence.tokens)
        self._sequence.checkpoint()

    def back(self) -> None:
        self._sequence.rollback(self._base_length)
        if self._sequence.owed:
            raise TargetError("llama.cpp did not roll back tokens")

    def read(self, tokens: Sequence[int], chunk: int) -> None:
        for start in range(0, len(tokens), chunk):
            self.evaluate(tokens[start : start + chunk])

    def evaluate(self, tokens: Sequence[int], rows: int = 1) -> Logits:
        """Append tokens in one pass, and return the logits after the first `rows` of them, or after the last for 1."""
        # As in decoding, a pass that could contain a draft computes the logits after all of its tokens. A pass of a
        # prefill computes only those after its last token.
        n_rows = len(tokens) if rows > 1 else 1
        append(self._passes, [(self._sequence, tokens, n_rows)])
        return self._passes.fetch()[:rows].copy()

    def __exit__(self, *_: object) -> None:
        self._passes.close()
        if self._owns_model:
            llama.llama_model_free(self._model)


def random_tokens(n_vocab: int, seed: int, count: int) -> list[int]:
    """Return random tokens, which suffice because kernels are chosen by shape and not by content."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, n_vocab, count)]


SAMPLE = (
    "The river was low that summer. Every morning she walked down to the bridge, and every morning the same boat lay"
    " there, tied to the same post.\n\ndef total(numbers):\n    return sum(one for one in numbers if one > 0)\n"
)
"""Sample of ordinary prose and code on which rounding is measured."""


def open_file(path: Path, settings: ModelSettings, *, n_gpu_layers: int, depth: int, prompt: int) -> TrialContext:
    """Load a model file without a vocabulary for passes of at most `prompt` tokens; the end of the trial frees it."""
    bindings.init_backend()
    params, _ = make_model_params(settings, all_on_gpu=devices.offloads_all(n_gpu_layers))
    params.n_gpu_layers = n_gpu_layers
    bindings.log_tail.clear()
    model = llama.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise TargetError(f"llama.cpp cannot load a model of this shape ({bindings.last_complaint()})")
    try:
        context_params = make_context_params(settings, depth + prompt + 2 * MAX_EVALUATE, prompt)
        trial = TrialContext(model, context_params, (), owns_model=True)
    except TargetError:
        llama.llama_model_free(model)
        raise
    trial.begin(depth)
    return trial


class SettingTrials:
    """The settings "fast" and "exact" of a model; those of "exact" have no flash attention on a CPU."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        fast = exact = weights.settings
        if fast.flash_attn == "auto" and not weights.on_gpu and fast.cache_type_v in UNQUANTISED:
            exact = replace(fast, flash_attn="off")
        if fast.ubatch_size:
            # It was chosen for the requested settings, so it may be too large for the exact ones.
            default = weights.micro_batch_size(replace(exact, ubatch_size=None))
            exact = replace(exact, ubatch_size=min(default, fast.ubatch_size))
        self.by_name = {"fast": fast, "exact": exact}
        self.settings = ("fast", "exact") if exact.flash_attn != fast.flash_attn else ("fast",)  # those to compare
        self.identity = weights.key(f"fa={fast.flash_attn} kv={fast.cache_types} ub={fast.ubatch_size}")  # for both

    def open(self, settings: ModelSettings, cells: int) -> TrialContext:
        """Return a separate context under other settings, except those of the weights, which cannot change."""
        params = self._weights.context_params(settings, cells)
        return TrialContext(self._weights.handle, params, self._weights.adapters)

    def trial(self, setting: str) -> TrialContext:
        return self.open(self.by_name[setting], ROOM)


SPARE = 2**30  # bytes of RAM that must stay free when the weights are loaded again


class SettingsTimer:
    """Times settings of a loaded model in contexts that are nearly empty or contain `depth` tokens.

    If a setting requires loading the weights in another way, they are loaded a second time, with `guard` around it.
    """

    def __init__(
        self, weights: Weights, depth: int, guard: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self._depth, self._guard = depth, guard
        self._weights = {(weights.settings.no_mmap, weights.settings.no_repack): weights}
        self._first = weights
        self._open: dict[tuple[object, ...], TrialContext] = {}
        self._stack = ExitStack()
        self.close = self._stack.close

    def seconds(self, settings: ModelSettings, measure: Measure) -> float:
        """Measure one time; for a pass of at most 0.1 s, the first one is a warm-up, and the fastest of two counts."""
        trial = self._context(settings, deep=measure.deep)
        first = trial.seconds(measure.size)
        if measure.is_prefill:
            return first / measure.size
        return first if first > 0.1 else min(trial.seconds(measure.size) for _ in range(2))

    def _context(self, settings: ModelSettings, *, deep: bool) -> TrialContext:
        """Return the context of these settings with their threads; a deep one contains `depth` tokens."""
        key = (replace(settings, threads=1, threads_batch=1), deep)
        trial = self._open.get(key)
        if trial is None:
            depth, room = (self._depth, READING.size) if deep else (0, LONG_READING.size)
            trials = SettingTrials(self._load(settings))
            trial = self._stack.enter_context(trials.open(settings, depth + room + 2 * READING.size))
            self._open[key] = trial
            trial.begin(depth)
        trial.use_threads(settings.threads or 1, settings.threads_batch or 1)
        return trial

    def _load(self, settings: ModelSettings) -> Weights:
        key = settings.no_mmap, settings.no_repack
        if key not in self._weights:
            if psutil.virtual_memory().available < self._first.size_bytes + SPARE:
                raise TargetError("not enough memory to load the weights a second time")
            # The memory of the first copy is not free, so a fit would place this copy differently.
            changes = {**self._first.plan.fixed, "no_mmap": settings.no_mmap, "no_repack": settings.no_repack}
            settings = replace(self._first.settings, **changes)
            with self._guard():
                self._weights[key] = self._stack.enter_context(Weights(self._first.path, settings))
        return self._weights[key]
