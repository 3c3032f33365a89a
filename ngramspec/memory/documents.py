"""What a memory is made of: files that were added and answers that were remembered, and the table that lists them.

In the text of a memory each document is followed by one seam, so that no context runs from one into the next.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal

import numpy as np

from ngramspec.drafting.token_index import SEAM
from ngramspec.memory.snapshot import Ints, unusable


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a memory.

    Attributes:
        kind: a file that was added, or an answer that was remembered.
        name: the file's absolute path; an answer's date and time.
        tokens: how many.
        size, mtime: the file's bytes and its time of modification (nanoseconds) when it was read; an answer: 0.
    """

    kind: Literal["file", "answer"]
    name: str
    tokens: int
    size: int = 0
    mtime: int = 0


@dataclass(frozen=True, slots=True)
class Text:
    """A document and its tokens."""

    document: Document
    tokens: Ints

    @classmethod
    def of_answer(cls, tokens: array[int], time: float) -> Text:
        """An answer remembered at `time`, seconds since the epoch."""
        name = datetime.fromtimestamp(time).isoformat(sep=" ", timespec="seconds")
        return cls(Document("answer", name, len(tokens)), np.frombuffer(tokens, np.int32))


@dataclass(frozen=True, slots=True)
class Table:
    """The documents of a snapshot in the order of its text, and the model whose tokenizer made them."""

    model: str
    documents: tuple[Document, ...]

    def to_json(self) -> bytes:
        """As it stands in the file; names that are no Unicode survive."""
        documents = [asdict(d) for d in self.documents]
        return json.dumps({"model": self.model, "documents": documents}, separators=(",", ":")).encode("ascii")

    @classmethod
    def from_json(cls, raw: bytes, size: int) -> Table:
        """Read what `to_json` wrote for a text of `size` tokens.

        Raises:
            MemoryFileError: it is no such table; worded to follow the file's name.
        """
        try:
            data = json.loads(raw)
            documents = tuple(_document(d) for d in data["documents"])
            model = data["model"]
            sound = isinstance(model, str) and sum(d.tokens + 1 for d in documents) == size
        except (ValueError, KeyError, TypeError, RecursionError):
            sound = False
        if not sound:
            raise unusable("is damaged: its list of documents does not fit its text")
        return cls(model, documents)

    def texts(self, tokens: Ints) -> list[Text]:
        """The documents with their shares of the text, which are views of it."""
        found, at = [], 0
        for document in self.documents:
            found.append(Text(document, tokens[at : at + document.tokens]))
            at += document.tokens + 1
        return found


def joined(texts: Sequence[Text]) -> Ints:
    """One text with a seam after each."""
    tokens = np.full(sum(len(t.tokens) + 1 for t in texts), SEAM, np.int32)
    at = 0
    for text in texts:
        tokens[at : at + len(text.tokens)] = text.tokens
        at += len(text.tokens) + 1
    return tokens


def _document(data: dict[str, Any]) -> Document:
    document = Document(**data)
    numbers = (document.tokens, document.size, document.mtime)
    if document.kind not in ("file", "answer") or not isinstance(document.name, str):
        raise ValueError("no document")
    if not all(type(n) is int for n in numbers) or document.tokens < 0:
        raise ValueError("no numbers")
    return document


def total(documents: Iterable[Document]) -> int:
    """Tokens of all of them."""
    return sum(d.tokens for d in documents)
