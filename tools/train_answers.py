"""Train the initial correction of answers after rejected tokens: `ngramspec/drafting/mixture/answers.npz`.

    train_answers.py MODEL PROMPTS        JSONL as `ngramspec bench --prompts` reads it

The script starts without any state and lets the model answer every prompt greedily with long drafts. Recorded
conversations are not sufficient, because they do not contain the target's predictions after rejected tokens.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting.mixture import weight_files
from ngramspec.drafting.mixture.drafter import MixtureDrafter
from ngramspec.instruments.prompts import load_prompts, prepare
from ngramspec.llama.target import Target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("-n", type=int, default=64, help="tokens of each answer")
    parser.add_argument("-c", type=int, default=2048)
    parser.add_argument("-t", type=int, default=None)
    parser.add_argument("--draft-max", type=int, default=20)
    options = parser.parse_args()
    path = weight_files.ANSWERS
    weight_files.ANSWERS = Path(os.devnull)
    target = Target(options.model, ctx_size=options.c, threads=options.t)
    drafter = MixtureDrafter()
    decoder = SpeculativeDecoder(target, drafter=drafter, policy="fixed", draft_max=options.draft_max, exact="off")
    tokens = 0
    for case in prepare(target.vocabulary, load_prompts(options.prompts), options.n + 64, options.c)[0]:
        tokens += sum(len(step.tokens) for step in decoder.generate(case.tokens, max_tokens=options.n))
    weight_files.save(path, drafter.guesser.answers.correction.global_weights)
    path.chmod(0o644)  # the file belongs to the package and must be readable for all users
    print(f"{path}: {path.stat().st_size} bytes, from {tokens} tokens")


if __name__ == "__main__":
    main()
