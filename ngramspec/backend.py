"""Interface of a model runner. Implement it in a package next to `ngramspec.llama` to use another library.

All other packages use a loaded model through three protocols: a `Runner` has a `Vocabulary`, which converts tokens, and
sequences, each a `Model`, which evaluates them. `ngramspec.llama.target.Target` is a runner. One object may implement
all three (`ModelBase`). Implement them in this order:

1. `Vocabulary`: `tokenize`, `piece`, `display_piece`, `is_eog` and `sampler`. A `Sampler` turns logits into a
   distribution and draws from it (llama.cpp's is `ngramspec.llama.samplers.SamplerChain`; raise GrammarError for
   `Sampling.grammar` at first).
2. `Model`, derived from `ModelBase`: `prefill`, `evaluate` and `clear`. With `can_rollback = False` nothing is drafted,
   and everything else works already.
3. `rollback`, and `can_rollback = True`: drafting works. If the memory cannot be cut, such as a recurrent state, set
   `replays = True` and `exact_rollback = False`. Copy the state in `checkpoint`, restore the copy in `rollback`, and
   return in `owed` how many tokens the next pass evaluates again before its new ones.
4. `fingerprint`: while it is "", the costs of passes are measured in every process.
5. `submit`, `fetch` and `returns_early = True`, if the library returns before a pass is done. The loop then submits the
   next pass before it reports the last one.

Optional: `SharedModel` for several texts at once; `ModelBase` has defaults for `controls`, `fill_in_tokens`,
`exactness`, `feeds_head` and `leaves`. With `leaves` above 0, branches are evaluated by a method `ask`
(`BranchingSequence`).

Test it with `pytest tests/test_model_contract.py` after adding your runner to its list, then on a real model with
`ngramspec.instruments.selfcheck.check.SelfCheck(runner, cases)`. Only `cli/` imports the package.

Errors: ValueError for a wrong call, ModelError for a file that cannot be used, TargetError if a pass failed; the cache
is then the same as before. Rows may be views of a buffer that the next call overwrites, so callers copy the rows that
they keep. Methods are not called from two threads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling.settings import Sampling
from ngramspec.tokens import Tokenizer

Logits = NDArray[np.float32]  # unnormalised log-probabilities, shape (n_vocab,) or (rows, n_vocab)
Progress = Callable[[int, int], None]  # called with (tokens done, tokens in all)


@dataclass(frozen=True, slots=True)
class ExactnessMode:
    """Allowed batch sizes of a request, and the guarantee for its text."""

    sizes: tuple[int, ...] | None = None  # allowed batch sizes; `None` means all
    aligned: bool = False  # alignment of the prefill; see `Model.prefill`
    bit_identical: bool = False  # True if the text is the same bit for bit with and without drafts
    # Maximum change of a logit by batch size; 0 if `bit_identical` is set or the maximum is not needed.
    max_logit_shift: float = 0.0
    agreeing: tuple[int, ...] = (1,)  # batch sizes that agree with a decode call without a draft


class FillInTokens(NamedTuple):
    """Ids of the tokens that mark the parts of a fill-in-the-middle prompt; `None` for each that is missing."""

    prefix: int | None  # token before the prefix
    suffix: int | None  # token before the suffix
    middle: int | None  # token before the middle, which the model generates
    project: int | None = None  # token before the name of the project
    file: int | None = None  # token before the name of each file


@runtime_checkable
class Vocabulary(Tokenizer, Protocol):
    """The tokens of a model, and its samplers."""

    @property
    def controls(self) -> Mapping[str, int]:
        """Ids of the control tokens, which have no text, by their names."""

    @property
    def fill_in_tokens(self) -> FillInTokens: ...

    def sampler(self, sampling: Sampling) -> Sampler:
        """Return a sampler for one text; a ValueError or GrammarError means that it does not support the settings."""


class Model(Protocol):
    """A language model with one text in its KV cache. `ModelBase` has defaults for the second half."""

    tokens: list[int]  # token ids in the cache, in order: those of the prompt and appended ones
    n_vocab: int  # length of a row of logits
    # Maximum number of tokens that may stay in the cache. One pass may exceed it by `max_batch` tokens, which are then
    # rolled back.
    n_ctx: int
    max_batch: int  # maximum number of tokens of one `evaluate` of which all but the first can be rolled back

    def prefill(self, tokens: Sequence[int], *, aligned: bool = False, progress: Progress | None = None) -> Logits:
        """Fill the cache with exactly these tokens, and return the logits after the last one, shape (n_vocab,).

        Their common prefix with the tokens in the cache need not be evaluated again. If `aligned`, the logits must
        depend only on `tokens`, bit for bit, and not on the earlier contents of the cache. Only exact mode requires it;
        evaluating all tokens again is correct, but slow. `progress` is called after each chunk.
        """

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        """Append tokens in one pass, and return the logits after each of them, shape (len(tokens), n_vocab)."""

    def submit(self, tokens: Sequence[int]) -> None:
        """Append tokens in one pass, as `evaluate` does. On a GPU it may return before the work is done."""

    def fetch(self) -> Logits:
        """Return the logits of the last `submit`, which `evaluate` would have returned; wait for them if necessary."""

    def rollback(self, length: int) -> None:
        """Keep only the first `length` tokens in the cache; do nothing if these are all of them."""

    def clear(self) -> None:
        """Empty the cache."""

    can_rollback: bool  # whether `rollback` can remove tokens; if not, nothing is drafted
    replays: bool  # whether a rollback requires a `checkpoint` before the pass, and evaluates tokens again after it
    exact_rollback: bool  # whether logits after a rollback are bit for bit those of a cache that never had the tokens
    returns_early: bool  # whether `submit` returns before the work is done, as on a GPU
    leaves: int  # maximum number of branches in a pass that no other branch extends; 0 if there is no method `ask`

    @property
    def owed(self) -> int:
        """Number of tokens in the cache that the next call evaluates again, before its new ones."""

    @property
    def fingerprint(self) -> str:
        """Key of all that measured costs depend on (file, build, machine, settings); with "" they are not stored."""

    def checkpoint(self) -> None:
        """Save the state, so that `rollback` can return to it until the next checkpoint."""


class ModelBase:
    """The defaults of a `Model` whose cache can be cut anywhere, without checkpoints, owed tokens and stored costs.

    A subclass that also implements `Vocabulary` is a whole `Runner`, of which it is the only sequence.
    """

    returns_early: bool = False
    can_rollback: bool = True
    replays: bool = False
    exact_rollback: bool = True
    owed: int = 0
    fingerprint: str = ""
    leaves: int = 0
    controls: Mapping[str, int] = MappingProxyType({})
    fill_in_tokens: FillInTokens = FillInTokens(None, None, None)
    exactness: ExactnessMode = ExactnessMode()
    feeds_head: bool = False

    @property
    def sequences(self) -> Sequence[Self]:
        return (self,)

    @property
    def vocabulary(self) -> Any:
        return self

    def checkpoint(self) -> None:
        pass

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        raise NotImplementedError

    def submit(self, tokens: Sequence[int]) -> None:
        self._fetched = self.evaluate(tokens)

    def fetch(self) -> Logits:
        return self._fetched


class Runner(Protocol):
    """A loaded model: its vocabulary, and the sequences in its KV cache, each of which is a `Model`."""

    feeds_head: bool  # whether passes store hidden states for the model's own head, which slows plain decoding down

    @property
    def exactness(self) -> ExactnessMode:
        """Mode of requests with `exact="auto"`."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def sequences(self) -> Sequence[Model]: ...


class SequenceModel(Model, Protocol):
    """A sequence of a `SharedModel`: usable as a separate model, and in passes together with other sequences."""

    number: int  # index of the sequence, from 0

    def reading(
        self, tokens: Sequence[int], *, aligned: bool = False, max_chunk: Callable[[], int] | None = None
    ) -> Generator[int, None, Logits]:
        """Prefill chunk by chunk, so that other sequences can have passes in between; return the logits at the end.

        It yields the number of these tokens in the cache: first of those that need not be evaluated again, then after
        each chunk except the last. `max_chunk` returns the maximum number of tokens of the next chunk; `aligned` chunks
        have a fixed size instead. If the generator is closed early, the tokens of finished chunks stay in the cache.
        """

    def adopt(self, source: SequenceModel, length: int) -> None:
        """Copy up to `length` tokens from the start of another sequence's cache, without an evaluation.

        The copy may be shorter than `length`; `tokens` contains the copied tokens.
        """

    def save_state(self) -> bytes:
        """Return the state of the cache, for any sequence of this model; raise a TargetError if it cannot be copied."""

    def restore(self, tokens: Sequence[int], state: bytes) -> None:
        """Restore what `save_state` returned with these tokens in the cache, which is empty after a TargetError."""


class Part(NamedTuple):
    """Work of a pass for one sequence."""

    sequence: SequenceModel  # sequence that the pass extends
    tokens: Sequence[int]  # tokens to append to the sequence, at least one
    rows: int  # number of tokens, counted from the last one, whose logits are returned


class SharedModel(Protocol):
    """A model that evaluates several sequences together: one pass reads the weights once for all of them."""

    # Maximum number of tokens of a sequence. One pass may exceed it by `max_rows` tokens, which are then rolled back.
    n_ctx: int
    max_tokens: int  # maximum number of tokens of a pass
    max_rows: int  # maximum number of rows of logits of a pass
    drafts_alone: bool  # whether a draft can be rolled back only if its pass contained no other sequence
    feeds_head: bool  # see `Runner`
    returns_early: bool  # see `Model`

    @property
    def sequences(self) -> Sequence[SequenceModel]: ...

    def submit_together(self, parts: Sequence[Part]) -> None:
        """Begin the pass of `evaluate_together`. On a GPU it may return before the work is done."""

    def fetch_together(self) -> list[Logits]:
        """Return the logits of each part of the last `submit_together`; wait for them if necessary."""

    def evaluate_together(self, parts: Sequence[Part]) -> list[Logits]:
        """Append tokens to several sequences in one pass and return the logits of each part, shape (rows, n_vocab).

        If a sequence owes tokens (`Model.owed`), the pass evaluates them before its new tokens. After a TargetError,
        every sequence has the same tokens as before, though it may owe some of them. A ValueError means no parts, two
        parts of one sequence, or too many tokens or rows.
        """

    def scale_adapters(self, scales: Sequence[float]) -> None:
        """Set the scale of each LoRA adapter for the following passes."""

    def batches(self, lengths: Sequence[int], sequences: Sequence[SequenceModel]) -> Sequence[int]:
        """Return the sizes of the batches of a pass with parts of these lengths; each batch reads the weights again.

        If all sequences share one pool of cells, the pass is one batch. If each sequence has a separate cache, a batch
        has equally many tokens of sequences with consecutive numbers, and longer parts continue in further batches.
        """
