"""llama.cpp's samplers without a vocabulary."""

from __future__ import annotations

import llama_cpp.llama_cpp as llama

from ngramspec.llama.samplers import SamplerChain
from ngramspec.sampling.settings import Sampling


def make_sampler(sampling: Sampling, n_vocab: int) -> SamplerChain:
    """The samplers that a `Sampling` asks for, without a vocabulary and so without DRY and grammars."""
    return SamplerChain(llama, sampling, n_vocab)
