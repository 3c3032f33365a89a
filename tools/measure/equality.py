"""Texts with and without drafts on packaged prompts or others: greedy, and sampled for some seeds.

In exact mode all must be equal, and so must, under `auto`, those for which exact settings were taken. A text that
differs elsewhere must have been told of: tokens that rounding could have decided are counted (`Step.close_calls`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.exactness.decision import EXACT
from ngramspec.instruments.prompts import load_prompts
from ngramspec.llama.target import Target
from ngramspec.sampling.settings import Sampling


def tokens_of(decoder: SpeculativeDecoder, prompt: list[int], tokens: int, sampling: Sampling) -> tuple[list[int], int]:
    """Token ids, and how many of them were close calls."""
    steps = list(decoder.generate(prompt, max_tokens=tokens, sampling=sampling))
    return [t for step in steps for t in step.tokens], sum(step.close_calls for step in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--exact", choices=EXACT, default="auto")
    parser.add_argument("--prompts", type=Path, default=None, help="as in ngramspec bench")
    parser.add_argument("-n", type=int, default=128)
    parser.add_argument("-c", type=int, default=2048)
    parser.add_argument("-t", type=int, default=None)
    parser.add_argument("--seeds", type=int, default=0, help="of sampled texts, for each of --seed-prompts")
    parser.add_argument("--seed-prompts", type=int, default=8, help="prompts that are also sampled, spread evenly")
    parser.add_argument("--policy", default="cost", help="fixed drafts always: the hardest case")
    options = parser.parse_args()
    target = Target(options.model, n_ctx=options.c, threads=options.t, exact=options.exact)
    plain = SpeculativeDecoder(target, drafter=None, exact=options.exact)
    drafted = SpeculativeDecoder(target, policy=options.policy, exact=options.exact)
    prompts = []
    for p in load_prompts(options.prompts):
        ids = target.tokenize(p.text) if p.text else target.chat_prompt(p.messages or ())
        if len(ids) + options.n <= options.c:
            prompts.append((f"{p.category}/{p.id}", ids))
    cases = [(name, ids, Sampling()) for name, ids in prompts]
    for name, ids in prompts[:: max(1, len(prompts) // options.seed_prompts)][: options.seed_prompts]:
        cases += [(name, ids, Sampling(temperature=0.8, seed=seed)) for seed in range(options.seeds)]
    equal = {"greedy": [0, 0], "sampled": [0, 0]}
    exactly = told = silent = 0
    for name, ids, sampling in cases:
        a, _ = tokens_of(plain, ids, options.n, sampling)
        b, calls = tokens_of(drafted, ids, options.n, sampling)
        count = equal["greedy" if sampling.greedy else "sampled"]
        count[0] += a == b
        count[1] += 1
        exactly += drafted.exactness.same
        if a != b:
            told += calls > 0
            silent += calls == 0
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            print(
                f"{name}, {len(ids)} tokens: first difference at {at} of {len(a)};"
                f" exact settings {drafted.exactness.same}, close calls {calls}",
                flush=True,
            )
    lengths = sorted(len(ids) for _, ids in prompts)
    print(
        f"--exact {options.exact}, {target.present.threads} threads, prompts of {lengths[0]} to {lengths[-1]} tokens"
        f" (median {lengths[len(lengths) // 2]}), {options.n} generated:"
        f" exact settings for {exactly} of {len(cases)} texts"
    )
    for kind, (same, of) in equal.items():
        print(f"  {kind}: {same} of {of} texts equal with and without drafts")
    print(f"  different and told: {told}; different and not told: {silent}")


if __name__ == "__main__":
    main()
