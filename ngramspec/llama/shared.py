"""`SharedTarget`: a loaded GGUF model with several texts in its KV cache, which can grow together.

    with SharedTarget(path, lanes=4) as shared:
        row = shared.lanes[0].prefill(prompt)           # a lane alone: see `ngramspec.backend.Lane`
        rows = shared.evaluate([Part(shared.lanes[0], [5], 1), Part(shared.lanes[2], [7, 8, 9], 3)])

One pass reads the weights once for all texts that are in it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import llama_cpp.llama_cpp as llama

from ngramspec.backend import Lane, Logits, Part
from ngramspec.errors import ModelError
from ngramspec.exactness.choice import Exact, Way
from ngramspec.llama.context import Context
from ngramspec.llama.kv_cache import CacheType
from ngramspec.llama.lane import Piece, SequenceLane, append
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.llama.split import equally, in_order

OWN_STATES = ("deepseek4",)
"""Hybrid architectures whose batches are made as if each lane had a cache of its own, even where they share a pool."""

ABORTS = ("minimax-01",)
"""Architectures on which llama.cpp ends the process if lanes with caches of their own meet in a batch."""


class SharedTarget(Context):
    """A GGUF model, its context, and the texts in its KV cache.

    Args:
        lanes: how many texts, 1 to MAX_EVALUATE.
        n_ctx: tokens of each; None takes the model's own, capped so that all lanes together fit in half of the
            machine's free memory (`notes` then says so).
        exact: "on" gives each lane a cache of its own, under the settings that `Target` chooses for it: a text in a
            pass then has the logits that it has alone, bit for bit, as far as the sizes of the batches agree (see
            `batches`). "off" lets all share one pool of cells on a GPU, and on a CPU does not. "auto" takes the one or
            the other, as `Target` decides, but for a GPU "off".
        path, n_gpu_layers, threads, threads_batch, micro_batch, flash_attn, cache_type_k, cache_type_v, mmap,
            extra_buffers, draft_max: as of `ngramspec.llama.target.Target`.

    Attributes:
        lanes, n_ctx, max_tokens, max_rows, drafts_alone: see `ngramspec.backend.SharedModel`.
        exact: "on" or "off".
        can_rollback, replays, max_batch: of every lane.

    Raises:
        ValueError: an argument is out of its range.
        ModelError: the file cannot be loaded, cannot generate text, or the context does not fit.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        lanes: int,
        n_ctx: int | None = None,
        n_gpu_layers: int = -1,
        threads: int | None = None,
        threads_batch: int | None = None,
        micro_batch: int | None = None,
        flash_attn: Literal["auto", "on", "off"] = "auto",
        cache_type_k: CacheType = "f16",
        cache_type_v: CacheType = "f16",
        mmap: bool = True,
        exact: Exact = "off",
        extra_buffers: bool | None = None,
        draft_max: int | None = None,
    ) -> None:
        if not 1 <= lanes <= MAX_EVALUATE:
            raise ValueError(f"lanes is {lanes}, but must be 1 to {MAX_EVALUATE}")
        self._texts = lanes
        super().__init__(
            path,
            n_ctx=n_ctx,
            n_gpu_layers=n_gpu_layers,
            threads=threads,
            threads_batch=threads_batch,
            micro_batch=micro_batch,
            flash_attn=flash_attn,
            cache_type_k=cache_type_k,
            cache_type_v=cache_type_v,
            mmap=mmap,
            exact=exact,
            extra_buffers=extra_buffers,
            n_seq=1,
            draft_max=draft_max,
        )
        self.max_tokens = self.n_batch
        self.max_rows = MAX_EVALUATE
        self.drafts_alone = self._recurrent
        key = self.fingerprint
        for lane in self._lanes:
            lane.fingerprint = key

    @property
    def lanes(self) -> Sequence[SequenceLane]:
        """The lanes, by number."""
        return self._lanes

    @property
    def _pooled(self) -> bool:
        # A CPU's attention goes over the cells of all lanes, and rounds by where they lie; one batch gains it little.
        return self.exact == "off" and self.can_pool and (self.on_gpu or self.architecture in ABORTS)

    def _decide(self, ways: Sequence[Way] = ("fast", "exact"), sample: str = "") -> Way:
        aborts = self._texts > 1 and self.architecture in ABORTS
        way = "fast" if self.on_gpu or aborts else super()._decide(ways, sample)
        self.exact = "on" if way == "exact" else "off"
        return way

    def _open_context(self, n_ctx: int, setting: str) -> None:
        if not self._pooled and self._texts > 1 and self.architecture in ABORTS:
            raise ModelError(
                f"{self.path}: llama.cpp cannot evaluate several texts of a {self.architecture} model exactly; ask for"
                " one at a time, or not for exactness"
            )
        super()._open_context(n_ctx, setting)

    @property
    def fingerprint(self) -> str:
        """Key of everything a measured cost depends on: file, build, machine, settings, and the number of lanes."""
        cells = "one pool" if self._pooled else "own caches"
        settings = f"fa={self.flash_attn} kv={self.cache_types} ub={self.n_batch}"
        return self._key(f"{settings} lanes={self._texts} in {cells}")

    def evaluate(self, parts: Sequence[Part]) -> list[Logits]:
        """See `ngramspec.backend.SharedModel.evaluate`. The logits are views, valid until the next pass of any lane."""
        self._check_open()
        pieces = [Piece(self._own(lane), tokens, rows) for lane, tokens, rows in parts]
        if not pieces or len({piece.lane.number for piece in pieces}) < len(pieces):
            raise ValueError("a pass takes one part or more, and one of each lane at most")
        for lane, tokens, rows in pieces:
            if not 0 <= rows <= len(tokens) or not tokens:
                raise ValueError(f"lane {lane.number} has {len(tokens)} tokens and {rows} rows of logits in this pass")
        tokens, rows = (sum(counts) for counts in zip(*((len(p.tokens), p.rows) for p in pieces), strict=True))
        if tokens > self.max_tokens or rows > self.max_rows:
            raise ValueError(
                f"{tokens} tokens and {rows} rows of logits are more than the {self.max_tokens} and {self.max_rows}"
                " of a pass"
            )
        # llama.cpp puts lanes into one batch if their numbers follow each other.
        order = sorted(range(len(pieces)), key=lambda i: pieces[i].lane.number)
        append(self._passes, [pieces[i] for i in order])
        logits, end = self._passes.logits(rows), 0
        found: dict[int, Logits] = {}
        for i in order:
            start, end = end, end + pieces[i].rows
            found[i] = logits[start:end]
        return [found[i] for i in range(len(pieces))]

    def _own(self, lane: Lane) -> SequenceLane:
        if not isinstance(lane, SequenceLane) or not any(lane is own for own in self._lanes):
            raise ValueError("a pass takes lanes of its own model only")
        return lane

    def batches(self, lengths: Sequence[int], lanes: Sequence[Lane] = ()) -> Sequence[int]:
        """See `ngramspec.backend.SharedModel.batches`."""
        if lanes and len(lanes) != len(lengths):
            raise ValueError(f"{len(lengths)} lengths of {len(lanes)} lanes")
        if any(length < 1 for length in lengths):
            raise ValueError("a part has at least one token")
        if self._pooled and not self._recurrent:
            return in_order(sum(lengths), self.n_batch)
        numbers = [lane.number for lane in lanes] if lanes else range(len(lengths))
        kept = self._lanes[0].cache.snapshots.count
        return equally(
            dict(zip(numbers, lengths, strict=True)),
            self.n_batch,
            neighbours=not self._pooled
            or bool(llama.llama_model_is_recurrent(self._model))
            or self.architecture in OWN_STATES,
            tail=kept + 1 if kept else 0,
        )
