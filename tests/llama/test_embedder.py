"""Tests of `Embedder`: its embeddings equal llama.cpp's for all poolings and memories; the target stays unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from architectures.files import write_models
from support.cli_runner import DEMO
from support.embedding import embed
from support.grid import grid
from support.tiny_models import write_model

from ngramspec.data import ModelError
from ngramspec.llama.embedder import POOLINGS, Embedder
from ngramspec.llama.target import Target

MODELS = ("llama", "gemma3", "qwen35", "mamba2")
TEXT = "had a bad cab face abed fed a dab hag gaff egg head beef cafe deaf bead gab fade " * 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("models"), MODELS)


def of_llama_cpp(model: Path, pooling: str, text: str) -> Any:
    """Return llama-cpp-python's embedding of a text in one batch, pooled by llama.cpp."""
    llama = llama_cpp.Llama(
        str(model), embedding=True, pooling_type=POOLINGS.index(pooling), n_ctx=512, n_threads=1, verbose=False
    )
    try:
        return np.atleast_2d(np.array(llama.embed(text), np.float32))
    finally:
        llama.close()


def cosines(one: Any, other: Any) -> Any:
    assert one.shape == other.shape
    return (one * other).sum(axis=1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)


@grid(name=MODELS, pooling=POOLINGS)
def test_embedder_returns_embeddings_of_llama_cpp(models: dict[str, Path], name: str, pooling: Any) -> None:
    with Target(models[name], ctx_size=512, threads=1, exact="off") as target:
        tokens = target.vocabulary.tokenize(TEXT, special=True)
        assert len(tokens) > 128  # more than one pass
        embedder = Embedder(target, pooling, 512)
        # An earlier text has no influence.
        embed(embedder, tokens[::-1])
        found = embed(embedder, tokens)
    assert cosines(found, of_llama_cpp(models[name], pooling, TEXT)).min() > 0.99999


def test_embedder_keeps_logits_of_target(models: dict[str, Path]) -> None:
    with Target(models["llama"], ctx_size=512, threads=1, exact="on") as target:
        tokens = target.vocabulary.tokenize(TEXT)[:40]
        plain = [target.sequences[0].prefill(tokens).copy(), target.sequences[0].evaluate([5, 6])[-1].copy()]
        target.sequences[0].clear()
        embedder = Embedder(target, "mean", 512)
        steps = embedder.reading(tokens * 5, lambda: 7)
        rows = [target.sequences[0].prefill(tokens).copy()]
        next(steps)
        next(steps)
        rows.append(target.sequences[0].evaluate([5, 6])[-1].copy())
        assert np.array_equal(plain, rows)
        # Neither the sizes of the passes nor an abandoned text have an influence.
        assert cosines(embed(embedder, tokens * 5), embed(embedder, tokens * 5)).min() > 0.99999


def test_embedder_rejects_empty_and_too_long_texts(models: dict[str, Path]) -> None:
    with Target(models["llama"], ctx_size=64, threads=1, exact="off") as target:
        embedder = Embedder(target, "last", 64)
        for tokens in ([], [5] * 65):
            with pytest.raises(ValueError, match="1 to 64 tokens"):
                embed(embedder, tokens)
        assert embed(embedder, [5] * 64).shape == (1, embedder.width)


def test_embedder_uses_pooling_of_file_and_rejects_unsupported_models(tmp_path: Path) -> None:
    def opened(**values: Any) -> Target:
        return Target(write_model(tmp_path / "model.gguf", "llama", **values), ctx_size=64, threads=1, exact="off")

    with Target(DEMO, ctx_size=64, threads=1, exact="off") as target:
        assert Embedder(target, None, 64).pooling == "none"
    with opened(pooling=3) as target:
        assert Embedder(target, None, 64).pooling == "last"
        assert Embedder(target, "mean", 64).pooling == "mean"
    with opened(pooling=4) as target, pytest.raises(ModelError, match="is a ranking model"):
        Embedder(target, None, 64)
    with opened(causal=False) as target, pytest.raises(ModelError, match="uses bidirectional attention"):
        Embedder(target, "mean", 64)
