"""Texts with and without drafts on every packaged prompt: greedy, and sampled for some seeds; default or exact mode.

In exact mode all must be equal. In default mode a first difference must have a top-2 margin below the largest
logit difference between batch sizes that the probe found; anything else is a defect.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from ngramspec.decoder import SpeculativeDecoder
from ngramspec.prompts_io import load_prompts
from ngramspec.sampling import Sampling
from ngramspec.target import Target


def tokens_of(decoder: SpeculativeDecoder, prompt: list[int], tokens: int, sampling: Sampling) -> list[int]:
    return [t for step in decoder.generate(prompt, max_tokens=tokens, sampling=sampling) for t in step.tokens]


def margin(target: Target, prefix: list[int]) -> float:
    """Gap between the two largest logits after `prefix`."""
    top = np.sort(np.partition(target.prefill(prefix), -2)[-2:])
    return float(top[1] - top[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--exact", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("-n", type=int, default=128)
    parser.add_argument("-c", type=int, default=2048)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seed-prompts", type=int, default=8, help="prompts that are also sampled, spread evenly")
    parser.add_argument("--policy", default="fixed", help="fixed drafts always: the hardest case")
    options = parser.parse_args()
    target = Target(options.model, n_ctx=options.c, exact=options.exact)
    bound = target.probe().max_difference
    plain = SpeculativeDecoder(target, drafter=None, exact=options.exact)
    drafted = SpeculativeDecoder(target, policy=options.policy, exact=options.exact)
    prompts = []
    for p in load_prompts(None):
        ids = target.tokenize(p.text) if p.text else target.chat_prompt(p.messages or ())
        if len(ids) + options.n <= options.c:
            prompts.append((p.id, ids))
    longest = max(len(ids) for _, ids in prompts)
    cases = [(name, ids, Sampling()) for name, ids in prompts]
    for name, ids in prompts[:: max(1, len(prompts) // options.seed_prompts)][: options.seed_prompts]:
        cases += [(name, ids, Sampling(temperature=0.8, seed=seed)) for seed in range(options.seeds)]
    equal = {"greedy": [0, 0], "sampled": [0, 0]}
    for name, ids, sampling in cases:
        a, b = tokens_of(plain, ids, options.n, sampling), tokens_of(drafted, ids, options.n, sampling)
        count = equal["greedy" if sampling.greedy else "sampled"]
        count[0] += a == b
        count[1] += 1
        if a != b and sampling.greedy:
            at = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
            gap = margin(target, ids + a[:at])
            verdict = "within" if gap < bound else "NOT WITHIN"
            print(f"{name}: first difference at token {at}, margin {gap:.4f}, {verdict} the bound {bound:.4f}")
    mode = f"exact {options.exact}"
    print(f"{mode} mode, longest prompt {longest} tokens, {options.n} generated, probe bound {bound:.4g}:")
    for kind, (same, of) in equal.items():
        print(f"  {kind}: {same} of {of} texts equal with and without drafts")


if __name__ == "__main__":
    main()
