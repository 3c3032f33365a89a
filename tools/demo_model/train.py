"""Train the demo model on CPU for a given time, from scratch or from a GGUF or checkpoint.

The schedule follows wall-clock time, because the speed of the machine is unknown. Learning rates
warm up over 50 steps and fall linearly to zero at the end of --minutes. The last --long-share of
the time trains on windows that are twice as long. A checkpoint with the counts of steps, tokens and
seconds is written every --save-minutes and at the end. Batches are drawn with a fixed seed, but
their number depends on the machine, so another run gives a similar model and not the same one.
"""

# mypy: disable-error-code="import-not-found,misc,no-untyped-call,untyped-decorator"

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from model import DemoModel, Shape, grow, load_gguf
from torch import Tensor, nn

WARMUP_STEPS = 50
MUON_DECAY = 0.01


def orthogonalise(update: Tensor) -> Tensor:
    """Apply five Newton-Schulz steps towards the nearest semi-orthogonal matrix in bf16.

    The quintic's coefficients are those of Jordan et al. 2024, "Muon: an optimizer for hidden
    layers in neural networks", section "Newton-Schulz iteration".
    """
    x = update.bfloat16()
    x = x / (x.norm() + 1e-7)
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.T
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Optimizer with orthogonalised updates of Nesterov momentum for the matrices inside the blocks."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for weight in group["params"]:
                state = self.state[weight]
                buffer = state.setdefault("momentum", torch.zeros_like(weight))
                buffer.mul_(momentum).add_(weight.grad)
                update = orthogonalise(weight.grad.add(buffer, alpha=momentum))
                # A matrix with more rows than columns needs a larger step for the same change of its output's rms.
                scale = max(1.0, weight.size(0) / weight.size(1)) ** 0.5
                weight.mul_(1 - rate * MUON_DECAY)
                weight.add_(update.to(weight.dtype), alpha=-rate * scale)


class Batches:
    """Random windows of the code and chat streams, from chat with probability `chat_share`."""

    def __init__(self, data: Path, chat_share: float, seed: int) -> None:
        self.code = np.load(data / "code.npy", mmap_mode="r")
        self.chat = np.load(data / "chat.npy", mmap_mode="r")
        self.chat_share = chat_share
        self.rng = np.random.default_rng(seed)

    def draw(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return tokens and the tokens after them, int64, shape (rows, length) each."""
        windows = []
        for _ in range(rows):
            stream = self.chat if self.rng.random() < self.chat_share else self.code
            start = int(self.rng.integers(0, len(stream) - length))
            windows.append(stream[start : start + length + 1].astype(np.int64))
        batch = torch.from_numpy(np.stack(windows))
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


def make_or_load(source: Path | None, layers: int | None) -> tuple[DemoModel, dict[str, float]]:
    """Return the model to train and its counts so far: new, from a GGUF or from a checkpoint."""
    counts = {"steps": 0.0, "tokens": 0.0, "seconds": 0.0}
    if source is None:
        return DemoModel(Shape(layers=layers or Shape.layers)), counts
    if source.suffix == ".gguf":
        model = load_gguf(source)
    else:
        model, counts = load(source)
    return (grow(model, layers) if layers else model), counts


def load(checkpoint: Path) -> tuple[DemoModel, dict[str, float]]:
    """Return the model of a checkpoint and its counts of steps, tokens and seconds."""
    checkpoint_data = torch.load(checkpoint, map_location="cpu", weights_only=True)
    model = DemoModel(Shape(**checkpoint_data["shape"]))
    model.load_state_dict(checkpoint_data["weights"])
    return model, checkpoint_data["counts"]


def save(model: DemoModel, counts: dict[str, float], path: Path) -> None:
    checkpoint_data = {"shape": asdict(model.shape), "weights": model.state_dict(), "counts": counts}
    partial = path.with_suffix(".partial")
    torch.save(checkpoint_data, partial)
    partial.replace(path)  # readers never get an incomplete file


def train(model: DemoModel, batches: Batches, counts: dict[str, float], options: argparse.Namespace) -> None:
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    matrix_ids = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in matrix_ids]
    muon = Muon(matrices, options.muon_lr)
    adamw = torch.optim.AdamW(rest, lr=options.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    compiled_model = torch.compile(model, dynamic=False)
    budget = 60.0 * options.minutes
    before = dict(counts)
    begin = last_save = last_report = time.monotonic()
    step, recent = 0, []
    while (seconds := time.monotonic() - begin) < budget:
        progress = seconds / budget
        scale = min(1.0, (step + 1) / WARMUP_STEPS) * (1 - progress)
        muon.param_groups[0]["lr"] = options.muon_lr * scale
        adamw.param_groups[0]["lr"] = options.adam_lr * scale
        # The number of tokens per step stays the same: twice the length with half the rows.
        longer = 2 if progress >= 1 - options.long_share else 1
        tokens, targets = batches.draw(options.rows // longer, options.length * longer)
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled_model(tokens, targets)
        loss.backward()
        muon.step()
        adamw.step()
        for weight in model.parameters():
            weight.grad = None
        step += 1
        recent.append(loss.item())
        now = time.monotonic()
        counts["steps"] = before["steps"] + step
        counts["tokens"] = before["tokens"] + step * tokens.numel()
        counts["seconds"] = before["seconds"] + now - begin
        if now - last_report > 30:
            rate = step * tokens.numel() / (now - begin)
            mean = sum(recent) / len(recent)
            print(
                f"{now - begin:5.0f} s  step {step:5d}  loss {mean:.3f}  {rate:.0f} tok/s",
                flush=True,
            )
            last_report, recent = now, []
        if now - last_save > 60 * options.save_minutes:
            save(model, counts, options.out)
            last_save = now
    save(model, counts, options.out)
    print("done", counts)


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder prepare.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint to write")
    parser.add_argument("--start", type=Path, help="GGUF or checkpoint to continue from")
    parser.add_argument("--layers", type=int, help="blocks; with --start, grow to so many")
    parser.add_argument("--minutes", type=float, required=True, help="time of the whole schedule")
    parser.add_argument("--save-minutes", type=float, default=4.0)
    parser.add_argument("--rows", type=int, default=16, help="windows per step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--long-share", type=float, default=0.5, help="share of the time at 2x")
    parser.add_argument("--chat-share", type=float, default=0.13, help="share of chat windows")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    model, counts = make_or_load(options.start, options.layers)
    size = sum(weight.numel() for weight in model.parameters())
    print(f"{size / 1e6:.2f} M parameters, {model.shape}, before: {counts}", flush=True)
    train(model, Batches(options.data, options.chat_share, options.seed), counts, options)


if __name__ == "__main__":
    main()
