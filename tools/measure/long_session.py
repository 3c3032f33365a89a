"""One decoder over many requests, 100,000 tokens in all: what a pass costs outside `llama_decode`, start and end.

Each request continues the tail of the text so far, sampled, as an endless session would.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from statistics import median

from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.llama.target import Target
from ngramspec.sampling.settings import Sampling


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("-t", type=int, default=None)
    options = parser.parse_args()
    target = Target(options.model, n_ctx=2048, threads=options.t)
    decoder = SpeculativeDecoder(target)
    text = target.tokenize("import os\n")
    outside: list[float] = []
    peak: list[int] = []
    total = request = 0
    while total < options.tokens:
        request += 1
        sampling = Sampling(temperature=0.8, seed=request)
        steps = decoder.generate(text[-400:], max_tokens=1600, sampling=sampling)
        text += next(steps).tokens
        began = time.perf_counter()
        next(steps, None)
        while True:
            began = time.perf_counter()
            step = next(steps, None)
            if step is None:
                break
            outside.append((time.perf_counter() - began - step.seconds) * 1e6)
            text += step.tokens
            total += len(step.tokens)
        peak.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    tenth = len(outside) // 10
    for name, part in (("first", outside[:tenth]), ("last", outside[-tenth:])):
        mean = sum(part) / len(part)
        print(f"{name} tenth: median {median(part):.1f} us per pass outside llama_decode, mean {mean:.1f}")
    print(f"{total} tokens, {request} requests; peak memory {peak[0] / 1024:.0f} MiB after one,", end=" ")
    print(f"{peak[-1] / 1024:.0f} MiB at the end")


if __name__ == "__main__":
    main()
