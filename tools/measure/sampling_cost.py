"""Compare the cost of verifying a batch with llama.cpp's own sampler chain on one position of the same logits.

Every round evaluates a batch again, so that the logits are in cold memory as in decoding. It then times one of two
operations. `llama_sampler_sample` fills llama.cpp's candidates, runs its chain and draws a token at the last position.
The other operation is the verification of the whole batch with a draft that is accepted completely.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import llama_cpp.llama_cpp as llama

from ngramspec.acceptance.verifier import RuleVerifier
from ngramspec.drafting.draft import NO_DRAFT, Draft
from ngramspec.llama.target import Target
from ngramspec.sampling.settings import Sampling


def llama_chain(sampling: Sampling) -> Any:
    """Return llama.cpp's chain in its default order with the samplers that are enabled."""
    params = llama.llama_sampler_chain_default_params()
    params.no_perf = True
    chain = llama.llama_sampler_chain_init(params)
    if sampling.greedy:
        parts = [llama.llama_sampler_init_greedy()]
    else:
        parts = [
            llama.llama_sampler_init_top_k(sampling.top_k),
            llama.llama_sampler_init_top_p(sampling.top_p, 0),
            llama.llama_sampler_init_min_p(sampling.min_p, 0),
            llama.llama_sampler_init_temp_ext(sampling.temperature, 0.0, 1.0),
            llama.llama_sampler_init_dist(1),
        ]
    for part in parts:
        llama.llama_sampler_chain_add(chain, part)
    return chain


def measure(
    target: Target, prompt: list[int], batch: list[int], sampling: Sampling, rounds: int
) -> tuple[float, float]:
    """Return the median milliseconds of llama.cpp on one position and of ngramspec on the whole batch."""
    chain = llama_chain(sampling)
    target.sequences[0].prefill(prompt)

    def verifier() -> RuleVerifier:
        sampler = target.vocabulary.sampler(sampling)
        sampler.begin(prompt)
        return RuleVerifier(sampler)

    rows = target.sequences[0].evaluate(batch)
    plain = verifier()
    tokens = [plain.verify([row], NO_DRAFT, len(prompt) + i).tokens[0] for i, row in enumerate(rows)]
    draft = Draft(tuple(tokens[:-1]))
    times: dict[str, list[float]] = {"llama.cpp": [], "ngramspec": []}
    for i in range(2 * rounds):
        target.sequences[0].rollback(len(prompt))
        rows = target.sequences[0].evaluate(batch)
        ours = verifier()
        began = time.perf_counter()
        if i % 2:
            llama.llama_sampler_sample(chain, target._ctx, -1)
        else:
            assert ours.verify(rows, draft, len(prompt)).accepted == len(draft)
        times["ngramspec" if i % 2 == 0 else "llama.cpp"].append(time.perf_counter() - began)
    llama.llama_sampler_free(chain)
    return 1e3 * median(times["llama.cpp"]), 1e3 * median(times["ngramspec"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("-t", type=int, default=None)
    options = parser.parse_args()
    with Target(options.model, n_ctx=512, threads=options.t) as target:
        prompt = target.vocabulary.tokenize("The quick brown fox jumps over the lazy dog, and then")
        batch = target.vocabulary.tokenize(" the lazy dog jumps over the quick brown fox and", add_bos=False)[
            : options.batch
        ]
        print(f"{target.weights.name}: vocabulary of {target.vocabulary.n_vocab}, batches of {len(batch)}; median ms")
        for name, sampling in (
            ("greedy", Sampling()),
            ("top-k 40, top-p 0.95, min-p 0.05, T 0.8", Sampling(0.8)),
            ("the same with penalties and DRY", Sampling(0.8, repeat_penalty=1.1, dry_multiplier=0.8)),
        ):
            theirs, ours = measure(target, prompt, batch, sampling, options.rounds)
            print(f"{name}: llama.cpp on one position {theirs:.3f}; here the batch {ours:.3f}; {ours - theirs:+.3f}")


if __name__ == "__main__":
    main()
