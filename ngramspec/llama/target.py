"""`Target`: a loaded GGUF model and the sequences in its KV cache.

    logits = target.prefill(prompt)        # (n_vocab,) after the last token; reuses the longest common prefix
    logits = target.evaluate(tokens)       # (len(tokens), n_vocab): ONE llama_decode, appended to the cache
    target.rollback(length)                # the cache stands for exactly its first `length` tokens again

With several texts, a target is the first of its sequences, and one pass reads the weights once for all that are in it:

    with Target(path, texts=4) as target:
        row = target.sequences[1].prefill(prompt)       # a sequence alone: see `ngramspec.shared_model.SequenceModel`
        rows = target.evaluate_together([Part(target, [5], 1), Part(target.sequences[2], [7, 8, 9], 3)])

The low-level API is used: logits are requested for the positions that are read and for no others, so nothing grows
with n_ctx x n_vocab. It knows nothing about drafts or acceptance.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

import llama_cpp.llama_cpp as llama

from ngramspec.backend import Logits
from ngramspec.cpu.cores import shared_load, usable_cores
from ngramspec.cpu.thread_governor import ThreadGovernor
from ngramspec.errors import ModelError
from ngramspec.exactness.decision import EXACT, UNMEASURED, WAYS, Exact, ExactAuto, ExactnessMode, Way
from ngramspec.llama import bindings, devices
from ngramspec.llama.cache import CACHE_TYPES, UNQUANTISED, Cache, CacheType
from ngramspec.llama.cache_tree import Branch, CacheTree, ask
from ngramspec.llama.embedder import POOLINGS, Embedder, Pooling
from ngramspec.llama.head import Head, Heads
from ngramspec.llama.hidden_states import HiddenStates
from ngramspec.llama.passes import MAX_EVALUATE, Passes, equally, in_order
from ngramspec.llama.sequence import CacheSequence, append
from ngramspec.llama.trial_context import ROOM, TrialContext
from ngramspec.llama.weights import Lora, Weights, open_context, set_adapters
from ngramspec.machine import LEAST_MICRO, MOST_MICRO, MOST_THREADS, Settings
from ngramspec.sampling.option import between, one_of
from ngramspec.shared_model import Part, SequenceModel
from ngramspec.tokens import Node

LEAVES = 8  # most branches in one pass: 8 gain 1 % over 4 where rows are free, and 0.3 % on GPUs

MAX_CELLS = 2**31 - 1

MICRO_BATCH, WITHOUT_FLASH = 512, 128
"""Tokens of a prompt per micro-batch. Without flash attention one holds heads x n_ctx x n_ubatch scores."""

SNAPSHOTS = 16
"""How many tokens back a recurrent state can be restored, unless longer or shorter drafts are asked for. Each snapshot
takes as much space as the state itself, and on some architectures each is copied in every pass."""

SNAPSHOT_SHARE = 1 / 16  # snapshots may take at most this part of the free RAM or GPU memory; one is kept in any case

SAMPLE = (
    "The river was low that summer. Every morning she walked down to the bridge, and every morning the same boat lay"
    " there, tied to the same post.\n\ndef total(numbers):\n    return sum(one for one in numbers if one > 0)\n"
)
"""A text such as people write, to measure rounding on."""

OWN_STATES = ("deepseek4",)
"""Hybrid architectures whose batches are made as if each text had a cache of its own, even where they share a pool."""

ABORTS = ("minimax-01",)
"""Architectures on which llama.cpp ends the process if texts with caches of their own meet in a batch."""

assert LEAST_MICRO >= MAX_EVALUATE  # a pass with the longest draft is one micro-batch

_FLASH = {"auto": -1, "on": 1, "off": 0}

TEXTS, THREADS = between(1, MAX_EVALUATE), between(1, MOST_THREADS)
MICRO_BATCHES, DRAFT_LENGTHS = between(LEAST_MICRO, MOST_MICRO), between(1, MAX_EVALUATE - 1)
FLASH, TYPES, EXACTNESS = one_of(*_FLASH), one_of(*CACHE_TYPES), one_of(*EXACT)
"""The values that arguments of a `Target` may have, and settings of loading with them."""


class Target(Weights, CacheSequence):
    """A GGUF model, its context and what is in its KV cache; the calls of a `Model` are those of the first text.

    Args:
        path: a GGUF file (the first part of a split one).
        texts: how many texts the cache holds, for passes over several. None: one text, and no such passes.
        n_ctx: context size of a text in tokens; None takes the model's own, capped so that the KV cache fits in half of
            the machine's free memory.
        n_gpu_layers: layers to offload; negative: all, to whatever GPU the build supports.
        threads: CPU threads; `None` means one per usable core, and fewer while other programs use the cores.
        threads_batch: CPU threads of passes over more than one token; `None` means as `threads`.
        tuned_threads: Whether `threads` and `threads_batch` are the best numbers for an idle machine, which may be
            reduced while other programs use the cores.
        micro_batch: tokens of a prompt per pass; None: 512, without flash attention 128.
        flash_attn: "auto" leaves the choice to llama.cpp.
        cache_type_k, cache_type_v: element type of the KV cache.
        mmap: map the file instead of reading it.
        exact: "on" takes the settings under which most batch sizes give bit-identical logits: on a CPU no flash
            attention, and a cache of its own for each of several texts. "auto" measures what that costs, if it is not
            known, and takes the fastest or those (see `ngramspec.exactness.decision`); of several texts on a GPU the
            fastest.
        repack: weights may be put into the order that CPU kernels like.
        n_seq: most sequences in the cache of one text, which share its cells. `tree` and `ask` need several. None: as
            many as `ask` needs on a GPU, where it may pay, else 1.
        draft_max: the longest draft that will be sent: as many snapshots of a recurrent state are kept (None:
            SNAPSHOTS), or fewer if the machine is short of memory.
        head: also load the model's own head, which drafts for its texts, where the file holds one that this build runs.
        lora: files of LoRA adapters, each with its scale.

    Attributes:
        notes: what the user should know about how it was loaded.
        present: the settings that it was loaded with, those that "exact" changes aside.
        governor: Chooses the number of threads of each pass.
        exact: of several texts "on" or "off", what "auto" has decided on.
        exact_price: Time that the same text with and without drafts would take, as a multiple; `None` if unknown.
        exactness: the mode of requests that "auto" has decided on.
        setting: "fast" or "exact": what the context was opened for.
        heads: the model's own head, a model that drafts (see `ngramspec.llama.head`); None: there is none.
        leaves: most branches of one `ask`; 0 where the cache cannot hold any, or would give away what they share.
        tokens, n_vocab, n_ctx, max_batch, can_rollback, replays, exact_rollback, fingerprint: see
            `ngramspec.backend.Model`; max_tokens, max_rows, drafts_alone: `ngramspec.shared_model.SharedModel`.

    Raises:
        ValueError: an argument is out of its range.
        ModelError: the file cannot be loaded, cannot generate text, or the context does not fit; or an adapter cannot
            be applied to it.
    """

    heads: Heads | None = None
    exact_price: float | None = None
    _embedders: tuple[Embedder, ...] = ()
    _submitted: Sequence[tuple[int, int]] = ()
    max_rows = MAX_EVALUATE
    _ctx: Any = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        texts: int | None = None,
        n_ctx: int | None = None,
        n_gpu_layers: int = -1,
        threads: int | None = None,
        threads_batch: int | None = None,
        tuned_threads: bool = False,
        micro_batch: int | None = None,
        flash_attn: Literal["auto", "on", "off"] = "auto",
        cache_type_k: CacheType = "f16",
        cache_type_v: CacheType = "f16",
        mmap: bool = True,
        exact: Exact = "auto",
        repack: bool = True,
        n_seq: int | None = None,
        draft_max: int | None = None,
        head: bool = False,
        lora: Sequence[Lora] = (),
    ) -> None:
        self.texts, self._texts = texts, 1 if texts is None else texts
        cells = between(1, MAX_CELLS // max(1, self._texts) - MAX_EVALUATE)
        for name, value, allowed in (
            ("texts", texts, TEXTS),
            ("n_ctx", n_ctx, cells),
            ("threads", threads, THREADS),
            ("threads_batch", threads_batch, THREADS),
            ("micro_batch", micro_batch, MICRO_BATCHES),
            ("n_seq", n_seq, TEXTS),
            ("draft_max", draft_max, DRAFT_LENGTHS),
            ("flash_attn", flash_attn, FLASH),
            ("cache_type_k", cache_type_k, TYPES),
            ("cache_type_v", cache_type_v, TYPES),
            ("exact", exact, EXACTNESS),
        ):
            if value is not None and not allowed.holds(value):
                raise ValueError(f"{name} must be {allowed.words}, got {value!r}")
        if (n_seq or 1) > 1 and (texts is not None or head):
            raise ValueError("n_seq above 1 cannot be combined with texts above 1 or a head")
        adapts = threads is None or tuned_threads, (threads is None and threads_batch is None) or tuned_threads
        threads = threads or usable_cores()
        shared_load()  # whose first sample is over the time of loading
        types = (cache_type_k, cache_type_v)
        asked = Settings(threads, threads_batch or threads, flash_attn, micro_batch, mmap, repack, types)
        super().__init__(path, asked, n_gpu_layers=n_gpu_layers, head=head, lora=lora)
        self.exact = exact
        may_branch = texts is None and self.can_pool and not (head or self._recurrent or self.window)
        self.n_seq = n_seq or (1 + LEAVES if may_branch and self.on_gpu else 1)
        self.leaves = self.n_seq - 1 if may_branch else 0
        attention_can_go = not self.on_gpu and cache_type_v in UNQUANTISED
        flash = "off" if flash_attn == "auto" and attention_can_go else flash_attn
        # The micro-batch that was asked for is for the settings that were asked for.
        micro = min(_usual_micro(flash), micro_batch) if micro_batch else None
        self._under = {"fast": asked, "exact": replace(asked, flash_attn=flash, micro_batch=micro)}
        self._longest = draft_max or SNAPSHOTS
        self._adapts = adapts
        size = self._context_size(n_ctx, self._texts)
        width = bindings.width_out(llama, self._model)
        self._states = [HiddenStates(width) for _ in range(self._texts if self.has_head else 0)]
        self.exactness = ExactnessMode()
        setting = "exact" if exact == "on" or (exact == "auto" and self._decide() == "exact") else "fast"
        try:
            self._open_context(size, setting)
        except ModelError:
            if exact != "auto" or setting == "fast":
                raise
            # Too little memory for these settings; there may be enough for the others.
            self._decide(("fast", "padded"))
            self._open_context(size, "fast")
        if self._states:
            for states in self._states:
                states.of_prompts = self.exact != "on"
            params = self._params(self._texts * (self.n_ctx + MAX_EVALUATE), 0, self._under[self.setting])
            self.heads = Heads(
                self._model,
                params,
                self._states,
                n_ctx=self.n_ctx,
                pooled=self._pooled,
                adapters=self._adapters,
                governor=self.governor,
            )

    @property
    def head(self) -> Head | None:
        """The own head of the first text."""
        return None if self.heads is None else self.heads.sequences[0]

    @property
    def feeds_head(self) -> bool:
        """Whether passes keep what the model's own head goes by."""
        return any(states.wanted for states in self._states)

    @feeds_head.setter
    def feeds_head(self, wanted: bool) -> None:
        for states in self._states:
            states.wanted = wanted

    # ------------------------------------------------------------------ opening

    @property
    def _aborts(self) -> bool:
        return self._texts > 1 and self.architecture in ABORTS

    def _decide(self, ways: Sequence[Way] = WAYS) -> Way:
        """Choose for `exact="auto"` how requests are decoded."""
        way: Way = "fast"
        if self.texts is not None and (self.on_gpu or self._aborts):
            pass
        # As in `CacheSequence.exact_rollback`: else taking drafts back may move last bits under all settings.
        elif self._recurrent and (self.window or not self._snapshots(1, "fast")):
            self.exactness = ExactnessMode(bound=UNMEASURED)
        else:
            auto = ExactAuto(self, ways, self.tokenize(SAMPLE) if self.texts is None else ())
            auto.measure()
            self.exactness, way, self.exact_price = auto.exactness, auto.way, auto.price
        if self.texts is not None:
            self.exact = "on" if way == "exact" else "off"
        return way

    def _snapshots(self, wanted: int, setting: str) -> int:
        """How many snapshots of the recurrent state to ask for: 0 where the architecture has none."""
        if not self._recurrent:
            return 0
        # A context of a few tokens shows what the large one would do.
        context = llama.llama_init_from_model(self._model, self._params(MAX_EVALUATE, 1, self._under[setting]))
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
        free = devices.free_bytes(self.devices, self._cached_layers)
        return max(1, min(wanted, int(SNAPSHOT_SHARE * free / max(1, size * self._texts))))

    @property
    def _pooled(self) -> bool:
        """Whether all sequences share one pool of cells, so that what they have in common is stored once."""
        if self.texts is None:
            return self.n_seq > 1
        # A CPU's attention goes over the cells of all texts, and rounds by where they lie; one batch gains it little.
        return self.exact == "off" and self.can_pool and (self.on_gpu or self.architecture in ABORTS)

    def _params(self, cells: int, snapshots: int, settings: Settings, *, alone: bool = False) -> Any:
        """llama.cpp's parameters of a context, for one text `alone` or for all."""
        params = llama.llama_context_default_params()
        params.n_ctx = cells
        params.n_batch = params.n_ubatch = settings.micro_batch or _usual_micro(settings.flash_attn)
        params.n_outputs_max = params.n_outputs_max_per_seq = MAX_EVALUATE
        params.n_seq_max = 1 if alone else max(self.n_seq, self._texts)
        params.kv_unified = self._pooled and not alone
        params.n_threads, params.n_threads_batch = settings.threads, settings.threads_batch
        params.flash_attn_type = _FLASH[settings.flash_attn]
        params.type_k, params.type_v = (CACHE_TYPES[t][0] for t in settings.cache_types)
        params.n_rs_seq = snapshots
        return params

    def _open_context(self, n_ctx: int, setting: str) -> None:
        if not self._pooled and self._aborts:
            raise ModelError(
                f"{self.path}: llama.cpp cannot evaluate several sequences of a {self.architecture} model exactly;"
                " use one sequence, or exact='off'"
            )
        snapshots = self._snapshots(self._longest, setting)
        while True:
            bindings.log_tail.clear()
            # Room for the dummy tokens of a padded batch, which never stay in the cache.
            params = self._params(self._texts * (n_ctx + MAX_EVALUATE), snapshots, self._under[setting])
            self._ctx = open_context(self._model, params, self._adapters)
            if self._ctx or snapshots <= 1:
                break
            snapshots //= 2
        if not self._ctx:
            raise ModelError(
                f"{self.path}: could not create a context of {n_ctx} tokens ({bindings.last_complaint()});"
                " try a smaller -c/--ctx-size"
            )
        if 0 < snapshots < self._longest:
            self.notes.append(f"low memory: drafts are limited to {snapshots} tokens")
        self.setting = setting
        # Flash attention on a CPU splits the context over the threads, so their number moves last bits.
        is_exact = self.exact == "on" or self.exactness.same
        adapts = (False, False) if is_exact and self.flash_attn != "off" and not self.on_gpu else self._adapts
        self.governor = ThreadGovernor(self.present.threads, self.present.threads_batch, adapts=adapts)
        self.n_batch = self.max_tokens = int(params.n_batch)
        self.drafts_alone = self._recurrent
        caches = [
            Cache(
                self._ctx,
                sequence=number,
                recurrent=self._recurrent,
                window=self.window,
                sole=self._texts == 1,
                pooled=self._pooled,
                states=self._states[number] if self._states else None,
            )
            for number in range(self._texts)
        ]
        passes = Passes(
            self._ctx,
            caches,
            self,
            n_batch=self.n_batch,
            n_seq=self.n_seq,
            governor=self.governor,
            returns_early=self.on_gpu,
        )
        CacheSequence.__init__(self, passes, caches[0], n_ctx=n_ctx)
        self._others = [CacheSequence(passes, cache, n_ctx=n_ctx) for cache in caches[1:]]
        if self.replays:
            self.evaluate([0])
            self.can_rollback = self.goes_back()
            self.clear()
        settings = f"fa={self.flash_attn} kv={self.present.cache_types} ub={self.n_batch}"
        if self.texts is not None:
            settings += f" lanes={self._texts} in {'one pool' if self._pooled else 'own caches'}"
        self.fingerprint = self._key(settings)
        for sequence in self._others:
            sequence.can_rollback, sequence.fingerprint = self.can_rollback, self.fingerprint

    # ------------------------------------------------------------------ settings

    @property
    def flash_attn(self) -> str:
        """Flash attention as it was asked for under the setting that holds now: "auto", "on" or "off"."""
        return self._under[self.setting].flash_attn

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings that can be measured: "fast", and "exact" if it differs from that."""
        return ("fast", "exact") if self._under["exact"].flash_attn != self.present.flash_attn else ("fast",)

    @property
    def identity(self) -> str:
        """The key of measurements under all `settings`."""
        asked = self.present
        micro = "" if asked.micro_batch is None else f" ub={asked.micro_batch}"
        return self._key(f"fa={asked.flash_attn} kv={asked.cache_types}{micro}")

    def trial_of(self, settings: Settings, cells: int) -> TrialContext:
        """A separate context under other settings, but for `mmap` and `repack`.

        Raises:
            TargetError: the machine lacks the memory for it.
        """
        self._check_open()
        return TrialContext(self._model, self._params(cells, 0, settings, alone=True), self._adapters)

    def trial(self, setting: str) -> TrialContext:
        """The same under "fast" or "exact"."""
        return self.trial_of(self._under[setting], ROOM)

    def embedder(self, pooling: Pooling | None, n_ctx: int) -> Embedder:
        """What makes vectors of texts with this model's weights, in a context of its own; `close` frees it too.

        `pooling`: None takes what the file says, "none" where it does not; `n_ctx`: most tokens of a text.

        Raises:
            ModelError: the model makes no such vectors, or the machine lacks the memory for the context.
        """
        self._check_open()
        if self._meta(f"{self.architecture}.attention.causal") == "false":
            raise ModelError(f"{self.path} uses bidirectional attention; embeddings of such models are not supported")
        if pooling is None:
            number = int(self._meta(f"{self.architecture}.pooling_type") or 0)
            if number >= len(POOLINGS):
                raise ModelError(f"{self.path} is a ranking model; use --pooling mean to compute embeddings with it")
            pooling = POOLINGS[number]
        params = self._params(n_ctx + MAX_EVALUATE, 0, self._under[self.setting], alone=True)
        params.pooling_type = llama.LLAMA_POOLING_TYPE_NONE
        context = open_context(self._model, params, self._adapters)
        if not context:
            raise ModelError(f"{self.path}: not enough memory for the embeddings context of {n_ctx} tokens")
        made = Embedder(context, pooling, n_ctx=n_ctx, n_batch=int(params.n_batch), governor=self.governor)
        self._embedders = (*self._embedders, made)
        return made

    def scale_adapters(self, scales: Sequence[float]) -> None:
        """Set the scales of all LoRA adapters for the following passes of all sequences and of the own head.

        The caller clears sequences whose tokens were evaluated with other scales. Embedders keep the first scales.
        """
        self._check_open()
        adapters = [(handle, scale) for (handle, _), scale in zip(self._adapters, scales, strict=True)]
        set_adapters(self._ctx, adapters)
        if self.heads is not None:
            self.heads.set_adapters(adapters)

    # ------------------------------------------------------------------ several texts

    @property
    def sequences(self) -> Sequence[CacheSequence]:
        """The sequences, by number; the target is the first."""
        # Made anew: a target in a list of its own would stay in memory after its last use.
        return [self, *self._others]

    def evaluate_together(self, parts: Sequence[Part]) -> list[Logits]:
        """Append to several sequences in one pass; see `ngramspec.shared_model.SharedModel`.

        The logits are views, valid until the next pass of any sequence.
        """
        self.submit_together(parts)
        return self.fetch_together()

    def submit_together(self, parts: Sequence[Part]) -> None:
        self._check_open()
        own = self.sequences
        if not parts or len({part.sequence.number for part in parts if part.sequence in own}) < len(parts):
            raise ValueError("a pass requires at least one part, and at most one for each sequence of this model")
        if any(not part.tokens or not 0 <= part.rows <= len(part.tokens) for part in parts):
            raise ValueError("a part of a pass has tokens, and rows of logits for as many at most")
        size, total = sum(len(part.tokens) for part in parts), sum(part.rows for part in parts)
        if size > self.max_tokens or total > self.max_rows:
            raise ValueError(
                f"{size} tokens and {total} rows of logits are more than the {self.max_tokens} and {self.max_rows}"
                " of a pass"
            )
        # llama.cpp puts sequences into one batch if their numbers follow each other.
        order = sorted(parts, key=lambda part: part.sequence.number)
        append(self._passes, [(own[sequence.number], tokens, rows) for sequence, tokens, rows in order])
        # Where the rows of each part are among those of the pass.
        ends = dict(zip((part.sequence.number for part in order), accumulate(part.rows for part in order), strict=True))
        self._submitted = [(ends[part.sequence.number], part.rows) for part in parts]

    def fetch_together(self) -> list[Logits]:
        logits = self._passes.fetch()
        return [logits[end - rows : end] for end, rows in self._submitted]

    def batches(self, lengths: Sequence[int], sequences: Sequence[SequenceModel]) -> Sequence[int]:
        if self._pooled and not self._recurrent:
            return in_order(sum(lengths), self.n_batch)
        kept = self.cache.snapshots
        return equally(
            {sequence.number: length for sequence, length in zip(sequences, lengths, strict=True)},
            self.n_batch,
            neighbours=not self._pooled
            or bool(llama.llama_model_is_recurrent(self._model))
            or self.architecture in OWN_STATES,
            tail=kept + 1 if kept else 0,
        )

    # ------------------------------------------------------------------ several continuations

    @property
    def can_branch(self) -> bool:
        """Whether several continuations can share a beginning in the cache; recurrent states cannot be shared."""
        return self.can_pool and not self._recurrent

    def tree(self, root: Node) -> CacheTree:
        """A tree of continuations of what the cache holds, `root`; nothing else may be evaluated until it is closed.

        Raises:
            ValueError: the target was loaded for one sequence, its KV cache cannot branch, or `root` is not as long.
        """
        self._check_open()
        if self.n_seq < 2 or not self.can_branch:
            raise ValueError(
                "a tree needs a target with n_seq above 1 and a memory that is not recurrent, nor read in blocks"
            )
        self.settle()
        if root.length != len(self.tokens) or not self.tokens:
            raise ValueError(f"a tree after {root.length} tokens cannot grow where the cache holds {len(self.tokens)}")
        return CacheTree(self._passes, root, count=self.n_seq, windowed=self.window > 0)

    # ------------------------------------------------------------------ branches beside the text

    def ask(self, tokens: Sequence[int], branches: Sequence[Branch]) -> Logits:
        """Append tokens as `evaluate` does; the logits after each token, then after each of the branches.

        Both are at most `max_batch`. The tokens' logits are those that `evaluate` gives with as many tokens more, bit
        for bit. Branches are all different, each after those that it rests on, and leave nothing in the cache.

        Raises:
            ValueError: more than `leaves` branches, or than there is room for.
            TargetError: llama.cpp could not evaluate them; the cache is as before.
        """
        self._check_open()
        if not self.leaves:
            raise ValueError("branches need a target with n_seq above 1 and a memory that keeps what they share")
        return ask(self._passes, self, self.leaves, tokens, branches)

    # ------------------------------------------------------------------ end

    def close(self) -> None:
        """Free the context and the model; the target, and logits it returned, cannot be used afterwards."""
        for embedder in self._embedders:
            embedder.close()
        if self._ctx:
            self._passes.close()
            self._ctx = None
        if self.heads is not None:
            self.heads.close()
        super().close()


def _usual_micro(flash_attn: str) -> int:
    """Tokens of a micro-batch where nothing else was asked for."""
    return WITHOUT_FLASH if flash_attn == "off" else MICRO_BATCH
