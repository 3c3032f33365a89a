"""ngramspec: any local GGUF model, faster, with no draft model needed and its output unchanged.

    import ngramspec

    with ngramspec.load("model.gguf") as model:
        for step in model.decoder.generate(model.target.tokenize("def fib(n):"), max_tokens=200):
            print(step.text, end="", flush=True)

Importing this is cheap: what it names is imported when it is first used. llama.cpp is loaded by `load`, `LoadSettings`,
`Target`, `Llama` and `LlamaDraftModel` alone; the algorithms do without.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from ngramspec.version import __version__ as __version__

# Before ggml loads: where it ends the process, it would start a debugger that prints every thread.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")
# Before libgomp loads, too. Threads that spin for milliseconds, its default of 300,000 turns, wait many times as long
# as a pass takes where another process holds a core (100,000 turns: 258 ms, 4,000: 50, 1,000: 30). Where none does,
# 4,000 are as fast as any (10.9 ms), 1,000 are not (12.0). SmolLM2 Q4_1, 2 threads on 2 cores of an Intel Xeon.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")

if TYPE_CHECKING:
    from ngramspec.decoding.decoder import SpeculativeDecoder
    from ngramspec.drafting.draft import Draft, Drafter
    from ngramspec.drafting.draft_model.asked_model import AskedModel
    from ngramspec.drafting.draft_model.hybrid import HybridDrafter
    from ngramspec.drafting.draft_model.model import ModelDrafter
    from ngramspec.drafting.predictor import NGramPredictor
    from ngramspec.dropin.llama import Llama, LlamaDraftModel
    from ngramspec.llama.target import Target
    from ngramspec.loading.load import Loaded, load
    from ngramspec.loading.settings import LoadSettings
    from ngramspec.sampling.settings import Sampling
    from ngramspec.steps import Stats, Step
else:
    _MODULES = {
        "Draft": "drafting.draft",
        "Drafter": "drafting.draft",
        "Llama": "dropin.llama",
        "LlamaDraftModel": "dropin.llama",
        "LoadSettings": "loading.settings",
        "Loaded": "loading.load",
        "AskedModel": "drafting.draft_model.asked_model",
        "HybridDrafter": "drafting.draft_model.hybrid",
        "ModelDrafter": "drafting.draft_model.model",
        "NGramPredictor": "drafting.predictor",
        "Sampling": "sampling.settings",
        "SpeculativeDecoder": "decoding.decoder",
        "Stats": "steps",
        "Step": "steps",
        "Target": "llama.target",
        "load": "loading.load",
    }

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value


__all__ = [
    "AskedModel",
    "Draft",
    "Drafter",
    "HybridDrafter",
    "Llama",
    "LlamaDraftModel",
    "LoadSettings",
    "Loaded",
    "ModelDrafter",
    "NGramPredictor",
    "Sampling",
    "SpeculativeDecoder",
    "Stats",
    "Step",
    "Target",
    "load",
]
