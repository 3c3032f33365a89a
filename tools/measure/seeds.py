"""Compare the methods that ngramspec is based on, as implemented here, in one run: counts, alpha and gain.

    python tools/measure/seeds.py TARGET --draft SMALL                      times of this machine
    python tools/measure/seeds.py TARGET --draft SMALL --curve flat -x 0.1  times of passes from the curve; a pass of
                                                                            the draft model takes a tenth of them

Each method continues every prompt greedily in turn. All methods write the same text except for rounding, and the report
shows how many texts differ. `tokens/pass` includes the target's own token, `alpha` is accepted / verified, and `calls`
is the number of passes of the draft model. `formula` is the result of Leviathan et al. 2023, equation (1), for that
alpha and the lengths of the drafts.

`gain` is the speed relative to plain decoding of the same prompts in this run, including drafting but not prefill.
Times need an otherwise idle machine; modelled figures and counts do not. `ngramspec bench` compares interleaved runs.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ngramspec.backend import ExactnessMode, Logits, Model
from ngramspec.cost.fixed_curves import CURVES, find_curves, make_fixed_curve
from ngramspec.cost.times import LARGEST, PassTimes
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting import DRAFTERS, make_drafter
from ngramspec.drafting.draft import Drafter
from ngramspec.drafting.draft_model.hybrid import HybridDrafter
from ngramspec.drafting.draft_model.model import ModelDrafter
from ngramspec.drafting.mixture.drafter import TextIndexSet
from ngramspec.instruments.prompts import load_prompts, prepare
from ngramspec.llama.target import Target
from ngramspec.steps import Stats
from ngramspec.tokens import common_prefix


class Clock:
    """Clock with modelled seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedModel:
    """Model whose passes take the time of a curve times `cost`; a prefill has passes of up to LARGEST tokens."""

    exactness = ExactnessMode()
    feeds_head = returns_early = False

    def __init__(self, model: Model, curve: PassTimes, cost: float, clock: Clock) -> None:
        self._model, self._curve, self._cost, self._clock = model, curve, cost, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property
    def sequences(self) -> Sequence[TimedModel]:
        return (self,)

    def prefill(self, tokens: Sequence[int], **options: Any) -> Logits:
        # Prefill is not only for prompts: a draft model also reads text that it did not propose.
        new = len(tokens) - min(common_prefix(self._model.tokens, tokens), len(tokens) - 1)
        self._clock.now += self._cost * sum(self._curve.ratio(min(LARGEST, new - at)) for at in range(0, new, LARGEST))
        return self._model.prefill(tokens, **options)

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        self._clock.now += self._cost * self._curve.ratio(len(tokens))
        return self._model.evaluate(tokens)

    def submit(self, tokens: Sequence[int]) -> None:
        self._rows = self.evaluate(tokens)

    def fetch(self) -> Logits:
        return self._rows

    def ask(self, tokens: Sequence[int], branches: Sequence[Any]) -> Logits:
        self._clock.now += self._cost * self._curve.ratio(len(tokens) + len(branches))
        return self._model.ask(tokens, branches)  # type: ignore[attr-defined, no-any-return]


class CountingModel(TimedModel):
    """Draft model that counts its passes."""

    calls = 0

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        self.calls += 1
        return super().evaluate(tokens)


@dataclass
class Row:
    """Method with its name, its options in ngramspec and its counters."""

    seed: str
    options: str
    make: Callable[[], Drafter | None]
    policy: str = "cost"
    draft_max: int | None = None
    stats: Stats = field(default_factory=Stats)
    lengths: list[int] = field(default_factory=list)
    calls: int = 0
    different: int = 0

    def play(self, decoder: SpeculativeDecoder, ids: Sequence[int], n: int) -> list[int]:
        """Continue a prompt, add its counters to the row, and return its tokens."""
        text = list[int]()
        for step in decoder.generate(ids, max_tokens=n):
            self.stats.add(step)
            text += step.tokens
            if step.batch:
                self.lengths.append(len(step.drafted))
        return text

    def line(self, plain: Row) -> str:
        s = self.stats
        n_tested = sum(s.tested_at)
        alpha = s.accepted / n_tested if n_tested else 0.0
        formula = sum(alpha**k for length in self.lengths for k in range(length + 1)) / s.passes
        gain = (s.tokens_per_second or 0) / (plain.stats.tokens_per_second or 1)
        differ = f" ({self.different} texts differ)" if self.different else ""
        return (
            f"| {self.seed} | `{self.options}` | {s.tokens_per_pass:.2f} | {alpha:.3f} | {formula:.2f}"
            f" | {self.calls or ''} | {gain:.2f}{differ} |"
        )


def make_rows(draft: CountingModel | None, clock: Callable[[], float], corpus: TextIndexSet | None) -> list[Row]:
    """Return all methods that are possible with the given models and texts."""

    def model(kind: type[ModelDrafter] = ModelDrafter) -> ModelDrafter:
        assert draft is not None
        return kind(draft, clock=clock)

    def of(name: str) -> Callable[[], Drafter]:
        return lambda: make_drafter(name)

    result = [
        Row("plain decoding", "--no-draft", lambda: None),
        Row("prompt lookup", "--drafter ngram --policy fixed --draft-max 10", of("ngram"), "fixed", 10),
        Row("NASD", "--drafter nasd --policy fixed --draft-max 5", of("nasd"), "fixed", 5),
        Row("SuffixDecoding", "--drafter suffix --policy threshold", of("suffix"), "threshold"),
        Row("SAM-Decoding", "--drafter suffix --policy fixed --draft-max 40", of("suffix"), "fixed", 40),
        Row("Token Recycling", "--drafter recycle --policy fixed --draft-max 6", of("recycle"), "fixed", 6),
    ]
    if "lookahead" in DRAFTERS:
        result.append(Row("Lookahead", "--drafter lookahead", of("lookahead")))
    if corpus is not None:
        result.append(
            Row("REST", "--drafter memory --policy fixed", lambda: make_drafter("memory", memory=corpus), "fixed")
        )
    if draft is not None:
        result += [
            Row("Leviathan et al.", "-md SMALL --drafter model --policy fixed --draft-max 5", model, "fixed", 5),
            Row("assisted generation, heuristic", "-md SMALL --drafter model --policy heuristic", model, "heuristic"),
            Row("assisted generation, 0.4", "-md SMALL --drafter model --policy threshold", model, "threshold"),
            Row("EGAG", "-md SMALL --drafter model --policy entropy", model, "entropy"),
            Row("draft model, by cost", "-md SMALL --drafter model", model),
        ]
    result.append(Row("ngramspec", "", of("mixture")))
    if draft is not None:
        result.append(Row("ngramspec and a model", "-md SMALL", lambda: HybridDrafter(model(ModelDrafter))))  # type: ignore[arg-type]
    return result


def read_corpus(target: Target, paths: Sequence[Path]) -> TextIndexSet:
    """Return a memory of text files."""
    recall = TextIndexSet()
    for path in paths:
        recall.add_text(target.vocabulary.tokenize(path.read_text("utf-8", "replace"), add_bos=False))
    return recall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--draft", type=Path, help="a smaller model of the same vocabulary")
    parser.add_argument("--corpus", type=Path, nargs="+", default=[], help="text files, for REST")
    parser.add_argument("--curve", choices=CURVES, help="what passes take; without it they are timed")
    parser.add_argument("-x", type=float, default=0.1, help="with --curve: a draft model's pass, in the target's")
    parser.add_argument("-n", type=int, default=64)
    parser.add_argument("-c", type=int, default=2048)
    parser.add_argument("-t", type=int, default=None)
    parser.add_argument("--limit", type=int, default=2, help="prompts per category")
    parser.add_argument("--only", nargs="+", help="systems whose name has one of these in it; plain decoding always")
    options = parser.parse_args()
    target = Target(options.target, ctx_size=options.c, threads=options.t)
    small = Target(options.draft, ctx_size=options.c, threads=options.t) if options.draft else None
    curve = find_curves(options.curve)[options.curve] if options.curve else None
    clock = Clock()
    model: Any = target if curve is None else TimedModel(target.sequences[0], curve, 1.0, clock)
    costs = curve or make_fixed_curve({1: 1.0})
    draft = CountingModel(small.sequences[0], costs, options.x, clock) if small is not None else None
    now = time.perf_counter if curve is None else clock
    table = make_rows(draft, now, read_corpus(target, options.corpus) if options.corpus else None)
    if options.only:
        table = [r for r in table if r is table[0] or any(name in r.seed for name in options.only)]
    decoders = [
        SpeculativeDecoder(
            model,
            vocabulary=target.vocabulary,
            drafter=row.make(),
            policy=row.policy,
            draft_max=row.draft_max,
            exact="off",
            times=curve,
            clock=now,
        )
        for row in table
    ]
    counts = Counter[str]()
    for case in prepare(target.vocabulary, load_prompts(None), options.n + 64, options.c)[0]:
        if counts[case.category] == options.limit:
            continue
        counts[case.category] += 1
        plain: list[int] = []
        for row, decoder in zip(table, decoders, strict=True):
            before = draft.calls if draft else 0
            text = row.play(decoder, case.tokens, options.n)
            plain = plain or text
            row.different += text != plain
            row.calls += (draft.calls if draft else 0) - before
    print(f"{counts.total()} prompts of {len(counts)} kinds, {options.n} tokens each, greedy;", end=" ")
    print(f"curve {options.curve}, a draft model's pass {options.x:g}" if curve else "seconds of this machine")
    heads = ["system", "options", "tokens/pass", "alpha", "formula", "calls", "gain"]
    print("\n" + "".join(f"| {head} " for head in heads) + "|\n" + "|---" * len(heads) + "|")
    for row in table:
        print(row.line(table[0]))


if __name__ == "__main__":
    main()
