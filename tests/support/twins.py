"""`llama_cpp.Llama` and `ngramspec.Llama` with the same settings, and their visible state token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
import numpy as np
import pytest
from architectures.oracle import Oracle

import ngramspec
from ngramspec.cost import store
from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.dropin import llama as dropin
from ngramspec.policies.policy import FixedPolicy

FREE = make_fixed_curve({1: 1.0, 64: 1.0})


class VisibleState(NamedTuple):
    """The visible state of a model after a token."""

    token: int
    n_tokens: int
    input_ids: tuple[int, ...]
    scores: bytes


class Twins:
    """Two instances with the same model and settings; in every pass, ours drafts tokens of which some are correct."""

    def __init__(self, path: Path, *, draft: int = 6, **settings: Any) -> None:
        self._text: list[int] = []
        self._draft = draft
        self._before = (0, 0)
        settings = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "seed": 7} | settings
        # Ours comes first, since it disables AMX kernels that would crash the process.
        self.ours = ngramspec.Llama(str(path), exact="off", persist_stats=False, **settings)
        self.parent = llama_cpp.Llama(str(path), **settings)

    def _rest(self, text: Sequence[int]) -> list[int]:
        """Return the tokens that followed in the parent's text."""
        return self._text[len(text) :]

    def call_both(self, call: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Return the results of a call of the parent and of ours, which drafts the tokens that the parent evaluated."""
        theirs = call(self.parent)
        self._text = self.parent.input_ids[: self.parent.n_tokens].tolist()
        # The first generation of ours makes its drafter.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dropin, "make_drafter", lambda *_, **__: Oracle(self._rest, self.parent.n_vocab()))
            patch.setattr(dropin, "make_policy", lambda *_: FixedPolicy(self._draft))
            patch.setattr(store, "_read", lambda _: FREE.copy())
            return theirs, call(self.ours)

    def compare(self, call: Callable[[Any], Any]) -> Any:
        """Return the result of a call, which must be the same from both."""
        theirs, ours = self.call_both(call)
        assert ours == theirs
        return theirs

    def reset(self) -> Twins:
        """Return the twins after a reset of their caches and counters."""
        for llama in (self.parent, self.ours):
            llama.reset()
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llama.ctx), True)
        stats = self.ours.draft_stats
        self._before = stats.accepted, stats.drafted
        return self

    @property
    def drafts(self) -> tuple[int, int]:
        """(accepted draft tokens, all draft tokens) since the last reset."""
        stats = self.ours.draft_stats
        return stats.accepted - self._before[0], stats.drafted - self._before[1]

    @property
    def drafted(self) -> bool:
        """True if some draft tokens were accepted and others refused."""
        n_accepted, n_drafted = self.drafts
        return 0 < n_accepted < n_drafted

    def close(self) -> None:
        self.ours.close()
        self.parent.close()


def generate_states(llama: Any, prompt: Sequence[int], count: int, **settings: Any) -> list[VisibleState]:
    """Return the first tokens of a generation, with the visible state after each of them."""
    stream = llama.generate(prompt, **settings)
    states = [read_state(llama, token) for token in islice(stream, count)]
    stream.close()
    return states


def read_state(llama: Any, token: int) -> VisibleState:
    scores = llama._scores[:].tobytes() if llama._logits_all else b""
    return VisibleState(token, llama.n_tokens, tuple(llama._input_ids.tolist()), scores)


def count_cached_tokens(llama: Any) -> int:
    """Return the number of tokens in the KV cache."""
    memory = llama_cpp.llama_get_memory(llama.ctx)
    return int(llama_cpp.llama_memory_seq_pos_max(memory, 0)) + 1


def strip_call_fields(answer: Any) -> Any:
    """Return an answer without the fields that differ between calls."""
    if isinstance(answer, dict):
        return {key: strip_call_fields(value) for key, value in answer.items() if key not in ("id", "created")}
    if isinstance(answer, Iterator):
        return [strip_call_fields(part) for part in answer]
    if isinstance(answer, np.generic):
        return answer.item()
    return [strip_call_fields(part) for part in answer] if isinstance(answer, list) else answer
