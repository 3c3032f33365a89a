"""Names of features that the core loads only if they are used, so that each can be deleted with its lines here.

    leaves.ChatFormat(vocabulary)   # imports `ngramspec.llama.chat_format`

The core must not import them in any other way; see `tests/test_leaves.py`. `README.md#delete-a-feature`
lists the steps.
"""

from importlib import import_module
from typing import TYPE_CHECKING

MODULES = {
    "BudgetSampler": "sampling.reasoning",
    "BranchingSequence": "llama.branches",
    "ChatFormat": "llama.chat_format",
    "Grammar": "llama.grammar",
    "GrammarGuide": "drafting.grammar",
    "Grammars": "llama.grammar",
    "Heads": "llama.head",
    "HiddenStates": "llama.head",
    "HybridDrafter": "drafting.draft_model.hybrid",
    "Memory": "memory.memory",
    "ModelDrafter": "drafting.draft_model.model",
    "UserDrafter": "user_class",
    "UserPolicy": "user_class",
    "choose_loop": "decoding.branches",
    "connect": "llama.rpc",
    "head_missing": "llama.head",
    "load_class": "user_class",
    "memory_folder": "memory.memory",
    "open_memory": "memory.memory",
    "schema_grammar": "grammars.json_schema",
    "with_trace": "policies.traced",
    "workers": "llama.rpc",
}

if TYPE_CHECKING:
    from ngramspec.decoding.branches import choose_loop as choose_loop
    from ngramspec.drafting.draft_model.hybrid import HybridDrafter as HybridDrafter
    from ngramspec.drafting.draft_model.model import ModelDrafter as ModelDrafter
    from ngramspec.drafting.grammar import GrammarGuide as GrammarGuide
    from ngramspec.grammars.json_schema import schema_grammar as schema_grammar
    from ngramspec.llama.branches import BranchingSequence as BranchingSequence
    from ngramspec.llama.chat_format import ChatFormat as ChatFormat
    from ngramspec.llama.grammar import Grammar as Grammar
    from ngramspec.llama.grammar import Grammars as Grammars
    from ngramspec.llama.head import Heads as Heads
    from ngramspec.llama.head import HiddenStates as HiddenStates
    from ngramspec.llama.head import head_missing as head_missing
    from ngramspec.llama.rpc import connect as connect
    from ngramspec.llama.rpc import workers as workers
    from ngramspec.memory.memory import Memory as Memory
    from ngramspec.memory.memory import memory_folder as memory_folder
    from ngramspec.memory.memory import open_memory as open_memory
    from ngramspec.policies.traced import with_trace as with_trace
    from ngramspec.sampling.reasoning import BudgetSampler as BudgetSampler
    from ngramspec.user_class import UserDrafter as UserDrafter
    from ngramspec.user_class import UserPolicy as UserPolicy
    from ngramspec.user_class import load_class as load_class
else:

    def __getattr__(name):
        if name not in MODULES:
            raise AttributeError(f"there is no leaf {name!r}")
        return getattr(import_module(f"ngramspec.{MODULES[name]}"), name)
