"""Memory: the user's own text as something to draft from, in one file per tokenizer. See `ngramspec.memory.store`."""

from __future__ import annotations

from ngramspec.memory.memory import Memory
from ngramspec.memory.store import Document, MemoryFileError, Store

__all__ = ["Document", "Memory", "MemoryFileError", "Store"]
