"""`Shape`: the dimensions of a dense transformer. `SyntheticModels`: some of its layers with random weights.

llama.cpp's quantiser selects the types in a file with all layers, in which every matrix has two rows. The loaded models
repeat these rows. The output layer is a separate model: one layer with the whole vocabulary.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ngramspec.data import ModelError, TargetError
from ngramspec.llama.bindings import last_complaint
from ngramspec.llama.requantize import quantize
from ngramspec.llama.trial import TrialContext, open_file
from ngramspec.model_settings import ModelSettings
from ngramspec.models.check import read_headers
from ngramspec.models.gguf import BLOCKS, MAGIC, read_header


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a transformer without experts, as in Llama; it raises a ValueError for one that is out of range."""

    layers: int  # number of layers without the output layer
    embd: int  # width of the hidden state
    ff: int  # width of the feed-forward part
    heads: int  # number of attention heads
    kv_heads: int  # number of key and value heads
    head_dim: int  # width of a head
    vocab: int  # number of tokens in the vocabulary
    tied: bool = False  # whether the output layer has the weights of the token embeddings

    def __post_init__(self) -> None:
        # llama.cpp loads at most 512 layers, and its smallest blocks of quantised weights contain 32.
        limits = {"layers": (512, 1), "embd": (2**20, 32), "ff": (2**20, 32), "heads": (1024, 1), "kv_heads": (1024, 1)}
        for name, (most, multiple) in (limits | {"head_dim": (1024, 2), "vocab": (2**24, 1)}).items():
            value = getattr(self, name)
            if not multiple <= value <= most or value % multiple:
                steps = f", in steps of {multiple}" if multiple > 1 else ""
                raise ValueError(f"{name} must be from {multiple} to {most}{steps}, got {value}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")
        if self.heads * self.head_dim % 32:
            raise ValueError(f"heads times head_dim must be a multiple of 32, got {self.heads} times {self.head_dim}")

    @property
    def text(self) -> str:
        """The dimensions as `parse_shape` reads them."""
        words = asdict(self) | {"tied": "yes" if self.tied else "no"}
        return ",".join(f"{name}={word}" for name, word in words.items())

    @property
    def parameters(self) -> int:
        """Number of weights in matrices."""
        return sum(columns * rows for columns, rows in self.matrices(range(self.layers), self.vocab).values())

    def matrices(self, layers: Iterable[int], vocab: int) -> dict[str, tuple[int, int]]:
        """Return (columns, rows) of the tables for a vocabulary and of the matrices of layers, by llama.cpp's names."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = {"attn_q": queries, "attn_k": keys, "attn_v": keys, "ffn_gate": self.ff, "ffn_up": self.ff}
        sizes = {name: (self.embd, count) for name, count in rows.items()}
        sizes |= {"attn_output": (queries, self.embd), "ffn_down": (self.ff, self.embd)}
        tables = ["token_embd.weight"] if self.tied else ["token_embd.weight", "output.weight"]
        matrices = {f"blk.{i}.{name}.weight": size for i in layers for name, size in sizes.items()}
        return dict.fromkeys(tables, (self.embd, vocab)) | matrices


NAMES = [field.name for field in fields(Shape)]

SHAPES: Mapping[str, str] = json.loads(Path(__file__).with_name("shapes.json").read_bytes())
"""Lists of the dimensions of well-known models by name."""


def is_shape(text: str) -> bool:
    """Return True if a text is the name of a shape, or lists dimensions."""
    return text.lower() in SHAPES or text.partition("=")[0] in NAMES


def parse_shape(text: str) -> Shape:
    """Return the shape of a name in `SHAPES` or of a list of dimensions; raise a ValueError if it is neither."""
    values: dict[str, Any] = {}
    for item in SHAPES.get(text.lower(), text).split(","):
        name, _, value = item.partition("=")
        if name not in NAMES:
            raise ValueError(f"{item!r} is not a dimension; use the form {SHAPES['qwen2.5-1.5b']}")
        if name in values:
            raise ValueError(f"{name} is listed twice")
        if name == "tied":
            if value not in ("yes", "no"):
                raise ValueError(f"tied must be yes or no, got {value!r}")
            values[name] = value == "yes"
        elif value.isascii() and value.isdecimal() and len(value) < 10:
            values[name] = int(value)
        else:
            raise ValueError(f"{name} must be a whole number, got {value!r}")
    return _make(values)


def _make(values: Mapping[str, Any]) -> Shape:
    """Return a shape, of which kv_heads and head_dim are optional."""
    if values.get("heads"):
        values = {"kv_heads": values["heads"], "head_dim": values.get("embd", 0) // values["heads"]} | dict(values)
    if missing := [name for name in NAMES[:-1] if name not in values]:
        raise ValueError(f"the shape lacks {', '.join(missing)}; use the form {SHAPES['qwen2.5-1.5b']}")
    return Shape(**values)


def shape_of(path: Path) -> Shape:
    """Return the shape of the model in a GGUF file, which was checked; raise a ModelError if it is not like Llama."""
    headers = read_headers(path)
    metadata = headers[0].metadata
    tensors = {name: shape for header in headers for name, shape in header.shapes.items()}
    kind = metadata.get("general.architecture")
    keys = {"layers": "block_count", "embd": "embedding_length", "ff": "feed_forward_length"}
    keys |= {"heads": "attention.head_count", "kv_heads": "attention.head_count_kv", "head_dim": "attention.key_length"}
    try:
        if metadata.get(f"{kind}.expert_count"):
            raise ValueError("a mixture of experts")
        if not {"token_embd.weight", "blk.0.attn_output.weight", "blk.0.ffn_down.weight"} <= tensors.keys():
            raise ValueError(f"{kind} has other layers")
        values = {name: metadata.get(f"{kind}.{key}") for name, key in keys.items()}
        known = {
            name: value for name, value in values.items() if value is not None or name not in ("kv_heads", "head_dim")
        }
        if missing := [keys[name] for name, value in known.items() if not isinstance(value, int)]:
            raise ValueError(f"{missing[0]} is not one number for all layers")
        vocab, tied = tensors["token_embd.weight"][-1], "output.weight" not in tensors
        return _make(known | {"vocab": vocab, "tied": tied})
    except ValueError as error:
        what = f"{path.name} is not a dense transformer like Llama ({error})"
        raise ModelError(f"{what}; pass a shape such as qwen2.5-1.5b instead") from error


PROMPT = 128  # number of tokens in a timed prompt

MIN_LAYER_BYTES = 96 * 2**20  # minimum bytes of the loaded layers as Q4_0: more than most processors cache
ROWS = 2  # rows of each quantised matrix; llama.cpp does not quantise a matrix with one row
SPARE = 2**30  # bytes of RAM and disk that must stay free

F32, Q4_0 = 0, 2  # ggml.h, enum ggml_type

Part = tuple[str, Sequence[int], int]
"""A model to load: its quantisation, the numbers of its layers in the whole model, and the size of its vocabulary."""

Tensors = Mapping[str, tuple[int, tuple[int, ...], bytes]]
"""ggml type, shape (number of columns, then of rows) and the bytes of some rows, which are repeated, by name."""


class SyntheticModels(ExitStack):
    """Models with random weights; the context manager frees them and deletes their files.

    A negative `n_gpu_layers` means all, and `depth` is the number of tokens in the context before each pass.
    """

    def __init__(
        self, shape: Shape, quantisations: Sequence[str], settings: ModelSettings, *, n_gpu_layers: int, depth: int
    ) -> None:
        super().__init__()
        self._shape, self._quantisations, self._settings = shape, quantisations, settings
        self._n_gpu_layers, self._depth = n_gpu_layers, depth
        layer_bytes = sum(_bytes(Q4_0, *size) for size in shape.matrices([0], vocab=0).values())
        # Number of loaded layers; at least two, because half of them have larger types in mixed quantisations.
        self.layers = min(shape.layers, max(2, -(-MIN_LAYER_BYTES // layer_bytes)))
        # Size in bytes of each quantisation, and its output layer, which others with the same type share.
        self.files: dict[str, tuple[int, str]] = {}
        self.outputs: dict[str, str] = {}  # quantisation of the one layer in front of each output layer
        self._rows: dict[str, dict[str, tuple[int, bytes]]] = {}  # type and rows of the tensors, by quantisation
        folder = tempfile.TemporaryDirectory(prefix="ngramspec-quants-", ignore_cleanup_errors=True)
        self._folder = Path(self.enter_context(folder))
        self._open: dict[str, TrialContext] = {}

    def prepare(self) -> Iterator[str]:
        """Write and load the models, and yield the name of each before it is written."""
        yield "quantising"
        shape, source = self._shape, self._path("source")
        rng = np.random.default_rng(0)
        tensors = {}
        for name, (columns, _) in shape.matrices(range(shape.layers), shape.vocab).items():
            values = rng.standard_normal((ROWS, columns), np.float32) * np.float32(0.02)
            tensors[name] = F32, (columns, ROWS), values.tobytes()
        write_model(source, shape, shape.layers, shape.vocab, tensors)
        for name in self._quantisations:
            self._quantise(source, name)
        parts: dict[str, Part] = {
            name: (name, self._spread_layers(name), min(256, shape.vocab)) for name in self._quantisations
        }
        for output, name in self.outputs.items():
            parts[output] = name, self._spread_layers(name)[:1], shape.vocab
        self._check_room(parts.values())
        for number, (name, part) in enumerate(parts.items()):
            yield f"loading {name}"
            self._write_part(path := self._path(f"part{number}"), part)
            options = {"n_gpu_layers": self._n_gpu_layers, "depth": self._depth, "prompt": PROMPT}
            self._open[name] = self.enter_context(open_file(path, self._settings, **options))
            if os.name == "posix":  # Windows does not delete files that are open
                path.unlink()

    def seconds(self, name: str, size: int) -> float:
        """Return the time of a pass of a quantisation or output layer; see `TrialContext.seconds`."""
        return self._open[name].seconds(size)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.gguf"

    def _quantise(self, source: Path, name: str) -> None:
        path, shape = self._path("quantised"), self._shape
        if not quantize(source, path, name):
            raise TargetError(f"llama.cpp cannot quantise this shape to {name} ({last_complaint()})")
        places, contents = read_header(path).places, path.read_bytes()
        rows = self._rows[name] = {}
        size = 4 * shape.embd * (2 * shape.layers + 1)  # of the norms
        for tensor, (columns, count) in shape.matrices(range(shape.layers), shape.vocab).items():
            kind, start = places[tensor]
            rows[tensor] = kind, contents[start : start + _bytes(kind, columns, ROWS)]
            size += _bytes(kind, columns, count)
        output = f"output layer {rows['token_embd.weight' if shape.tied else 'output.weight'][0]}"
        self.files[name] = size, output
        self.outputs.setdefault(output, name)

    def _spread_layers(self, name: str) -> list[int]:
        """Return the numbers of the layers to load, so that each mixture of types has its share."""
        rows, count = self._rows[name], self._shape.layers

        def mixture(layer: int) -> list[int]:
            return [rows[matrix][0] for matrix in self._shape.matrices([layer], vocab=0)]

        layers = sorted(range(count), key=mixture)
        return [layers[(2 * i + 1) * count // (2 * self.layers)] for i in range(self.layers)]

    def _check_room(self, parts: Iterable[Part]) -> None:
        needed = SPARE
        for name, layers, vocab in parts:
            matrices = self._shape.matrices(layers, vocab)
            needed += sum(_bytes(self._rows[name][tensor][0], *size) for tensor, size in matrices.items())
        free = {"memory": psutil.virtual_memory().available, "disk space": shutil.disk_usage(self._folder).free}
        for what, amount in free.items():
            if amount < needed:
                raise ModelError(
                    f"measuring this shape needs {needed / 2**30:.1f} GiB of {what}, but only"
                    f" {amount / 2**30:.1f} GiB are free; pass a smaller shape"
                )

    def _write_part(self, path: Path, part: Part) -> None:
        quantisation, layers, vocab = part
        matrices, originals = (self._shape.matrices(numbers, vocab) for numbers in (range(len(layers)), layers))
        tensors: dict[str, tuple[int, tuple[int, ...], bytes]] = {}
        for (name, size), original in zip(matrices.items(), originals, strict=True):
            kind, rows = self._rows[quantisation][original]
            tensors[name] = kind, size, rows
        norms = [f"blk.{i}.{name}" for i in range(len(layers)) for name in ("attn_norm", "ffn_norm")]
        ones = np.ones(self._shape.embd, np.float32).tobytes()
        tensors |= {f"{name}.weight": (F32, (self._shape.embd,), ones) for name in (*norms, "output_norm")}
        write_model(path, self._shape, len(layers), vocab, tensors)


def _bytes(kind: int, columns: int, rows: int = 1) -> int:
    weights, size = BLOCKS[kind]
    return columns // weights * size * rows


def write_model(path: Path, shape: Shape, layers: int, vocab: int, tensors: Tensors) -> None:
    """Write layers of a shape as a GGUF file, version 3 (see `ngramspec.models.gguf`). Raises OSError."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode("ascii")

    numbers = {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": shape.embd,
        "feed_forward_length": shape.ff,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        **dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), shape.head_dim),
        "vocab_size": vocab,
    }
    texts = {"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"}
    metadata = [text(key) + struct.pack("<I", 8) + text(value) for key, value in texts.items()]
    metadata += [text(f"llama.{name}") + struct.pack("<II", 4, number) for name, number in numbers.items()]
    metadata.append(text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-6))
    with path.open("wb") as file:
        file.write(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + b"".join(metadata))
        offset = 0
        for name, (kind, size, _) in tensors.items():
            file.write(text(name) + struct.pack(f"<I{len(size)}QIQ", len(size), *size, kind, offset))
            offset += -(-_bytes(kind, *size) // 32) * 32
        for kind, size, rows in tensors.values():
            file.write(bytes(-file.tell() % 32))
            np.resize(np.frombuffer(rows, np.uint8), _bytes(kind, *size)).tofile(file)
        file.write(bytes(-file.tell() % 32))
