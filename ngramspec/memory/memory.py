"""`Memory`: what a drafter may look up beside the context, and what it is told to remember.

`indexes` are the snapshot in the file, and all that was remembered since.
"""

from __future__ import annotations

from collections.abc import Sequence

from ngramspec.drafting.token_index import SEAM, TokenIndex
from ngramspec.memory.journal import EMPTY
from ngramspec.memory.store import Contents, Store


class Memory:
    """Texts of earlier sessions, of the user's files, and of this process.

    Args:
        contents: what was read from a store; None for a memory that begins empty.
        journal_to: the store that answers are kept in; None keeps them in this process only.

    Attributes:
        indexes: what to look up, the oldest first; all but the last never change. A negative token in one is a
            seam between two texts.
        stored: tokens that came from the store, seams included.
    """

    def __init__(self, contents: Contents | None = None, *, journal_to: Store | None = None) -> None:
        self.indexes: list[TokenIndex] = []
        self._live = TokenIndex()
        self._store = journal_to
        journal = contents.journal if contents else EMPTY
        if contents is not None and contents.snapshot is not None and contents.snapshot.header.size:
            self.indexes.append(contents.snapshot.index)
        self.indexes.append(self._live)
        for _, tokens in journal.texts:
            self.hear(tokens)
        self.stored = sum(index.size for index in self.indexes)

    def remember(self, tokens: Sequence[int]) -> None:
        """Remember an answer: `hear` and `keep` it."""
        self.hear(tokens)
        self.keep(tokens)

    def hear(self, tokens: Sequence[int]) -> None:
        """Remember an answer in this process. One that stays in the context need not be heard: it is there already.

        Args:
            tokens: token ids, none of them negative.
        """
        if tokens:
            self._live.extend(tokens)
            self._live.append(SEAM)

    def keep(self, tokens: Sequence[int]) -> None:
        """Remember an answer for later sessions, if there is a store to write to.

        Raises:
            MemoryFileError: the store cannot be written; it is as before.
        """
        if tokens and self._store is not None:
            self._store.append(tokens)
