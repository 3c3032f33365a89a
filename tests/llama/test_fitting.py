"""Fit of layers into the memory of GPUs: numbers alone, and the sizes of real models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from architectures.files import write_model as write_architecture
from support.cli_runner import DEMO
from support.tiny_models import write_model

from ngramspec.llama import bindings
from ngramspec.llama.context_size import token_bytes
from ngramspec.llama.fitting import Demand, Fit, LayerSize, ModelSizes, fit, model_sizes
from ngramspec.llama.target import Target
from ngramspec.models.gguf import GGUFHeader, read_header


def dense(count: int = 4, size: int = 10, output: int = 5, **more: int) -> ModelSizes:
    return ModelSizes(tuple(LayerSize(size - 2, 0, 2) for _ in range(count)), output, **more)


def mixture(count: int = 4, size: int = 10, experts: int = 8, **more: int) -> ModelSizes:
    return ModelSizes(tuple(LayerSize(size - experts, experts, 0) for _ in range(count)), 5, **more)


@pytest.mark.parametrize(
    ("model", "rooms", "found"),
    [
        (dense(), [45], Fit(5)),
        (dense(), [44], Fit(4)),
        (dense(), [28], Fit(3)),
        (dense(), [5], Fit(1)),
        (dense(), [4], Fit(0)),
        (dense(compute=10), [45], Fit(4)),
        (dense(largest=4), [45], Fit(5)),
        (dense(largest=5), [44], Fit(3)),  # 10 for copies of tensors in RAM
        (mixture(), [45], Fit(5)),
        (mixture(), [44], Fit(5, 1)),
        (mixture(), [28], Fit(5, 3)),
        (mixture(), [13], Fit(5, 4)),
        (mixture(), [12], Fit(4, 4)),
        (mixture(), [4], Fit(0, 4)),
        (mixture(largest=1), [44], Fit(5, 1)),
        (mixture(largest=5), [44], Fit(5, 2)),
    ],
)
def test_fit_places_experts_before_layers_in_ram(model: ModelSizes, rooms: list[int], found: Fit) -> None:
    assert fit(model, rooms, rooms) == found


@pytest.mark.parametrize(
    ("rooms", "shares", "found"),
    [
        ([25, 25], [1, 1], Fit(5, 0, (2, 3))),  # llama.cpp's own split would be 3 and 2
        ([30, 15], [2, 1], Fit(5, 0, (3, 2))),
        ([35, 15], [3, 2], Fit(5)),
        ([100, 4], [24, 1], Fit(5)),
        ([20, 15], [1, 1], Fit(4)),
        ([9, 30], [1, 1], Fit(3, 0, (0, 3))),
    ],
)
def test_fit_splits_layers_over_gpus(rooms: list[int], shares: list[int], found: Fit) -> None:
    assert fit(dense(), rooms, shares) == found


def test_fit_keeps_the_number_of_experts_that_the_user_sets() -> None:
    assert fit(mixture(), [100], [1], 2) == Fit(5, 2)
    assert fit(mixture(), [28], [1], 2) == Fit(4, 2)
    assert fit(mixture(), [28], [1], 0) == Fit(3)


# ---------------------------------------------------------------------- sizes


def sizes(path: Path, demand: Demand, **more: Any) -> ModelSizes:
    return model_sizes([read_header(path)], demand, **more)


KINDS = ("qwen3moe", "deepseek2", "gemma2", "phi3", "falcon-h1", "qwen35", "mamba")


@pytest.mark.parametrize("name", KINDS)
def test_cache_of_other_architectures_is_that_of_llama_cpp(name: str, tmp_path: Path) -> None:
    lines: list[str] = []
    path = write_architecture(tmp_path / "m.gguf", name)
    with bindings.log_listener(lines.append), Target(path, n_ctx=1024 - 64, threads=1, exact="off", n_seq=1):
        found = [re.search(r"llama_kv_cache: size = +([\d.]+) MiB \( *1024 cells", line) for line in lines]
    allocated = sum(float(match[1]) for match in found if match)
    assert sum(layer.cache for layer in sizes(path, Demand(1024 - 64)).layers) / 2**20 == allocated


@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q8_0")])
def test_sizes_of_a_model_are_those_of_llama_cpp(types: tuple[Any, Any]) -> None:
    width = {"f16": 2.0, "q8_0": 34 / 32}
    demand = Demand(1024 - 64, 2, (width[types[0]], width[types[1]]))
    found = sizes(DEMO, demand)
    with Target(
        DEMO, texts=2, n_ctx=1024 - 64, threads=1, exact="off", cache_type_k=types[0], cache_type_v=types[1]
    ) as t:
        assert sum(layer.cache for layer in found.layers) == token_bytes(t.weights, 2) * 1024
        embeddings = read_header(DEMO).sizes["token_embd.weight"]
        assert found.output + sum(layer.dense for layer in found.layers) - t.weights.size_bytes in (0, -embeddings)
    assert not any(layer.experts for layer in found.layers)


def test_sizes_leave_out_tensors_that_are_in_ram() -> None:
    whole = sizes(DEMO, Demand())
    without = sizes(DEMO, Demand(), in_ram=lambda name: name.startswith("blk.0.ffn"))
    assert without.layers[0].dense < whole.layers[0].dense
    assert without.layers[1:] == whole.layers[1:]
    assert sizes(DEMO, Demand(), in_ram=lambda name: True)[:2] == (
        tuple(LayerSize(0, 0, layer.cache) for layer in whole.layers),
        0,
    )


def test_recurrent_layers_have_no_cache(tmp_path: Path) -> None:
    path = write_model(tmp_path / "mamba.gguf", "mamba")
    assert [layer.cache for layer in sizes(path, Demand()).layers] == [0, 0]


@pytest.mark.parametrize(
    ("shapes", "width"),
    [
        ({"attn_k": (64, 32), "attn_v": (64, 16)}, 48),
        ({"attn_k": (64, 32)}, 64),
        ({"attn_kv_a_mqa": (64, 576)}, 576),
        ({"attn_qkv": (64, 96)}, 32),  # 4 heads and 1 KV head of 16
        ({"attn_qkv": (64, 96), "ssm_in": (64, 64)}, 0),
    ],
)
def test_width_of_the_cache_follows_from_the_tensors(shapes: Mapping[str, tuple[int, ...]], width: int) -> None:
    metadata = {
        **{"general.architecture": "x", "x.block_count": 1, "x.attention.head_count": 4},
        **{"x.attention.head_count_kv": 1, "x.context_length": 192},
    }
    made = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    header = GGUFHeader(len(made), metadata, b"", 0, {}, made, dict.fromkeys(made, (24, 0)))
    assert model_sizes([header], Demand(element_bytes=(1, 1))).layers[0].cache == 256 * width


def test_buffers_grow_without_flash_attention() -> None:
    assert sizes(DEMO, Demand(8192)).compute * 4 < sizes(DEMO, Demand(8192, flash=False)).compute
