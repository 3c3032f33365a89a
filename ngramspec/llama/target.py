"""`Target`: a loaded GGUF model with one sequence in its KV cache.

The contract in three calls:

    logits = target.prefill(prompt)        # (n_vocab,) after the last token; reuses the longest common prefix
    logits = target.evaluate(tokens)       # (len(tokens), n_vocab): ONE llama_decode, appended to the cache
    target.rollback(length)                # the cache stands for exactly its first `length` tokens again

The low-level API is used: logits are requested for the positions that are read and for no others, so nothing grows
with n_ctx x n_vocab. It knows nothing about drafts or acceptance.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import llama_cpp.llama_cpp as llama
import numpy as np
from llama_cpp._ggml import libggml

from ngramspec import machine
from ngramspec.backend import Logits, Node, Progress
from ngramspec.errors import ModelError, TargetError
from ngramspec.exactness.choice import EXACT, Exact
from ngramspec.exactness.trial import ROOM, Trial
from ngramspec.llama import amx, devices, huge_pages, log
from ngramspec.llama.devices import build
from ngramspec.llama.kv_cache import CACHE_TYPES, CacheShape, CacheType, fitting_context
from ngramspec.llama.sequences import Sequences
from ngramspec.llama.state import Cache
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.tokens import common_prefix

MAX_EVALUATE = 64
"""Most tokens one `evaluate` takes: the logits buffer is reserved for this many positions."""

MAX_CONTEXT = 2**31 - 1 - MAX_EVALUATE

SNAPSHOTS = 16
"""States of a recurrent memory that can be gone back to, unless longer or shorter drafts are asked for. Each takes the
memory of one state, and on some architectures each is copied in every pass."""

SNAPSHOT_SHARE = 1 / 16
"""Most of the free memory that snapshots may take, the first one excepted."""

TAIL = 8
"""Tokens of a prompt behind its checkpoint: a template often ends the same prompt in another way, later on."""

APART = 64
"""Fewest tokens between two checkpoints of prompts: evaluating so many again takes about one pass."""

_FLASH = {"auto": -1, "off": 0, "on": 1}


class Target(Vocabulary):
    """A GGUF model, its context and the tokens in its KV cache.

    Args:
        path: a GGUF file (the first part of a split one).
        n_ctx: context size in tokens; None takes the model's own, capped so that the KV cache fits in half of
            the memory that is free (`notes` then says so).
        n_gpu_layers: layers to offload; negative: all, to whatever GPU the build supports.
        threads: CPU threads; None takes the physical cores.
        flash_attn: "auto" leaves the choice to llama.cpp.
        cache_type_k, cache_type_v: element type of the KV cache.
        mmap: map the file instead of reading it.
        exact: "on" chooses the settings under which most batch sizes give bit-identical logits: no flash attention
            where the model runs on the CPU (see `ngramspec.cost.kernels`), and a micro-batch small enough for its
            attention scores. "auto" begins with the fastest and lets a decoder change them (see
            `ngramspec.exactness.auto`).
        extra_buffers: None leaves AMX out if this build's kernels for it are broken (`notes` then says so, and
            `amx_broken` is true). True takes all of ggml's extra memory types for weights, unchecked and before a
            GPU's host memory; False takes none. Both are for the check itself.
        n_seq: most sequences in the cache, 1 to MAX_EVALUATE; they share its cells. `sequences` needs several.
        draft_max: the longest draft that will be sent, where it is known: a recurrent memory keeps as many snapshots
            (None: SNAPSHOTS), or fewer where memory is short (`notes` then says so).

    Attributes:
        tokens: what the cache stands for.
        exact: as above.
        setting: "fast" or "exact": what the context was opened for.
        can_rollback: whether refused drafts can be taken back.
        replays: whether that is done by evaluating tokens again from a checkpoint on: the memory is recurrent, and
            llama.cpp keeps no snapshots for this architecture.
        max_batch: most tokens of a pass of which all but the first can be taken back; `evaluate` takes more.

    Raises:
        ValueError: an argument is out of its range.
        ModelError: the file cannot be loaded, cannot generate text, or the context does not fit.
    """

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
        self.path = Path(path)
        self.notes: list[str] = []
        self.tokens: list[int] = []
        self.threads = machine.physical_cores() if threads is None else threads
        self.cache_types = (cache_type_k, cache_type_v)
        self.exact = exact
        self.n_seq = n_seq
        self._mapped = mmap
        log.init_backend()
        self._load(n_gpu_layers, extra_buffers)
        self.on_gpu = n_gpu_layers != 0 and any(d.is_gpu for d in self.devices)
        # llama.cpp has a quantised V cache with flash attention only.
        attention_can_go = not self.on_gpu and cache_type_v in ("f32", "f16", "bf16")
        self._flash = {"fast": flash_attn, "exact": "off" if flash_attn == "auto" and attention_can_go else flash_attn}
        self._longest = draft_max or SNAPSHOTS
        # A build whose kernels get mended keeps its name, and its passes then cost half.
        self._loaded_as = f"ngl={n_gpu_layers}{' amx=off' if self.amx_broken else ''}"
        self._open_context(self._context_size(n_ctx), "exact" if exact == "on" else "fast")

    # ------------------------------------------------------------------ loading

    def _load(self, n_gpu_layers: int, extra_buffers: bool | None) -> None:
        params = llama.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.load_mode = llama.LLAMA_LOAD_MODE_AUTO if self._mapped else llama.LLAMA_LOAD_MODE_NONE
        params.no_host = extra_buffers is True
        params.use_extra_bufts = extra_buffers is not False
        self.amx_broken = extra_buffers is None and _has_broken_amx(n_gpu_layers)
        if self.amx_broken:
            self.notes.append(amx.NOTE)
            params.use_extra_bufts = amx.hide(libggml)
        before = huge_pages.anonymous()

        @llama.llama_progress_callback  # type: ignore[untyped-decorator]
        def loading(done: float, _data: Any) -> bool:
            # The first call comes when all buffers are mapped and none is filled.
            if done == 0:
                huge_pages.advise(before)
            return True

        params.progress_callback = loading
        self._open_model(params)
        if llama.llama_model_has_encoder(self._model) or not llama.llama_model_has_decoder(self._model):
            raise ModelError(f"{self.path}: this model has an encoder; only decoder models can be run")
        if llama.llama_model_is_diffusion(self._model):
            raise ModelError(f"{self.path}: a diffusion model does not decode token by token")
        self.n_ctx_train: int = llama.llama_model_n_ctx_train(self._model)
        self.size_bytes: int = llama.llama_model_size(self._model)
        self.n_params: int = llama.llama_model_n_params(self._model)
        self.architecture = self._meta("general.architecture") or "unknown"
        self.name = self._meta("general.name") or self.path.stem
        buffer = ctypes.create_string_buffer(256)
        llama.llama_model_desc(self._model, buffer, 256)
        self.description = buffer.value.decode("utf-8", "replace")
        self.devices = devices.devices(libggml)
        is_recurrent = llama.llama_model_is_recurrent, llama.llama_model_is_hybrid
        self._recurrent = any(ask(self._model) for ask in is_recurrent)

    def _meta(self, key: str) -> str | None:
        buffer = ctypes.create_string_buffer(1024)
        length = llama.llama_model_meta_val_str(self._model, key.encode(), buffer, 1024)
        return buffer.value.decode("utf-8", "replace") if length >= 0 else None

    def _context_size(self, asked: int | None) -> int:
        heads = max(1, llama.llama_model_n_head(self._model))
        head_width = llama.llama_model_n_embd(self._model) // heads
        per_token = CacheShape(
            llama.llama_model_n_layer(self._model),
            llama.llama_model_n_head_kv(self._model) or heads,
            int(self._meta(f"{self.architecture}.attention.key_length") or head_width),
            int(self._meta(f"{self.architecture}.attention.value_length") or head_width),
        ).bytes_per_token(*self.cache_types)
        if asked is None:
            # Mapped weights still count as free memory, and will not stay so.
            mapped = self.size_bytes if self._mapped and not self.on_gpu else 0
            free = devices.free_bytes(self.devices, self.on_gpu, mapped)
            size, note = fitting_context(self.n_ctx_train, per_token, free)
            self.notes += [note] if note else []
            return size
        total = devices.total_bytes(self.devices, self.on_gpu)
        # The estimate is exact for plain attention only. Without this check the system ends the process.
        if asked * per_token > total and not self._recurrent and llama.llama_model_n_swa(self._model) == 0:
            raise ModelError(
                f"a context of {asked} tokens takes {asked * per_token / 2**30:.1f} GiB of KV cache, but there are"
                f" {total / 2**30:.1f} GiB in all; try a smaller -c/--ctx-size"
            )
        if asked > self.n_ctx_train > 0:
            self.notes.append(f"context of {asked} tokens is more than the {self.n_ctx_train} the model was trained on")
        return asked

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
        # One pool of cells: what continuations have in common is there once.
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

    # ------------------------------------------------------------------ the three calls

    def prefill(self, tokens: Sequence[int], *, aligned: bool = False, progress: Progress | None = None) -> Logits:
        """Make the cache hold exactly `tokens` and return the logits after the last one, shape (n_vocab,).

        Args:
            tokens: 1 to n_ctx token ids.
            aligned: reuse only what an aligned prefill computed, in whole chunks, so that the logits depend on
                `tokens` alone and not on how the cache came to hold them (exact mode).
            progress: called with (tokens done, tokens in all) after each chunk.

        Raises:
            ValueError: no tokens, or more than n_ctx.
            TargetError: llama.cpp could not evaluate them.
        """
        total = len(tokens)
        if not 0 < total <= self.n_ctx:
            raise ValueError(f"prefill needs 1 to {self.n_ctx} tokens, got {total}")
        keep = min(common_prefix(self.tokens, tokens), total - 1)
        if aligned:
            keep = min(keep, self._aligned) // self.n_batch * self.n_batch
        self.rollback(keep)
        if aligned and self._cache.length % self.n_batch:
            self.clear()
        was_aligned = self._aligned
        done = self._cache.length
        del self.tokens[done:]
        stop = self._checkpoint_at(total, aligned=aligned)
        while done < total:
            end = stop if done < stop < done + self.n_batch else min(total, done + self.n_batch)
            self._decode(tokens[done:end], all_logits=False)
            done = end
            if done == stop:
                self._cache.save(keep=True)
            if progress is not None:
                progress(done, total)
        self._aligned = total // self.n_batch * self.n_batch if aligned else min(keep, was_aligned)
        row: Logits = self._logits(1)[0]
        return row

    def _checkpoint_at(self, total: int, *, aligned: bool) -> int:
        """After which token of a prompt a recurrent state is to be kept for later ones; 0: after none."""
        # In exact mode the chunks of a prompt must be the same whatever is there already.
        stop = (total - 1) // self.n_batch * self.n_batch if aligned else total - TAIL
        return stop if self._recurrent and stop - self._cache.saved >= APART else 0

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        """Append `tokens` (1 to MAX_EVALUATE) to the cache in one `llama_decode`.

        Returns:
            Logits after each of them, shape (len(tokens), n_vocab): a view of llama.cpp's buffer, valid until
            the next call that evaluates anything.

        Raises:
            ValueError: none, too many, or more than the context has room for.
            TargetError: llama.cpp could not evaluate them; the cache is as before.
        """
        n = len(tokens)
        if not 0 < n <= MAX_EVALUATE:
            raise ValueError(f"evaluate takes 1 to {MAX_EVALUATE} tokens, got {n}")
        self._decode(tokens, all_logits=True)
        return self._logits(n)

    def rollback(self, length: int) -> None:
        """Let the cache stand for the first `length` of its tokens.

        Where the memory cannot provably go back that far, it goes further, to a checkpoint or to the beginning, and
        the next call that evaluates anything evaluates the tokens between them again: `owed` says how many.

        Raises:
            ValueError: `length` is negative or more than the cache holds.
        """
        self._check_open()
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"cannot roll back to {length}: the cache holds {len(self.tokens)} tokens")
        self._aligned = min(self._aligned, length)
        del self.tokens[length:]
        self._cache.cut(length)

    @property
    def owed(self) -> int:
        """Tokens of the cache that the next call evaluates again, before its own."""
        return len(self.tokens) - self._cache.length

    def checkpoint(self) -> None:
        """Make it cheap to roll back to here until the next checkpoint, however much is evaluated meanwhile.

        A recurrent memory copies its state, a few to some hundred MB; any other can be cut everywhere as it is.
        """
        self._check_open()
        self._settle()
        self._cache.save()

    def sequences(self, root: Node) -> Sequences:
        """A tree of continuations of what the cache holds; nothing else may be evaluated until it is closed.

        Args:
            root: stands for what the cache holds.

        Raises:
            ValueError: the target was loaded for one sequence, its memory cannot branch, or `root` is not as long.
        """
        self._check_open()
        if self.n_seq < 2 or not self.can_branch:
            raise ValueError("a tree needs a target with n_seq above 1 and a memory that is not recurrent")
        self._settle()
        if root.length != len(self.tokens) or not self.tokens:
            raise ValueError(f"a tree after {root.length} tokens cannot grow where the cache holds {len(self.tokens)}")
        return Sequences(
            llama,
            self._ctx,
            llama.llama_get_memory(self._ctx),
            self._logits,
            root,
            count=self.n_seq,
            max_batch=self.max_batch,
            windowed=llama.llama_model_n_swa(self._model) > 0,
        )

    def clear(self) -> None:
        """Forget everything in the cache."""
        self._check_open()
        self._cache.clear()
        self.tokens.clear()
        self._aligned = 0

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
        """One `llama_decode`, behind what the memory holds, with the logits of the last so many tokens."""
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

    # ------------------------------------------------------------------ settings

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings that `use` changes between: "fast", and "exact" where that is another one."""
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
            ModelError: there is no memory for it; the target is then without a context until the next call.
        """
        super()._check_open()
        self.tokens.clear()
        self._close_context()
        self._open_context(self.n_ctx, setting)

    def trial(self, setting: str) -> Trial:
        """A small context of its own to measure a setting in, whatever the target holds.

        Raises:
            TargetError: there is no memory for it.
        """
        self._check_open()
        params = self._params(ROOM, 0, setting)
        params.n_seq_max, params.kv_unified = 1, False
        return Trial(llama, self._model, params, self.n_vocab, recurrent=self._recurrent)

    # ------------------------------------------------------------------ identity and end

    @property
    def can_branch(self) -> bool:
        """Whether several continuations can share a beginning in the cache; recurrent states cannot be shared."""
        return not self._recurrent

    @property
    def fingerprint(self) -> str:
        """Key of everything a measured cost or a probe result depends on: file, build, machine, settings."""
        return self._key(f"fa={self.flash_attn} kv={self.cache_types} ub={self.n_batch}")

    @property
    def identity(self) -> str:
        """The same, but for the setting that holds now."""
        return self._key(f"fa={self._flash['fast']} kv={self.cache_types}")

    def _key(self, settings: str) -> str:
        digest = hashlib.blake2b(digest_size=12)
        with self.path.open("rb") as file:
            digest.update(file.read(1 << 16))
            file.seek(max(0, self.path.stat().st_size - (1 << 16)))
            digest.update(file.read(1 << 16))
        digest.update(f"{self.path.stat().st_size} {build()} {machine.name()}".encode())
        devices = [d.name for d in self.devices]
        digest.update(f"{self.threads} {self._loaded_as} {settings} {devices}".encode())
        return digest.hexdigest()

    def close(self) -> None:
        """Free the context and the model; the target, and logits it returned, cannot be used afterwards."""
        self._close_context()
        super().close()

    def _close_context(self) -> None:
        if self._ctx:
            llama.llama_batch_free(self._batch)
            llama.llama_free(self._ctx)
            self._ctx = None


def _has_broken_amx(n_gpu_layers: int) -> bool:
    """Whether weights would be placed for AMX kernels that do not work."""
    if "AMX_INT8 = 1" not in build():
        return False
    all_on_gpu = n_gpu_layers < 0 and any(d.is_gpu for d in devices.devices(libggml))
    return not all_on_gpu and not amx.works(Path(libggml._name))
