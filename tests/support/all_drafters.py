"""A drafter of every name, with a draft model or a memory if it needs one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from support.decoder_loop import milliseconds
from support.mock_target import LineTokenizer, MockTarget

from ngramspec.drafting import DRAFTERS, REMEMBERING, make_drafter
from ngramspec.drafting.draft import Drafter
from ngramspec.drafting.draft_model.hybrid import HybridDrafter
from ngramspec.drafting.draft_model.model import ModelDrafter
from ngramspec.memory.memory import Memory

USER = "user"  # a user-defined drafter, loaded from a file, that breaks all rules
GARBAGE = f"{Path(__file__).with_name('garbage_drafter.py')}:Garbage"

ALL_DRAFTERS = (*DRAFTERS, "model", "hybrid", USER)


def make_any(name: str, small: Callable[[], MockTarget], known: Sequence[int] = ()) -> Drafter:
    """Return a drafter of `ALL_DRAFTERS`; `small` makes the draft model, and the `known` text is its memory, if any."""
    if name == "model":
        return ModelDrafter(small(), clock=milliseconds)
    if name == "hybrid":
        return HybridDrafter(ModelDrafter(small(), clock=milliseconds))
    if name not in REMEMBERING or not known:
        return make_drafter(GARBAGE if name == USER else name, vocabulary=LineTokenizer(small().n_vocab))
    memory = Memory()
    memory.add_text(known)
    return make_drafter(name, memory=memory)
