"""Held-out loss of GGUF files in nats per token and per byte of the same held-out text.

The stream is split into windows of --length tokens that do not overlap. Every token of a window
except the first is predicted from that window alone. Weights are dequantised and run in float32, so
the loss is that of the published file without the rounding of a backend. Nats per byte allow
comparisons of models with different tokenizers.
"""

# mypy: disable-error-code="import-not-found,misc,no-untyped-call,untyped-decorator"

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from model import DemoModel, load_gguf
from tokenizers import Tokenizer

ROWS = 8


def count_token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """Return the number of bytes of each token, shape (vocab,); it is 0 for special tokens."""
    special = tokenizer.get_added_tokens_decoder()
    # In byte-level BPE every character of a token's name is one byte.
    return np.array(
        [0 if index in special else len(tokenizer.id_to_token(index)) for index in range(tokenizer.get_vocab_size())]
    )


@torch.no_grad()
def compute_losses(model: DemoModel, stream: np.ndarray, length: int, sizes: np.ndarray) -> tuple[float, float, int]:
    """Return (nats per token, nats per byte, predicted tokens) of `stream`, shape (n,)."""
    count = len(stream) // length
    windows = torch.from_numpy(stream[: count * length].astype(np.int64)).view(count, length)
    nats = 0.0
    for start in range(0, count, ROWS):
        rows = windows[start : start + ROWS]
        logits = model(rows[:, :-1])
        targets = rows[:, 1:]
        nats += float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
    all_targets = windows[:, 1:]
    return nats / all_targets.numel(), nats / int(sizes[all_targets.numpy()].sum()), all_targets.numel()


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="GGUF files")
    parser.add_argument("--data", type=Path, required=True, help="folder prepare.py wrote")
    parser.add_argument("--streams", nargs="+", default=["heldout_code", "heldout_chat"])
    parser.add_argument("--length", type=int, nargs="+", default=[1024])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sizes = count_token_bytes(Tokenizer.from_file(str(arguments.data / "tok.json")))
    for path in arguments.models:
        model = load_gguf(path).eval()
        for name in arguments.streams:
            stream = np.load(arguments.data / f"{name}.npy")
            for length in arguments.length:
                per_token, per_byte, count = compute_losses(model, stream, length, sizes)
                print(
                    f"{path} {name} window {length}: {per_token:.4f} nats/token, "
                    f"{per_byte:.4f} nats/byte over {count} tokens",
                    flush=True,
                )


if __name__ == "__main__":
    main()
