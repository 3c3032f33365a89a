"""The interface of a model runner. Implement it in a package next to `ngramspec.llama` to use another library.

All other packages use a model through two protocols: `Model` evaluates tokens, and `Vocabulary` converts them. One
object may implement both (`Runner`), as `ngramspec.llama.target.Target` does. Implement them in this order:

1. `Vocabulary`: `tokenize`, `piece`, `is_eog` and `sampler`. A `Sampler` turns logits into a distribution and draws
   from it (`tests/support/numpy_sampler.py` is one; raise GrammarError for `Sampling.grammar` at first).
2. `Model`, derived from `ModelBase`: `prefill`, `evaluate` and `clear`. With `can_rollback = False` nothing is drafted,
   and everything else works already.
3. `rollback`, and `can_rollback = True`: drafting works. If the memory cannot be cut, such as a recurrent state, set
   `replays = True` and `exact_rollback = False`. Copy the state in `checkpoint`, restore the copy in `rollback`, and
   return in `owed` how many tokens the next pass evaluates again before its new ones.
4. `fingerprint`: while it is "", the costs of passes are measured in every process.
5. `submit`, `fetch` and `returns_early = True`, if the library returns before a pass is done. The loop then submits the
   next pass before it reports the last one.

Optional: `shown` (the bytes of a token, or the name of a control token), `fill_in_tokens`
(`ngramspec.fill_in.FillInTokens`), `exactness` (an `ExactnessMode`), `SharedModel` (`ngramspec.shared_model`) for
several texts at once, `leaves` and `ask` (`Target.ask`) for branches, and `feeds_head`, which is set to True if passes
must store the hidden states for the model's own head. Storing them slows plain decoding down.

Test it with `pytest tests/test_model_contract.py` after adding your runner to its list, then on a real model with
`ngramspec.instruments.selfcheck.check.SelfCheck(runner, cases)`. Only `cli/` imports the package.

Errors: ValueError for a wrong call, ModelError for a file that cannot be used, TargetError if a pass failed; the cache
is then the same as before. Rows may be views of a buffer that the next call overwrites, so callers copy the rows that
they keep. Methods are not called from two threads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ngramspec.cpu.thread_governor import Conditions
from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling.settings import Sampling
from ngramspec.tokens import Tokenizer

Logits = NDArray[np.float32]  # unnormalised log-probabilities, shape (n_vocab,) or (rows, n_vocab)
Progress = Callable[[int, int], None]  # called with (tokens done, tokens in all)


@runtime_checkable
class Vocabulary(Tokenizer, Protocol):
    """The tokens of a model, and how one is chosen."""

    def sampler(self, sampling: Sampling) -> Sampler:
        """Return a sampler for one text.

        Raises:
            ValueError, GrammarError: the vocabulary does not support these settings.
        """


class Model(Protocol):
    """A language model with one text in its KV cache. `ModelBase` has defaults for the second half.

    Attributes:
        tokens: Token ids in the cache, in order: those of the prompt and appended ones.
        n_vocab: Length of a row of logits.
        n_ctx: Maximum number of tokens that may stay in the cache. One pass may exceed it by `max_batch` tokens, which
        are
            then rolled back.
        max_batch: Maximum number of tokens of one `evaluate` of which all but the first can be rolled back.
        can_rollback: Whether `rollback` can remove tokens; if not, nothing is drafted.
        replays: Whether a rollback requires a `checkpoint` before the pass, and evaluates tokens again after it.
        exact_rollback: Whether logits after a rollback are bit for bit those of a cache that never held the tokens.
        owed: Number of tokens in the cache that the next call evaluates again, before its new ones.
        fingerprint: Key of everything that measured costs depend on: file, build, machine, settings. With "" they are
            not stored.
        conditions: Current conditions that they also depend on.
        returns_early: Whether `submit` returns before the work is done, as on a GPU.
    """

    @property
    def tokens(self) -> list[int]: ...

    @property
    def n_vocab(self) -> int: ...

    @property
    def n_ctx(self) -> int: ...

    @property
    def max_batch(self) -> int: ...

    def prefill(self, tokens: Sequence[int], *, aligned: bool = False, progress: Progress | None = None) -> Logits:
        """Make the cache stand for exactly `tokens`; the logits after the last one, shape (n_vocab,).

        What the cache already has in common with them need not be evaluated again.

        Args:
            tokens: 1 to n_ctx token ids.
            aligned: the logits must depend on `tokens` alone, bit for bit, not on what the cache held before. Only
                exact mode asks for it; evaluating everything again is right, if slow.
            progress: called after each chunk.
        """

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        """Append tokens in one pass; the logits after each of them, shape (len(tokens), n_vocab)."""

    def submit(self, tokens: Sequence[int]) -> None:
        """Append tokens in one pass, as `evaluate` does. On a GPU it may return before the work is done."""

    def fetch(self) -> Logits:
        """Return the logits of the last `submit`, which `evaluate` would have returned; wait for them if necessary."""

    def rollback(self, length: int) -> None:
        """Make the cache stand for the first `length` of its tokens. Does nothing where these are all of them."""

    def clear(self) -> None:
        """Empty the cache."""

    @property
    def can_rollback(self) -> bool: ...

    @property
    def replays(self) -> bool: ...

    @property
    def exact_rollback(self) -> bool: ...

    @property
    def owed(self) -> int: ...

    def checkpoint(self) -> None:
        """Let `rollback` go back to here, until the next checkpoint."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def conditions(self) -> Conditions: ...

    @property
    def returns_early(self) -> bool: ...


class EvaluatesAtOnce:
    """`submit` and `fetch` of a `Model` that returns from `evaluate` when the work is done."""

    returns_early: bool = False
    _fetched: Logits

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        raise NotImplementedError

    def submit(self, tokens: Sequence[int]) -> None:
        self._fetched = self.evaluate(tokens)

    def fetch(self) -> Logits:
        return self._fetched


class ModelBase(EvaluatesAtOnce):
    """The defaults of a `Model` whose cache can be cut anywhere: nothing to prepare, nothing owed, nothing kept."""

    can_rollback: bool = True
    replays: bool = False
    exact_rollback: bool = True
    owed: int = 0
    fingerprint: str = ""
    conditions: Conditions = Conditions()

    def checkpoint(self) -> None:
        pass


class Runner(Model, Vocabulary, Protocol):
    """A model and its vocabulary in one object."""
