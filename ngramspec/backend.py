"""What a model runner must offer: write a room like `ngramspec.llama` for another library.

All other rooms see a model through two protocols: `Model` evaluates tokens, `Vocabulary` knows what they mean. One
object may offer both (`Runner`), as `ngramspec.llama.target.Target` does. Write them in this order:

1. `Vocabulary`: `tokenize`, `piece`, `is_eog`, and `sampler`, whose `Sampler` turns logits into a distribution and
   draws from it (`tests/support/numpy_sampler.py` is one; raise GrammarError for `Sampling.grammar` at first).
2. `Model`, deriving from `ModelBase`: `prefill`, `evaluate` and `clear`. With `can_rollback = False` text is decoded
   plainly, and everything else works already.
3. `rollback`, and `can_rollback = True`: drafting works. Where the memory cannot be cut (a recurrent state), set
   `replays = True` and `exact_rollback = False`, copy the state in `checkpoint`, go back to the copy in `rollback`, and
   say in `owed` how many tokens the next pass evaluates again before its own.
4. `fingerprint`: while it is "", costs of passes are measured in every process.

Always optional: `shown` (a token's bytes, or the name of a control token), `fill_in_tokens` (`ngramspec.fill_in.FillInTokens`), `exactness` (an `ExactnessMode`), `SharedModel`
(`ngramspec.shared_model`) for several texts at once, `leaves` and `ask` (`Target.ask`) for branches, and `feeds_head`:
set to True where passes are to keep what a head of the model's own reads, which slows plain decoding.

Test it with `pytest tests/test_backend.py`, with your runner added to its list, then on a real model with
`ngramspec.instruments.selfcheck.check.SelfCheck(runner, cases)`. Only `cli/` imports the room.

Errors: ValueError for a call that is wrong, ModelError for a file that cannot be used, TargetError where a pass failed;
the cache is then what it was before. Rows may be views of a buffer that the next call overwrites: whoever keeps one
copies it. Nothing here is called from two threads at once.
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
    """What tokens mean, and how one is chosen."""

    def sampler(self, sampling: Sampling) -> Sampler:
        """A sampler for one text. ValueError or GrammarError for settings that this vocabulary cannot follow."""


class Model(Protocol):
    """A language model with one text in its KV cache. `ModelBase` has defaults for the second half.

    Attributes:
        tokens: ids of what the cache stands for: prompt and appended tokens, in order.
        n_vocab: length of a row of logits.
        n_ctx: most tokens that may stay in the cache; one pass may go beyond by `max_batch`, to be taken back after it.
        max_batch: most tokens of one `evaluate` of which all but the first can be taken back.
        can_rollback: whether `rollback` can take tokens back; if not, nothing is drafted.
        replays: whether taking back needs a `checkpoint` before the pass, and evaluates tokens again after it.
        exact_rollback: whether logits are bit for bit the same after tokens were taken back as if they had never been
            there.
        owed: how many tokens of the cache the next call evaluates again, before its own.
        fingerprint: key of all that measured costs depend on: file, build, machine, settings; "": do not keep them.
        conditions: what else they depend on at present.
        returns_early: whether `submit` returns before the work is done, as on a GPU.
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
