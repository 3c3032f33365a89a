"""Measure how much faster drafts make decoding, and compare that with the gain that `Stats.estimated_gain` shows.

    python tools/measure/gain.py MODEL [-n 96] [--rounds 3] [--limit 2]

Each packaged prompt is continued by two decoders in turns of a few tokens: one with drafts, one without. So both meet
the same disturbances, and their ratio is far more exact than that of runs one after the other. The prefill is not
counted. Each round uses new decoders, which load the stored costs as a new process does.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from statistics import median

from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting import DEFAULT, make_drafter
from ngramspec.instruments.prompts import load_prompts, prepare
from ngramspec.llama.target import Target
from ngramspec.steps import Stats, Step

TURN = 8  # tokens of a turn
SHORTEST = 20  # tokens of the shortest text that counts


class Run:
    """A text that is generated in turns; `seconds` is the time of its decoding so far."""

    def __init__(self, target: Target, prompt: Sequence[int], n_tokens: int, drafter: str | None) -> None:
        target.sequences[0].clear()
        decoder = SpeculativeDecoder(target, drafter=drafter and make_drafter(drafter), exact=target.exact)
        self._steps: Generator[Step] = decoder.generate(prompt, max_tokens=n_tokens)
        self.stats, self.seconds, self.is_over = Stats(), 0.0, False
        self.stats.add(next(self._steps))

    @property
    def seconds_per_token(self) -> float:
        """Mean decoding time of a token after the first one, which the prefill yields."""
        return self.seconds / max(1, self.stats.tokens - 1)

    def advance(self, n_tokens: int) -> None:
        """Decode until the text has `n_tokens` tokens, or ends."""
        while not self.is_over and self.stats.tokens < n_tokens:
            began = time.perf_counter()
            step = next(self._steps, None)
            self.seconds += time.perf_counter() - began
            if step is None:
                self.is_over = True
            else:
                self.stats.add(step)


def measure(
    targets: Sequence[Target], prompt: Sequence[int], n_tokens: int, *, is_plain_first: bool
) -> tuple[Run, Run]:
    """Decode a text with drafts and without, in turns, until one ends; return both runs.

    If rounding makes the texts differ, one may be longer. `is_plain_first` sets which begins.
    """
    runs = Run(targets[0], prompt, n_tokens, DEFAULT), Run(targets[1], prompt, n_tokens, None)
    length = 0
    while not any(run.is_over for run in runs):
        length += TURN
        for run in runs[:: -1 if is_plain_first else 1]:
            run.advance(length)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-n", type=int, default=96, help="tokens after each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=2, help="prompts of each category")
    parser.add_argument("-t", "--threads", type=int, default=2)
    options = parser.parse_args()
    settings = {"ctx_size": 4096, "threads": options.threads}
    results: list[tuple[float, float | None]] = []
    with Target(options.model, **settings) as drafted, Target(options.model, **settings) as plain:
        cases, _ = prepare(drafted.vocabulary, load_prompts(None), options.n, 2048)
        Run(drafted, cases[0].tokens, 2 * options.n, DEFAULT).advance(2 * options.n)  # measures the costs
        counts = Counter[str]()
        for case in cases:
            counts[case.category] += 1
            if counts[case.category] > options.limit:
                continue
            runs = [
                measure((drafted, plain), case.tokens, options.n, is_plain_first=number % 2 == 1)
                for number in range(options.rounds)
            ]
            if runs[0][0].stats.tokens < SHORTEST:
                continue
            ratios = [without.seconds_per_token / with_drafts.seconds_per_token for with_drafts, without in runs]
            true = sum(run.seconds_per_token for _, run in runs) / sum(run.seconds_per_token for run, _ in runs)
            gains = [gain for run, _ in runs if (gain := run.stats.estimated_gain) is not None]
            shown = median(gains) if gains else None
            results.append((true, shown))
            print(
                f"{case.id:24} true {true:.3f} ({min(ratios):.2f} to {max(ratios):.2f})",
                "no gain shown" if shown is None else f"shown {shown:.3f}",
                f"tokens per pass {median(run.stats.tokens_per_pass for run, _ in runs):.2f}",
                sep=", ",
                flush=True,
            )
    true_gains = [true for true, _ in results]
    pairs = [(true, shown) for true, shown in results if shown is not None]
    print(
        f"true gain: median {median(true_gains):.3f}, lowest {min(true_gains):.3f};"
        f" shown within 5 %: {sum(abs(shown / true - 1) <= 0.05 for true, shown in pairs)} of {len(pairs)};"
        f" on the wrong side of 1 for a true gain outside 0.97 to 1.03:"
        f" {sum((true - 1) * (shown - 1) < 0 and abs(true - 1) > 0.03 for true, shown in pairs)}"
    )


if __name__ == "__main__":
    main()
