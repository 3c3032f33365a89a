"""Tests of synthetic models on llama.cpp: their sizes and types are those of a model that was really quantised."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest

from ngramspec.data import ModelError, TargetError
from ngramspec.llama.requantize import quantize
from ngramspec.model_settings import ModelSettings
from ngramspec.models.gguf import read_header
from ngramspec.quants import models as synthetic
from ngramspec.quants.costs import PRECISION, costs_path
from ngramspec.quants.models import F32, PROMPT, Shape, SyntheticModels, write_model

SHAPES = {
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


@pytest.mark.parametrize("name", SHAPES)
def test_sizes_are_those_of_quantised_models(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
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
    shape = SHAPES["tied"]
    path = quantised(shape, "Q4_K_M", tmp_path)
    real = {name: kind for name, (kind, _) in read_header(path).places.items() if kind}
    assert len(set(real.values())) > 1
    with opened(shape) as models:
        list(models.prepare())
        assert {name: kind for name, (kind, _) in models._rows["Q4_K_M"].items()} == real


def test_loaded_layers_have_the_mixture_of_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "MIN_LAYER_BYTES", 1)
    with opened(replace(SHAPES["tied"], layers=10)) as models:
        list(models.prepare())
        assert models.layers == 2
        rows = models._rows["Q4_K_M"]
        kinds = Counter(rows[f"blk.{i}.ffn_down.weight"][0] for i in models._spread_layers("Q4_K_M"))
        assert sorted(kinds.values()) == [1, 1], "half of the layers have a larger type"


def test_passes_are_timed_and_files_deleted() -> None:
    with opened(SHAPES["tied"]) as models:
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
    with opened(SHAPES["tied"]) as models:
        with pytest.raises(ModelError, match=r"needs .* GiB of memory, but only .* are free; pass a smaller shape"):
            list(models.prepare())
        assert not models._open


def test_failures_of_llama_cpp_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "llama_model_quantize", lambda *_: 1)
    with opened(SHAPES["tied"]) as models, pytest.raises(TargetError, match="cannot quantise this shape to Q4_0"):
        list(models.prepare())
    monkeypatch.undo()
    monkeypatch.setattr(llama, "llama_model_load_from_file", lambda *_: None)
    with opened(SHAPES["tied"]) as models, pytest.raises(TargetError, match="cannot load a model of this shape"):
        list(models.prepare())


def test_measurements_of_another_shape_are_stored_separately() -> None:
    paths = {costs_path(shape, layers) for shape in SHAPES.values() for layers in (-1, 0)}
    assert len(paths) == 6
