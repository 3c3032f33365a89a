"""Text in which nothing can be guessed: the time of decoding with drafting on over the time with drafting off.

Novel text is made by sampling at a high temperature; both sides decode the same seeds, in turn (ABBA), with one
decoder each for the whole run, as a session has.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.llama.target import Target
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats


def seconds_per_token(
    decoder: SpeculativeDecoder, prompt: list[int], tokens: int, sampling: Sampling, stats: Stats
) -> float:
    """Wall clock per token after the first, everything included."""
    steps = decoder.generate(prompt, max_tokens=tokens + 1, sampling=sampling)
    next(steps)
    began, count = time.perf_counter(), 0
    for step in steps:
        stats.add(step)
        count += len(step.tokens)
    return (time.perf_counter() - began) / max(1, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("-n", type=int, default=400)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("-t", type=int, default=None)
    parser.add_argument("--temp", type=float, default=1.5)
    parser.add_argument("--top-k", type=int, default=200)
    options = parser.parse_args()
    target = Target(options.model, n_ctx=2048, threads=options.t)
    prompt = target.tokenize("Nobody had written this sentence before, and nobody would read it twice.")
    decoders = {"off": SpeculativeDecoder(target, drafter=None), "on": SpeculativeDecoder(target)}
    stats = {name: Stats() for name in decoders}
    seconds_per_token(decoders["on"], prompt, 32, Sampling(), Stats())
    ratios = []
    for i in range(options.repeat):
        sampling = Sampling(options.temp, options.top_k, 1.0, 0.0, i)
        order = ("off", "on") if i % 2 else ("on", "off")
        took = {name: seconds_per_token(decoders[name], prompt, options.n, sampling, stats[name]) for name in order}
        ratios.append(took["on"] / took["off"])
    on = stats["on"]
    print(
        f"time on / time off: median {median(ratios):.4f}, {min(ratios):.3f} to {max(ratios):.3f} of {len(ratios)};"
        f" {on.tokens_per_pass:.3f} tokens per pass, {on.drafted} drafted, {on.accepted} accepted of {on.tokens}"
    )


if __name__ == "__main__":
    main()
