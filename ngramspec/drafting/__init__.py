"""Drafters: everything that guesses the next tokens, behind the protocol of `ngramspec.draft`."""

from __future__ import annotations

from ngramspec.draft import Drafter
from ngramspec.drafting.ngram import NGramDrafter

DRAFTERS = {"ngram": NGramDrafter}


def make_drafter(name: str) -> Drafter:
    """A drafter by name; raises ValueError for an unknown one."""
    if name not in DRAFTERS:
        raise ValueError(f"unknown drafter {name!r}; choose one of: {', '.join(DRAFTERS)}")
    return DRAFTERS[name]()
