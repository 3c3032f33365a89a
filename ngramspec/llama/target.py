"""`Target`: a loaded GGUF model and the sequences in its KV cache.

    sequence = target.sequences[0]
    logits = sequence.prefill(prompt)      # (n_vocab,) after the last token; reuses the longest common prefix
    logits = sequence.evaluate(tokens)     # (len(tokens), n_vocab): ONE llama_decode, appended to the cache
    sequence.rollback(length)              # the cache contains exactly its first `length` tokens again

A `llama_decode` reads all weights once, for one token or for several, so a few more tokens in a pass cost little. For
example, the cache contains 1000 tokens, the next token t is known, and a drafter proposes d1 to d4.
`evaluate([t, d1, d2, d3, d4])` returns 5 rows of logits: row 0 verifies d1, and row 4 predicts the token after d4. If
d3 is rejected, the next token comes from row 2, and `rollback(1003)` removes d3 and d4. One pass yielded 3 new tokens.

One pass can also contain tokens of several sequences:

    with Target(path, texts=4) as target:
        first, second, third, fourth = target.sequences  # see `ngramspec.backend.SequenceModel`
        row = second.prefill(target.vocabulary.tokenize("Once"))
        rows = target.evaluate_together([Part(second, [5], 1), Part(third, [7, 8, 9], 3)])

Only the logits that are read are requested, so no buffer grows with n_ctx x n_vocab.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import llama_cpp.llama_cpp as llama

from ngramspec import leaves
from ngramspec.backend import ExactnessMode, Logits, Part, SequenceModel
from ngramspec.cost.bits import DEFAULT_LOGIT_SHIFT, ExactnessSelector
from ngramspec.cpu.cores import process_load, usable_cores
from ngramspec.cpu.thread_governor import ThreadGovernor
from ngramspec.data import ModelError
from ngramspec.llama import bindings
from ngramspec.llama.bindings import NativeObject
from ngramspec.llama.cache import Cache
from ngramspec.llama.passes import MAX_EVALUATE, Passes, split
from ngramspec.llama.placement import MARGIN
from ngramspec.llama.sequence import CacheSequence, append
from ngramspec.llama.trial import SAMPLE, SettingTrials
from ngramspec.llama.weights import Weights, set_adapters
from ngramspec.model_settings import ModelSettings
from ngramspec.sampling.settings import allow_int_range

MAX_BRANCHES = 8  # maximum number of branches in one pass: 8 gain 1 % over 4 if rows cost nothing, and 0.3 % on GPUs

TEXTS = allow_int_range(1, MAX_EVALUATE)


class Target(NativeObject):
    """A GGUF model with its weights, its vocabulary, and the sequences in its KV cache.

    Args:
        path: Path of a GGUF file (the first part of a split one).
        settings: Settings; `None` means the defaults.
        texts: Number of independent sequences in the cache, for passes over several. `None` means one sequence and no
            such passes. With it and `exact="auto"`, the fastest settings are used on a GPU.
        n_seq: Maximum number of llama.cpp sequences that share the cells of a single text, for beam search and
            branches. `None` means as many as branches need on a GPU, if they may pay there, and 1 otherwise.
        tuned_threads: Whether `threads` and `threads_batch` are the best numbers for an idle machine, which may be
            reduced while other programs use the cores.
        reserved: Bytes of GPU memory that stay free for a draft model.
        margin: Bytes of each GPU that stay free.
        on_note: Function that receives a note for the user before `exact="auto"` compares logits.
        changes: Settings by name that replace those in `settings`, such as `ctx_size=4096`.

    Attributes:
        weights: The weights, with what the file says about them and the settings that they were loaded with.
        vocabulary: The vocabulary.
        sequences: The sequences in the KV cache, by number.
        governor: Chooses the number of threads of each pass.
        exact: Resolved value with `texts`: "on" or "off", also if it was "auto".
        exactness: Mode of requests that "auto" has chosen.
        trials: Settings that the context can be opened with.
        heads: The model's own head, a draft model (see `ngramspec.llama.head`); `None` means that it is not loaded.
        users: Functions that free what uses the weights, such as an embedder; `close` calls them first.
        n_ctx, max_tokens, max_rows, drafts_alone: see `ngramspec.backend.SharedModel`.

    Raises:
        ValueError: A setting or argument is out of its range.
        ModelError: The file cannot be loaded, cannot generate text, or the context does not fit; or an adapter cannot
            be applied to it.
    """

    heads: Any = None
    users: tuple[Callable[[], object], ...] = ()
    _submitted: Sequence[tuple[int, int]] = ()
    max_rows = MAX_EVALUATE
    _ctx: Any = None
    _weights: Weights | None = None  # `weights`, or `None` if loading failed

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: ModelSettings | None = None,
        *,
        texts: int | None = None,
        n_seq: int | None = None,
        tuned_threads: bool = False,
        reserved: int = 0,
        margin: int = MARGIN,
        on_note: Callable[[str], object] = lambda _: None,
        **changes: Any,
    ) -> None:
        settings = replace(settings or ModelSettings(), **changes)
        self.texts = texts
        for name, value in (("texts", texts), ("n_seq", n_seq)):
            if value is not None and not TEXTS.accepts(value):
                raise ValueError(f"{name} must be {TEXTS.description}, got {value!r}")
        if (n_seq or 1) > 1 and (texts is not None or settings.mtp):
            raise ValueError("n_seq above 1 cannot be combined with texts above 1 or a head")
        single, batch = settings.threads, settings.threads_batch
        self._adapts = single is None or tuned_threads, (single is None and batch is None) or tuned_threads
        single = single or usable_cores()
        settings = replace(
            settings, threads=single, threads_batch=batch or single, flash_attn=settings.flash_attn or "auto"
        )
        process_load()  # start the first sample here, so that it covers the time of loading
        # The weights come first: they place the layers, and the memory that is left limits the context. Bits are
        # compared in other contexts, so this one, with the settings that agree, is opened last.
        self.weights = self._weights = weights = Weights(path, settings, texts or 1, reserved, margin)
        self.vocabulary = weights.vocabulary
        self.exact = settings.exact
        may_branch = texts is None and "BranchingSequence" in leaves.MODULES and weights.can_pool
        may_branch = may_branch and not (settings.mtp or weights.is_recurrent or weights.window)
        self.n_seq = n_seq or (1 + MAX_BRANCHES if may_branch and weights.on_gpu else 1)
        self._leaves = self.n_seq - 1 if may_branch else 0
        self._aborts = weights.texts > 1 and weights.needs_pool
        self.trials = SettingTrials(weights)
        n_ctx = weights.choose_context_size()
        self._states: list[Any] = []
        if weights.has_head:
            width = bindings.width_out(weights.handle)
            self._states = [leaves.HiddenStates(width) for _ in range(self.weights.texts)]
        self.exactness = ExactnessMode()
        # Rounding is not needed for several sequences.
        self._bits = ExactnessSelector(self.trials, self.vocabulary.tokenize(SAMPLE) if texts is None else ())
        setting = self._choose_setting(on_note)
        try:
            self._open_context(n_ctx, setting)
        except ModelError:
            if settings.exact != "auto" or setting == "fast":
                raise
            # The machine lacks memory for these settings, but may have enough for the others.
            self._set_exactness("fast")
            self._open_context(n_ctx, "fast")
        if self._states:
            for states in self._states:
                states.of_prompts = self.exact != "on"
            self.heads = leaves.Heads(
                weights,
                self._params(self.settings, n_ctx),
                self._states,
                n_ctx=n_ctx,
                pooled=self._pooled,
                governor=self.governor,
            )

    @property
    def head(self) -> Any:
        return None if self.heads is None else self.heads.sequences[0]

    @property
    def feeds_head(self) -> bool:
        """True if passes keep the hidden states that the model's own head needs."""
        return any(states.wanted for states in self._states)

    @feeds_head.setter
    def feeds_head(self, wanted: bool) -> None:
        for states in self._states:
            states.wanted = wanted

    def _choose_setting(self, on_note: Callable[[str], object]) -> str:
        """Return the setting that `exact` requires, "fast" or "exact"."""
        if self.exact != "auto":
            return "exact" if self.exact == "on" else "fast"
        # With several sequences on a GPU, the fastest settings are used. If rollback is not exact (see
        # `CacheSequence.exact_rollback`), a rejected draft may change last bits under all settings.
        if (self.texts is not None and (self.weights.on_gpu or self._aborts)) or (
            self.weights.is_recurrent
            and (self.weights.window or not self.weights.count_snapshots(self.trials.by_name["fast"], 1))
        ):
            self.exactness = ExactnessMode(max_logit_shift=DEFAULT_LOGIT_SHIFT)
            self.exact = "auto" if self.texts is None else "off"
            return "fast"
        self._bits.compare(on_note)
        self._set_exactness(self._bits.setting)
        return self._bits.setting

    def _set_exactness(self, setting: str) -> None:
        self.exactness = self._bits.exactness(setting)
        if self.texts is not None:
            self.exact = "on" if self.exactness.bit_identical else "off"

    @property
    def _pooled(self) -> bool:
        """True if all sequences share one pool of cells, so that a common prefix is stored once."""
        if self.texts is None:
            return self.n_seq > 1
        # On a CPU, attention iterates over the cells of all sequences in the pool, and rounding depends on the cells'
        # places. A single batch gains little there.
        weights = self.weights
        return self.exact == "off" and weights.can_pool and (weights.on_gpu or weights.needs_pool)

    def _params(self, settings: ModelSettings, n_ctx: int, snapshots: int = 0) -> Any:
        n_seq = max(self.n_seq, self.weights.texts)
        # MAX_EVALUATE adds room for the dummy tokens of a padded batch, which never stay in the cache.
        cells = self.weights.texts * (n_ctx + MAX_EVALUATE)
        return self.weights.context_params(settings, cells, n_seq=n_seq, pooled=self._pooled, snapshots=snapshots)

    def _open_context(self, n_ctx: int, setting: str) -> None:
        if not self._pooled and self._aborts:
            raise ModelError(
                f"{self.weights.path}: llama.cpp cannot evaluate several sequences of a"
                f" {self.weights.architecture} model exactly; use one sequence, or exact='off'"
            )
        settings = self.settings = self.trials.by_name[setting]
        longest = settings.draft_max or 16  # of a recurrent state, of which some architectures copy all in every pass
        snapshots = self.weights.count_snapshots(settings, longest)
        while not (context := self.weights.open_context(self._params(settings, n_ctx, snapshots))) and snapshots > 1:
            snapshots //= 2
        self._ctx = context
        if not context:
            raise ModelError(
                f"{self.weights.path}: could not create a context of {n_ctx} tokens ({bindings.last_complaint()});"
                f" try {self.weights.advise_smaller_size(n_ctx)}"
            )
        if 0 < snapshots < longest:
            self.weights.notes.append(f"low memory: drafts are limited to {snapshots} tokens")
        adapts = self._adapts
        if any(adapts) and settings.exact != "off" and not self._bits.threads_agree(setting):
            adapts = (False, False)
        self.governor = ThreadGovernor(settings.threads or 1, settings.threads_batch or 1, adapts=adapts)
        self.n_batch = self.max_tokens = self.weights.micro_batch_size(settings)
        self.drafts_alone = self.weights.is_recurrent
        self._open_sequences(n_ctx)
        context_key = f"fa={settings.flash_attn} kv={settings.cache_types} ub={self.n_batch}"
        if self.texts is not None:
            context_key += f" lanes={self.weights.texts} in {'one pool' if self._pooled else 'own caches'}"
        fingerprint = self.weights.key(context_key)
        for sequence in self.sequences:
            sequence.fingerprint = fingerprint

    def _open_sequences(self, n_ctx: int) -> None:
        """Create the sequences of the context, and find out whether they can be rolled back."""
        caches = [
            Cache(
                self._ctx,
                sequence=number,
                recurrent=self.weights.is_recurrent,
                window=self.weights.window,
                sole=self.weights.texts == 1,
                pooled=self._pooled,
                states=self._states[number] if self._states else None,
                on_device=self.weights.on_gpu and not any(name.startswith("Meta(") for name in self.weights.layers),
            )
            for number in range(self.weights.texts)
        ]
        self.returns_early = self.weights.on_gpu
        self.passes = passes = Passes(
            self._ctx,
            caches,
            self,
            n_batch=self.n_batch,
            n_seq=self.n_seq,
            governor=self.governor,
            returns_early=self.returns_early,
        )
        self.n_ctx = self.vocabulary.n_ctx = n_ctx
        self.sequences: tuple[CacheSequence, ...]
        if self._leaves:
            self.sequences = (leaves.BranchingSequence(passes, caches[0], n_ctx=n_ctx, leaves=self._leaves),)
        else:
            self.sequences = tuple(CacheSequence(passes, cache, n_ctx=n_ctx) for cache in caches)
        can_rollback, first = True, self.sequences[0]
        if first.replays:
            first.evaluate([0])
            can_rollback = first.goes_back()
            first.clear()
        for sequence in self.sequences:
            sequence.can_rollback = can_rollback

    def scale_adapters(self, scales: Sequence[float]) -> None:
        """Set the scales of all LoRA adapters for the following passes of all sequences and of the own head.

        The caller clears sequences whose tokens were evaluated with other scales. Embedders keep the first scales.
        """
        self.weights.check_open()
        adapters = [(handle, scale) for (handle, _), scale in zip(self.weights.adapters, scales, strict=True)]
        set_adapters(self._ctx, adapters)
        if self.heads is not None:
            self.heads.set_adapters(adapters)

    def evaluate_together(self, parts: Sequence[Part]) -> list[Logits]:
        """Append to several sequences in one pass; see `ngramspec.backend.SharedModel`. The logits are views."""
        self.submit_together(parts)
        return self.fetch_together()

    def submit_together(self, parts: Sequence[Part]) -> None:
        self.weights.check_open()
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
        append(self.passes, [(own[sequence.number], tokens, rows) for sequence, tokens, rows in order])
        # Map each sequence's number to the end of its rows in the logits of the pass.
        ends = dict(zip((part.sequence.number for part in order), accumulate(part.rows for part in order), strict=True))
        self._submitted = [(ends[part.sequence.number], part.rows) for part in parts]

    def fetch_together(self) -> list[Logits]:
        logits = self.passes.fetch()
        return [logits[end - rows : end] for end, rows in self._submitted]

    def batches(self, lengths: Sequence[int], sequences: Sequence[SequenceModel]) -> Sequence[int]:
        if self._pooled and not self.weights.is_recurrent:
            return split({0: sum(lengths)}, self.n_batch)  # tokens in their order
        snapshots = self.sequences[0].cache.snapshots
        # llama.cpp splits the batches of this hybrid architecture as if sequences had separate caches, even in a pool.
        is_separate = not self._pooled or self.weights.architecture == "deepseek4"
        return split(
            {sequence.number: length for sequence, length in zip(sequences, lengths, strict=True)},
            self.n_batch,
            neighbours=is_separate or bool(llama.llama_model_is_recurrent(self.weights.handle)),
            tail=snapshots + 1 if snapshots else 0,
        )

    @property
    def can_branch(self) -> bool:
        """True if several continuations can share a prefix in the cache; recurrent states cannot be shared."""
        return self.weights.can_pool and not self.weights.is_recurrent

    def close(self) -> None:
        """Free the context and the model; the target and the logits that it returned cannot be used afterwards."""
        for free in self.users:
            free()
        if self._ctx:
            self.passes.close()
            self._ctx = None
        if self.heads is not None:
            self.heads.close()
        if self._weights is not None:
            self._weights.close()
