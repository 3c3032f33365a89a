"""Tests of the engine on llama.cpp: simultaneous requests get the same texts as alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from architectures.files import write_models
from support.ear import ask, run_engine
from support.grid import grid

from ngramspec.backend import ExactnessMode
from ngramspec.batching.request import Done
from ngramspec.batching.writer import choose_sizes
from ngramspec.cost.bits import KernelClasses
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.llama.target import Target

N_CTX = 512
MODELS = ("llama", "gemma3", "qwen35", "lfm2", "mamba2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"), MODELS)


@grid(name=MODELS, exact=("on", "off"))
def test_engine_on_llama_keeps_texts_of_separate_decoding(models: dict[str, Path], name: str, exact: str) -> None:
    """Every text equals that of token-by-token decoding in a separate context, or differs from it only by rounding."""
    chance = random.Random(name)
    with Target(models[name], exact="on", ctx_size=N_CTX, threads=1) as target:
        base = [chance.randrange(3, target.vocabulary.n_vocab - 3) for _ in range(20)]
        prompts = [[*base * 3, 5 + i, *base[: 5 + i]] for i in range(5)]
        decoder = SpeculativeDecoder(target, drafter=None, exact="on", kernels=KernelClasses())
        plain = []
        for prompt in prompts:
            target.sequences[0].clear()
            plain.append([t for step in decoder.generate(prompt, max_tokens=40) for t in step.tokens])
    with Target(models[name], texts=3, ctx_size=N_CTX, threads=1, exact="on" if exact == "on" else "off") as shared:
        exactness = choose_sizes(shared, exact=True) if exact == "on" else ExactnessMode(max_logit_shift=1.0)
        with run_engine(shared, exactness=exactness, cache_room=1 << 26) as engine:
            ears = [ask(engine, prompt, 40) for prompt in prompts]
            ends = [ear.wait() for ear in ears]
            again = [ask(engine, [*prompt, *ear.tokens[:20]], 20) for prompt, ear in zip(prompts, ears, strict=True)]
            ends += [ear.wait() for ear in again]
    for end in ends:
        assert isinstance(end, Done)
    for text, prompt_text, ear in zip(plain, ears, again, strict=True):
        if exact == "on":
            assert prompt_text.tokens == text
            assert ear.tokens == text[20:]
            continue
        assert prompt_text.tokens == text or any(step.close_calls for step in prompt_text.steps)
