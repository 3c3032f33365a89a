"""The drafters by name. `ngramspec.drafting.draft` defines the interface.

A drafter is a class with three methods, in any file or in `DRAFTERS`: see "Add a drafter" in `ngramspec/README.md`.
`make_drafter` constructs those in `DRAFTERS` without arguments, and then sets `Drafter.vocabulary`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

from ngramspec import leaves
from ngramspec.data import CLASS_FORM, is_user_class
from ngramspec.drafting.baselines.suffix import SuffixDrafter
from ngramspec.drafting.baselines.target_logits import LookaheadDrafter, NasdDrafter, RecycleDrafter
from ngramspec.drafting.draft import Drafter
from ngramspec.drafting.mixture.drafter import MixtureDrafter, TextIndexSet
from ngramspec.drafting.predictor import NGramDrafter
from ngramspec.tokens import Tokenizer

DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "mixture": MixtureDrafter,
    "memory": partial(MixtureDrafter, context=False),
    "ngram": NGramDrafter,
    "suffix": SuffixDrafter,
    "recycle": RecycleDrafter,
    "nasd": NasdDrafter,
    "lookahead": LookaheadDrafter,
}

REMEMBERING = frozenset({"mixture", "memory"})  # names of the drafters that use a `memory`
DEFAULT = "mixture"


def make_drafter(
    name: str,
    *,
    memory: TextIndexSet | bool | None = None,
    state_path: Path | None = None,
    vocabulary: Tokenizer | None = None,
) -> Drafter:
    """Create a drafter by its name in `DRAFTERS`, or from the user's class as FILE.py:Class, whose file is run.

    `memory` are texts to draft from in addition to the context; True means the answers since the drafter was created.
    `state_path` is the file for the statistics of `MixtureDrafter`. An unknown `vocabulary`, as in `replay`, is `None`.
    A ValueError means that the name is unknown, the drafter does not use a memory, or it requires one, and a
    UserCodeError that the user's class cannot be used.
    """
    if name not in DRAFTERS and not is_user_class(name):
        raise ValueError(f"unknown drafter {name!r}; choose one of: {', '.join(DRAFTERS)}, or {CLASS_FORM}")
    if name not in REMEMBERING:
        if memory:
            able = ", ".join(sorted(REMEMBERING))
            raise ValueError(f"the drafter {name!r} does not use earlier answers (drafters that do: {able})")
        drafter = leaves.UserDrafter(name, vocabulary) if is_user_class(name) else DRAFTERS[name]()
        drafter.vocabulary = vocabulary
        return drafter
    if name == "memory" and not memory:
        raise ValueError("the drafter 'memory' requires a memory")
    return DRAFTERS[name](memory=memory, state_path=state_path if name == DEFAULT else None)


def supports_prediction(name: str) -> bool:
    """Return True if the drafter of this name can draft from a predicted answer; a user's file is run."""
    if is_user_class(name):
        return leaves.load_class(name, Drafter).prediction is not None
    return name in REMEMBERING


@cache
def find_uncompiled_modules() -> tuple[str, ...]:
    """Return the names of the core's modules that run as plain Python; empty if all were compiled at install.

    Plain Python finds the same drafts, but takes about 40 times as long.
    """
    folder = Path(__file__).parent
    # Only the modules of the core have a declaration file for the compiler next to them.
    names = [
        ".".join([__package__, *declaration.relative_to(folder).with_suffix("").parts])
        for declaration in sorted(folder.rglob("*.pxd"))
    ]
    return tuple(name for name in names if (spec := find_spec(name)) and (spec.origin or "").endswith(".py"))
