"""`SyntheticModels`: some layers of a shape with random weights in several quantisations, whose decode calls are timed.

    with SyntheticModels(shape, ["Q4_0", "Q4_K_M"], settings, n_gpu_layers=-1, depth=256) as models:
        for name in models.prepare():       # writes and loads one model after the other
            ...
        models.files["Q4_0"].size_bytes     # of all layers
        models.seconds("Q4_0", 4)           # of a pass over 4 tokens through `models.layers` layers

llama.cpp's quantiser selects the type of every tensor. It quantises a file with all layers, in which every matrix has
two rows, because quantising whole matrices takes minutes. The loaded models repeat these two rows, which takes the same
time as other weights.

The layers of a quantisation have a small vocabulary. The output layer is a separate model: one layer with the whole
vocabulary. Most quantisations share its type.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import llama_cpp.llama_cpp as llama
import numpy as np
import psutil

from ngramspec import machine
from ngramspec.data import ModelError, TargetError
from ngramspec.llama import bindings, devices
from ngramspec.llama.contexts import make_small_params
from ngramspec.llama.devices import build
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.llama.trial_context import TrialContext
from ngramspec.llama.weights import make_model_params
from ngramspec.machine import Settings
from ngramspec.models.gguf import BLOCKS, read_header
from ngramspec.models.shape import QuantisedShape, Shape
from ngramspec.models.write_gguf import Repeated, write_gguf
from ngramspec.storage import cache_folder

PROMPT = 128  # number of tokens in a timed prompt

MIN_LAYER_BYTES = 96 * 2**20
"""Minimum bytes of the layers that are loaded, as Q4_0: more than the cache of most processors contains."""

FEWEST_LAYERS = 2  # minimum number of loaded layers, because half of them have larger types in mixed quantisations

SMALL_VOCABULARY = 256

ROWS = 2  # rows of each quantised matrix; llama.cpp does not quantise a matrix with one row

SPARE = 2**30  # bytes of RAM and disk that must stay free

F32, Q4_0 = 0, 2  # ggml.h, enum ggml_type


@dataclass(frozen=True, slots=True)
class _Part:
    """A model to load: layers of a quantisation, and the size of its vocabulary."""

    quantisation: str
    layers: Sequence[int]  # numbers of the layers in the whole model
    vocab: int


class SyntheticModels:
    """Models with random weights; `close` frees them and deletes their files.

    Args:
        shape: Dimensions of the whole model.
        quantisations: Names of the quantisations, such as "Q4_K_M".
        settings: Settings of the models; the number of threads does not change.
        n_gpu_layers: Number of layers on the GPU; a negative number means all.
        depth: Number of tokens in the context before each pass.

    Attributes:
        layers: Number of layers in the model of a quantisation.
        files: Size and output layer of the whole model, by quantisation; empty before `prepare`.
        outputs: Quantisation of the layer in front of each output layer, by the name of the output layer.
    """

    def __init__(
        self, shape: Shape, quantisations: Sequence[str], settings: Settings, *, n_gpu_layers: int, depth: int
    ) -> None:
        self._shape, self._quantisations, self._settings = shape, quantisations, settings
        self._n_gpu_layers, self._depth = n_gpu_layers, depth
        matrices = shape.matrices.values()
        layer_bytes = sum(rows * _row_bytes(Q4_0, columns) for columns, rows in matrices)
        self.layers = min(shape.layers, max(FEWEST_LAYERS, -(-MIN_LAYER_BYTES // layer_bytes)))
        self.files: dict[str, QuantisedShape] = {}
        self.outputs: dict[str, str] = {}
        self._rows: dict[str, dict[str, tuple[int, bytes]]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="ngramspec-quants-", ignore_cleanup_errors=True)
        self._open: dict[str, tuple[Any, TrialContext]] = {}
        bindings.init_backend()

    def prepare(self) -> Iterator[str]:
        """Write and load the models, and yield the name of each before it is written.

        Raises:
            ModelError: The machine lacks the memory or the disk space.
            TargetError: llama.cpp cannot quantise or load a model.
        """
        yield "quantising"
        source = self._path("source")
        self._write_source(source)
        for name in self._quantisations:
            self._quantise(source, name)
        parts = {
            name: _Part(name, self._spread_layers(name), min(SMALL_VOCABULARY, self._shape.vocab))
            for name in self._quantisations
        }
        parts |= {
            output: _Part(name, self._spread_layers(name)[:1], self._shape.vocab)
            for output, name in self.outputs.items()
        }
        self._check_room(sum(self._part_bytes(part) for part in parts.values()))
        for number, (name, part) in enumerate(parts.items()):
            yield f"loading {name}"
            path = self._path(f"part{number}")
            self._write_part(path, part)
            self._open[name] = self._load(path)

    def seconds(self, name: str, size: int) -> float:
        """Return the time of a pass of a quantisation or output layer; see `TrialContext.seconds`."""
        return self._open[name][1].seconds(size)

    def close(self) -> None:
        for model, trial in self._open.values():
            trial.close()
            llama.llama_model_free(model)
        self._open.clear()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ quantising

    def _path(self, name: str) -> Path:
        return Path(self._folder.name) / f"{name}.gguf"

    def _write_source(self, path: Path) -> None:
        """Write a file with all tensors of the model, each matrix with `ROWS` rows of random numbers."""
        rng = np.random.default_rng(0)
        tensors = {
            name: _float_tensor((columns, ROWS), rng.standard_normal((ROWS, columns), np.float32) * np.float32(0.02))
            for name, (columns, _) in self._matrices(range(self._shape.layers), self._shape.vocab).items()
        }
        write_gguf(path, _metadata(self._shape, self._shape.layers, self._shape.vocab), tensors)

    def _matrices(self, layers: Sequence[int], vocab: int) -> dict[str, tuple[int, int]]:
        """Return (columns, rows) of the matrices of these layers, of the token embeddings and of the output layer."""
        matrices = {f"blk.{i}.{name}.weight": size for i in layers for name, size in self._shape.matrices.items()}
        tables = ["token_embd.weight"] if self._shape.tied else ["token_embd.weight", "output.weight"]
        return dict.fromkeys(tables, (self._shape.embd, vocab)) | matrices

    def _quantise(self, source: Path, name: str) -> None:
        params = llama.llama_model_quantize_default_params()
        params.ftype = bindings.file_types(llama)[f"LLAMA_FTYPE_MOSTLY_{name}"]
        path = self._path("quantised")
        bindings.log_tail.clear()
        if llama.llama_model_quantize(os.fsencode(source), os.fsencode(path), params) != 0:
            raise TargetError(f"llama.cpp cannot quantise this shape to {name} ({bindings.last_complaint()})")
        places, contents = read_header(path).places, path.read_bytes()
        sizes = self._matrices(range(self._shape.layers), self._shape.vocab)
        rows = self._rows[name] = {}
        for tensor, (columns, _) in sizes.items():
            kind, start = places[tensor]
            rows[tensor] = kind, contents[start : start + ROWS * _row_bytes(kind, columns)]
        norms = 4 * self._shape.embd * (2 * self._shape.layers + 1)
        size = norms + sum(count * _row_bytes(rows[tensor][0], columns) for tensor, (columns, count) in sizes.items())
        output = f"output layer {rows['token_embd.weight' if self._shape.tied else 'output.weight'][0]}"
        self.files[name] = QuantisedShape(size, output)
        self.outputs.setdefault(output, name)

    def _spread_layers(self, name: str) -> list[int]:
        """Return the numbers of the layers to load, so that each mixture of types has its share."""
        rows, count = self._rows[name], self._shape.layers

        def mixture(layer: int) -> tuple[int, ...]:
            return tuple(rows[f"blk.{layer}.{matrix}.weight"][0] for matrix in self._shape.matrices)

        layers = sorted(range(count), key=mixture)
        return [layers[(2 * i + 1) * count // (2 * self.layers)] for i in range(self.layers)]

    # ------------------------------------------------------------------ loading

    def _part_bytes(self, part: _Part) -> int:
        kinds = self._rows[part.quantisation]
        matrices = self._matrices(part.layers, part.vocab)
        return sum(rows * _row_bytes(kinds[name][0], columns) for name, (columns, rows) in matrices.items())

    def _check_room(self, n_bytes: int) -> None:
        free = {"memory": psutil.virtual_memory().available, "disk space": shutil.disk_usage(self._folder.name).free}
        for what, amount in free.items():
            if amount < n_bytes + SPARE:
                raise ModelError(
                    f"measuring this shape needs {(n_bytes + SPARE) / 2**30:.1f} GiB of {what}, but only"
                    f" {amount / 2**30:.1f} GiB are free; pass a smaller shape"
                )

    def _write_part(self, path: Path, part: _Part) -> None:
        contents = self._rows[part.quantisation]
        tensors: dict[str, Repeated] = {}
        for name, (columns, rows) in self._matrices(part.layers, part.vocab).items():
            kind, pattern = contents[name]
            tensors[_renumber(name, part.layers)] = Repeated(
                kind, (columns, rows), pattern, rows * _row_bytes(kind, columns)
            )
        norms = [f"blk.{i}.{name}" for i in range(len(part.layers)) for name in ("attn_norm", "ffn_norm")]
        ones = _float_tensor((self._shape.embd,), np.ones(self._shape.embd, np.float32))
        tensors |= dict.fromkeys([f"{name}.weight" for name in (*norms, "output_norm")], ones)
        write_gguf(path, _metadata(self._shape, len(part.layers), part.vocab), tensors)

    def _load(self, path: Path) -> tuple[Any, TrialContext]:
        """Load a model as `Weights` does, and delete its file if the system allows that."""
        params, _ = make_model_params(self._settings, all_on_gpu=devices.offloads_all(self._n_gpu_layers))
        params.n_gpu_layers = self._n_gpu_layers
        bindings.log_tail.clear()
        model = llama.llama_model_load_from_file(os.fsencode(path), params)
        if not model:
            raise TargetError(f"llama.cpp cannot load a model of this shape ({bindings.last_complaint()})")
        try:
            params = make_small_params(self._settings, self._depth + PROMPT + 2 * MAX_EVALUATE, PROMPT)
            trial = TrialContext(model, params, ())
        except TargetError:
            llama.llama_model_free(model)
            raise
        if os.name == "posix":
            path.unlink()
        trial.begin(self._depth)
        return model, trial


def _row_bytes(kind: int, columns: int) -> int:
    weights, size = BLOCKS[kind]
    return columns // weights * size


def _float_tensor(shape: tuple[int, ...], values: np.ndarray[Any, np.dtype[np.float32]]) -> Repeated:
    raw = values.astype("<f4").tobytes()
    return Repeated(F32, shape, raw, len(raw))


def _renumber(name: str, layers: Sequence[int]) -> str:
    """Return the name of a tensor in a model that contains only these layers."""
    first, number, *rest = name.split(".", 2)
    return f"{first}.{layers.index(int(number))}.{rest[0]}" if first == "blk" else name


def _metadata(shape: Shape, layers: int, vocab: int) -> Mapping[str, str | int | float]:
    return {
        "general.architecture": "llama",
        "llama.block_count": layers,
        "llama.context_length": 4096,
        "llama.embedding_length": shape.embd,
        "llama.feed_forward_length": shape.ff,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.key_length": shape.head_dim,
        "llama.attention.value_length": shape.head_dim,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.dimension_count": shape.head_dim,
        "llama.vocab_size": vocab,
        "tokenizer.ggml.model": "no_vocab",
    }


def measurement_path(shape: Shape, n_gpu_layers: int) -> Path:
    """Return the file of the measurements of a shape; it depends on the build and on the machine."""
    bindings.init_backend()
    conditions = f"{shape.text} {build()} {machine.name()}{devices.gpu_identity()} ngl={n_gpu_layers}"
    return cache_folder("quants") / f"{hashlib.blake2b(conditions.encode(), digest_size=12).hexdigest()}.json"
