"""Keeping a memory fresh while the files of a project change: `add_files` again after each burst of changes.

The library watchfiles says that something changed; what there is then is found out as when the folder was added. So it
does not matter how an editor saves (writing, or renaming a new file over the old one), in what order a checkout
touches files, or whether an event is lost among others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from watchfiles import watch

from ngramspec.memory.files import concerns
from ngramspec.memory.indexing import Added, add_files
from ngramspec.memory.snapshot import MemoryFileError
from ngramspec.memory.store import Store
from ngramspec.tokens import Tokenizer

CALM_MS, BURST_MS = 200, 5000
"""A burst is over after so long without a change, and is cut off when it lasts so long."""

LOOK_MS = 1000
"""How often a folder is looked at in which nothing seems to change: it may be another one by now."""

SHARE = 0.05
"""Most of the time that is spent reading and rewriting: after an update of a second nothing is done for 19."""


def watch_folders(
    store: Store,
    tokenizer: Tokenizer,
    folders: Sequence[Path],
    *,
    threads: int = 1,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Added]:
    """Update a memory whenever files below some folders change; yields what came of each update. Never ends by itself.

    Files are chosen as `add_files` chooses them, so that a change of what a .gitignore names starts no update.
    `sleep` is how it rests between updates.

    Raises:
        MemoryFileError: a folder is gone or another one stands in its place, it cannot be watched, or the store cannot
            be used or written.
        KeyboardInterrupt: a signal came while it was waiting.
    """
    roots = [folder.resolve() for folder in folders]
    began = [_identity(root) for root in roots]
    # What changed before the watcher was at work is found when it first reports, if only that nothing happened.
    first = True
    try:
        for events in watch(
            *roots, watch_filter=None, step=CALM_MS, debounce=BURST_MS, rust_timeout=LOOK_MS, yield_on_timeout=True
        ):
            for root, identity in zip(roots, began, strict=True):
                if _identity(root) != identity:
                    raise MemoryFileError(f"{root} is not the folder any more that was watched; watch it again")
            if first or _concern(events, roots):
                first = False
                start = time.monotonic()
                added = add_files(store, tokenizer, roots, threads=threads, may_be_empty=True)
                if added.new or added.changed or added.gone:
                    yield added
                sleep((time.monotonic() - start) * (1 / SHARE - 1))
    except (OSError, RuntimeError) as error:
        names = ", ".join(map(str, roots))
        raise MemoryFileError(f"cannot watch {names}: {error} (WATCHFILES_FORCE_POLLING=1 polls instead)") from error


def _concern(events: set[tuple[Any, str]], roots: Sequence[Path]) -> bool:
    paths = [Path(name) for _, name in events]
    return any(concerns((path for path in paths if root in path.parents), root) for root in roots)


def _identity(root: Path) -> tuple[int, int]:
    """What tells a folder from another one that has its name."""
    try:
        found = root.stat()
    except FileNotFoundError:
        raise MemoryFileError(f"{root} is gone; what the memory has of it stays (ngramspec memory remove)") from None
    return found.st_dev, found.st_ino
