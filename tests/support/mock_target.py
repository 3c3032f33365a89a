"""A target with a known distribution: the logits are a pure function of the last two tokens.

It implements `ngramspec.backend.Runner` and detects misuse. A batch that is too large, a full context and a rollback
past the end raise. Returned logits turn to nan at the next call that computes logits, since the logits of a real target
are views of a buffer.

With `kernels` it is as inexact as llama.cpp: the last bits of the logits then depend on the sizes of the batches that
put the latest tokens into the cache. With `seconds` and a `Clock`, its passes take a known time. With a `vocabulary` it
uses the tokens of that vocabulary and supports grammars.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngramspec import leaves as program
from ngramspec.acceptance.verifier import RuleVerifier
from ngramspec.backend import ModelBase, Vocabulary
from ngramspec.drafting.draft import NO_DRAFT
from ngramspec.llama.samplers import SamplerChain
from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling.settings import Sampling
from ngramspec.tokens import common_prefix

Progress = Callable[[int, int], None]
Kernels = Callable[[int, int], int]
"""(size of the batch, tokens in the cache before it) -> number of the kernel that computes it."""

PREFILL_KERNEL = 1 << 20


class Clock:
    """Replacement of `time.perf_counter`: each call advances it by `tick` seconds, and each pass by its duration."""

    def __init__(self, tick: float = 1e-6) -> None:
        self.now = 0.0
        self.tick = tick

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now


class MockTarget(ModelBase):
    """Language model of order two over tokens 0 .. n_vocab - 1.

    Token t is the byte (97 + t) % 256: token 0 is "a", and with at least 256 tokens the vocabulary covers any text.
    Tokens above 255 print as "<t>", end-of-generation tokens as nothing.
    """

    def __init__(
        self,
        n_vocab: int = 16,  # size of the vocabulary
        *,
        n_ctx: int = 4096,  # maximum number of tokens in the cache
        slack: int | None = None,  # tokens of padding that `evaluate` may add beyond n_ctx; `None` means `max_batch`
        n_batch: int = 512,  # number of tokens in a chunk of the prefill
        max_batch: int = 64,  # maximum number of tokens in one `evaluate`, at most n_batch
        peak: float = 3.0,  # scale of the logits: 1 is close to uniform; with 8 the text soon repeats itself
        eog: Collection[int] = (),  # end-of-generation tokens
        fail_rollback: bool = False,  # the cache cannot be cut, as in a recurrent model
        replays: bool = False,  # a rollback restores a checkpoint, as in a recurrent model, and raises without one
        kernels: Kernels | None = None,  # kernel that computes a batch; `None` means one for all batches
        noise: float = 1e-3,  # scale of the noise by which kernels differ
        seconds: Callable[[int], float] | None = None,  # duration of a pass over n tokens on `clock`
        reading: Callable[[int], float] | None = None,  # duration of a prefill of n tokens on `clock`; 0 by default
        clock: Clock | None = None,  # clock that a pass advances
        seed: int = 0,  # seed of the model's logits
        vocabulary: Vocabulary | None = None,  # vocabulary of the tokens, in place of n_vocab and eog
        words: Sequence[int] | None = None,  # the only tokens whose logits are not -inf; `None` means all
        leaves: int = 4,  # maximum number of branches in the questions of one `ask` call
        broken: Callable[[Sequence[int]], bool] | None = None,  # contexts after which a logit is nan
    ) -> None:
        self.n_vocab = n_vocab = vocabulary.n_vocab if vocabulary is not None else n_vocab
        self.leaves = leaves if "choose_loop" in program.MODULES else 0  # without that leaf, nothing branches
        self.questions = 0
        """Number of questions of all `ask` calls."""
        self.n_ctx = n_ctx
        self.n_batch = n_batch
        self.max_batch = min(max_batch, n_batch)
        self.can_rollback = not fail_rollback
        self.replays = replays
        self.exact_rollback = not replays
        self.owed = 0
        self._mark = 0
        self.tokens: list[int] = []
        self.batches: list[int] = []
        """Batch sizes of all `evaluate` calls."""
        self.rollbacks = 0
        """Number of `rollback` calls that removed tokens."""
        self._slack = self.max_batch if slack is None else slack
        self._last_rows = np.empty((0, n_vocab), np.float32)
        self.prefill_sizes: list[int] = []
        """Number of tokens that each `prefill` computed, without the reused prefix."""
        self._peak = peak
        self._eog = frozenset(eog)
        self._vocabulary = vocabulary
        self.controls = {} if vocabulary is None else vocabulary.controls
        self._words = words
        self._seed = seed
        self._rows: dict[tuple[int, int], NDArray[np.float32]] = {}
        self._kernels = kernels
        self._noise = noise
        self._noises: dict[tuple[int, ...], NDArray[np.float32]] = {}
        self._seconds, self._reading, self._clock = seconds, reading, clock
        self._broken = broken
        self._marks: list[int] = []  # the kernel that computed each cached token
        self._aligned = 0

    @property
    def fingerprint(self) -> str:
        """Key of the measurements of this model."""
        return f"mock-{self.n_vocab}-{self._peak}-{self._seed}"

    @property
    def passes(self) -> int:
        """Number of `evaluate` calls."""
        return len(self.batches)

    def row(self, context: Sequence[int]) -> NDArray[np.float32]:
        """Return the exact logits after `context`, shape (n_vocab,)."""
        before, last = [self.n_vocab, *context][-2:]
        if (before, last) not in self._rows:
            rng = np.random.default_rng((self._seed, before, last))
            logits = np.full(self.n_vocab, -np.inf, np.float32)
            words = slice(None) if self._words is None else list(self._words)
            logits[words] = self._peak * rng.standard_normal(logits[words].size)
            self._rows[before, last] = logits
        row = self._rows[before, last].copy()
        if self._broken is not None and self._broken(context):
            row[5] = np.nan
        return row

    def prefill(
        self, tokens: Sequence[int], *, aligned: bool = False, progress: Progress | None = None
    ) -> NDArray[np.float32]:
        """Fill the cache with `tokens`, reuse its prefix, and return the logits after the last token."""
        if not 0 < len(tokens) <= self.n_ctx:
            raise ValueError(f"a prompt needs 1 to {self.n_ctx} tokens, got {len(tokens)}")
        n_shared = self._reuse(tokens, aligned)
        was_aligned = self._aligned
        for start in range(n_shared, len(tokens), self.n_batch):
            chunk = tokens[start : start + self.n_batch]
            self._append(chunk, self.n_ctx, PREFILL_KERNEL + len(chunk))
            if progress is not None:
                progress(len(self.tokens), len(tokens))
        self._spend(self._reading, len(tokens) - n_shared)
        self._aligned = len(tokens) // self.n_batch * self.n_batch if aligned else was_aligned
        logits: NDArray[np.float32] = self._return_rows([self._inexact(len(self.tokens))])[0]
        return logits

    def _reuse(self, tokens: Sequence[int], aligned: bool) -> int:
        """Cut the cache to the beginning of a prompt that need not be evaluated again, and return its length.

        If `aligned`, these are only whole chunks of n_batch tokens; with kernels, only those of an aligned prefill.
        """
        n_shared = common_prefix(self.tokens, tokens[:-1])
        if aligned:
            # Without kernels, the batches that evaluated a token make no difference.
            n_computed = self._aligned if self._kernels else n_shared
            n_shared = min(n_shared, n_computed) // self.n_batch * self.n_batch
        if n_shared < len(self.tokens) and (self.replays or not self.can_rollback):
            n_shared = 0
        self._cut(n_shared)
        self._mark = self.owed = 0
        self.prefill_sizes.append(len(tokens) - n_shared)
        return n_shared

    def _spend(self, seconds: Callable[[int], float] | None, n_tokens: int) -> None:
        if seconds is not None and self._clock is not None:
            self._clock.now += seconds(n_tokens)

    def evaluate(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens in one pass and return the logits; row i, of shape (n_vocab,), follows tokens[i]."""
        if not 0 < len(tokens) <= self.max_batch:
            raise ValueError(f"a batch of {len(tokens)} tokens, n_batch is {self.n_batch}, max_batch {self.max_batch}")
        start = len(self.tokens)
        if start >= self.n_ctx:
            raise ValueError(f"the context of {self.n_ctx} tokens is full")
        kernel = self._kernels(len(tokens), start) if self._kernels else 0
        self._append(tokens, self.n_ctx + self._slack, kernel)
        size, self.owed = self.owed + len(tokens), 0
        self.batches.append(size)
        self._spend(self._seconds, size)
        return self._return_rows([self._inexact(start + i + 1) for i in range(len(tokens))])

    def ask(self, tokens: Sequence[int], questions: Sequence[tuple[int, tuple[int, ...]]]) -> NDArray[np.float32]:
        """Evaluate tokens and return their rows, then those of the questions, which do not stay in the cache."""
        start, unique = len(self.tokens), dict.fromkeys(questions)
        if len(unique) < len(questions):
            raise ValueError(f"a question twice: {questions}")
        ends = [(fork, path) for fork, path in unique if not any(q[0] == fork and q[1][:-1] == path for q in unique)]
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
        """Cut the cache to its first `length` tokens; if these are all, do nothing."""
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
        """Let `rollback` cut the cache to its present length or to a later one."""
        self._mark, self.owed = len(self.tokens), 0

    def clear(self) -> None:
        """Empty the cache."""
        self._cut(0)

    def is_eog(self, token: int) -> bool:
        """Return True if the token ends the generation."""
        return token in self._eog if self._vocabulary is None else self._vocabulary.is_eog(token)

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token."""
        if self._vocabulary is not None:
            return self._vocabulary.piece(token)
        if token in self._eog:
            return b""
        return bytes([(97 + token) % 256]) if token < 256 else b"<%d>" % token

    def display_piece(self, token: int) -> bytes:
        """Return the bytes of a token, or the name of a control token."""
        return self.piece(token) if self._vocabulary is None else self._vocabulary.display_piece(token)

    def sampler(self, sampling: Sampling) -> Sampler:
        """Return the vocabulary's sampler, or one without a vocabulary, which supports neither DRY nor grammars."""
        if self._vocabulary is not None:
            return self._vocabulary.sampler(sampling)
        return SamplerChain(sampling, self.n_vocab, vocab=None, n_ctx=self.n_ctx)

    def tokenize(self, text: str, *, special: bool = False, add_bos: bool = True) -> list[int]:
        """Return one token per byte of the text."""
        if self._vocabulary is not None:
            return self._vocabulary.tokenize(text, special=special, add_bos=add_bos)
        tokens = [(byte - 97) % 256 for byte in text.encode()]
        self._check(tokens)
        return tokens

    def _append(self, tokens: Sequence[int], max_length: int, kernel: int) -> None:
        self._check(tokens)
        if len(self.tokens) + len(tokens) > max_length:
            raise ValueError(f"{len(self.tokens)} + {len(tokens)} tokens do not fit into {max_length}")
        self.tokens.extend(tokens)
        self._marks.extend([kernel] * len(tokens))

    def _cut(self, length: int) -> None:
        del self.tokens[length:]
        del self._marks[length:]
        self._aligned = min(self._aligned, length)

    def _inexact(self, length: int) -> NDArray[np.float32]:
        """Return the logits after the first `length` tokens of the cache, with the noise of their kernels."""
        logits = self.row(self.tokens[:length])
        if self._kernels is not None:
            # The noise depends on three kernels, since cached values keep the rounding of their kernels.
            key = (self._seed, *self._marks[max(0, length - 3) : length], self.tokens[length - 1])
            if key not in self._noises:
                noise = self._noise * np.random.default_rng(key).standard_normal(self.n_vocab)
                self._noises[key] = noise.astype(np.float32)
            logits += self._noises[key]
        return logits

    def _return_rows(self, rows: list[NDArray[np.float32]]) -> NDArray[np.float32]:
        self._last_rows.fill(np.nan)
        self._last_rows = np.stack(rows)
        return self._last_rows

    def _check(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not 0 <= token < self.n_vocab:
                raise ValueError(f"token {token} is outside the vocabulary of {self.n_vocab}")


class Blurred(MockTarget):
    """Draft model of a mock target, to whose logits it adds noise of scale `blur`; a prefill takes time, too."""

    def __init__(self, n_vocab: int = 16, *, blur: float = 2.0, **options: Any) -> None:
        super().__init__(n_vocab, **{"reading": options.get("seconds"), **options})
        self._blur = blur

    def row(self, context: Sequence[int]) -> NDArray[np.float32]:
        rng = np.random.default_rng((7, *context))
        return super().row(context) + (self._blur * rng.standard_normal(self.n_vocab)).astype(np.float32)


class LineTokenizer(MockTarget):
    """A mock target whose tokens 0, 3, 6, ... are line breaks, for drafters that read text."""

    def piece(self, token: int) -> bytes:
        return b"\n" if token % 3 == 0 else super().piece(token)


def rows_to(best: Sequence[int], n_vocab: int = 12) -> NDArray[np.float32]:
    """Return rows of logits; row i has its maximum at best[i]."""
    rows = np.zeros((len(best), n_vocab), np.float32)
    rows[np.arange(len(best)), best] = 4.0
    return rows


def plain_generate(mock: MockTarget, prompt: Sequence[int], n: int, sampling: Sampling) -> list[int]:
    """Return at most n tokens generated without drafts; the end of the text or a full context ends them."""
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
