"""Tests of shapes: names, lists of dimensions, and the shapes of model files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.cli_runner import DEMO
from support.model_files import write_changed_demo, write_model

from ngramspec.data import ModelError
from ngramspec.models.gguf import read_header
from ngramspec.quants.models import SHAPES, is_shape, parse_shape, shape_of

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
    for path, reason in ((write_model(tmp_path / "mamba.gguf", "mamba"), "mamba has "), (experts, "a mixture of")):
        with pytest.raises(ModelError, match=rf"is not a dense transformer like Llama \({reason}.*; pass a shape"):
            shape_of(path)


def test_shape_of_names_a_dimension_that_cannot_be_quantised(tmp_path: Path) -> None:
    path = write_changed_demo(tmp_path / "odd.gguf", {"llama.feed_forward_length": 33}, tensors=True)
    with pytest.raises(ModelError, match=r"ff must be .* in steps of 32"):
        shape_of(path)
