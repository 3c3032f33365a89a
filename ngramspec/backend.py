"""`TargetProtocol`: what the loop, the probe and the cost measurement need of a target.

`ngramspec.llama.target.Target` is the real one; tests use a mock with a known distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ngramspec.cost.kernels import ProbeReport
    from ngramspec.llama.samplers import SamplerChain
    from ngramspec.sampling.settings import Sampling

Logits = NDArray[np.float32]
Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all)."""


class TargetProtocol(Protocol):
    """A language model with one sequence in its KV cache; see `ngramspec.llama.target.Target` for the contracts.

    Attributes:
        tokens: what the cache holds.
        n_ctx: most tokens it can hold.
        n_vocab: size of the vocabulary.
        max_batch: most tokens of a pass of which all but the first can be taken back.
        can_rollback: whether rejected drafts can be taken out of the memory again.
        replays: whether that takes a `checkpoint` before the pass, and evaluating tokens again after it.
        owed: tokens that the next call evaluates again, before its own.
    """

    tokens: list[int]
    n_ctx: int
    n_vocab: int
    max_batch: int
    can_rollback: bool
    replays: bool

    @property
    def owed(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def prefill(self, tokens: Sequence[int], *, aligned: bool = False, progress: Progress | None = None) -> Logits: ...

    def evaluate(self, tokens: Sequence[int]) -> Logits: ...

    def rollback(self, length: int) -> None: ...

    def checkpoint(self) -> None: ...

    def clear(self) -> None: ...

    def probe(self) -> ProbeReport: ...

    def is_eog(self, token: int) -> bool: ...

    def piece(self, token: int) -> bytes: ...

    def sampler(self, sampling: Sampling) -> SamplerChain: ...
