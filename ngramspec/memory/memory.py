"""`Memory`: texts that a drafter may look things up in, beyond the context, and where answers are remembered.

`indexes` are the snapshot in the file, its journal, and what this process heard.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from ngramspec.drafting.recall import Recall
from ngramspec.drafting.token_index import SEAM, TokenIndex
from ngramspec.memory.snapshot import MemoryFileError
from ngramspec.memory.store import NOTHING, Contents, Store


class Memory(Recall):
    """Texts of earlier sessions, of the user's files, and of this process.

    Args:
        contents: what was read from a store.
        store: where it was read, and is read again when it was rewritten; None for a memory of this process alone.
        keeps: answers are kept in the store.

    """

    def __init__(self, contents: Contents = NOTHING, *, store: Store | None = None, keeps: bool = False) -> None:
        self._store, self._keeps, self._contents = store, keeps, contents
        super().__init__(_indexes(contents))

    @property
    def stored(self) -> int:
        """Tokens that came from the store, seams included."""
        return sum(index.size for index in self.indexes[: -len(self._heard)])

    def refresh(self) -> None:
        """Take up what the store has become, if it was rewritten; a file that cannot be used changes nothing."""
        with suppress(MemoryFileError):
            if self._store is None or self._store.is_current(self._contents):
                return
            self._contents = self._store.read()
            if self._keeps:
                # What was heard here is in the file by now.
                self._heard = [TokenIndex()]
            self.indexes[:] = [*_indexes(self._contents), *self._heard]

    @property
    def keeps(self) -> bool:
        """Whether answers are kept for later sessions."""
        return self._keeps and self._store is not None

    def remember(self, tokens: Sequence[int]) -> None:
        """Remember an answer: `hear` and `keep` it."""
        self.hear(tokens)
        self.keep(tokens)

    def keep(self, tokens: Sequence[int]) -> None:
        """Remember an answer for later sessions, if there is a store to keep it in.

        Raises:
            MemoryFileError: the store cannot be written; it is as before.
        """
        if tokens and self._keeps and self._store is not None:
            self._store.append(tokens)


def _indexes(contents: Contents) -> list[TokenIndex]:
    """Of the snapshot and of the journal, as far as there is something in them."""
    found = [contents.snapshot.index] if contents.snapshot is not None else []
    journal = TokenIndex()
    for _, tokens in contents.journal.texts:
        journal.extend(tokens)
        journal.append(SEAM)
    return [index for index in (*found, journal) if index.size]
