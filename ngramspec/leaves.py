"""Features that the core loads only if they are used, so that each can be deleted with its line here.

The core must not import them in any other way; see `tests/test_leaves.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

LEAVES = {
    "NextN head": "llama.head",
    "branches": "llama.branches",
    "branching loop": "decoding.branches",
    "draft models": "drafting.draft_model.hybrid",
    "RPC": "llama.rpc",
    "grammars": "llama.grammar",
    "chats": "llama.chat_format",
    "grammar guide": "drafting.grammar",
    "schemas": "grammars.json_schema",
    "memory": "memory.memory",
    "trace": "policies.traced",
}


def load_leaf(name: str) -> Any:
    """Return the module with which a feature begins."""
    return import_module(f"ngramspec.{LEAVES[name]}")
