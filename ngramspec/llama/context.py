"""`Context`: the KV cache that llama.cpp evaluates tokens in, its size and settings, and the lanes in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, cast

import llama_cpp.llama_cpp as llama

from ngramspec.backend import LEAVES
from ngramspec.errors import ModelError
from ngramspec.exactness.auto import UNMEASURED, ExactAuto, Footing
from ngramspec.exactness.choice import EXACT, WAYS, Exact, Way
from ngramspec.exactness.trial import ROOM
from ngramspec.llama import devices, log
from ngramspec.llama.head import Head
from ngramspec.llama.kv_cache import CACHE_TYPES, UNQUANTISED, CacheType
from ngramspec.llama.lane import SequenceLane
from ngramspec.llama.passes import MAX_EVALUATE, Passes
from ngramspec.llama.state import Cache
from ngramspec.llama.states import HiddenStates
from ngramspec.llama.trial import Trial
from ngramspec.llama.weights import Weights
from ngramspec.tuning.settings import LEAST_MICRO, MOST_MICRO, Settings

MAX_CELLS = 2**31 - 1

MICRO_BATCH, WITHOUT_FLASH = 512, 128
"""Tokens of a prompt per micro-batch. Without flash attention one holds heads x n_ctx x n_ubatch scores."""

SNAPSHOTS = 16
"""How many tokens back a recurrent state can be restored, unless longer or shorter drafts are asked for. Each snapshot
takes as much space as the state itself, and on some architectures each is copied in every pass."""

SNAPSHOT_SHARE = 1 / 16
"""Snapshots may take at most this part of the free RAM or GPU memory; one is kept in any case."""

SAMPLE = (
    "The river was low that summer. Every morning she walked down to the bridge, and every morning the same boat lay"
    " there, tied to the same post.\n\ndef total(numbers):\n    return sum(one for one in numbers if one > 0)\n"
)
"""A text such as people write, to measure rounding on."""

assert LEAST_MICRO >= MAX_EVALUATE  # a pass with the longest draft is one micro-batch

_FLASH = {"auto": -1, "off": 0, "on": 1}


class Context(Weights):
    """A loaded model with an open context. Args, attributes and errors as of `ngramspec.llama.target.Target`."""

    head: Head | None = None
    _ctx: Any = None
    _texts = 1  # how many lanes the context is opened for

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_ctx: int | None = None,
        n_gpu_layers: int = -1,
        threads: int | None = None,
        threads_batch: int | None = None,
        micro_batch: int | None = None,
        flash_attn: Literal["auto", "on", "off"] = "auto",
        cache_type_k: CacheType = "f16",
        cache_type_v: CacheType = "f16",
        mmap: bool = True,
        exact: Exact = "auto",
        extra_buffers: bool | None = None,
        n_seq: int | None = None,
        draft_max: int | None = None,
        head: bool = False,
    ) -> None:
        most = MAX_CELLS // self._texts - MAX_EVALUATE
        if n_ctx is not None and not 1 <= n_ctx <= most:
            raise ValueError(f"n_ctx is {n_ctx}, but must be 1 to {most}")
        for name, count in (("threads", threads), ("threads_batch", threads_batch)):
            if count is not None and count < 1:
                raise ValueError(f"{name} is {count}, but must be at least 1")
        if micro_batch is not None and not LEAST_MICRO <= micro_batch <= MOST_MICRO:
            raise ValueError(f"micro_batch is {micro_batch}, but must be {LEAST_MICRO} to {MOST_MICRO}")
        for name, value, allowed in (
            ("flash_attn", flash_attn, _FLASH),
            ("cache_type_k", cache_type_k, CACHE_TYPES),
            ("cache_type_v", cache_type_v, CACHE_TYPES),
            ("exact", exact, EXACT),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}, but must be one of: {', '.join(allowed)}")
        if n_seq is not None and not 1 <= n_seq <= MAX_EVALUATE:
            raise ValueError(f"n_seq is {n_seq}, but must be 1 to {MAX_EVALUATE}")
        if draft_max is not None and not 1 <= draft_max < MAX_EVALUATE:
            raise ValueError(f"draft_max is {draft_max}, but must be 1 to {MAX_EVALUATE - 1}")
        if head and max(n_seq or 1, self._texts) > 1:
            raise ValueError("the model's head drafts for one sequence; head and n_seq exclude each other")
        super().__init__(
            path,
            n_gpu_layers=n_gpu_layers,
            threads=threads,
            threads_batch=threads_batch,
            mmap=mmap,
            extra_buffers=extra_buffers,
            head=head,
        )
        self._micro_batch = micro_batch
        self.cache_types = (cache_type_k, cache_type_v)
        self.exact = exact
        # Sequences of a recurrent state, or of a sliding window, take memory each; where cells are shared they do not.
        may_ask = self.can_pool and not (head or self._recurrent or self.window)
        self.n_seq = n_seq or (1 + LEAVES if may_ask else 1)
        self.leaves = self.n_seq - 1 if may_ask else 0
        attention_can_go = not self.on_gpu and cache_type_v in UNQUANTISED
        self._flash = {"fast": flash_attn, "exact": "off" if flash_attn == "auto" and attention_can_go else flash_attn}
        self._longest = draft_max or SNAPSHOTS
        size = self._context_size(n_ctx, self.cache_types, self._texts)
        width = llama.llama_model_n_embd_out(self._model) if self.has_head else 0
        self._states = HiddenStates(width) if self.has_head else None
        self.footing = Footing()
        setting = "exact" if exact == "on" or (exact == "auto" and self._decide() == "exact") else "fast"
        try:
            self._open_context(size, setting)
        except ModelError:
            if exact != "auto" or setting == "fast":
                raise
            # Too little memory for these settings; there may be enough for the others.
            self._decide(("fast", "padded"))
            self._open_context(size, "fast")
        if self._states is not None:
            params = self._params(self.n_ctx + MAX_EVALUATE, 0, self.setting)
            self.head = Head(self._model, params, self._states, n_ctx=self.n_ctx)

    @property
    def feeds_head(self) -> bool:
        """Whether passes keep what the model's own head goes by; see `ngramspec.backend.Headed`."""
        return self._states is not None and self._states.wanted

    @feeds_head.setter
    def feeds_head(self, wanted: bool) -> None:
        if self._states is not None:
            self._states.wanted = wanted

    # ------------------------------------------------------------------ opening

    def _decide(self, ways: Sequence[Way] = WAYS, sample: str = SAMPLE) -> Way:
        """Choose for `exact="auto"` how requests are decoded; for `sample`: see `ExactAuto`."""
        # As in `SequenceLane.exact_rollback`: else taking drafts back may move last bits under all settings.
        if self._recurrent and (self.window or not self._snapshots(1, "fast")):
            self.footing = Footing(bound=UNMEASURED)
            return "fast"
        auto = ExactAuto(self, ways, self.tokenize(sample))
        auto.measure()
        self.footing = auto.footing
        return auto.way

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
        return max(1, min(wanted, int(SNAPSHOT_SHARE * free / max(1, size * self._texts))))

    @property
    def _pooled(self) -> bool:
        """Whether all sequences share one pool of cells, so that what they have in common is stored once."""
        return self.n_seq > 1

    def _micro(self, setting: str) -> int:
        usual = _usual_micro(self._flash[setting])
        if self._micro_batch is None:
            return usual
        # What was asked for is for the settings that were asked for.
        return self._micro_batch if setting == "fast" else min(usual, self._micro_batch)

    def _params(self, cells: int, snapshots: int, setting: str) -> Any:
        """llama.cpp's parameters of a context."""
        params = llama.llama_context_default_params()
        params.n_ctx = cells
        params.n_batch = params.n_ubatch = self._micro(setting)
        params.n_outputs_max = params.n_outputs_max_per_seq = MAX_EVALUATE
        params.n_seq_max = max(self.n_seq, self._texts)
        params.kv_unified = self._pooled
        params.n_threads, params.n_threads_batch = self.threads, self.threads_batch
        params.flash_attn_type = _FLASH[self._flash[setting]]
        params.type_k, params.type_v = (CACHE_TYPES[t][0] for t in self.cache_types)
        params.n_rs_seq = snapshots
        return params

    def _open_context(self, n_ctx: int, setting: str) -> None:
        snapshots = self._snapshots(self._longest, setting)
        while True:
            log.tail.clear()
            # Room for the dummy tokens of a padded batch, which never stay in the cache.
            params = self._params(self._texts * (n_ctx + MAX_EVALUATE), snapshots, setting)
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
        sole = self._texts == 1
        shape: dict[str, Any] = {
            "recurrent": self._recurrent,
            "window": self.window,
            "sole": sole,
            "pooled": self._pooled,
        }
        caches = [Cache(llama, self._ctx, sequence=number, **shape) for number in range(self._texts)]
        self._passes = Passes(
            llama, self._ctx, caches, self, n_batch=self.n_batch, n_vocab=self.n_vocab, states=self._states
        )
        self._lanes = [SequenceLane(self._passes, cache, n_ctx=n_ctx) for cache in caches]
        first = self._lanes[0]
        self.replays, self.max_batch = first.replays, first.max_batch
        self.exact_rollback = first.exact_rollback
        self.can_rollback = first.goes_back()
        for lane in self._lanes:
            lane.can_rollback = self.can_rollback

    # ------------------------------------------------------------------ settings

    @property
    def flash_attn(self) -> str:
        """Flash attention as it was asked for under the setting that holds now: "auto", "on" or "off"."""
        return self._flash[self.setting]

    @property
    def fingerprint(self) -> str:
        """Key of everything a measured cost or a probe result depends on: file, build, machine, settings."""
        return self._key(f"fa={self.flash_attn} kv={self.cache_types} ub={self.n_batch}")

    # ------------------------------------------------------------------ settings

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings that can be measured: "fast", and "exact" if it differs from that."""
        return ("fast", "exact") if self._flash["exact"] != self._flash["fast"] else ("fast",)

    @property
    def identity(self) -> str:
        """The key of measurements under all `settings`."""
        micro = "" if self._micro_batch is None else f" ub={self._micro_batch}"
        return self._key(f"fa={self._flash['fast']} kv={self.cache_types}{micro}")

    @property
    def present(self) -> Settings:
        """The settings that it was loaded with, those that "exact" changes aside."""
        return Settings(
            self.threads,
            self.threads_batch,
            flash_attn=self._flash["fast"],
            micro_batch=self._micro_batch,
            mmap=self._mapped,
            repack=self._repacks,
            cache_types=self.cache_types,
        )

    def trial_of(self, settings: Settings, cells: int) -> tuple[Trial, int]:
        """A separate context under other settings, but for `mmap` and `repack`, and the tokens of its micro-batches.

        Raises:
            TargetError: the machine lacks the memory for it.
        """
        self._check_open()
        params = self._params(cells, 0, "fast")
        params.flash_attn_type = _FLASH[settings.flash_attn]
        params.type_k, params.type_v = (CACHE_TYPES[cast(CacheType, t)][0] for t in settings.cache_types)
        params.n_batch = params.n_ubatch = settings.micro_batch or _usual_micro(settings.flash_attn)
        return self._try(params), int(params.n_ubatch)

    def trial(self, setting: str) -> Trial:
        """A separate small context to measure a setting in; what the target holds does not matter.

        Raises:
            TargetError: the machine lacks the memory for it.
        """
        self._check_open()
        return self._try(self._params(ROOM, 0, setting))

    def _try(self, params: Any) -> Trial:
        """A separate context for one text."""
        params.n_seq_max, params.kv_unified = 1, False
        return Trial(llama, self._model, params, self.n_vocab, recurrent=self._recurrent)

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Free the context and the model; the target, and logits it returned, cannot be used afterwards."""
        if self._ctx:
            self._passes.close()
            self._ctx = None
        if self.head is not None:
            self.head.close()
        super().close()


def _usual_micro(flash_attn: str) -> int:
    """Tokens of a micro-batch where nothing else was asked for."""
    return WITHOUT_FLASH if flash_attn == "off" else MICRO_BATCH
