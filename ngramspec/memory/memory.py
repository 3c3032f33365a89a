"""`Memory`: texts that a drafter may look things up in, beyond the context, and where answers are remembered.

`indexes` are the snapshot in the file, and all that was remembered since.
"""

from __future__ import annotations

from collections.abc import Sequence

from ngramspec.drafting.recall import Recall
from ngramspec.memory.journal import EMPTY
from ngramspec.memory.store import Contents, Store


class Memory(Recall):
    """Texts of earlier sessions, of the user's files, and of this process.

    Args:
        contents: what was read from a store; None for a memory that begins empty.
        journal_to: the store that answers are kept in; None keeps them in this process only.

    Attributes:
        stored: tokens that came from the store, seams included.
    """

    def __init__(self, contents: Contents | None = None, *, journal_to: Store | None = None) -> None:
        snapshot = contents.snapshot if contents else None
        super().__init__([snapshot.index] if snapshot is not None and snapshot.header.size else [])
        self._store = journal_to
        journal = contents.journal if contents else EMPTY
        for _, tokens in journal.texts:
            self.hear(tokens)
        self.stored = sum(index.size for index in self.indexes)

    @property
    def keeps(self) -> bool:
        """Whether answers are kept for later sessions."""
        return self._store is not None

    def remember(self, tokens: Sequence[int]) -> None:
        """Remember an answer: `hear` and `keep` it."""
        self.hear(tokens)
        self.keep(tokens)

    def keep(self, tokens: Sequence[int]) -> None:
        """Remember an answer for later sessions, if there is a store to write to.

        Raises:
            MemoryFileError: the store cannot be written; it is as before.
        """
        if tokens and self._store is not None:
            self._store.append(tokens)
