"""`DrySamplers`: a cache of llama.cpp's DRY samplers, because preparing one takes milliseconds per breaker.

For each sequence breaker, llama.cpp compares all tokens of the vocabulary with it. A copy of a sampler is cheap.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from typing import Any

import llama_cpp.llama_cpp as llama

from ngramspec.llama import bindings
from ngramspec.sampling.settings import Sampling

_MAX_SAMPLERS = 32  # maximum number of samplers that are kept


def dry_window(sampling: Sampling, n_ctx: int) -> int:
    """Return the number of recent tokens that DRY searches; 0 means that it has no effect."""
    return window(sampling.dry_penalty_last_n, n_ctx) if sampling.dry_multiplier > 0 else 0


def window(last_n: int, n_ctx: int) -> int:
    """Return a number of recent tokens, at most the context: llama.cpp reserves memory for all of them."""
    return n_ctx if last_n < 0 else min(last_n, n_ctx) if n_ctx else last_n


class DrySamplers:
    """The DRY samplers of one vocabulary; any thread may call the methods."""

    def __init__(self, vocab: Any) -> None:
        self._vocab = vocab
        self._lock = threading.Lock()
        self._samplers: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    def prepare(self, sampling: Sampling, n_ctx: int) -> None:
        """Prepare a sampler, so that `make` is fast; nothing happens if DRY has no effect."""
        if "dry" in sampling.samplers and dry_window(sampling, n_ctx):
            llama.llama_sampler_free(self.make(sampling, n_ctx))

    def make(self, sampling: Sampling, n_ctx: int) -> Any:
        """Return a sampler at the start of a text, which the caller frees."""
        shape = sampling.dry_multiplier, sampling.dry_base, sampling.dry_allowed_length, dry_window(sampling, n_ctx)
        breakers = tuple(dict.fromkeys(sampling.dry_sequence_breakers))
        key = (*shape, breakers)
        if (copy := self._copy(key)) is not None:
            return copy
        array = (ctypes.c_char_p * len(breakers))(*(text.encode() for text in breakers))
        sampler = bindings.dry(llama, self._vocab, *shape, array)
        with self._lock:
            if key in self._samplers:
                llama.llama_sampler_free(sampler)
            else:
                self._samplers[key] = sampler
            while len(self._samplers) > _MAX_SAMPLERS:
                llama.llama_sampler_free(self._samplers.popitem(last=False)[1])
            return llama.llama_sampler_clone(self._samplers[key])

    def _copy(self, key: tuple[Any, ...]) -> Any:
        """Return a copy of a known sampler; `None` if it is not known."""
        with self._lock:
            if key not in self._samplers:
                return None
            self._samplers.move_to_end(key)
            return llama.llama_sampler_clone(self._samplers[key])

    def __del__(self) -> None:
        for sampler in self._samplers.values():
            llama.llama_sampler_free(sampler)
