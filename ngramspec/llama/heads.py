"""`Heads`: a model's own head for several texts, each of which has a `Head`.

    heads = Heads(model, params, [states, other], n_ctx=4096, pooled=False)
    heads.sequences[1].prefill(text)            # a text alone
    heads.evaluate_together([Part(heads.sequences[0], [5], 1), Part(heads.sequences[1], [7], 1)])

It is a `SharedModel` as far as a draft model has to be one: texts are evaluated and taken back, not copied. A head
reads a text anew by the hidden states of the target's, which are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from ngramspec.backend import Logits
from ngramspec.llama.head import Head, evaluate_together
from ngramspec.llama.head_passes import HeadPasses
from ngramspec.llama.hidden_states import HiddenStates
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.shared_model import Part, SequenceModel


class Heads:
    """The heads of a loaded model's texts, in one context.

    Args:
        model: llama.cpp's handle.
        params: of the context.
        states: the target's, for each of its texts.
        n_ctx: most tokens of a text that may stay in the cache.
        pooled: whether the context's sequences share one pool of cells, so that a pass over several is one batch.

    Attributes:
        sequences: by number; those of the target have the same.
        n_ctx, max_tokens, max_rows, drafts_alone: see `ngramspec.shared_model.SharedModel`.

    Raises:
        ModelError: llama.cpp makes no such context, for lack of memory.
    """

    max_rows = MAX_EVALUATE
    drafts_alone = False

    def __init__(self, model: Any, params: Any, states: Sequence[HiddenStates], *, n_ctx: int, pooled: bool) -> None:
        self._passes = HeadPasses(model, params)
        self.n_ctx, self.max_tokens = n_ctx, self._passes.n_batch
        self._pooled = pooled
        self.sequences = [Head(self._passes, own, number=number, n_ctx=n_ctx) for number, own in enumerate(states)]

    def evaluate_together(self, parts: Sequence[Part]) -> list[Logits]:
        """See `ngramspec.shared_model.SharedModel.evaluate_together`; what a head owes may take passes before."""
        return evaluate_together([(cast(Head, sequence), tokens, rows) for sequence, tokens, rows in parts])

    def batches(self, lengths: Sequence[int], sequences: Sequence[SequenceModel] = ()) -> Sequence[int]:
        """See `ngramspec.shared_model.SharedModel.batches`; with caches of their own texts go one after the other."""
        return [sum(lengths)] if self._pooled else list(lengths)

    def close(self) -> None:
        """Free the context; nothing can be evaluated afterwards."""
        self._passes.close()
