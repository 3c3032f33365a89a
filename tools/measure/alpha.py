"""How often a drafted token is accepted when sampling, by each of the ways to verify.

    python tools/measure/alpha.py MODEL

Every prompt is continued under each of them, with the same seeds:

    match      the drafter's likeliest guess, kept where it is the token that plain sampling draws
    coupled    the guess is drawn from the drafter's q with the target's own noise
    rejection  the guess is drawn from q, and kept with probability min(1, p / q)
    L=0.5, typical   change the output: lenience, and typical acceptance

The first two emit the same texts. `alpha` counts the drafted tokens that were judged, those before which all were
accepted; nothing is timed. One drafter serves a whole row, as a session has it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.cost.given import given_curve
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.instruments.prompts import load_prompts
from ngramspec.llama.target import Target
from ngramspec.policies.policy import FixedPolicy
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats

WAYS = {
    "match": Acceptance("match"),
    "coupled": Acceptance("coupled"),
    "rejection": Acceptance("rejection"),
    "L=0.5": Acceptance(lenience=0.5),
    "typical": Acceptance(typical=True),
}


class Row:
    """One way to draft and verify, with what it counted."""

    def __init__(self, target: Target, name: str, length: int, way: str) -> None:
        self.name, self.length, self.way = name, length, way
        self.decoder = SpeculativeDecoder(target, drafter=name, policy=FixedPolicy(length), curve=given_curve({1: 1.0}))
        self.stats = Stats()

    def run(self, prompt: list[int], tokens: int, sampling: Sampling) -> None:
        """Continue a prompt."""
        for step in self.decoder.generate(prompt, max_tokens=tokens, sampling=sampling, verify=WAYS[self.way]):
            self.stats.add(step)

    def __str__(self) -> str:
        stats = self.stats
        alpha = stats.accepted / max(1, sum(stats.tested_at))
        return (
            f"{self.name:8} {self.length:6} {self.way:9} {alpha:6.3f} {stats.tokens_per_pass:12.3f}"
            f" {stats.drafted:8} {stats.passes_without_draft / stats.passes:17.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--temp", type=float, default=0.7)
    parser.add_argument("--top-k", type=int, default=40)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--min-p", type=float, default=0.05)
    parser.add_argument("-n", type=int, default=96)
    parser.add_argument("-c", type=int, default=2048)
    parser.add_argument("-t", type=int, default=None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=1, help="take every so manieth prompt only")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--drafters", nargs="+", default=["mixture", "ngram"])
    options = parser.parse_args()
    target = Target(options.model, n_ctx=options.c, threads=options.t)
    texts = [target.tokenize(p.text) if p.text else target.chat_prompt(p.messages or ()) for p in load_prompts(None)]
    texts = texts[:: options.every]
    prompts = [text for text in texts if len(text) + options.n <= options.c]
    print(f"{len(prompts)} prompts, {options.seeds} seeds, {options.n} tokens each, temperature {options.temp:g}")
    print(f"{'drafter':8} length way        alpha  tokens/pass  drafted   without a draft")
    rows = [Row(target, n, k, way) for n in options.drafters for k in options.lengths for way in WAYS]
    for prompt in prompts:  # the outer loop: its prefill is done once
        for seed in range(options.seeds):
            sampling = Sampling(options.temp, options.top_k, options.top_p, options.min_p, seed)
            for row in rows:
                row.run(prompt, options.n, sampling)
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
