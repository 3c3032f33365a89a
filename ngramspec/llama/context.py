"""`Context`: the KV cache that llama.cpp evaluates tokens in, its size and settings, and one pass over a batch.

A target has one open context at a time. `use` closes it and opens another one under other settings.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any, Literal

import llama_cpp.llama_cpp as llama
import numpy as np

from ngramspec.backend import Logits
from ngramspec.errors import ModelError, TargetError
from ngramspec.exactness.choice import EXACT, Exact
from ngramspec.exactness.trial import ROOM
from ngramspec.llama import devices, log
from ngramspec.llama.kv_cache import CACHE_TYPES, CacheType
from ngramspec.llama.state import Cache
from ngramspec.llama.trial import Trial
from ngramspec.llama.weights import Weights

MAX_EVALUATE = 64
"""Most tokens one `evaluate` takes: the logits buffer is reserved for this many positions."""

MAX_CONTEXT = 2**31 - 1 - MAX_EVALUATE

SNAPSHOTS = 16
"""How many tokens back a recurrent state can be restored, unless longer or shorter drafts are asked for. Each snapshot
takes as much space as the state itself, and on some architectures each is copied in every pass."""

SNAPSHOT_SHARE = 1 / 16
"""Snapshots may take at most this part of the free RAM or GPU memory; one is kept in any case."""

_FLASH = {"auto": -1, "off": 0, "on": 1}


class Context(Weights):
    """A loaded model with an open context. Args, attributes and errors as of `ngramspec.llama.target.Target`."""

    _ctx: Any = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_ctx: int | None = None,
        n_gpu_layers: int = -1,
        threads: int | None = None,
        flash_attn: Literal["auto", "on", "off"] = "auto",
        cache_type_k: CacheType = "f16",
        cache_type_v: CacheType = "f16",
        mmap: bool = True,
        exact: Exact = "auto",
        extra_buffers: bool | None = None,
        n_seq: int = 1,
        draft_max: int | None = None,
    ) -> None:
        if n_ctx is not None and not 1 <= n_ctx <= MAX_CONTEXT:
            raise ValueError(f"n_ctx is {n_ctx}, but must be 1 to {MAX_CONTEXT}")
        if threads is not None and threads < 1:
            raise ValueError(f"threads is {threads}, but must be at least 1")
        for name, value, allowed in (
            ("flash_attn", flash_attn, _FLASH),
            ("cache_type_k", cache_type_k, CACHE_TYPES),
            ("cache_type_v", cache_type_v, CACHE_TYPES),
            ("exact", exact, EXACT),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}, but must be one of: {', '.join(allowed)}")
        if not 1 <= n_seq <= MAX_EVALUATE:
            raise ValueError(f"n_seq is {n_seq}, but must be 1 to {MAX_EVALUATE}")
        if draft_max is not None and not 1 <= draft_max < MAX_EVALUATE:
            raise ValueError(f"draft_max is {draft_max}, but must be 1 to {MAX_EVALUATE - 1}")
        super().__init__(path, n_gpu_layers=n_gpu_layers, threads=threads, mmap=mmap, extra_buffers=extra_buffers)
        self.tokens: list[int] = []
        self.cache_types = (cache_type_k, cache_type_v)
        self.exact = exact
        self.n_seq = n_seq
        # llama.cpp has a quantised V cache with flash attention only.
        attention_can_go = not self.on_gpu and cache_type_v in ("f32", "f16", "bf16")
        self._flash = {"fast": flash_attn, "exact": "off" if flash_attn == "auto" and attention_can_go else flash_attn}
        self._longest = draft_max or SNAPSHOTS
        self._open_context(self._context_size(n_ctx, self.cache_types), "exact" if exact == "on" else "fast")

    # ------------------------------------------------------------------ opening

    def _snapshots(self, wanted: int, setting: str) -> int:
        """How many snapshots of the recurrent state to ask for: 0 where the architecture has none."""
        if not self._recurrent:
            return 0
        # A context of a few tokens shows what the large one would do.
        context = llama.llama_init_from_model(self._model, self._params(MAX_EVALUATE, 1, setting))
        if not context:
            return wanted
        try:
            if llama.llama_n_rs_seq(context) == 0:
                return 0
            token = (llama.llama_token * 1)(0)
            if llama.llama_decode(context, llama.llama_batch_get_one(token, 1)) != 0:
                return wanted
            size = llama.llama_state_seq_get_size_ext(context, 0, llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
        finally:
            llama.llama_free(context)
        free = devices.free_bytes(self.devices, self.on_gpu, 0)
        return max(1, min(wanted, int(SNAPSHOT_SHARE * free / max(1, size))))

    def _params(self, cells: int, snapshots: int, setting: str) -> Any:
        """llama.cpp's parameters of a context."""
        params = llama.llama_context_default_params()
        params.n_ctx = cells
        # Without flash attention a micro-batch holds heads x n_ctx x n_ubatch scores.
        params.n_batch = params.n_ubatch = 128 if self._flash[setting] == "off" else 512
        params.n_outputs_max = params.n_outputs_max_per_seq = MAX_EVALUATE
        params.n_seq_max = self.n_seq
        # One pool of cells, so that what continuations have in common is stored once.
        params.kv_unified = self.n_seq > 1
        params.n_threads = params.n_threads_batch = self.threads
        params.flash_attn_type = _FLASH[self._flash[setting]]
        params.type_k, params.type_v = (CACHE_TYPES[t][0] for t in self.cache_types)
        params.n_rs_seq = snapshots
        return params

    def _open_context(self, n_ctx: int, setting: str) -> None:
        snapshots = self._snapshots(self._longest, setting)
        while True:
            log.tail.clear()
            # Room for the dummy tokens of a padded batch, which never stay in the cache.
            params = self._params(n_ctx + MAX_EVALUATE, snapshots, setting)
            self._ctx = llama.llama_init_from_model(self._model, params)
            if self._ctx or snapshots <= 1:
                break
            snapshots //= 2
        if not self._ctx:
            raise ModelError(
                f"{self.path}: no context of {n_ctx} tokens could be made ({log.last_complaint()});"
                " try a smaller -c/--ctx-size"
            )
        if 0 < snapshots < self._longest:
            self.notes.append(f"memory is short: no draft is longer than {snapshots} tokens")
        self.n_ctx = n_ctx
        self.setting = setting
        self.n_batch: int = params.n_batch
        self._batch = llama.llama_batch_init(self.n_batch, 0, 1)
        self._batch_tokens = np.ctypeslib.as_array(self._batch.token, (self.n_batch,))
        self._batch_pos = np.ctypeslib.as_array(self._batch.pos, (self.n_batch,))
        self._batch_logits = np.ctypeslib.as_array(self._batch.logits, (self.n_batch,))
        for i in range(self.n_batch):
            self._batch.n_seq_id[i] = 1
            self._batch.seq_id[i][0] = 0
        self._positions = np.arange(n_ctx + MAX_EVALUATE, dtype=np.int32)
        self._aligned = 0
        window = llama.llama_model_n_swa(self._model)
        self._cache = Cache(llama, self._ctx, recurrent=self._recurrent, window=window)
        kept = self._cache.snapshots.count
        self.replays = self._recurrent and kept == 0
        self.max_batch = min(MAX_EVALUATE, kept + 1) if kept else MAX_EVALUATE
        self.can_rollback = not self.replays or self._can_go_back()

    def _can_go_back(self) -> bool:
        """Whether llama.cpp hands out the state of a recurrent memory, and takes it back."""
        try:
            self._decode([0], all_logits=True)
            self._cache.save()
            self._decode([0], all_logits=True)
            self._cache.cut(1)
            return self._cache.length == 1
        finally:
            self.clear()

    # ------------------------------------------------------------------ settings

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings that `use` switches between: "fast", and "exact" if it differs from that."""
        return ("fast", "exact") if self._flash["exact"] != self._flash["fast"] else ("fast",)

    @property
    def flash_attn(self) -> str:
        """Flash attention as it was asked for under the setting that holds now: "auto", "on" or "off"."""
        return self._flash[self.setting]

    def _check_open(self) -> None:
        super()._check_open()
        if not self._ctx:
            raise TargetError("the target has no context: its settings could not be changed")

    def use(self, setting: str) -> None:
        """Open the context anew under a setting; the cache is then empty, and logits returned before are gone.

        Raises:
            ModelError: the machine lacks the memory for it; the target then has no context until the next call.
        """
        super()._check_open()
        self.tokens.clear()
        self._close_context()
        self._open_context(self.n_ctx, setting)

    def trial(self, setting: str) -> Trial:
        """A separate small context to measure a setting in; what the target holds does not matter.

        Raises:
            TargetError: the machine lacks the memory for it.
        """
        self._check_open()
        params = self._params(ROOM, 0, setting)
        params.n_seq_max, params.kv_unified = 1, False
        return Trial(llama, self._model, params, self.n_vocab, recurrent=self._recurrent)

    @property
    def fingerprint(self) -> str:
        """Key of everything a measured cost or a probe result depends on: file, build, machine, settings."""
        return self._key(f"fa={self.flash_attn} kv={self.cache_types} ub={self.n_batch}")

    @property
    def identity(self) -> str:
        """The same, but for the setting that holds now."""
        return self._key(f"fa={self._flash['fast']} kv={self.cache_types}")

    def close(self) -> None:
        """Free the context and the model; the target, and logits it returned, cannot be used afterwards."""
        self._close_context()
        super().close()

    def _close_context(self) -> None:
        if self._ctx:
            llama.llama_batch_free(self._batch)
            llama.llama_free(self._ctx)
            self._ctx = None

    # ------------------------------------------------------------------ passes

    def clear(self) -> None:
        """Forget everything in the cache."""
        self._check_open()
        self._cache.clear()
        self.tokens.clear()
        self._aligned = 0

    @property
    def owed(self) -> int:
        """How many tokens of the cache the next call must evaluate again before its own."""
        return len(self.tokens) - self._cache.length

    def _settle(self) -> None:
        """Evaluate what is owed."""
        self._check_open()
        while self.owed:
            start = self._cache.length
            self._pass(self.tokens[start : start + self.n_batch], logits=0)

    def _decode(self, tokens: Sequence[int], *, all_logits: bool) -> None:
        """Append tokens, behind what is owed, with the logits of all or of the last."""
        self._check_open()
        before, n = len(self.tokens), len(tokens)
        if before + n > self.n_ctx + MAX_EVALUATE:
            raise ValueError(f"{before + n} tokens do not fit in a context of {self.n_ctx}")
        try:
            self.tokens.extend(tokens)
            while self.owed > self.n_batch:
                start = self._cache.length
                self._pass(self.tokens[start : min(start + self.n_batch, before)], logits=0)
            self._pass(self.tokens[self._cache.length :], logits=n if all_logits else 1)
        except BaseException:
            del self.tokens[before:]
            self._cache.recover(before)
            raise

    def _pass(self, tokens: Sequence[int], *, logits: int) -> None:
        """One `llama_decode` that appends to the KV cache, with logits for the last `logits` tokens."""
        start, n = self._cache.length, len(tokens)
        batch = self._batch
        batch.n_tokens = n
        self._batch_tokens[:n] = tokens
        self._batch_pos[:n] = self._positions[start : start + n]
        self._batch_logits[:n] = 0
        self._batch_logits[n - logits : n] = 1
        status = llama.llama_decode(self._ctx, batch)
        if status != 0:
            raise TargetError(f"llama_decode returned {status} for {n} tokens at position {start}")
        self._cache.decoded(n)

    def _logits(self, n: int) -> Logits:
        first = llama.llama_get_logits_ith(self._ctx, -n)
        if not first:
            raise TargetError("llama.cpp returned no logits")
        size = n * self.n_vocab * ctypes.sizeof(ctypes.c_float)
        buffer: Any = (ctypes.c_char * size).from_address(ctypes.addressof(first.contents))
        # The rows keep the buffer alive, and so the context behind it.
        buffer.owner = self
        rows: Logits = np.ndarray((n, self.n_vocab), np.float32, buffer)
        return rows
