"""`llama_cpp.Llama` and `ngramspec.Llama` side by side: what a program can see of both, token by token."""

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
from ngramspec.cost.calibration import Calibration
from ngramspec.cost.given import given_curve
from ngramspec.dropin import look_ahead
from ngramspec.policies.policy import FixedPolicy

FREE = given_curve({1: 1.0, 64: 1.0})


class Seen(NamedTuple):
    """What can be seen when a token has come."""

    token: int
    n_tokens: int
    input_ids: tuple[int, ...]
    scores: bytes


class Twins:
    """Two of the same model and settings. Ours drafts 6 tokens in every pass, of which a random beginning is right.

    Args:
        path: the model.
        draft: so many tokens, if not 6.
        settings: of both.
    """

    def __init__(self, path: Path, *, draft: int = 6, **settings: Any) -> None:
        self._text: list[int] = []
        self._draft = draft
        self._before = (0, 0)
        settings = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "seed": 7} | settings
        # First ours, which leaves out AMX kernels that would end the process.
        self.ours = ngramspec.Llama(str(path), exact="off", persist_stats=False, **settings)
        self.parent = llama_cpp.Llama(str(path), **settings)

    def _rest(self, text: Sequence[int]) -> list[int]:
        """What followed in the parent's text."""
        return self._text[len(text) :]

    def both(self, call: Callable[[Any], Any]) -> tuple[Any, Any]:
        """What a call gives from the parent and from ours, which drafts from what the parent has evaluated."""
        theirs = call(self.parent)
        self._text = self.parent.input_ids[: self.parent.n_tokens].tolist()
        # What drafts for ours is made in its first generation.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(look_ahead, "make_drafter", lambda *_, **__: Oracle(self._rest, self.parent.n_vocab()))
            patch.setattr(look_ahead, "make_policy", lambda *_: FixedPolicy(self._draft))
            patch.setattr(Calibration, "load", lambda *_: Calibration.given(FREE))
            return theirs, call(self.ours)

    def same(self, call: Callable[[Any], Any]) -> Any:
        """What a call gives from both, which must be the same."""
        theirs, ours = self.both(call)
        assert ours == theirs
        return theirs

    def begun(self) -> Twins:
        """These, with nothing evaluated and nothing drafted."""
        for llama in (self.parent, self.ours):
            llama.reset()
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llama.ctx), True)
        stats = self.ours.draft_stats
        self._before = stats.accepted, stats.drafted
        return self

    @property
    def drafts(self) -> tuple[int, int]:
        """How many drafted tokens were accepted since these were begun, and how many there were."""
        stats = self.ours.draft_stats
        return stats.accepted - self._before[0], stats.drafted - self._before[1]

    @property
    def drafted(self) -> bool:
        """Whether drafts were accepted, and others refused."""
        accepted, drafted = self.drafts
        return 0 < accepted < drafted

    def close(self) -> None:
        self.ours.close()
        self.parent.close()


def watched(llama: Any, prompt: Sequence[int], count: int, **settings: Any) -> list[Seen]:
    """The first tokens of a generation, and what can be seen at each of them."""
    stream = llama.generate(prompt, **settings)
    found = [look(llama, token) for token in islice(stream, count)]
    stream.close()
    return found


def look(llama: Any, token: int) -> Seen:
    scores = llama._scores[:].tobytes() if llama._logits_all else b""
    return Seen(token, llama.n_tokens, tuple(llama._input_ids.tolist()), scores)


def cached(llama: Any) -> int:
    """Tokens in the KV cache."""
    memory = llama_cpp.llama_get_memory(llama.ctx)
    return int(llama_cpp.llama_memory_seq_pos_max(memory, 0)) + 1


def bare(answer: Any) -> Any:
    """An answer without what differs from one call to the next."""
    if isinstance(answer, dict):
        return {key: bare(value) for key, value in answer.items() if key not in ("id", "created")}
    if isinstance(answer, Iterator):
        return [bare(part) for part in answer]
    if isinstance(answer, np.generic):
        return answer.item()
    return [bare(part) for part in answer] if isinstance(answer, list) else answer
