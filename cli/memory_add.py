"""`ngramspec memory add` and `watch`: files of the user's into a memory, once or whenever they change."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from ngramspec import machine
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.memory import Store
from ngramspec.memory.indexing import Added, add_files, list_skipped
from ngramspec.memory.names import DEFAULT, memory_folder
from ngramspec.models.check import has_gguf_magic

from .console import Terminated, counted, fail, index_bar, note, usage_error
from .options import open_vocabulary

Name = Annotated[str, typer.Option("--memory", metavar="NAME", help="Which memory.")]
ModelName = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Whose tokenizer; the file needs no weights. Default: the default model.",
        show_default=False,
    ),
]


def add(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Files, and folders with all below them.")],
    memory: Name = DEFAULT,
    model: ModelName = None,
) -> None:
    """Add files and folders: ngramspec memory add --model model.gguf ~/src/project

    Of a folder everything below it that is text and that no .gitignore names. Adding again takes in what has
    changed and drops what is gone.
    """
    _add(paths_of(paths), memory, model)


def _add(
    chosen: Sequence[Path], memory: str, model: str | None, *, may_be_empty: bool = False
) -> tuple[Vocabulary, Store]:
    """Add paths and tell what came of it; also whose tokens they were cut into, and where they are."""
    folder = memory_folder(memory)
    vocabulary = _vocabulary(model)
    store = Store(folder, vocabulary.vocabulary_hash, vocabulary.n_vocab, vocabulary.path.name)
    before = store.path()
    try:
        with index_bar() as progress:
            added = add_files(
                store,
                vocabulary,
                chosen,
                threads=machine.physical_cores(),
                progress=progress,
                may_be_empty=may_be_empty,
            )
    except (KeyboardInterrupt, Terminated):
        if store.path() == before:
            note("interrupted; the memory is as it was")
        raise
    note(f"memory {memory!r} for {vocabulary.path.name}: {_in_words(added)}")
    return vocabulary, store


def watch(
    folders: Annotated[list[str], typer.Argument(metavar="FOLDER...", help="Folders, with all below them.")],
    memory: Name = DEFAULT,
    model: ModelName = None,
) -> None:
    """Add folders, and again whenever files in them change, until Ctrl-C: ngramspec memory watch ~/src/project

    What is taken is what `memory add` takes; changed files are replaced, deleted ones dropped. Whatever drafts from the
    memory meanwhile takes up the changes with its next request.
    """
    try:
        from ngramspec.memory.watch import watch_folders
    except ImportError:
        fail("memory watch needs a package that is not installed: pip install 'ngramspec[watch]'")
    chosen = paths_of(folders)
    for path in chosen:
        if path.exists() and not path.is_dir():
            usage_error(f"{path} is not a folder; watch the folder that it is in")
    vocabulary, store = _add(chosen, memory, model, may_be_empty=True)
    note(f"watching {', '.join(map(str, chosen))}; Ctrl-C ends it")
    updates = 0
    with suppress(KeyboardInterrupt, Terminated):
        for added in watch_folders(store, vocabulary, chosen, threads=machine.physical_cores()):
            updates += 1
            note(f"{datetime.now():%H:%M:%S} {_in_words(replace(added, unchanged=0, skipped={}))}")
    note(f"watching ended after {counted(updates, 'update')}; the memory keeps what it has")


def paths_of(names: Sequence[str]) -> list[Path]:
    """Paths that were typed; ends the program if one is empty."""
    # An empty name (an unset variable of a script) would be the current folder.
    if not all(names):
        usage_error("the name of a file or folder is empty")
    return [Path(name) for name in names]


def _vocabulary(model: str | None) -> Vocabulary:
    """The vocabulary of a model as `resolve` finds it, or of a file without weights."""
    path = Path(os.path.expanduser(model)) if model else None
    file = path if path is not None and has_gguf_magic(path) else None
    return open_vocabulary(file, model, "no --model given: the memory is for")


def _in_words(added: Added) -> str:
    others = ((added.changed, "replaced"), (added.gone, "gone"), (added.unchanged, "unchanged"))
    parts = [f"{counted(added.new, 'file')} added"] + [f"{n:,} {what}" for n, what in others if n]
    return f"{', '.join(parts)}; {counted(added.tokens, 'token')} read{list_skipped(added.skipped)}"
