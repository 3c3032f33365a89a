"""Drafters: everything that guesses the next tokens, behind the protocol of `ngramspec.drafting.draft`."""

from __future__ import annotations

from collections.abc import Callable

from ngramspec.drafting.draft import Drafter
from ngramspec.drafting.mixture.drafter import MemoryDrafter, MixtureDrafter
from ngramspec.drafting.ngram import NGramDrafter
from ngramspec.drafting.recall import Recall
from ngramspec.drafting.recycle import RecycleDrafter
from ngramspec.drafting.suffix import SuffixDrafter

DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "mixture": MixtureDrafter,
    "memory": MemoryDrafter,
    "ngram": NGramDrafter,
    "suffix": SuffixDrafter,
    "recycle": RecycleDrafter,
}

REMEMBERING = frozenset({"mixture", "memory"})
"""The drafters that take a `memory`."""

DEFAULT = "mixture"


def make_drafter(name: str, *, memory: Recall | bool | None = None) -> Drafter:
    """A drafter by name.

    Args:
        name: one of DRAFTERS.
        memory: where it looks beside the context; True: what was answered since it was made, and no more.

    Raises:
        ValueError: an unknown name, a drafter that cannot remember, or one that has nothing else to draft from.
    """
    if name not in DRAFTERS:
        raise ValueError(f"unknown drafter {name!r}; choose one of: {', '.join(DRAFTERS)}")
    if not memory and name == "memory":
        raise ValueError("the drafter 'memory' drafts from a memory alone, and there is none")
    if not memory:
        return DRAFTERS[name]()
    if name not in REMEMBERING:
        able = ", ".join(sorted(REMEMBERING))
        raise ValueError(f"the drafter {name!r} cannot remember earlier answers (those that can: {able})")
    return DRAFTERS[name](memory=memory)
