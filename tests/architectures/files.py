"""Files of the tiny models, with random weights for all tensors that llama.cpp expects and the demo model's vocabulary.

    path = architecture("qwen35", head=True)        # written once per process

llama.cpp lists the tensors that it would load for given hyperparameters (`llama_model_init_from_user`). If these are
invalid, it may end the process. The same name gives the same file.
"""

from __future__ import annotations

import ctypes
import tempfile
import tomllib
import zlib
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from support.model_files import add_demo_fields, demo_fields, finish, written

from architectures.weights import DROPPED, OF_ITS_OWN, agreeing, is_plain, weights

CONTEXT = 8192
"""Context length in the files' metadata."""

_ARRAYS = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
_WIDE = ("layer_multipliers", "head_offsets", "head_vocab_sizes")
"""Keys of arrays of 64-bit integers."""


@cache
def _catalogue() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("models.toml").read_text("utf-8"))


def families() -> dict[str, list[str]]:
    """Return the names of the models by the kind of their memory."""
    return {family: list(models) for family, models in _catalogue()["models"].items()}


def names() -> list[str]:
    """Return the names of all models."""
    return [name for models in families().values() for name in models]


def hyperparameters(name: str, *, head: bool = False) -> tuple[str, dict[str, Any]]:
    """Return (architecture, hyperparameters by key without the architecture) of a model."""
    catalogue = _catalogue()
    own = dict(next(models[name] for models in catalogue["models"].values() if name in models))
    architecture, parts = own.pop("architecture", name), own.pop("parts", [])
    layers = [catalogue["defaults"], *(catalogue["parts"][part] for part in parts), own]
    values = {"context_length": CONTEXT} | {key: v for layer in layers for key, v in _flat(layer)}
    if head:
        count = values["block_count"]
        by_layer = {key: v for key, v in values.items() if isinstance(v, list) and len(v) == count}
        values |= {key: [*v, max(v)] for key, v in by_layer.items()}  # a layer with attention
        values |= {"block_count": count + 1, "nextn_predict_layers": 1}
    return architecture, values


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def write_model(path: Path, name: str, *, half: bool = True, head: bool = False) -> Path:
    """Write a model in this process, with `head` also a NextN layer, which mostly predicts the model's tokens.

    With `half`, large matrices are in half precision; in single precision there is almost no rounding.
    """
    with tempfile.TemporaryDirectory() as folder:
        metadata = Path(folder) / "metadata.gguf"
        finish(_writer(metadata, name, head=head))
        shapes = discover(metadata)
    writer = _writer(path, name, head=head)
    control = [t for t, kind in enumerate(demo_fields()["tokenizer.ggml.token_type"][0]) if kind == _CONTROL]
    tied = "output.weight" not in shapes
    for tensor, shape in shapes.items():
        if tensor.endswith(DROPPED) or (head and tensor.endswith(OF_ITS_OWN)):
            continue
        data = weights(tensor, shape, np.random.default_rng([0, zlib.crc32(tensor.encode())]), tied=tied)
        if tensor == "output.weight" or (tied and tensor == "token_embd.weight"):
            data[control] = 0  # Control tokens are never the most likely, so only the length ends a text.
        if head:
            data = agreeing(tensor, data)
        writer.add_tensor(tensor, data.astype(np.float16 if half and not is_plain(tensor, shape) else np.float32))
    finish(writer)
    return path


architecture = partial(written, write_model)
"""Return the file of a model of `write_model` by its name, written once per process."""

_CONTROL = int(gguf.TokenType.CONTROL)


def _writer(path: Path, name: str, *, head: bool = False) -> gguf.GGUFWriter:
    """Return a writer with hyperparameters and vocabulary."""
    architecture, values = hyperparameters(name, head=head)
    writer = gguf.GGUFWriter(path, architecture)
    # llama.cpp assumes Phi-3's tokens in a file with this name.
    writer.add_name("tiny model" if name == "phi3" else f"tiny {name}")
    size = len(demo_fields()["tokenizer.ggml.tokens"][0])
    for key, value in (values | {"vocab_size": size}).items():
        _add(writer, f"{architecture}.{key}", value)
    add_demo_fields(writer, "tokenizer.ggml.", {})
    return writer


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        kind = gguf.GGUFValueType.UINT64 if key.endswith(_WIDE) else _ARRAYS[type(value[0])]
        writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, sub_type=kind)
    else:
        {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)](key, value)


class _Tensor(ctypes.Structure):
    """The first fields of ggml's `ggml_tensor`."""

    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4))


class _InitParams(ctypes.Structure):
    """The struct `gguf_init_params`."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def discover(metadata: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape in numpy's order of every tensor that llama.cpp looks for, by name, including optional ones."""
    import llama_cpp.llama_cpp as llama
    from llama_cpp._ggml import libggml as base

    base.gguf_init_from_file.restype = ctypes.c_void_p
    base.gguf_init_from_file.argtypes = [ctypes.c_char_p, _InitParams]
    base.ggml_get_name.restype = ctypes.c_char_p
    base.ggml_get_name.argtypes = [ctypes.c_void_p]
    shapes: dict[str, tuple[int, ...]] = {}

    @llama.llama_model_set_tensor_data_t
    def note(tensor: int, _data: object) -> None:
        shape = tuple(ctypes.cast(tensor, ctypes.POINTER(_Tensor)).contents.ne)[::-1]
        while len(shape) > 1 and shape[0] == 1:
            shape = shape[1:]
        shapes[base.ggml_get_name(tensor).decode()] = shape

    context = base.gguf_init_from_file(str(metadata).encode(), _InitParams(True, None))
    params = llama.llama_model_default_params()
    params.n_gpu_layers = 0
    params.load_mtp = True
    model = llama.llama_model_init_from_user(ctypes.cast(context, llama.gguf_context_p_ctypes), note, None, params)
    if not model:
        raise RuntimeError("llama.cpp refuses the hyperparameters")
    llama.llama_model_free(model)
    return shapes
