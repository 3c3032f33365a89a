"""Tests of shapes, and of models made of them: their sizes and types are those of a model that was really quantised."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from support.cli_runner import DEMO
from support.model_files import write_changed_demo
from support.model_files import write_model as write_tiny_model

from ngramspec.data import ModelError, TargetError
from ngramspec.llama.requantize import quantize
from ngramspec.model_settings import ModelSettings
from ngramspec.models.gguf import read_header
from ngramspec.quants import models as synthetic
from ngramspec.quants.costs import PRECISION, costs_path
from ngramspec.quants.models import (
    F32,
    PROMPT,
    SHAPES,
    Shape,
    SyntheticModels,
    is_shape,
    parse_shape,
    shape_of,
    write_model,
)

TINY = {
    "tied": Shape(8, 256, 256, 4, 2, 64, 64, tied=True),
    "separate": Shape(1, 256, 256, 4, 4, 64, 64),
    "narrow": Shape(3, 96, 160, 3, 3, 32, 65, tied=True),  # K-quants need 256 columns, so llama.cpp replaces them
}

MIXTURES = ("Q4_0", "Q4_K_M", "Q5_K_M")
"""Quantisations for the shape with eight layers, of which some have larger types than others."""


def opened(shape: Shape, names: Sequence[str] = ("Q4_0", "Q4_K_M")) -> SyntheticModels:
    return SyntheticModels(shape, names, ModelSettings(threads=1, threads_batch=1), n_gpu_layers=0, depth=0)


def quantised(shape: Shape, name: str, folder: Path) -> Path:
    """Write a model whose matrices have all rows, and quantise it with llama.cpp."""
    source, path = folder / "source.gguf", folder / f"{name}.gguf"
    rng = np.random.default_rng(1)
    sizes = shape.matrices(range(shape.layers), shape.vocab)
    norms = [f"blk.{i}.{norm}_norm" for i in range(shape.layers) for norm in ("attn", "ffn")]
    sizes |= {f"{norm}.weight": (shape.embd,) for norm in (*norms, "output_norm")}
    tensors = {name: (F32, size, rng.standard_normal(size, np.float32).tobytes()) for name, size in sizes.items()}
    write_model(source, shape, shape.layers, shape.vocab, tensors)
    assert quantize(source, path, name)
    return path


@pytest.mark.parametrize("name", TINY)
def test_sizes_are_those_of_quantised_models(name: str, tmp_path: Path) -> None:
    shape = TINY[name]
    kinds = MIXTURES if name == "tied" else PRECISION
    with opened(shape, kinds) as models:
        assert list(models.prepare())[1:] == [f"loading {part}" for part in (*kinds, *models.outputs)]
        for kind in kinds:
            params = llama.llama_model_default_params()
            params.n_gpu_layers = 0
            model = llama.llama_model_load_from_file(os.fsencode(quantised(shape, kind, tmp_path)), params)
            assert models.files[kind][0] == llama.llama_model_size(model), kind
            llama.llama_model_free(model)


def test_types_are_those_of_a_quantised_model(tmp_path: Path) -> None:
    shape = TINY["tied"]
    path = quantised(shape, "Q4_K_M", tmp_path)
    real = {name: kind for name, (kind, _) in read_header(path).places.items() if kind}
    assert len(set(real.values())) > 1
    with opened(shape) as models:
        list(models.prepare())
        assert {name: kind for name, (kind, _) in models._rows["Q4_K_M"].items()} == real


def test_loaded_layers_have_the_mixture_of_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "MIN_LAYER_BYTES", 1)
    with opened(replace(TINY["tied"], layers=10)) as models:
        list(models.prepare())
        assert models.layers == 2
        rows = models._rows["Q4_K_M"]
        kinds = Counter(rows[f"blk.{i}.ffn_down.weight"][0] for i in models._spread_layers("Q4_K_M"))
        assert sorted(kinds.values()) == [1, 1], "half of the layers have a larger type"


def test_passes_are_timed_and_files_deleted() -> None:
    with opened(TINY["tied"]) as models:
        list(models.prepare())
        folder = models._folder
        assert folder.exists()
        for name in ("Q4_0", "Q4_K_M", *models.outputs):
            assert all(models.seconds(name, size) > 0 for size in (1, 16, PROMPT))
        trial = models._open["Q4_0"]
        rows = trial.evaluate([1, 2], 2)
        assert np.isfinite(rows).all()
    assert not folder.exists()


def test_lack_of_memory_is_an_error_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "SPARE", 2**60)
    with opened(TINY["tied"]) as models:
        with pytest.raises(ModelError, match=r"needs .* GiB of memory, but only .* are free; pass a smaller shape"):
            list(models.prepare())
        assert not models._open


def test_failures_of_llama_cpp_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "llama_model_quantize", lambda *_: 1)
    with opened(TINY["tied"]) as models, pytest.raises(TargetError, match="cannot quantise this shape to Q4_0"):
        list(models.prepare())
    monkeypatch.undo()
    monkeypatch.setattr(llama, "llama_model_load_from_file", lambda *_: None)
    with opened(TINY["tied"]) as models, pytest.raises(TargetError, match="cannot load a model of this shape"):
        list(models.prepare())


def test_measurements_of_another_shape_are_stored_separately() -> None:
    paths = {costs_path(shape, layers) for shape in TINY.values() for layers in (-1, 0)}
    assert len(paths) == 6


LIST = "layers=2,embd=64,ff=96,heads=4,kv_heads=2,head_dim=16,vocab=100,tied=yes"


def test_parse_shape_reads_names_and_lists() -> None:
    assert parse_shape("Qwen2.5-1.5B").text == SHAPES["qwen2.5-1.5b"]
    shape = parse_shape(LIST)
    assert shape.text == LIST
    assert parse_shape("ff=96,layers=2,embd=64,heads=4,vocab=100").text == (
        "layers=2,embd=64,ff=96,heads=4,kv_heads=4,head_dim=16,vocab=100,tied=no"
    )
    assert shape.parameters == 100 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)


PARAMETERS = {
    **{"smollm2-135m": 0.1345, "smollm2-360m": 0.362, "smollm2-1.7b": 1.711, "mistral-7b": 7.25},
    **{"qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.543, "qwen2.5-3b": 3.086, "qwen2.5-7b": 7.61, "qwen2.5-14b": 14.77},
    **{"qwen3-0.6b": 0.596, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02, "qwen3-8b": 8.19},
    **{"llama-3.2-1b": 1.236, "llama-3.2-3b": 3.21, "llama-3.1-8b": 8.03},
}
"""Billions of parameters as the makers of the models state them."""


def test_shapes_have_the_published_numbers_of_parameters() -> None:
    assert {name: parse_shape(name).parameters / 1e9 for name in SHAPES} == pytest.approx(PARAMETERS, rel=0.005)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layers=2", "the shape lacks embd, ff, heads, kv_heads, head_dim, vocab"),
        (LIST.replace("layers", "depth"), "'depth=2' is not a dimension"),
        (f"{LIST},ff=32", "ff is listed twice"),
        (LIST.replace("tied=yes", "tied=1"), "tied must be yes or no, got '1'"),
        (LIST.replace("layers=2", "layers=-2"), "layers must be a whole number, got '-2'"),
        (LIST.replace("layers=2", "layers=0"), "layers must be from 1 to 512, got 0"),
        (LIST.replace("embd=64", "embd=65"), "embd must be from 32 to 1048576, in steps of 32, got 65"),
        (LIST.replace("kv_heads=2", "kv_heads=3"), "heads must be a multiple of kv_heads, got 4 and 3"),
        (LIST.replace("head_dim=16", "head_dim=6"), "heads times head_dim must be a multiple of 32, got 4 times 6"),
        (LIST.replace("heads=4", "heads=0", 1), "heads must be from 1 to 1024, got 0"),
    ],
)
def test_parse_shape_names_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_shape(text)


def test_is_shape_distinguishes_shapes_from_models() -> None:
    assert all(map(is_shape, ("qwen3-8b", LIST, "ff=1")))
    assert not any(map(is_shape, ("model.gguf", "hf:owner/repo", "a=b.gguf", "qwen3-9b")))


def test_shape_of_reads_a_model_file(tmp_path: Path) -> None:
    shape = shape_of(DEMO)
    shapes = read_header(DEMO).shapes
    matrices = shape.matrices(range(shape.layers), shape.vocab)
    assert matrices == {name: size for name, size in shapes.items() if len(size) == 2}
    assert f"blk.{shape.layers}.attn_q.weight" not in shapes


def test_shape_of_rejects_models_with_other_layers(tmp_path: Path) -> None:
    experts = write_changed_demo(tmp_path / "experts.gguf", {"llama.expert_count": 8})
    for path, reason in ((write_tiny_model(tmp_path / "mamba.gguf", "mamba"), "mamba has "), (experts, "a mixture of")):
        with pytest.raises(ModelError, match=rf"is not a dense transformer like Llama \({reason}.*; pass a shape"):
            shape_of(path)


def test_shape_of_names_a_dimension_that_cannot_be_quantised(tmp_path: Path) -> None:
    path = write_changed_demo(tmp_path / "odd.gguf", {"llama.feed_forward_length": 33}, tensors=True)
    with pytest.raises(ModelError, match=r"ff must be .* in steps of 32"):
        shape_of(path)
