"""A target with a known law: the logits are a pure function of the last two tokens.

It satisfies `ngramspec.backend.Runner`, and sets traps: a batch too large, a full context
and a rollback past the end raise, and logits that were returned turn to nan at the next call that
computes any, since those of a real target are views of a buffer.

With `kernels` it is as inexact as llama.cpp: the last bits of the logits then depend on the sizes
of the batches that put the latest tokens into the cache. With `seconds` and a `Clock` its passes
take a known time. With a `vocabulary` it speaks that one's tokens, and can be held to a grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.numpy_sampler import NumpySampler

from ngramspec.acceptance.verifier import RuleVerifier
from ngramspec.backend import EvaluatesAtOnce, Vocabulary
from ngramspec.cpu.thread_governor import Conditions
from ngramspec.drafting.draft import NO_DRAFT
from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling.settings import Sampling
from ngramspec.tokens import common_prefix

Progress = Callable[[int, int], None]
Kernels = Callable[[int, int], int]
"""(size of the batch, tokens in the cache before it) -> number of the kernel that computes it."""

PREFILL_KERNEL = 1 << 20


class Clock:
    """Stands in for `time.perf_counter`: each look takes `tick` seconds, and passes what they take."""

    def __init__(self, tick: float = 1e-6) -> None:
        self.now = 0.0
        self.tick = tick

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now


class MockTarget(EvaluatesAtOnce):
    """A language model of order two over tokens 0 .. n_vocab - 1.

    Token t stands for the byte (97 + t) % 256: token 0 is "a", and from 256 tokens on any text can
    be tokenized; tokens past 255 print as "<t>", end-of-generation tokens as nothing.

    Args:
        n_vocab: size of the vocabulary.
        n_ctx: most tokens the cache may hold.
        slack: how many more one `evaluate` may add, for the padding of a batch; they must be rolled
            back before the next call. None: `max_batch`.
        n_batch: tokens in a chunk of the prefill.
        max_batch: most tokens one `evaluate` may take, where that is less than n_batch.
        peak: scale of the normally distributed logits; 1 is close to uniform, 8 close to certain,
            so that the text soon repeats itself.
        eog: end-of-generation tokens.
        fail_rollback: a target whose cache cannot be cut (a recurrent model).
        replays: a target whose cache goes back to a checkpoint, from where on tokens are evaluated again (a
            recurrent model, too); going back without one raises.
        kernels: which kernel computes a batch; None: one for all.
        noise: scale of the noise that tells kernels apart.
        seconds: what a pass over n tokens takes on `clock`.
        clock: see `seconds`.
        seed: another seed is another model.
        vocabulary: what the tokens stand for, in place of n_vocab and eog.
        words: the only tokens whose logits are not -inf; None: all.
        leaves: most branches of questions.
    """

    def __init__(
        self,
        n_vocab: int = 16,
        *,
        n_ctx: int = 4096,
        slack: int | None = None,
        n_batch: int = 512,
        max_batch: int = 64,
        peak: float = 3.0,
        eog: Collection[int] = (),
        fail_rollback: bool = False,
        replays: bool = False,
        kernels: Kernels | None = None,
        noise: float = 1e-3,
        seconds: Callable[[int], float] | None = None,
        clock: Clock | None = None,
        seed: int = 0,
        vocabulary: Vocabulary | None = None,
        words: Sequence[int] | None = None,
        leaves: int = 4,
    ) -> None:
        self.n_vocab = n_vocab = vocabulary.n_vocab if vocabulary is not None else n_vocab
        self.leaves = leaves
        self.questions = 0
        """Questions of all `ask` calls so far."""
        self.n_ctx = n_ctx
        self.n_batch = n_batch
        self.max_batch = min(max_batch, n_batch)
        self.can_rollback = not fail_rollback
        self.replays = replays
        self.exact_rollback = not replays
        self.conditions = Conditions()
        self.owed = 0
        self._mark = 0
        self.tokens: list[int] = []
        self.batches: list[int] = []
        """Sizes of the `evaluate` calls so far."""
        self.rollbacks = 0
        """Calls of `rollback` that took something back."""
        self._slack = self.max_batch if slack is None else slack
        self._given = np.empty((0, n_vocab), np.float32)
        self.prefilled: list[int] = []
        """How many tokens each `prefill` had to compute, the reused prefix excluded."""
        self._peak = peak
        self._eog = frozenset(eog)
        self._vocabulary = vocabulary
        self._words = words
        self._seed = seed
        self._rows: dict[tuple[int, int], NDArray[np.float32]] = {}
        self._kernels = kernels
        self._noise = noise
        self._noises: dict[tuple[int, ...], NDArray[np.float32]] = {}
        self._seconds = seconds
        self._clock = clock
        self._marks: list[int] = []  # the kernel that computed each cached token
        self._aligned = 0

    @property
    def fingerprint(self) -> str:
        """Key of what was measured of this model."""
        return f"mock-{self.n_vocab}-{self._peak}-{self._seed}"

    @property
    def passes(self) -> int:
        """Number of `evaluate` calls."""
        return len(self.batches)

    def row(self, context: Sequence[int]) -> NDArray[np.float32]:
        """The logits after `context`, shape (n_vocab,): what every method here must return."""
        before, last = [self.n_vocab, *context][-2:]
        if (before, last) not in self._rows:
            rng = np.random.default_rng((self._seed, before, last))
            logits = np.full(self.n_vocab, -np.inf, np.float32)
            words = slice(None) if self._words is None else list(self._words)
            logits[words] = self._peak * rng.standard_normal(logits[words].size)
            self._rows[before, last] = logits
        return self._rows[before, last].copy()

    def prefill(
        self, tokens: Sequence[int], *, aligned: bool = False, progress: Progress | None = None
    ) -> NDArray[np.float32]:
        """Make the cache hold `tokens`, reusing the prefix it has; logits after the last one.

        `aligned` reuses whole chunks of n_batch tokens only, and with kernels only those that an
        aligned prefill computed; `progress` gets (tokens done, all).
        """
        if not 0 < len(tokens) <= self.n_ctx:
            raise ValueError(f"a prompt needs 1 to {self.n_ctx} tokens, got {len(tokens)}")
        shared = common_prefix(self.tokens, tokens[:-1])
        if aligned:
            # Without kernels it makes no difference how a token came into the cache.
            computed = self._aligned if self._kernels else shared
            shared = min(shared, computed) // self.n_batch * self.n_batch
        if shared < len(self.tokens) and (self.replays or not self.can_rollback):
            shared = 0
        self._cut(shared)
        self._mark = self.owed = 0
        was_aligned = self._aligned
        self.prefilled.append(len(tokens) - shared)
        for start in range(shared, len(tokens), self.n_batch):
            chunk = tokens[start : start + self.n_batch]
            self._append(chunk, self.n_ctx, PREFILL_KERNEL + len(chunk))
            if progress is not None:
                progress(len(self.tokens), len(tokens))
        self._aligned = len(tokens) // self.n_batch * self.n_batch if aligned else was_aligned
        logits: NDArray[np.float32] = self._give([self._inexact(len(self.tokens))])[0]
        return logits

    def evaluate(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens in one pass; row i, of shape (n_vocab,): logits after tokens[i]."""
        if not 0 < len(tokens) <= self.max_batch:
            raise ValueError(f"a batch of {len(tokens)} tokens, n_batch is {self.n_batch}, max_batch {self.max_batch}")
        start = len(self.tokens)
        if start >= self.n_ctx:
            raise ValueError(f"the context of {self.n_ctx} tokens is full")
        kernel = self._kernels(len(tokens), start) if self._kernels else 0
        self._append(tokens, self.n_ctx + self._slack, kernel)
        size, self.owed = self.owed + len(tokens), 0
        self.batches.append(size)
        if self._seconds is not None and self._clock is not None:
            self._clock.now += self._seconds(size)
        return self._give([self._inexact(start + i + 1) for i in range(len(tokens))])

    def ask(self, tokens: Sequence[int], questions: Sequence[tuple[int, tuple[int, ...]]]) -> NDArray[np.float32]:
        """`evaluate`, and behind its rows those of questions, which leave nothing behind."""
        start, asked = len(self.tokens), dict.fromkeys(questions)
        if len(asked) < len(questions):
            raise ValueError(f"a question twice: {questions}")
        ends = [(fork, path) for fork, path in asked if not any(q[0] == fork and q[1][:-1] == path for q in asked)]
        if len(ends) > self.leaves:
            raise ValueError(f"{len(ends)} branches of {self.leaves}")
        rows = self.evaluate([*tokens, *[0] * len(questions)])
        for i, (fork, path) in enumerate(questions):
            if fork >= len(tokens) or (len(path) > 1 and (fork, path[:-1]) not in questions[:i]):
                raise ValueError(f"question {fork, path} has nothing before it")
            rows[len(tokens) + i] = self.row([*self.tokens[: start + fork + 1], *path])
        self._cut(start + len(tokens))
        self.questions += len(questions)
        return rows

    def rollback(self, length: int) -> None:
        """Cut the cache to its first `length` tokens; always fine where that is all of them."""
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"rollback to {length} tokens, the cache holds {len(self.tokens)}")
        if length < len(self.tokens):
            if not self.can_rollback:
                raise RuntimeError("this model's cache cannot be rolled back")
            if self.replays and self._mark > length:
                raise RuntimeError(f"no checkpoint to go back to {length} from")
            self.rollbacks += 1
            self._cut(length)
            self.owed = length - self._mark if self.replays else 0

    def checkpoint(self) -> None:
        """Let `rollback` go back to here, or further on."""
        self._mark, self.owed = len(self.tokens), 0

    def clear(self) -> None:
        """Empty the cache."""
        self._cut(0)

    def is_eog(self, token: int) -> bool:
        """Whether the token ends the generation."""
        return token in self._eog if self._vocabulary is None else self._vocabulary.is_eog(token)

    def piece(self, token: int) -> bytes:
        """The bytes per token stands for."""
        if self._vocabulary is not None:
            return self._vocabulary.piece(token)
        if token in self._eog:
            return b""
        return bytes([(97 + token) % 256]) if token < 256 else b"<%d>" % token

    def sampler(self, sampling: Sampling) -> Sampler:
        """The vocabulary's, or one in numpy, which knows no DRY and keeps to no grammar."""
        if self._vocabulary is not None:
            return self._vocabulary.sampler(sampling)
        return NumpySampler(sampling, self.n_vocab)

    def tokenize(self, text: str, *, special: bool = False, add_bos: bool = True) -> list[int]:
        """One token per byte of the text; ValueError for a byte outside the vocabulary."""
        if self._vocabulary is not None:
            return self._vocabulary.tokenize(text, special=special, add_bos=add_bos)
        tokens = [(byte - 97) % 256 for byte in text.encode()]
        self._check(tokens)
        return tokens

    def _append(self, tokens: Sequence[int], most: int, kernel: int) -> None:
        self._check(tokens)
        if len(self.tokens) + len(tokens) > most:
            raise ValueError(f"{len(self.tokens)} + {len(tokens)} tokens do not fit into {most}")
        self.tokens.extend(tokens)
        self._marks.extend([kernel] * len(tokens))

    def _cut(self, length: int) -> None:
        del self.tokens[length:]
        del self._marks[length:]
        self._aligned = min(self._aligned, length)

    def _inexact(self, length: int) -> NDArray[np.float32]:
        """The logits after the first `length` tokens of the cache, with their kernels' noise."""
        logits = self.row(self.tokens[:length])
        if self._kernels is not None:
            # The last three: what the cache holds of a token carries its kernel's rounding along.
            key = (self._seed, *self._marks[max(0, length - 3) : length], self.tokens[length - 1])
            if key not in self._noises:
                noise = self._noise * np.random.default_rng(key).standard_normal(self.n_vocab)
                self._noises[key] = noise.astype(np.float32)
            logits += self._noises[key]
        return logits

    def _give(self, rows: list[NDArray[np.float32]]) -> NDArray[np.float32]:
        self._given.fill(np.nan)
        self._given = np.stack(rows)
        return self._given

    def _check(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not 0 <= token < self.n_vocab:
                raise ValueError(f"token {token} is outside the vocabulary of {self.n_vocab}")


class Blurred(MockTarget):
    """A draft model of a mock target: right except for a blur. Reading a text takes it time, too.

    Args:
        blur: scale of what moves the target's logits, by each token in the cache.
        options: of `MockTarget`.
    """

    def __init__(self, n_vocab: int = 16, *, blur: float = 2.0, **options: Any) -> None:
        super().__init__(n_vocab, **options)
        self._blur = blur

    def prefill(self, tokens: Sequence[int], **options: Any) -> NDArray[np.float32]:
        row = super().prefill(tokens, **options)
        if self._seconds is not None and self._clock is not None:
            self._clock.now += self._seconds(self.prefilled[-1])
        return row

    def row(self, context: Sequence[int]) -> NDArray[np.float32]:
        rng = np.random.default_rng((7, *context))
        return super().row(context) + (self._blur * rng.standard_normal(self.n_vocab)).astype(np.float32)


def rows_to(best: Sequence[int], n_vocab: int = 12) -> NDArray[np.float32]:
    """Rows in which these tokens are the best, in turn."""
    rows = np.zeros((len(best), n_vocab), np.float32)
    rows[np.arange(len(best)), best] = 4.0
    return rows


def plain_generate(mock: MockTarget, prompt: Sequence[int], n: int, sampling: Sampling) -> list[int]:
    """The reference: one token a pass, no draft. At most n tokens; an end-of-generation token ends
    the list and is its last entry, and so does a full context."""
    sampler = mock.sampler(sampling)
    sampler.begin(prompt)
    verifier = RuleVerifier(sampler)
    logits = mock.prefill(prompt)
    out: list[int] = []
    while True:
        verdict = verifier.verify([logits], NO_DRAFT, len(prompt) + len(out))
        out.append(verdict.tokens[0])
        full = len(mock.tokens) == mock.n_ctx
        if len(out) >= n or mock.is_eog(out[-1]) or full:
            return out
        logits = mock.evaluate(out[-1:])[0]
