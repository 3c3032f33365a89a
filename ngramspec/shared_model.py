"""Several texts in one cache: a pass of a `SharedModel` over its sequences reads the weights once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, Protocol

from ngramspec.backend import Logits, Model


class SequenceModel(Model, Protocol):
    """One of the texts in a shared cache: a model of its own, which can also take part in passes with others."""

    number: int  # from 0 on

    def reading(
        self, tokens: Sequence[int], *, aligned: bool = False, most: Callable[[], int] | None = None
    ) -> Generator[int, None, Logits]:
        """`prefill` chunk by chunk, so that other sequences can have passes in between.

        Yields how many of the tokens are held: first those that need not be evaluated again, then after each chunk
        but the last. Returns the logits after the last token. Whoever closes it early leaves what was read. `most` is
        asked before each chunk for its most tokens; aligned chunks have a size of their own.
        """

    def adopt(self, other: SequenceModel, length: int) -> None:
        """Copy the first `length` tokens that another's cache holds, or fewer: `tokens` tells. Nothing is evaluated."""

    def saved(self) -> bytes:
        """What the cache holds, to be `restore`d later, by any sequence of the same model under the same settings.

        Raises TargetError if the runner cannot hand it out.
        """

    def restore(self, tokens: Sequence[int], state: bytes) -> None:
        """Make the cache hold what `saved` gave when it held `tokens`; TargetError, and an empty one, if it cannot."""


class Part(NamedTuple):
    """Work of a pass for one sequence."""

    sequence: SequenceModel  # whose text grows
    tokens: Sequence[int]  # that are appended to it, at least one
    rows: int  # for how many of the last of them logits are wanted


class SharedModel(Protocol):
    """Several texts evaluated together: one pass reads the weights once for all of them.

    Attributes:
        sequences: as many as texts can be held.
        n_ctx: most tokens of a sequence; one pass may go beyond by `max_rows`, to be rolled back after it.
        max_tokens, max_rows: most tokens, and most rows of logits, of a pass.
        drafts_alone: whether a sequence's draft can be rolled back only if its pass held no other sequence.
    """

    n_ctx: int
    max_tokens: int
    max_rows: int
    drafts_alone: bool

    @property
    def sequences(self) -> Sequence[SequenceModel]: ...

    @property
    def returns_early(self) -> bool: ...

    def submit_together(self, parts: Sequence[Part]) -> None:
        """Begin what `evaluate_together` does. On a GPU it may return before the work is done."""

    def fetch_together(self) -> list[Logits]:
        """Return the logits of each part of the last `submit_together`; wait for them if necessary."""

    def evaluate_together(self, parts: Sequence[Part]) -> list[Logits]:
        """Append to several sequences in one pass; for each part its logits, shape (rows, n_vocab).

        What a sequence owes is evaluated too, in front of its tokens.

        Raises:
            ValueError: no parts, two of one sequence, too many tokens or rows, or a sequence that has no room for them.
            TargetError: the pass failed; every sequence is as before, though it may owe tokens.
        """

    def scale_adapters(self, scales: Sequence[float]) -> None:
        """Set the scale of each LoRA adapter for the following passes."""

    def batches(self, lengths: Sequence[int], sequences: Sequence[SequenceModel]) -> Sequence[int]:
        """The sizes of the batches of a pass over parts of at least one token each; each batch reads the weights again.

        One batch of their sum, where all sequences share one pool of cells. Where each has a cache of its own, a batch
        has equally many tokens of sequences with consecutive numbers; longer ones continue in further batches.
        """
