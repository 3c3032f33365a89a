"""Whether the core of drafting runs compiled, or as the plain Python that it is written in."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def uncompiled() -> tuple[str, ...]:
    """Names of the core's modules that run as plain Python; empty where all were compiled at install.

    Drafts are the same then, and take some 40 times as long to find.
    """
    folder = Path(__file__).parent
    # Each module of the core, and no other, has a declaration for the compiler beside it.
    names = [
        ".".join([__package__, *declaration.relative_to(folder).with_suffix("").parts])
        for declaration in sorted(folder.rglob("*.pxd"))
    ]
    return tuple(name for name in names if (spec := find_spec(name)) and (spec.origin or "").endswith(".py"))
