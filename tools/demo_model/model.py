"""Demo model, a small Llama-architecture transformer in torch, and the GGUF names of its tensors.

Every matrix has the orientation that `nn.Linear` and GGUF share, (out, in). Rotary embeddings
rotate adjacent pairs of a head (Su et al. 2021, "RoFormer", section 3.4.2). This is llama.cpp's NORM
layout for the `llama` architecture, so exported weights need no permutation. Input and output
embedding are one matrix, which GGUF expresses by the absence of `output.weight`.
"""

# mypy: disable-error-code="import-not-found,misc,no-untyped-call,no-any-return"

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

RMS_EPS = 1e-5
ROPE_BASE = 10_000.0
CONTEXT = 2048

BLOCK_NAMES = {
    "attn_norm": "attn_norm.weight",
    "query": "attn_q.weight",
    "key": "attn_k.weight",
    "value": "attn_v.weight",
    "attn_out": "attn_output.weight",
    "ffn_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the defaults are those of the demo model before any growth."""

    layers: int = 6
    width: int = 256
    heads: int = 4
    hidden: int = 704
    vocab: int = 4096

    @property
    def head_width(self) -> int:
        return self.width // self.heads


class RmsNorm(nn.Module):
    """Normalization x / rms(x) * weight (Zhang and Sennrich 2019, equation 4)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.size(-1),), self.weight.to(x.dtype), RMS_EPS)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[2i], x[2i+1]) of the last axis; cos, sin: (positions, head_width / 2)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Block(nn.Module):
    """Pre-norm attention and SwiGLU feed-forward, without biases."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, hidden = shape.width, shape.hidden
        self.attn_norm, self.ffn_norm = RmsNorm(width), RmsNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        inputs = self.attn_norm(x)
        query, key, value = (
            part(inputs).view(batch, length, self.shape.heads, self.shape.head_width).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        attention = F.scaled_dot_product_attention(
            rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True
        )
        x = x + self.attn_out(attention.transpose(1, 2).reshape(batch, length, width))
        inputs = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(inputs)) * self.up(inputs))


class DemoModel(nn.Module):
    """Model from token ids (batch, length) to logits (batch, length, vocab) or to the mean loss in nats."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        for name, weight in self.blocks.named_parameters():
            if weight.ndim == 2:
                # Output projections start smaller so that the residual stream's variance does not
                # grow with depth (Radford et al. 2019, section 2.3).
                is_output = name.endswith(("attn_out.weight", "down.weight"))
                shrink = math.sqrt(2 * shape.layers) if is_output else 1.0
                nn.init.normal_(weight, std=0.02 / shrink)
        half = torch.arange(0, shape.head_width, 2) / shape.head_width
        angles = torch.outer(torch.arange(CONTEXT), ROPE_BASE**-half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        length = tokens.size(1)
        # Under bf16 autocast the heads are bf16; float32 tables would promote them to float32.
        kind = torch.bfloat16 if torch.is_autocast_enabled("cpu") else x.dtype
        cos, sin = self.cos[:length].to(kind), self.sin[:length].to(kind)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = F.linear(self.norm(x), self.embedding.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().view(-1, self.shape.vocab), targets.view(-1))

    def gguf_tensors(self) -> dict[str, Tensor]:
        """Return the parameters by GGUF name in the order of the file."""
        tensors = {
            "token_embd.weight": self.embedding.weight,
            "output_norm.weight": self.norm.weight,
        }
        for index, block in enumerate(self.blocks):
            for own, name in BLOCK_NAMES.items():
                tensors[f"blk.{index}.{name}"] = getattr(block, own).weight
        return tensors


def load_gguf(path: Path) -> DemoModel:
    """Return the model stored in `path`, dequantised to float32.

    Raises:
        KeyError: Metadata key or tensor of the `llama` architecture that the file lacks.
    """
    reader = gguf.GGUFReader(str(path))

    def number(key: str) -> int:
        return int(reader.fields[f"llama.{key}"].contents())

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    shape = Shape(
        layers=number("block_count"),
        width=number("embedding_length"),
        heads=number("attention.head_count"),
        hidden=number("feed_forward_length"),
        vocab=int(tensors["token_embd.weight"].shape[1]),
    )
    model = DemoModel(shape)
    with torch.no_grad():
        for name, weight in model.gguf_tensors().items():
            tensor = tensors[name]
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            weight.copy_(torch.from_numpy(values.copy()).view_as(weight))
    return model


def grow(model: DemoModel, layers: int) -> DemoModel:
    """Return a model of `layers` blocks that computes the same function as `model`.

    The added blocks are copies, spread evenly over the depth, whose two output projections are zero.
    Each adds nothing to the residual stream until training changes it. These are the identity blocks
    of Chen, Goodfellow and Shlens 2016, "Net2Net", section 2.4, in pre-norm form.

    Raises:
        ValueError: Value of `layers` below the present depth or above twice that depth.
    """
    depth = model.shape.layers
    extra = layers - depth
    if not 0 <= extra <= depth:
        raise ValueError(f"cannot grow {depth} blocks to {layers}")
    copy_positions = {(index + 1) * depth // extra - 1 for index in range(extra)}
    bigger = DemoModel(Shape(**{**model.shape.__dict__, "layers": layers}))
    blocks: list[nn.Module] = []
    for index, block in enumerate(model.blocks):
        blocks.append(block)
        if index in copy_positions:
            copied_block = copy.deepcopy(block)
            with torch.no_grad():
                copied_block.attn_out.weight.zero_()
                copied_block.down.weight.zero_()
            blocks.append(copied_block)
    bigger.embedding, bigger.norm = model.embedding, model.norm
    bigger.blocks = nn.ModuleList(blocks)
    return bigger
