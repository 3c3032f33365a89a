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
# as a pass takes where another process holds a core (a token of SmolLM2 Q4_1 after 340 others then takes 2,000 ms,
# with 10,000 turns 124, with 4,000 67; 2 threads on 2 cores of an Intel Xeon). Where none does, they must not sleep
# before the slower one is done: flash attention gives one thread up to 256 more of the context's tokens than another,
# 0.25 ms a layer (17.9 ms a token with 4,000 turns, 17.1 with 10,000, 16.6 with more; without it 12.7 with any).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

if TYPE_CHECKING:
    from ngramspec.decoding.decoder import SpeculativeDecoder as SpeculativeDecoder
    from ngramspec.drafting.draft import Draft as Draft
    from ngramspec.drafting.draft import Drafter as Drafter
    from ngramspec.drafting.draft_model.asked_model import DraftModel as DraftModel
    from ngramspec.drafting.draft_model.hybrid import HybridDrafter as HybridDrafter
    from ngramspec.drafting.draft_model.model import ModelDrafter as ModelDrafter
    from ngramspec.drafting.predictor import NGramPredictor as NGramPredictor
    from ngramspec.dropin.llama import Llama as Llama
    from ngramspec.dropin.llama import LlamaDraftModel as LlamaDraftModel
    from ngramspec.llama.target import Target as Target
    from ngramspec.loading.load import LoadedModel as LoadedModel
    from ngramspec.loading.load import load as load
    from ngramspec.loading.settings import LoadSettings as LoadSettings
    from ngramspec.sampling.settings import Sampling as Sampling
    from ngramspec.steps import Stats as Stats
    from ngramspec.steps import Step as Step
else:
    _MODULES = {
        "Draft": "drafting.draft",
        "Drafter": "drafting.draft",
        "Llama": "dropin.llama",
        "LlamaDraftModel": "dropin.llama",
        "LoadSettings": "loading.settings",
        "LoadedModel": "loading.load",
        "DraftModel": "drafting.draft_model.asked_model",
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
    __all__ = list(_MODULES)

    def __getattr__(name):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value
