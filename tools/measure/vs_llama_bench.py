"""Compare the tokens per second of ngramspec, with and without drafts, with llama.cpp's llama-bench on the same model.

Build llama-bench from the source that the installed llama-cpp-python was built from, with the same flags. Both use the
same number of threads, llama.cpp's choice of flash attention, an F16 KV cache and a context of the same depth. The
script checks the settings that llama-bench reports. All columns are measured in turn in each round. Every speed is
divided by llama-bench's speed in the same round, because the machine's speed drifts more between rounds than the
columns differ.

    llama-bench      its tg test: passes over one random token each; the logits are not read
    + huge pages     llama-bench with weights in huge pages through glibc (Linux), as in ngramspec.llama.devices; it
                     shows the difference to ngramspec with equal pages
    plain greedy     --no-draft from a prompt of random tokens: the argmax of the logits, text, events
    plain sampled    --no-draft at a high temperature: top-k and a draw from it instead of the argmax
    drafted sampled  the texts of plain sampled with drafts; they are unpredictable ("accepted" counts correct tokens)

Plain sampled over plain greedy is the cost of sampling, which llama-bench does not do. Drafted sampled over plain
sampled is the cost of drafting without any benefit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from pathlib import Path
from statistics import median

import numpy as np

from ngramspec.cpu.cores import physical_cores
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.llama.target import Target
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats

DEPTH = 16
COLUMNS = ("llama-bench", "+ huge pages", "plain greedy", "plain sampled", "drafted sampled")
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def llama_bench(program: Path, model: Path, tokens: int, threads: int, environment: dict[str, str]) -> float:
    """Return the tokens per second of one tg run of llama-bench at the same depth.

    Raises:
        SystemExit: Settings of llama-bench that differ from ngramspec's.
    """
    command = [str(program), "-m", str(model), "-p", "0", "-n", str(tokens), "-d", str(DEPTH), "-r", "1"]
    command += ["-t", str(threads), "-o", "json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    result = json.loads(done.stdout)[0]
    ours = {"n_threads": threads, "n_depth": DEPTH, "type_k": "f16", "type_v": "f16"}
    theirs = {name: result[name] for name in ours}
    if theirs != ours:
        raise SystemExit(f"llama-bench ran {theirs}, not {ours}")
    return float(result["avg_ts"])


def ours(decoder: SpeculativeDecoder, tokens: int, sampling: Sampling, prompt: list[int]) -> tuple[float, Stats]:
    """Return the tokens per second of wall-clock time after the first token, everything included, and the counters."""
    decoder.target.sequences[0].clear()
    steps = decoder.generate(prompt, max_tokens=tokens + 1, sampling=sampling)
    next(steps)
    stats = Stats()
    began = time.perf_counter()
    for step in steps:
        stats.add(step)
    return stats.tokens / (time.perf_counter() - began), stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("-n", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("-t", "--threads", type=int, default=physical_cores())
    options = parser.parse_args()
    target = Target(options.model, n_ctx=2048, threads=options.threads)
    decoders = {"plain": SpeculativeDecoder(target, drafter=None), "drafted": SpeculativeDecoder(target)}
    ours(decoders["drafted"], 32, Sampling(), [1])  # this call measures the cost curve
    speeds: dict[str, list[float]] = {name: [] for name in COLUMNS}
    totals = {name: Stats() for name in COLUMNS}
    for i in range(options.repeat):
        prompt = [int(t) for t in np.random.default_rng(i).integers(0, target.vocabulary.n_vocab, DEPTH)]
        samplings = {"greedy": Sampling(), "sampled": Sampling(1.5, top_k=40, top_p=1.0, min_p=0.0, seed=i)}
        for name in COLUMNS:
            loop, _, kind = name.partition(" ")
            if loop in decoders:
                speed, stats = ours(decoders[loop], options.n, samplings[kind], prompt)
                totals[name].merge(stats)
            else:
                environment = HUGE_PAGES if loop == "+" else {}
                speed = llama_bench(options.llama_bench, options.model, options.n, options.threads, environment)
            speeds[name].append(speed)
        print({name: round(values[-1], 1) for name, values in speeds.items()}, flush=True)
    print(f"{'':16s} tokens/s  of llama-bench  of it + huge pages  drafted  accepted  tokens")
    for name, values in speeds.items():
        shares = [median(v / b for v, b in zip(values, speeds[base], strict=True)) for base in COLUMNS[:2]]
        s = totals[name]
        print(
            f"{name:16s} {median(values):8.1f} {shares[0]:15.3f} {shares[1]:19.3f}"
            f" {s.drafted:8d} {s.accepted:9d} {s.tokens:7d}"
        )


if __name__ == "__main__":
    main()
