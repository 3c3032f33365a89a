"""`Head`: the layer of a model that guesses the token after the next one (NextN, also called MTP), as a model.

DeepSeek-V3 (arXiv 2412.19437, section 2.2) trains one: from the model's hidden state after token i and the embedding of
token i + 1 a layer of its own, with the model's output matrix, guesses token i + 2. A second guess takes the layer's
own output in place of a hidden state that nobody computed yet. So its cost is that of one layer and the output matrix
per token, and it is a `Model` like any other: `evaluate` appends tokens and gives the logits after them.

Its KV cache holds one layer, of which tokens can be cut off. `ngramspec.llama.heads.Heads` has those of several texts.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import llama_cpp.llama_cpp as llama
import numpy as np

from ngramspec.backend import Logits, Progress
from ngramspec.llama import bindings
from ngramspec.llama.hidden_states import HiddenStates, States
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.models.check import has_gguf_magic, parts_of
from ngramspec.models.gguf import read_header
from ngramspec.tokens import common_prefix

if TYPE_CHECKING:
    from ngramspec.llama.heads import Heads


class HeadFeed(NamedTuple):
    """What a pass appends to one sequence."""

    sequence: int  # its number
    first: int  # number of the first token in its text
    tokens: Sequence[int]  # at least one
    states: States  # that go with them, one for each
    # whether there are logits after all of them, or after none. Where only some are asked for, most of llama.cpp's
    # graphs hand out the layer's output after other tokens (llama-cpp-python 0.3.36).
    speaks: bool


HeadRows = tuple[Logits, States]
"""What came of a feed: the logits after its tokens, and the layer's output after the last of them, a row; where it does
not speak, none of either."""

Evaluating = Generator[HeadFeed, HeadRows, Logits]
"""The passes that tokens take, one after the other; the logits after them."""

ARCHITECTURES = frozenset({"deepseek2", "deepseek32", "glm4moe", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next"})
"""Values of general.architecture whose heads are tested here. llama.cpp has graphs for more, and ends the process in
some of them where a tensor is not as it expects."""

LAYER = ".nextn.eh_proj.weight"  # how the name of a tensor ends that each such layer has once


def head_missing(path: Path) -> str:
    """Why the head of a model cannot be run with this build of llama.cpp, in a few words; "" if it can."""
    if bindings.head_functions(llama) is None:
        return "this build of llama-cpp-python cannot run NextN layers"
    if not has_gguf_magic(path):
        return ""  # the loader says what it is
    headers = [read_header(part) for part in parts_of(path) if has_gguf_magic(part)]
    count = sum(name.endswith(LAYER) for header in headers for name in header.shapes)
    architecture = headers[0].metadata.get("general.architecture")
    if not count:
        return "its file holds no NextN layer"
    if architecture not in ARCHITECTURES:
        return f"NextN layers of {architecture} are not supported"
    if count > 1:
        return f"it has {count} NextN layers, and only models with one are supported"
    return ""


class Head:
    """The head of a loaded model, for one text, in a sequence of the context that all heads share.

    The target's hidden states go with the tokens that the target has evaluated. Tokens behind those are evaluated with
    the head's own output, one by one, and once more when their states are there: `owed` counts them. Where older
    states are missing, the cache begins behind them.

    Args:
        heads: of that context.
        states: the target's, of this text.
        number: of the sequence.
    """

    max_batch = MAX_EVALUATE
    can_rollback, replays, exact_rollback, fingerprint = True, False, True, ""

    def __init__(self, heads: Heads, states: HiddenStates, number: int) -> None:
        self._heads, self._states = heads, states
        self.number = number
        self.n_vocab, self.n_ctx = heads.n_vocab, heads.n_ctx
        self.tokens: list[int] = []
        self._first = 0  # number of the first token that the cache holds
        self._true = 0  # number of the first token that is to be evaluated again
        self._known = 0  # tokens of which the target's states were there when that was asked last
        self._own: list[States] = []  # the head's output after its last tokens, as far as it is known

    # ------------------------------------------------------------------ as of `ngramspec.backend.Model`

    def prefill(self, tokens: Sequence[int], *, aligned: bool = False, progress: Progress | None = None) -> Logits:
        """What is not known of the target's states is left out, but the last token."""
        if not 0 < len(tokens) <= self.n_ctx:
            raise ValueError(f"prefill needs 1 to {self.n_ctx} tokens, got {len(tokens)}")
        self.rollback(0 if aligned else min(common_prefix(self.tokens, tokens), len(tokens) - 1))
        row: Logits = self._heads.evaluate([(self, tokens[len(self.tokens) :], 1)])[0][0]
        if progress is not None:
            progress(len(tokens), len(tokens))
        return row

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        """Tokens without a hidden state of the target's take a pass each."""
        if not 0 < len(tokens) <= MAX_EVALUATE:
            raise ValueError(f"evaluate takes 1 to {MAX_EVALUATE} tokens, got {len(tokens)}")
        if len(self.tokens) + len(tokens) > self.n_ctx + MAX_EVALUATE:
            raise ValueError(f"{len(self.tokens) + len(tokens)} tokens do not fit in a context of {self.n_ctx}")
        return self._heads.evaluate([(self, tokens, len(tokens))])[0]

    def rollback(self, length: int) -> None:
        back = len(self.tokens) - length
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"cannot roll back to {length}: the cache holds {len(self.tokens)} tokens")
        if back:
            del self.tokens[length:], self._own[max(0, len(self._own) - back) :]
            self._first, self._true = min(self._first, length), min(self._true, length)
            self._known = min(self._known, length)
            self._heads.cut(self.number, length)

    def clear(self) -> None:
        self._heads.check()
        self._empty(0)
        self.tokens.clear()
        self._known = 0

    @property
    def owed(self) -> int:
        """How many tokens are evaluated again as soon as the target's states for them are there."""
        return len(self.tokens) - max(self._true, self._first)

    def checkpoint(self) -> None:
        """Nothing: the cache can be cut anywhere."""

    # ------------------------------------------------------------------ evaluating

    def appending(self, tokens: Sequence[int], rows: int) -> Evaluating:
        """Append tokens, and evaluate them and what is owed; returns the logits after the last `rows` of them."""
        self._heads.check()
        start = len(self.tokens)
        self.tokens += tokens
        return self._evaluate(start, rows)

    def _evaluate(self, start: int, rows: int) -> Evaluating:
        """Evaluate the tokens from number `start` on, and what is owed; the logits after the last `rows` of them."""
        end, states = len(self.tokens), self._states
        read = end - rows  # the first whose logits are wanted
        known = self._known = states.known(self.tokens, self._known)
        # Tokens from this one on follow states that are yet to come. Where all that is known is newer, none will come.
        told = end if end <= states.first else min(end, known + 1) if known else 0
        seen = np.empty((0, self.n_vocab), np.float32)
        if max(told, start) < read:
            # What the head would make of so many by itself is of no use.
            self._empty(read)
            told = read
        elif told > self._true:
            first = states.first + 1 if states.first else 0
            if first <= self._true:
                first = self._true
                self._heads.cut(self.number, first)
            else:
                first = min(first, read)
                self._empty(first)
            self._own.clear()
            self._true = told
            silent = min(read, told - 1)
            while first < silent:
                step = min(self._heads.max_tokens, silent - first)
                yield self._feed(first, states.before(first, first + step), speaks=False)
                first += step
            seen, own = yield self._feed(first, states.before(first, told))
            self._own.append(own)
            if told == end:
                return seen
        else:
            told = start
        found = np.empty((rows, self.n_vocab), np.float32)
        if told > read:
            found[: told - read] = seen
        for at in range(told, end):
            row, own = yield self._feed(at, self._own[-1] if self._own else states.before(0, 1))
            self._own.append(own)
            if at >= read:
                found[at - read] = row[0]
        return found

    def _empty(self, first: int) -> None:
        """Let the cache hold nothing, and begin at token number `first`."""
        self._heads.cut(self.number, 0)
        self._own.clear()
        self._true, self._first = 0, first

    def _feed(self, first: int, states: States, *, speaks: bool = True) -> HeadFeed:
        """A pass over tokens from number `first` on, one for each state."""
        return HeadFeed(self.number, first, self.tokens[first : first + len(states)], states, speaks)
