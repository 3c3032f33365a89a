"""Helpers for tests of the memory: a tokenizer without a model, stores and texts."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from ngramspec.memory.store import Document, Store

N_VOCAB = 256
VOCABULARY = bytes(range(16))
PATIENCE = 120.0


class ByteTokenizer:
    """A tokenizer whose tokens are bytes."""

    n_vocab = N_VOCAB
    vocabulary_hash = VOCABULARY

    def tokenize(self, text: str, *, special: bool = False, add_bos: bool = True) -> list[int]:
        assert not special
        assert not add_bos
        return list(text.encode())


def open_store(folder: Path) -> Store:
    return Store(folder, VOCABULARY, "bytes")


def make_document(name: str, tokens: Sequence[int] = (1, 2, 3, 4, 5)) -> Document:
    return Document("file", name, np.array(tokens, np.int32), 10, 20)


def make_filled_store(folder: Path, count: int = 3) -> Store:
    """Return a store with a few documents, named `file 0` and so on, and two answers in its journal."""
    store = open_store(folder)
    rng = np.random.default_rng(0)
    store.update(lambda _: [make_document(f"file {i}", rng.integers(0, 9, 700).tolist()) for i in range(count)])
    store.append([7, 7, 7, 7, 1])
    store.append([8, 8, 8, 8, 2])
    return store


def names(store: Store) -> list[str]:
    """Return the names of the files in a store."""
    return [d.name for d in store.documents() if d.kind == "file"]


def texts(store: Store) -> dict[str, str]:
    """Return the text of the files in a store, by name without the folder."""
    documents = store.documents()
    return {Path(d.name).name: bytes(d.tokens.tolist()).decode() for d in documents if d.kind == "file"}


def answers(store: Store) -> list[list[int]]:
    """Return the tokens of the answers in a store."""
    return [d.tokens.tolist() for d in store.documents() if d.kind == "answer"]


def fork_process(work: Callable[..., None], *arguments: object) -> BaseProcess:
    """Start a fork of this process that calls `work`."""
    process = multiprocessing.get_context("fork").Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def wait_for_exit(process: BaseProcess) -> int | None:
    """Return the exit code of a process: 1 if it raised, negative if a signal killed it, `None` if it hangs."""
    process.join(PATIENCE)
    return process.exitcode
