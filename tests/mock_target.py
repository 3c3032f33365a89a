"""A target with a known law: the logits are a pure function of the last two tokens.

It has the interface of `ngramspec.target.Target` that the decoding loop uses, and sets traps: a
batch too large, a full context and a rollback past the end raise, and logits that were returned
turn to nan at the next call that computes any, since those of a real target are views of a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from ngramspec.draft import NO_DRAFT
from ngramspec.verify import Verifier

Progress = Callable[[int, int], None]


class MockTarget:
    """A language model of order two over tokens 0 .. n_vocab - 1.

    Token t stands for the byte (97 + t) % 256: token 0 is "a", and from 256 tokens on any text can
    be tokenized; tokens past 255 print as "<t>", end-of-generation tokens as nothing.

    Args:
        n_vocab: size of the vocabulary.
        n_ctx: most tokens the cache may hold.
        slack: how many more one `evaluate` may add, for the padding of a batch; they must be rolled
            back before the next call.
        n_batch: most tokens one `evaluate` may take.
        peak: scale of the normally distributed logits; 1 is close to uniform, 8 close to certain,
            so that the text soon repeats itself.
        eog: end-of-generation tokens.
        fail_rollback: a target whose cache cannot be cut (a recurrent model).
        seed: another seed is another model.
    """

    def __init__(
        self,
        n_vocab: int = 16,
        *,
        n_ctx: int = 4096,
        slack: int = 0,
        n_batch: int = 512,
        peak: float = 3.0,
        eog: Collection[int] = (),
        fail_rollback: bool = False,
        seed: int = 0,
    ) -> None:
        self.n_vocab = n_vocab
        self.n_ctx = n_ctx
        self.n_batch = n_batch
        self.can_rollback = not fail_rollback
        self.tokens: list[int] = []
        self.batches: list[int] = []
        """Sizes of the `evaluate` calls so far."""
        self._slack = slack
        self._given = np.empty((0, n_vocab), np.float32)
        self.prefilled: list[int] = []
        """How many tokens each `prefill` had to compute, the reused prefix excluded."""
        self._peak = peak
        self._eog = frozenset(eog)
        self._seed = seed
        self._rows: dict[tuple[int, int], NDArray[np.float32]] = {}

    @property
    def passes(self) -> int:
        """Number of `evaluate` calls."""
        return len(self.batches)

    def row(self, context: Sequence[int]) -> NDArray[np.float32]:
        """The logits after `context`, shape (n_vocab,): what every method here must return."""
        before, last = [self.n_vocab, *context][-2:]
        if (before, last) not in self._rows:
            rng = np.random.default_rng((self._seed, before, last))
            logits = self._peak * rng.standard_normal(self.n_vocab)
            self._rows[before, last] = logits.astype(np.float32)
        return self._rows[before, last].copy()

    def prefill(
        self, tokens: Sequence[int], *, aligned: bool = False, progress: Progress | None = None
    ) -> NDArray[np.float32]:
        """Make the cache hold `tokens`, reusing the prefix it has; logits after the last one.

        `aligned` reuses whole chunks of n_batch tokens only; `progress` gets (tokens done, all).
        """
        if not tokens:
            raise ValueError("an empty prompt")
        shared = 0
        for have, want in zip(self.tokens, tokens[:-1], strict=False):
            if have != want:
                break
            shared += 1
        if aligned:
            shared = shared // self.n_batch * self.n_batch
        if shared < len(self.tokens) and not self.can_rollback:
            shared = 0
        del self.tokens[shared:]
        self.prefilled.append(len(tokens) - shared)
        for start in range(shared, len(tokens), self.n_batch):
            self._append(tokens[start : start + self.n_batch], self.n_ctx)
            if progress is not None:
                progress(len(self.tokens), len(tokens))
        logits: NDArray[np.float32] = self._give([self.row(self.tokens)])[0]
        return logits

    def evaluate(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens in one pass; row i, of shape (n_vocab,): logits after tokens[i]."""
        if not 0 < len(tokens) <= self.n_batch:
            raise ValueError(f"a batch of {len(tokens)} tokens, n_batch is {self.n_batch}")
        start = len(self.tokens)
        if start >= self.n_ctx:
            raise ValueError(f"the context of {self.n_ctx} tokens is full")
        self._append(tokens, self.n_ctx + self._slack)
        self.batches.append(len(tokens))
        return self._give([self.row(self.tokens[: start + i + 1]) for i in range(len(tokens))])

    def rollback(self, length: int) -> None:
        """Cut the cache to its first `length` tokens."""
        if not self.can_rollback:
            raise RuntimeError("this model's cache cannot be rolled back")
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"rollback to {length} tokens, the cache holds {len(self.tokens)}")
        del self.tokens[length:]

    def is_eog(self, token: int) -> bool:
        """Whether the token ends the generation."""
        return token in self._eog

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for."""
        if token in self._eog:
            return b""
        return bytes([(97 + token) % 256]) if token < 256 else b"<%d>" % token

    def tokenize(self, text: str) -> list[int]:
        """One token per byte of the text; ValueError for a byte outside the vocabulary."""
        tokens = [(byte - 97) % 256 for byte in text.encode()]
        self._check(tokens)
        return tokens

    def _append(self, tokens: Sequence[int], most: int) -> None:
        self._check(tokens)
        if len(self.tokens) + len(tokens) > most:
            raise ValueError(f"{len(self.tokens)} + {len(tokens)} tokens do not fit into {most}")
        self.tokens.extend(tokens)

    def _give(self, rows: list[NDArray[np.float32]]) -> NDArray[np.float32]:
        self._given.fill(np.nan)
        self._given = np.stack(rows)
        return self._given

    def _check(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not 0 <= token < self.n_vocab:
                raise ValueError(f"token {token} is outside the vocabulary of {self.n_vocab}")


def plain_generate(mock: MockTarget, prompt: Sequence[int], n: int, verifier: Verifier) -> list[int]:
    """The reference: one token a pass, no draft. At most n tokens; an end-of-generation token ends
    the list and is its last entry, and so does a full context."""
    logits = mock.prefill(prompt)
    out: list[int] = []
    while True:
        verdict = verifier.verify([logits], NO_DRAFT, len(prompt) + len(out))
        out.append(verdict.tokens[0])
        full = len(mock.tokens) == mock.n_ctx
        if len(out) >= n or mock.is_eog(out[-1]) or full:
            return out
        logits = mock.evaluate(out[-1:])[0]
