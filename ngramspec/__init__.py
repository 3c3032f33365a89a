"""ngramspec: any local GGUF model, faster, with no draft model needed and its output unchanged.

    import ngramspec

    with ngramspec.load("model.gguf") as model:
        for step in model.decoder.generate(model.target.vocabulary.tokenize("def fib(n):"), max_tokens=200):
            print(step.text, end="", flush=True)

Importing this package is cheap: it imports the module of a name when the name is first used. Only `load`,
`LoadSettings`, `Target`, `Llama` and `LlamaDraftModel` load llama.cpp; the algorithms do not require it.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from ngramspec.data import __version__ as __version__

# Set before ggml loads. Otherwise ggml starts a debugger that prints every thread when it ends the process.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")
# Set before libgomp loads. GOMP_SPINCOUNT is the number of turns that a thread waits for the others before it sleeps.
# Few turns make decoding slow on an idle machine, and many on a busy one; see ngramspec/policies/README.md.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")

if TYPE_CHECKING:
    from ngramspec.decoding.decoder import SpeculativeDecoder as SpeculativeDecoder
    from ngramspec.drafting.draft import Ask as Ask
    from ngramspec.drafting.draft import Draft as Draft
    from ngramspec.drafting.draft import Drafter as Drafter
    from ngramspec.drafting.draft_model.hybrid import HybridDrafter as HybridDrafter
    from ngramspec.drafting.draft_model.model import ModelDrafter as ModelDrafter
    from ngramspec.drafting.predictor import NGramPredictor as NGramPredictor
    from ngramspec.dropin.llama import Llama as Llama
    from ngramspec.dropin.llama import LlamaDraftModel as LlamaDraftModel
    from ngramspec.llama.target import Target as Target
    from ngramspec.loading.load import LoadedModel as LoadedModel
    from ngramspec.loading.load import load as load
    from ngramspec.loading.settings import LoadSettings as LoadSettings
    from ngramspec.policies.policy import Policy as Policy
    from ngramspec.sampling.settings import Sampling as Sampling
    from ngramspec.steps import Stats as Stats
    from ngramspec.steps import Step as Step
else:
    _MODULES = {
        "Ask": "drafting.draft",
        "Draft": "drafting.draft",
        "Drafter": "drafting.draft",
        "Llama": "dropin.llama",
        "LlamaDraftModel": "dropin.llama",
        "LoadSettings": "loading.settings",
        "LoadedModel": "loading.load",
        "HybridDrafter": "drafting.draft_model.hybrid",
        "ModelDrafter": "drafting.draft_model.model",
        "NGramPredictor": "drafting.predictor",
        "Policy": "policies.policy",
        "Sampling": "sampling.settings",
        "SpeculativeDecoder": "decoding.decoder",
        "Stats": "steps",
        "Step": "steps",
        "Target": "llama.target",
        "load": "loading.load",
    }
    __all__ = list(_MODULES)

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value
