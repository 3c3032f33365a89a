"""Memory: the user's own texts as a source of drafts, in one file per tokenizer (see `ngramspec.memory.store`)."""

from __future__ import annotations

from ngramspec.memory.memory import Memory
from ngramspec.memory.store import Document, MemoryFileError, Store

__all__ = ["Document", "Memory", "MemoryFileError", "Store"]
