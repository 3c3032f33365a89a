"""Random weights with which memory matters.

A gate keeps a recurrent state for several tens of tokens, and the logits of a position depend on all of them. The
logits differ clearly from each other, so that errors of a memory are visible and rounding does not look like one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DROPPED = (".scale", ".input_scale", "rope_factors_long.weight", "rope_factors_short.weight")
"""Ends of names of optional tensors that the models omit."""

_PLAIN = (
    *("conv", "ssm_a", "ssm_d.", "norm", "gate_inp", "time_mix_lerp", "time_mix_first", ".bias", "altup", "hc_"),
    *("_base", "attn_res", "_ape"),
)


def is_plain(name: str, shape: tuple[int, ...]) -> bool:
    """Return True if a tensor has type F32: llama.cpp has no other kernels for some, and small ones gain nothing."""
    return len(shape) < 2 or shape[-1] % 32 != 0 or any(part in name for part in _PLAIN)


def weights(name: str, shape: tuple[int, ...], rng: np.random.Generator, *, tied: bool) -> NDArray[np.float64]:
    """Return random weights of a scale that keeps activations near 1 and the gates of a memory half open.

    If `tied`, the embedding is also the output matrix; the blocks must then outweigh it, or every token repeats itself.
    """
    last = name.removesuffix(".weight").removesuffix(".bias").split(".")[-1]
    noise = rng.standard_normal(shape)
    if tied:
        if last == "token_embd":
            return noise * shape[-1] ** -0.5
        if last == "output_norm":
            return 4 + 0.4 * noise
        if last.startswith("post_"):
            return 8 + 0.8 * noise
    if last.startswith("time_mix_lerp"):
        return rng.random(shape)
    if (small := _vector(name, last, shape, noise)) is not None:
        return small
    # Logits are about 4, the largest about 16, and rounding rarely swaps experts.
    scale = 4.0 if last in ("output", "ffn_gate_inp") else 8.0 if tied and last in ("attn_output", "ffn_down") else 1.0
    return scale * noise * shape[-1] ** -0.5


def _vector(name: str, last: str, shape: tuple[int, ...], noise: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Return the weights of a tensor that does not mix activations, such as a vector; `None` for other tensors."""
    is_bias = name.endswith("bias")
    if last in ("ssm_d", "rope_freqs") or "layer_output_scale" in name or last.endswith("_scale"):
        return np.ones(shape)
    if "norm" in last and not is_bias:
        return 1 + 0.1 * noise
    if last in ("ssm_dt", "ssm_f_b", "ssm_dt_bias") and (is_bias or len(shape) == 1):
        return noise - 3.0  # The softplus of this is a step of about 0.05.
    own = {
        "ssm_a": lambda: -np.exp(noise),  # decay
        "time_mix_w0": lambda: noise - 3.0,
        "time_mix_decay": lambda: noise - 4.0,
        "token_embd": lambda: noise,
        "attn_sinks": lambda: noise,
    }
    if last in own:
        return own[last]()
    return 0.1 * noise if is_bias or len(shape) == 1 else None


OF_ITS_OWN = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
"""Ends of names of tensors that a NextN layer may share with the model."""


def agreeing(name: str, data: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return weights for a model whose NextN layer mostly predicts the model's tokens.

    The layers add little to a token's embedding, and the NextN layer uses the embedding and a part of the hidden state.
    """
    last = name.removesuffix(".weight").split(".")[-1]
    if last == "eh_proj":
        data = 0.1 * data
        data[:, : len(data)] += np.eye(len(data))
        return data
    adds = ("attn_output", "ssm_out", "ffn_down", "ffn_down_exps", "ffn_down_shexp")
    return 0.12 * data if last in adds else data
