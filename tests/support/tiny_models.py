"""Models of about 100 kB with random weights that llama.cpp really runs, written by gguf-py.

One of each kind of memory: a KV cache (llama), a KV cache with a sliding window (gemma2), and a recurrent state
that cannot be cut back (mamba).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np

WINDOW = 24
"""Sliding window of the gemma2 model, in tokens."""

WIDTH, LAYERS, HEADS, HIDDEN = 32, 2, 2, 64


def add_vocabulary(writer: gguf.GGUFWriter, controls: Sequence[str] = ()) -> int:
    """Add the bytes, a few letters, a control token for the end of a turn, and others; return the vocabulary's size."""
    kinds = gguf.TokenType
    tokens = [("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL)]
    tokens += [(f"<0x{byte:02X}>", kinds.BYTE) for byte in range(256)]
    tokens += [(letter, kinds.NORMAL) for letter in "\u2581abcdefgh"]
    tokens += [(name, kinds.CONTROL) for name in ("<|im_end|>", *controls)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_vocab_size(len(tokens))
    return len(tokens)


def write_model(
    path: Path,
    architecture: str,
    *,
    chat_template: str | None = None,
    pooling: int | None = None,
    causal: bool = True,
    vocabulary: Callable[[gguf.GGUFWriter], int] = add_vocabulary,
) -> Path:
    """Write a model: "llama", "gemma2" or "mamba"; the same architecture and vocabulary always get the same weights.

    `pooling` and `causal` are the file's entries on embeddings and attention. `vocabulary` adds the vocabulary and
    returns its size.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny {architecture}")
    writer.add_context_length(1024)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_layer_norm_rms_eps(1e-5)
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling))
    if not causal:
        writer.add_causal_attention(False)
    vocab = vocabulary(writer)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    shapes = {"token_embd.weight": (vocab, WIDTH), "output_norm.weight": (WIDTH,)}
    if architecture != "gemma2":  # gemma2 uses its embedding matrix as output matrix.
        shapes["output.weight"] = (vocab, WIDTH)
    block = _mamba(writer) if architecture == "mamba" else _transformer(writer, architecture)
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            data = np.ones(shape)
        elif name.endswith("ssm_a"):
            data = -np.exp(rng.standard_normal(shape))
        else:
            data = rng.standard_normal(shape) * (1.5 if name.startswith("token") else shape[-1] ** -0.5)
        writer.add_tensor(name, data.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _transformer(writer: gguf.GGUFWriter, architecture: str) -> dict[str, tuple[int, ...]]:
    head = WIDTH // HEADS
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (WIDTH,),
        "attn_q.weight": (WIDTH, WIDTH),
        "attn_k.weight": (head, WIDTH),
        "attn_v.weight": (head, WIDTH),
        "attn_output.weight": (WIDTH, WIDTH),
        "ffn_norm.weight": (WIDTH,),
        "ffn_gate.weight": (HIDDEN, WIDTH),
        "ffn_up.weight": (HIDDEN, WIDTH),
        "ffn_down.weight": (WIDTH, HIDDEN),
    }
    if architecture == "gemma2":
        writer.add_sliding_window(WINDOW)
        writer.add_attn_logit_softcapping(50.0)
        writer.add_final_logit_softcapping(30.0)
        shapes |= {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)}
    return shapes


def _mamba(writer: gguf.GGUFWriter) -> dict[str, tuple[int, ...]]:
    inner, state, rank, kernel = 2 * WIDTH, 8, 2, 4
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    return {
        "attn_norm.weight": (WIDTH,),
        "ssm_in.weight": (2 * inner, WIDTH),
        "ssm_conv1d.weight": (inner, kernel),
        "ssm_conv1d.bias": (inner,),
        "ssm_x.weight": (rank + 2 * state, inner),
        "ssm_dt.weight": (inner, rank),
        "ssm_dt.bias": (inner,),
        "ssm_a": (inner, state),
        "ssm_d": (inner,),
        "ssm_out.weight": (WIDTH, inner),
    }
