"""ngramspec: any local GGUF model, faster, without a draft model and without changing its output.

    from ngramspec import Sampling, SpeculativeDecoder
    from ngramspec.target import Target

    target = Target("model.gguf")
    decoder = SpeculativeDecoder(target)
    for step in decoder.generate(target.tokenize("def fib(n):"), max_tokens=200):
        print(step.text, end="", flush=True)

`ngramspec.target` is not imported here: it loads llama.cpp, which the algorithms do without.
"""

import os

# Before ggml loads: where it ends the process, it would start a debugger that prints every thread.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

from ngramspec.decoder import SpeculativeDecoder
from ngramspec.draft import Draft, Drafter
from ngramspec.predictor import NGramPredictor
from ngramspec.sampling import Sampling
from ngramspec.stats import Stats, Step

__all__ = ["Draft", "Drafter", "NGramPredictor", "Sampling", "SpeculativeDecoder", "Stats", "Step"]
__version__ = "0.1.0"
