"""Tokens per second of ngramspec, plain and drafted, against llama.cpp's llama-bench on the same model.

All three decode from an empty context (one token of prompt), in turn, and the medians are compared. The text is
sampled at a high temperature, so that drafts find nothing to guess: the drafted loop is shown at its worst.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from statistics import median

from ngramspec.decoder import SpeculativeDecoder
from ngramspec.machine import physical_cores
from ngramspec.sampling import Sampling
from ngramspec.target import Target


def llama_bench(program: Path, model: Path, tokens: int, threads: int) -> float:
    """Tokens per second of one llama-bench tg run."""
    command = [program, "-m", model, "-p", "0", "-n", str(tokens), "-r", "1", "-t", str(threads), "-o", "json"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(json.loads(output)[0]["avg_ts"])


def ours(decoder: SpeculativeDecoder, tokens: int, sampling: Sampling) -> float:
    """Tokens per second from the first token on, wall clock, everything included."""
    decoder.target.clear()
    steps = decoder.generate([1], max_tokens=tokens + 1, sampling=sampling)
    next(steps)
    began, count = time.perf_counter(), 0
    for step in steps:
        count += len(step.tokens)
    return count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("-n", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("-t", "--threads", type=int, default=physical_cores())
    options = parser.parse_args()
    target = Target(options.model, n_ctx=2048, threads=options.threads)
    plain, drafted = SpeculativeDecoder(target, drafter=None), SpeculativeDecoder(target)
    ours(drafted, 32, Sampling())
    speeds: dict[str, list[float]] = {
        name: [] for name in ("llama-bench", "plain greedy", "plain novel", "drafted novel")
    }
    for i in range(options.repeat):
        novel = Sampling(temperature=1.5, top_k=40, top_p=1.0, min_p=0.0, seed=i)
        speeds["llama-bench"].append(llama_bench(options.llama_bench, options.model, options.n, options.threads))
        speeds["plain greedy"].append(ours(plain, options.n, Sampling()))
        speeds["plain novel"].append(ours(plain, options.n, novel))
        speeds["drafted novel"].append(ours(drafted, options.n, novel))
        print({name: round(values[-1], 1) for name, values in speeds.items()}, flush=True)
    base = median(speeds["llama-bench"])
    for name, values in speeds.items():
        paired = median(v / b for v, b in zip(values, speeds["llama-bench"], strict=True))
        share = median(values) / base
        print(f"{name:14s} {median(values):8.1f} tokens/s, {share:.3f} of llama-bench (paired {paired:.3f})")


if __name__ == "__main__":
    main()
