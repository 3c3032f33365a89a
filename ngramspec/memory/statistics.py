"""`Statistics`: what a memory holds for one tokenizer, counted; no name of a file and no text of one is in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import PurePath

from ngramspec.memory.documents import total
from ngramspec.memory.store import Contents


@dataclass(frozen=True, slots=True)
class Statistics:
    """The counts of one file of a memory.

    Attributes:
        model: whose tokenizer.
        files, file_tokens: that were added.
        answers, answer_tokens: that were remembered.
        size_bytes: of the file.
        kinds: tokens of files by the ends of their names (".py"; "" without one), the most first.
    """

    model: str
    files: int
    file_tokens: int
    answers: int
    answer_tokens: int
    size_bytes: int
    kinds: dict[str, int]

    @property
    def tokens(self) -> int:
        """Of files and answers."""
        return self.file_tokens + self.answer_tokens

    @property
    def bytes_per_token(self) -> float:
        """What a token takes on the disk."""
        return self.size_bytes / max(1, self.tokens)

    @classmethod
    def of(cls, contents: Contents) -> Statistics:
        """Count what a store holds, of which there must be a file."""
        assert contents.path
        documents = contents.documents()
        files = [d for d in documents if d.kind == "file"]
        answers = [d for d in documents if d.kind == "answer"]
        kinds = Counter[str]()
        for file in files:
            kinds[PurePath(file.name).suffix.lower()] += file.tokens
        return cls(
            model=contents.table.model,
            files=len(files),
            file_tokens=total(files),
            answers=len(answers),
            answer_tokens=total(answers),
            size_bytes=contents.path.stat().st_size,
            kinds=dict(kinds.most_common()),
        )
