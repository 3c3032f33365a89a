"""Interface of a model with several sequences: one pass of a `SharedModel` reads the weights once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, Protocol

from ngramspec.backend import Logits, Model


class SequenceModel(Model, Protocol):
    """A sequence of a `SharedModel`: usable as a separate model, and in passes together with other sequences."""

    number: int  # index of the sequence, from 0

    def reading(
        self, tokens: Sequence[int], *, aligned: bool = False, max_chunk: Callable[[], int] | None = None
    ) -> Generator[int, None, Logits]:
        """Prefill chunk by chunk, so that other sequences can have passes in between.

        If the caller closes the generator early, the tokens of the finished chunks stay in the cache.

        Args:
            tokens: Token ids, as in `prefill`.
            aligned: Use chunks of a fixed size, as in `prefill`; `max_chunk` then has no effect.
            max_chunk: Function that returns the maximum number of tokens of the next chunk; called before each chunk.

        Yields:
            Number of these tokens in the cache: first of those that need not be evaluated again, then after each chunk
            except the last.

        Returns:
            Logits after the last token.
        """

    def adopt(self, source: SequenceModel, length: int) -> None:
        """Copy up to `length` tokens from the start of another sequence's cache, without an evaluation.

        The copy may be shorter than `length`; `tokens` contains the copied tokens.
        """

    def save_state(self) -> bytes:
        """Return the state of the cache, which any sequence of the same model with the same settings can `restore`.

        Raises:
            TargetError: The runner cannot copy the state.
        """

    def restore(self, tokens: Sequence[int], state: bytes) -> None:
        """Restore a state of the cache.

        Args:
            tokens: Tokens that were in the cache when `save_state` was called.
            state: State that `save_state` returned.

        Raises:
            TargetError: The state cannot be restored; the cache is then empty.
        """


class Part(NamedTuple):
    """Work of a pass for one sequence."""

    sequence: SequenceModel  # sequence that the pass extends
    tokens: Sequence[int]  # tokens to append to the sequence, at least one
    rows: int  # number of tokens, counted from the last one, whose logits are returned


class SharedModel(Protocol):
    """A model that evaluates several sequences together: one pass reads the weights once for all of them.

    Attributes:
        sequences: All sequences of the model.
        n_ctx: Maximum number of tokens of a sequence. One pass may exceed it by `max_rows` tokens, which are then
            rolled back.
        max_tokens: Maximum number of tokens of a pass.
        max_rows: Maximum number of rows of logits of a pass.
        drafts_alone: Whether a draft can be rolled back only if its pass contained no other sequence.
        feeds_head: See `ngramspec.backend.Runner`.
    """

    n_ctx: int
    max_tokens: int
    max_rows: int
    drafts_alone: bool
    feeds_head: bool

    @property
    def sequences(self) -> Sequence[SequenceModel]: ...

    @property
    def returns_early(self) -> bool: ...

    def submit_together(self, parts: Sequence[Part]) -> None:
        """Begin the pass of `evaluate_together`. On a GPU it may return before the work is done."""

    def fetch_together(self) -> list[Logits]:
        """Return the logits of each part of the last `submit_together`; wait for them if necessary."""

    def evaluate_together(self, parts: Sequence[Part]) -> list[Logits]:
        """Append tokens to several sequences in one pass and return the logits of each part, shape (rows, n_vocab).

        If a sequence owes tokens (`Model.owed`), the pass evaluates them before its new tokens.

        Raises:
            ValueError: There are no parts, two parts of one sequence, too many tokens or rows, or a sequence without
                room for its tokens.
            TargetError: The pass failed. Every sequence has the same tokens as before, though it may owe some of them.
        """

    def scale_adapters(self, scales: Sequence[float]) -> None:
        """Set the scale of each LoRA adapter for the following passes."""

    def batches(self, lengths: Sequence[int], sequences: Sequence[SequenceModel]) -> Sequence[int]:
        """Return the sizes of the batches of a pass; each batch reads the weights again.

        If all sequences share one pool of cells, the pass is one batch. If each sequence has a separate cache, a batch
        has equally many tokens of sequences with consecutive numbers, and longer parts continue in further batches.

        Args:
            lengths: Number of tokens of each part, at least one.
            sequences: Sequence of each part.
        """
