"""Measure the microseconds of a pass outside `llama_decode`: the cost of drafting, verification and output of the text.

The prompt contains a file twice, so that the majority of the passes have drafts. Times are medians of a run. The times
of the parts come from a separate run, because their measurement makes a run longer.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import llama_cpp.llama_cpp as llama

from ngramspec.acceptance.verifier import RuleVerifier
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.decoding.text import Text
from ngramspec.drafting.mixture.drafter import MixtureDrafter
from ngramspec.llama.passes import Passes
from ngramspec.llama.sequence import CacheSequence
from ngramspec.llama.target import Target
from ngramspec.policies.cost import CostPolicy
from ngramspec.sampling.settings import Sampling

PARTS = (
    (MixtureDrafter, "propose"),
    (CostPolicy, "plan"),
    (CacheSequence, "submit"),
    (Passes, "decode"),
    (Text, "commit"),
    (RuleVerifier, "verify"),
    (CacheSequence, "rollback"),
    (MixtureDrafter, "accept"),
    (CostPolicy, "record"),
)
"""Functions that are timed separately; inner functions follow the functions that call them."""


class Stopwatch:
    """Timer of `llama_decode` in total and of each part of a pass without `llama_decode`, in seconds."""

    def __init__(self) -> None:
        self.inside = 0.0
        self.parts: dict[str, float] = defaultdict(float)

    def decoding(self, decode: Callable[..., int]) -> Callable[..., int]:
        def call_timed(*arguments: Any) -> int:
            began = time.perf_counter()
            try:
                return decode(*arguments)
            finally:
                self.inside += time.perf_counter() - began

        return call_timed

    def part(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def call_timed(*arguments: Any, **options: Any) -> Any:
            began, inside = time.perf_counter(), self.inside
            try:
                return call(*arguments, **options)
            finally:
                self.parts[name] += time.perf_counter() - began - (self.inside - inside)

        return call_timed

    @contextmanager
    def watching(self, *, parts: bool) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(patch.object(llama, "llama_decode", self.decoding(llama.llama_decode)))
            for owner, name in PARTS if parts else ():
                full = f"{owner.__name__}.{name}"
                stack.enter_context(patch.object(owner, name, self.part(full, getattr(owner, name))))
            yield


def measure_passes(
    decoder: SpeculativeDecoder, prompt: list[int], tokens: int, sampling: Sampling, *, parts: bool
) -> dict[bool, list[dict[str, float]]]:
    """Return the figures of each pass, separately for passes without and with a draft.

    The figures are the microseconds in total and by part, and the numbers of draft tokens sent and accepted.
    """
    watch = Stopwatch()
    passes: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with watch.watching(parts=parts):
        steps = decoder.generate(prompt, max_tokens=tokens, sampling=sampling)
        next(steps)
        next(steps, None)  # this step measures the cost of a pass if it is unknown
        while True:
            watch.parts.clear()
            began, inside = time.perf_counter(), watch.inside
            step = next(steps, None)
            seconds = time.perf_counter() - began - (watch.inside - inside)
            if step is None:
                return passes
            figures = {"outside": seconds, **watch.parts}
            passes[bool(step.drafted)].append(
                {"sent": len(step.drafted), "kept": step.accepted} | {name: 1e6 * x for name, x in figures.items()}
            )


def report(name: str, passes_by_kind: dict[bool, list[dict[str, float]]]) -> None:
    for has_draft, passes in passes_by_kind.items():
        if len(passes) < 10:
            continue
        times = [figures["outside"] for figures in passes]
        n_sent, n_accepted = (sum(figures[key] for figures in passes) / len(passes) for key in ("sent", "kept"))
        kind = f"drafted passes ({n_sent:.1f} sent, {n_accepted:.1f} kept)" if has_draft else "passes without a draft"
        tenths = quantiles(times, n=10)
        print(f"{name}, {len(passes)} {kind}: median {median(times):.1f} us", end="")
        print(f" (10 % below {tenths[0]:.1f}, 10 % above {tenths[-1]:.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--exact", default="auto", choices=("auto", "on", "off"))
    parser.add_argument("-t", type=int, default=None)
    parser.add_argument("--parts", action="store_true", help="also the parts of a pass")
    options = parser.parse_args()
    target = Target(options.model, ctx_size=2048, threads=options.t)
    prompt = (
        target.vocabulary.tokenize(
            (Path(__file__).parents[2] / "ngramspec/drafting/acceptance_estimator.py").read_text()
        )[:700]
        * 2
    )
    decoder = SpeculativeDecoder(target, exact=options.exact)
    for name, sampling in (("greedy", Sampling()), ("temperature 0.8", Sampling(temperature=0.8, seed=1))):
        report(name, measure_passes(decoder, prompt, options.tokens, sampling, parts=False))
        if not options.parts:
            continue
        passes = measure_passes(decoder, prompt, options.tokens, sampling, parts=True)[True]
        for part in ("outside", *(f"{owner.__name__}.{method}" for owner, method in PARTS)):
            print(f"    {part:30} {median(figures.get(part, 0.0) for figures in passes):6.1f} us")


if __name__ == "__main__":
    main()
