"""Features that the core loads only if they are used, so that each can be deleted with its line here.

The core must not import them in any other way; see `tests/test_leaves.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

LEAVES = {
    "NextN head": "ngramspec.llama.head",
    "branches": "ngramspec.llama.branches",
    "draft models": "ngramspec.drafting.draft_model.hybrid",
    "RPC": "ngramspec.llama.rpc",
    "grammars": "ngramspec.llama.grammar",
    "schemas": "ngramspec.grammars.json_schema",
    "memory": "ngramspec.memory.memory",
}


def load_leaf(name: str) -> Any:
    """Return the module with which a feature begins."""
    return import_module(LEAVES[name])
