"""`ngramspec memory`: management of the user's own texts that drafts come from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.progress import DownloadColumn

from ngramspec.cpu.cores import usable_cores
from ngramspec.drafting.mixture import weight_files
from ngramspec.memory.files import SECRET, add_files, list_skipped, remove_files
from ngramspec.memory.memory import DEFAULT, memory_folder, memory_names, saves_answers, write_save_answers
from ngramspec.memory.store import MemoryFileError, Store, total
from ngramspec.models.check import has_gguf_magic
from ngramspec.sampling.settings import option

from .console import Terminated, fail, note, pluralize, printable, usage_error, write_stdout
from .options import open_vocabulary
from .show import counting_bar

HELP = "Manage the files and answers to draft from: files and folders that you add, and saved answers."

NAME: str = option(DEFAULT, "--memory", metavar="NAME", help="Name of the memory.")
_PATHS = typer.Argument(metavar="PATH...", help="Files and folders; folders are added recursively.")


def add(
    paths: Annotated[list[str], _PATHS],
    memory: str = NAME,
    model: str | None = option(
        None,
        "-m",
        metavar="MODEL",
        help="Model whose tokenizer is used; the file needs no weights. Default: the default model.",
    ),
) -> None:
    """Add files and folders.

    Example: ngramspec memory add --model model.gguf ~/src/project

    Folders are added recursively. Binary files, files listed in a .gitignore and files that look like secrets (.env,
    id_rsa) are skipped. Running the command again updates changed files and removes deleted ones.
    """
    folder = memory_folder(memory)
    path = Path(os.path.expanduser(model)) if model else None
    file = path if path is not None and has_gguf_magic(path) else None
    vocabulary = open_vocabulary(file, model, "no --model given; using the tokenizer of")
    store = Store(folder, vocabulary.vocabulary_hash, vocabulary.path.name)
    before = store.generation()
    try:
        with counting_bar("indexing", DownloadColumn()) as progress:
            changes = add_files(store, vocabulary, _paths(paths), threads=usable_cores(), progress=progress)
    except (KeyboardInterrupt, Terminated):
        if store.generation() == before:
            note("interrupted; the memory is unchanged")
        raise
    counts = ((changes.changed, "replaced"), (changes.removed, "removed"), (changes.unchanged, "unchanged"))
    parts = [f"{pluralize(changes.new, 'file')} added"] + [f"{n:,} {what}" for n, what in counts if n]
    read = f"{pluralize(changes.tokens, 'token')} read{list_skipped(changes.skipped)}"
    note(f"memory {memory!r} for {vocabulary.path.name}: {', '.join(parts)}; {read}")
    if SECRET in changes.skipped:
        note("files that look like secrets (.env, keys, passwords) are added only if you name the file itself")


def list_(memory: str = NAME) -> None:
    """List the files of a memory with their tokens."""
    note(f"memories: {', '.join(memory_names()) or 'none'}; saving answers: {'on' if saves_answers() else 'off'}")
    errors = list[str]()
    for store in _stores(memory):
        try:
            documents, model = store.documents(), store.read().model
        except MemoryFileError as error:  # the other files follow
            errors.append(str(error))
            continue
        write_stdout(f"tokenizer of {printable(model).replace(chr(10), ' ')}\n")
        for document in documents:
            if document.kind == "file":
                write_stdout(f"{len(document.tokens):>12,}  {printable(document.name)}\n")
        if answers := [document for document in documents if document.kind == "answer"]:
            write_stdout(f"{total(answers):>12,}  in {pluralize(len(answers), 'saved answer')}\n")
    if errors:
        fail("; ".join(errors))


def remove(
    paths: Annotated[list[str] | None, _PATHS] = None,
    answers: bool = option(False, help="Remove the saved answers."),
    memory: str = NAME,
) -> None:
    """Remove files, folders or answers from a memory, whether the files still exist or not."""
    if not paths and not answers:
        usage_error("pass files or folders to remove, or --answers")
    file_paths, stores = _paths(paths or ()), _stores(memory)
    for path in file_paths:
        count = sum(remove_files(store, path) for store in stores)
        if not count:
            fail(f"memory {memory!r} does not contain {path} (ngramspec memory list shows its files)")
        note(f"removed {pluralize(count, 'file')}: {path}")
    if answers:
        for store in stores:
            store.update(lambda before: [d for d in before if d.kind != "answer"])
        note("removed the saved answers")


def clear(memory: str = NAME) -> None:
    """Delete a memory with all its contents; for the default memory, also delete the draft statistics."""
    stores = Store.all_in(memory_folder(memory))
    for store in stores:
        store.clear()
    note(f"deleted memory {memory!r}" if stores else f"memory {memory!r} is already empty")
    if memory == DEFAULT:
        for file in (files := weight_files.files()):
            file.unlink(missing_ok=True)
        if files:
            note("deleted the draft statistics")


def save_answers(
    state: Annotated[Literal["on", "off"], typer.Argument(help="Whether to save answers for later sessions.")],
) -> None:
    """Turn the saving of chat and complete answers on or off; default: off."""
    write_save_answers(state == "on")
    saved = "answers of chat and complete will be saved on this machine (undo: ngramspec memory save-answers off)"
    unsaved = "answers will not be saved; ngramspec memory remove --answers removes those already saved"
    note(saved if state == "on" else unsaved)


def _stores(memory: str) -> list[Store]:
    stores = Store.all_in(memory_folder(memory))
    if not stores:
        fail(f"memory {memory!r} is empty; ngramspec memory add PATH adds files")
    return stores


def _paths(names: Sequence[str]) -> list[Path]:
    # An empty name, such as an unset variable in a script, would mean the current folder.
    if not all(names):
        usage_error("the name of a file or folder must not be empty")
    return [Path(name) for name in names]


COMMANDS = {"add": add, "list": list_, "remove": remove, "clear": clear, "save-answers": save_answers}
