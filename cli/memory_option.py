"""The memory a command drafts from: opening it, telling the user about it, and adding answers to it."""

from __future__ import annotations

from collections.abc import Sequence

from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.memory import Memory, MemoryFileError, Store
from ngramspec.memory.names import DEFAULT, memory_folder
from ngramspec.memory.remember import remembers, settings_path
from ngramspec.storage import state_folder

from .console import fail, note


def open_memory(name: str | None, target: Vocabulary, *, keep: bool) -> Memory:
    """The memory `name` for the tokenizer of `target`; what the user should know about it goes to stderr.

    Args:
        name: None for the default memory, which need not exist.
        target: the loaded model, or its vocabulary.
        keep: answers are kept for later sessions, if the user has switched that on.
    """
    keep = keep and remembers()
    folder = memory_folder(name or DEFAULT)
    there = Store.all_in(folder)
    store = Store(folder, target.vocabulary_hash, target.n_vocab, target.path.name)
    if not there and name is None and not keep:
        return Memory(store=store)
    try:
        contents = store.read()
    except MemoryFileError as error:
        note(f"memory {name or DEFAULT!r} is not used: {error}")
        return Memory()
    if contents.path is None and not keep:
        missing = f"memory {name or DEFAULT!r} holds nothing for this model's tokenizer"
        advice = f"ngramspec memory add --memory {name or DEFAULT} --model {target.path} PATH adds files"
        if name is not None:
            fail(f"{missing} ({advice})")
        note(f"{missing}, only for others' ({advice})")
    if contents.journal.damaged:
        note(f"{contents.path}: {contents.journal.damaged} remembered answers are damaged and left out")
    return Memory(contents, store=store, keeps=keep)


def suggest_remembering() -> None:
    """Say what remembering answers would bring: once per user, and never to one who has decided on it."""
    if settings_path().exists():
        return
    told = state_folder() / "told-of-remembering"
    try:
        told.parent.mkdir(parents=True, exist_ok=True)
        told.touch(exist_ok=False)
    except OSError:
        # Told before; or it cannot be noted down, and would be told again and again.
        return
    note(
        "tip: ngramspec memory remember on keeps answers, on this machine, and drafts later ones from them, which made"
        " recorded ones 2 to 8 % faster"
    )


def keep(memory: Memory | None, tokens: Sequence[int]) -> None:
    """Keep an answer for later sessions; failing to keep one does not end anything."""
    if memory is None:
        return
    try:
        memory.keep(tokens)
    except MemoryFileError as error:
        note(f"this answer is not kept for later sessions: {error}")
