"""`Shape`: the dimensions of a dense transformer, which determine the size and the time of its decode calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ngramspec.data import ModelError
from ngramspec.models.check import read_headers


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
