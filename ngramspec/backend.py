"""What a model runner must offer: the room beside `ngramspec.llama` that you would write for another library.

Everything above this file (drafting, acceptance, policies, the loop, its measurements) sees a model through two small
protocols: `Model`, which evaluates tokens, and `Vocabulary`, which knows what tokens mean. One object may offer both
(`Runner`), as `ngramspec.llama.target.Target` does. A recipe for `ngramspec/mlx/`, in this order:

1. `Vocabulary` (file `vocabulary.py`): `n_vocab`, `tokenize`, `piece`, `is_eog`, and `sampler`, whose `Sampler` turns a
   row of logits into a law and draws from it. `tests/support/numpy_sampler.py` is one in numpy; grammars may be left
   out at first (raise GrammarError for `Sampling.grammar`).
2. `Model` (file `target.py`), deriving from `ModelBase`, which fills in what may be left out. Set `tokens = []`,
   `n_ctx` and `max_batch` (in tokens), `n_vocab`; write `prefill`, `evaluate`, `rollback` (raise at first) and `clear`.
   Logits are float32 and unnormalised. A row has shape (n_vocab,). `evaluate` of n tokens is ONE pass of the model and
   gives n rows, shape (n, n_vocab): row i is what follows tokens[i]. `prefill` gives the last row alone. After every
   call `tokens` is what the cache stands for: prompt and appended tokens, in order.
   With `can_rollback = False` the decoder decodes plainly: one token per pass, and everything else works already.
3. `rollback`, and `can_rollback = True`: drafting now works. A refused draft is cut off the end of the cache. If the
   memory cannot be cut (a recurrent state), set `replays = True` and `exact_rollback = False`, copy the state in
   `checkpoint`, go back to the copy in `rollback`, and report in `owed` the tokens that the next pass must evaluate
   again before its own.
4. `fingerprint`: a string that changes with the model file, the library's version, the machine and the settings.
   Measured costs of passes are kept under it; while it is "" they are measured in every process.
5. `fill_in_tokens` beside `Vocabulary` (`ngramspec.fill_in.FillInTokenizer`), where models can fill gaps: for editors.
   `ngramspec.exactness.auto.Decided`, where the library can trade speed for logits that do not depend on the batch
   size (`exact="auto"`), `Asked` for branches beside drafts, `BranchingTarget` for beam search, and `Headed` where
   models draft for themselves. All five are optional for good.

Tests to run: first `pytest tests/test_backend.py` with your runner added to its list: the contract of 1 to 3 on any
model, the logits of single tokens and batches against each other, and texts with drafts against texts without. Then
`ngramspec.selfcheck.check.SelfCheck(runner, cases)`, which is what `ngramspec verify` does: texts and rollbacks on
your real model. The room goes in the table of `tests/test_layers.py` beside `llama`; only `cli/` imports it.

Errors: ValueError for a call that is wrong, ModelError for a file that cannot be used, TargetError where a pass failed.
After a TargetError the cache must be what it was before the call. Rows may be views of a buffer that the next call
overwrites: whoever keeps one copies it. Nothing here is called from two threads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling.settings import Sampling
from ngramspec.tokens import Tokenizer

Logits = NDArray[np.float32]
"""Unnormalised log-probabilities, shape (n_vocab,) or (rows, n_vocab)."""

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all)."""


@runtime_checkable
class Vocabulary(Tokenizer, Protocol):
    """What tokens mean, and how one is chosen."""

    def sampler(self, sampling: Sampling) -> Sampler:
        """A sampler for one text. ValueError or GrammarError for settings that this vocabulary cannot follow."""


class Model(Protocol):
    """A language model with one sequence in its KV cache. `ModelBase` has defaults for the second half."""

    @property
    def tokens(self) -> list[int]:
        """The token ids that the cache stands for."""

    @property
    def n_vocab(self) -> int:
        """Length of a row of logits."""

    @property
    def n_ctx(self) -> int:
        """Most tokens that may stay in the cache; one pass may go beyond by `max_batch`, to be taken back after it."""

    @property
    def max_batch(self) -> int:
        """Most tokens of one `evaluate` of which all but the first can be taken back."""

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

    def rollback(self, length: int) -> None:
        """Make the cache stand for the first `length` of its tokens. Does nothing where these are all of them."""

    def clear(self) -> None:
        """Empty the cache."""

    @property
    def can_rollback(self) -> bool:
        """Whether `rollback` can take tokens back; if not, nothing is drafted."""

    @property
    def replays(self) -> bool:
        """Whether taking back needs a `checkpoint` before the pass, and evaluates tokens again after it."""

    @property
    def exact_rollback(self) -> bool:
        """Whether logits are bit for bit the same after tokens were taken back as if they had never been there."""

    @property
    def owed(self) -> int:
        """How many tokens of the cache the next call evaluates again, before its own."""

    def checkpoint(self) -> None:
        """Let `rollback` go back to here, until the next checkpoint."""

    @property
    def fingerprint(self) -> str:
        """Key of all that measured costs depend on: file, build, machine, settings; "": do not keep them."""


class ModelBase:
    """The defaults of a `Model` whose cache can be cut anywhere: nothing to prepare, nothing owed, nothing kept."""

    can_rollback: bool = True
    replays: bool = False
    exact_rollback: bool = True
    owed: int = 0
    fingerprint: str = ""

    def checkpoint(self) -> None:
        pass


class Runner(Model, Vocabulary, Protocol):
    """A model and its vocabulary in one object."""


# --------------------------------------------------------------------------- a head of its own


@runtime_checkable
class Headed(Protocol):
    """A model that may have a head of its own, which guesses from what the model's layers made of a text.

    Attributes:
        feeds_head: whether passes keep what the head goes by. A text that was evaluated meanwhile is one of which the
            head knows nothing.
    """

    feeds_head: bool


# --------------------------------------------------------------------------- questions beside a draft


LEAVES = 8
"""Most branches of questions in a pass: twice as many as 4 gain 1 % more where rows are free, and 0.3 % on GPUs."""

Path = tuple[int, tuple[int, ...]]
"""A question: how many tokens of the pass it follows behind the first one, and those that come then, its own last."""


@runtime_checkable
class Asked(Model, Protocol):
    """A model whose passes can also evaluate tokens beside the text, which leave nothing in the cache.

    Attributes:
        leaves: most branches of such tokens; 0: none can be asked.
    """

    leaves: int

    def ask(self, tokens: Sequence[int], questions: Sequence[Path]) -> Logits:
        """Append tokens in one pass, as `evaluate` does, with questions beside them.

        The logits of the tokens are those that `evaluate` gives with as many tokens more, bit for bit.

        Args:
            tokens: at least one; with the questions at most `max_batch`.
            questions: all different, each behind those that it rests on.

        Returns:
            the logits after each token, then after each question.
        """


# --------------------------------------------------------------------------- several texts in one cache


class Lane(Model, Protocol):
    """One of the texts in a shared cache: a model of its own, which can also take part in passes with others.

    Attributes:
        number: from 0 on.
    """

    number: int

    def reading(
        self, tokens: Sequence[int], *, aligned: bool = False, most: Callable[[], int] | None = None
    ) -> Generator[int, None, Logits]:
        """`prefill` chunk by chunk, so that other lanes can have passes in between.

        Yields how many of the tokens are held: first those that need not be evaluated again, then after each chunk
        but the last. Returns the logits after the last token. Whoever closes it early leaves what was read.

        Args:
            tokens, aligned: as in `prefill`.
            most: asked before each chunk for its most tokens; aligned chunks have a size of their own.
        """

    def adopt(self, other: Lane, length: int) -> None:
        """Make the cache of this lane hold the first `length` tokens of another's, or fewer: `tokens` tells.

        Copies what the other holds; nothing is evaluated.
        """

    def saved(self) -> bytes:
        """What the cache holds, to be `restore`d later, by any lane of the same model under the same settings.

        Raises:
            TargetError: the runner cannot hand it out.
        """

    def restore(self, tokens: Sequence[int], state: bytes) -> None:
        """Make the cache hold what `saved` gave when it held `tokens`.

        Raises:
            TargetError: it cannot; the lane is then empty.
        """


class Part(NamedTuple):
    """What a pass does for one lane.

    Attributes:
        lane: whose text grows.
        tokens: that are appended to it, at least one.
        rows: for how many of the last of them logits are wanted.
    """

    lane: Lane
    tokens: Sequence[int]
    rows: int


class SharedModel(Protocol):
    """Several texts evaluated together: one pass reads the weights once for all of them.

    Attributes:
        lanes: as many as texts can be held.
        n_ctx: most tokens of a lane; one pass may go beyond by `max_rows`, to be taken back after it.
        max_tokens, max_rows: most tokens, and most rows of logits, of a pass.
        drafts_alone: whether a lane's draft can be taken back only if its pass held no other lane.
    """

    n_ctx: int
    max_tokens: int
    max_rows: int
    drafts_alone: bool

    @property
    def lanes(self) -> Sequence[Lane]: ...

    def evaluate(self, parts: Sequence[Part]) -> list[Logits]:
        """Append to several lanes in one pass; for each part its logits, shape (rows, n_vocab).

        What a lane owes is evaluated too, in front of its tokens.

        Raises:
            ValueError: no parts, two of one lane, too many tokens or rows, or a lane that has no room for them.
            TargetError: the pass failed; every lane is as before, though it may owe tokens.
        """

    def batches(self, lengths: Sequence[int], lanes: Sequence[Lane] = ()) -> Sequence[int]:
        """The sizes of the batches that a pass over parts of these lengths is made of; each reads the weights again.

        One batch of their sum, where all lanes share one pool of cells. Where each has a cache of its own, a batch
        holds as many tokens of each lane as of any other, so that lanes with more of them go on in further batches,
        and takes in lanes only as long as their numbers follow each other.

        Args:
            lengths: at least one token each.
            lanes: whose parts they are; empty: of the first lanes, in order.
        """


# --------------------------------------------------------------------------- several continuations of one prompt


Likely = Sequence[tuple[int, float]]
"""(token id, natural logarithm of its probability), best first."""


class Node:
    """A token after all that stands before it.

    Attributes:
        parent: the node before it; None for the root.
        token: its id; -1 for the root, which stands for the prompt.
        length: tokens from the start of the prompt to here.
        children: nodes that follow it, by token.
        likely: the likeliest tokens after it, filled in by whoever reads the logits; None until then.
        notes: a place for a drafter's own notes on this node.
    """

    __slots__ = ("children", "holder", "length", "likely", "mark", "notes", "parent", "token")

    def __init__(self, parent: Node | None, token: int, length: int) -> None:
        self.parent = parent
        self.token = token
        self.length = length
        self.children: dict[int, Node] = {}
        self.likely: Likely | None = None
        self.notes: Any = None
        self.holder = 0  # a sequence that holds it, if any does
        self.mark = 0  # the last `keep` that it lived through

    def child(self, token: int) -> Node:
        """The node of `token` after this one, made if there is none."""
        node = self.children.get(token)
        if node is None:
            node = self.children[token] = Node(self, token, self.length + 1)
        return node

    def path(self) -> list[int]:
        """The tokens after the prompt, in order."""
        tokens: list[int] = []
        node = self
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]


def common_ancestor(a: Node, b: Node) -> Node:
    """The last node that two paths of one tree have in common."""
    while a is not b:
        later = a if a.length >= b.length else b
        assert later.parent is not None
        if later is a:
            a = later.parent
        else:
            b = later.parent
    return a


class TreeProtocol(Protocol):
    """A tree of continuations in a target's cache; see `ngramspec.llama.sequences.Sequences` for the contracts."""

    leaves: int
    max_batch: int
    windowed: bool

    def evaluate(self, nodes: Sequence[Node]) -> Logits: ...

    def keep(self, nodes: Sequence[Node]) -> None: ...

    def close(self) -> None: ...


class BranchingTarget(Runner, Protocol):
    """A target whose cache can hold several continuations of a prompt; see `ngramspec.llama.target.Target`."""

    n_seq: int

    @property
    def suppressed(self) -> tuple[int, ...]: ...

    @property
    def can_branch(self) -> bool: ...

    def sequences(self, root: Node) -> TreeProtocol: ...
