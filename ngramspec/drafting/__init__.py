"""Drafters: everything that guesses the next tokens, behind the protocol of `ngramspec.drafting.draft`.

A drafter is three methods in a file of its own, and a line in `DRAFTERS`: see "Add a drafter" in `ngramspec/README.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

from ngramspec.drafting.baselines.suffix import SuffixDrafter
from ngramspec.drafting.baselines.target_logits import LookaheadDrafter, NasdDrafter, RecycleDrafter
from ngramspec.drafting.draft import Drafter
from ngramspec.drafting.mixture.drafter import MixtureDrafter, Recall
from ngramspec.drafting.ngram import NGramDrafter

DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "mixture": MixtureDrafter,
    "memory": partial(MixtureDrafter, context=False),
    "ngram": NGramDrafter,
    "suffix": SuffixDrafter,
    "recycle": RecycleDrafter,
    "nasd": NasdDrafter,
    "lookahead": LookaheadDrafter,
}

REMEMBERING = frozenset({"mixture", "memory"})  # the drafters that take a `memory`

DEFAULT = "mixture"


def make_drafter(name: str, *, memory: Recall | bool | None = None, kept: Path | None = None) -> Drafter:
    """A drafter by name.

    Args:
        name: one of DRAFTERS.
        memory: where it looks beside the context; True: what was answered since it was made, and no more.
        kept: as in `MixtureDrafter`; the others keep nothing.

    Raises:
        ValueError: an unknown name, a drafter that cannot remember, or one that has nothing else to draft from.
    """
    if name not in DRAFTERS:
        raise ValueError(f"unknown drafter {name!r}; choose one of: {', '.join(DRAFTERS)}")
    if name not in REMEMBERING:
        if memory:
            able = ", ".join(sorted(REMEMBERING))
            raise ValueError(f"the drafter {name!r} does not use earlier answers (drafters that do: {able})")
        return DRAFTERS[name]()
    if name == "memory" and not memory:
        raise ValueError("the drafter 'memory' requires a memory")
    return DRAFTERS[name](memory=memory, kept=kept if name == DEFAULT else None)


@cache
def uncompiled() -> tuple[str, ...]:
    """Names of the core's modules that run as plain Python; empty where all were compiled at install.

    Drafts are the same then, and take about 40 times as long to find.
    """
    folder = Path(__file__).parent
    # Each module of the core, and no other, has a declaration for the compiler beside it.
    names = [
        ".".join([__package__, *declaration.relative_to(folder).with_suffix("").parts])
        for declaration in sorted(folder.rglob("*.pxd"))
    ]
    return tuple(name for name in names if (spec := find_spec(name)) and (spec.origin or "").endswith(".py"))
