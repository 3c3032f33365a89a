"""Comparison of n-grams, a draft model and both by the cost of passes: see `ngramspec/drafting/README.md`.

    python tools/measure/hybrid.py TARGET --draft SMALL... [--curve NAME...] [-x C...] [--prompts FILE] [-n N]

The target continues each prompt greedily without drafts. The same text is then decoded with drafts of each kind and the
default policy on a modelled clock. The curve gives the time of a pass of the target. A pass of the draft model takes C
times as long.

The script prints the number of tokens in the time of a one-token pass of the target, and the gain of both kinds
together over the better one alone. For each curve it then prints the kind of text that was slowest at any C (plain
decoding is 1), and the gain with hindsight. With hindsight, drafts contain only correct tokens and have the best
length. N-grams propose a token for free, the draft model with one pass.

No model evaluates a text twice (`memory_model.py`), but every draft token is verified with the real output of the
models. The figures exclude the prefill of prompts, but include the time in which a draft model reads the answer. Each
configuration starts with a drafter without learned state and runs the prompts in their order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memory_model import AnswerModel, Memory, MemoryModel
from seeds import Clock, TimedModel

from ngramspec.cost.fixed_curves import CURVES, find_curves
from ngramspec.cost.times import LARGEST, PassTimes
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting.draft import Ask, Drafter
from ngramspec.drafting.draft_model.hybrid import HybridDrafter
from ngramspec.drafting.draft_model.model import ModelDrafter
from ngramspec.drafting.mixture.drafter import FREE, MixtureDrafter
from ngramspec.instruments.prompts import load_prompts, prepare
from ngramspec.llama.target import Target
from ngramspec.steps import Stats


@dataclass
class Configuration:
    """Drafter on a cost curve with its counters by kind of text; the key "" is for all texts.

    Args:
        target: Memory of the target.
        curve: Name of the cost curve.
        draft: Memory of the draft model; `None` means only n-grams.
        x: Time of a pass of the draft model relative to one of the target.
        combined: True for n-grams and the draft model, False for the draft model alone.
    """

    target: Memory
    curve: str
    draft: Memory | None = None
    x: float = 0.0
    combined: bool = False
    stats: dict[str, Stats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        clock, curve = Clock(), find_curves(self.curve)[self.curve]
        drafter: Drafter = MixtureDrafter()
        if self.draft is not None:
            small: Any = TimedModel(MemoryModel(self.draft), curve, self.x, clock)
            drafter = (
                HybridDrafter(ModelDrafter(small, clock=clock)) if self.combined else ModelDrafter(small, clock=clock)
            )
        model: Any = TimedModel(AnswerModel(self.target, drafter), curve, 1.0, clock)
        self.decoder = SpeculativeDecoder(
            model, vocabulary=self.target.model.vocabulary, drafter=drafter, exact="off", times=curve, clock=clock
        )

    def play(self, prompt: Sequence[int], kind: str, n: int, text: Sequence[int]) -> None:
        """Answer a prompt with up to n tokens and check that the result is `text`."""
        output = list[int]()
        for step in self.decoder.generate(prompt, max_tokens=n):
            output += step.tokens
            for key in ("", kind):
                self.stats.setdefault(key, Stats()).add(step)
        assert output == text, "drafts changed the text"

    def gain(self, kind: str = "") -> float:
        return self.stats[kind].tokens_per_second or 1.0


class Hindsight:
    """Times of texts if drafts contained only correct tokens, for n-grams, a draft model and both."""

    def __init__(self, curve: PassTimes, x: float) -> None:
        self._curve, self._x = curve, x
        self._tokens = 0
        self._seconds = [0.0, 0.0, 0.0]

    def add(self, ngrams: Sequence[bool], model: Sequence[bool]) -> None:
        """Count a text, given which tokens after the first n-grams and the draft model predict correctly."""
        self._tokens += len(ngrams)
        none = [False] * len(ngrams)
        for i, ways in enumerate([(ngrams, none), (none, model), (ngrams, model)]):
            self._seconds[i] += self._min_seconds(*ways)

    def _min_seconds(self, from_ngrams: Sequence[bool], from_model: Sequence[bool]) -> float:
        """Return the minimum time of a text, computed backwards from its end."""
        seconds = [0.0] * (len(from_ngrams) + 1)
        for at in range(len(from_ngrams) - 1, -1, -1):
            seconds[at], guesses = self._curve.ratio(1) + seconds[at + 1], 0.0
            for end in range(at + 1, min(len(from_ngrams), at + LARGEST)):
                if not (from_ngrams[end - 1] or from_model[end - 1]):
                    break
                guesses += 0.0 if from_ngrams[end - 1] else self._x
                seconds[at] = min(seconds[at], self._curve.ratio(1 + end - at) + guesses + seconds[end + 1])
        return seconds[0]

    @property
    def gain(self) -> float:
        """Gain of both kinds together over the better one alone."""
        ngrams, model, combined = self._seconds
        return min(ngrams, model) / combined - 1


def check_ngrams(drafter: Drafter, prompt: Sequence[int], text: Sequence[int]) -> list[bool]:
    """Return True for each token after the first that n-grams predict correctly."""
    drafter.begin(prompt)
    drafter.accept(text[:1])
    results = []
    for token in text[1:]:
        results.append(drafter.propose(Ask(1, price=FREE)).tokens == (token,))
        drafter.accept((token,))
    return results


def check_model(memory: Memory, prompt: Sequence[int], text: Sequence[int]) -> list[bool]:
    """Return True for each token after the first that a model predicts correctly."""
    model = MemoryModel(memory)
    model.prefill(prompt)
    predictions = [int(model.evaluate([token]).argmax()) for token in text[:-1]]
    return [token == best for token, best in zip(text[1:], predictions, strict=True)]


def find_slowest(ways: Sequence[Configuration]) -> str:
    gain, kind = min((way.gain(kind), kind) for way in ways for kind in way.stats if kind)
    return f"{gain:.2f} ({kind})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--draft", type=Path, nargs="+", required=True, help="smaller models of the same vocabulary")
    parser.add_argument("--curve", nargs="+", choices=CURVES, default=list(CURVES), help="what passes take; else each")
    parser.add_argument("-x", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.2], help="draft models' passes")
    parser.add_argument("--prompts", type=Path, help="as `ngramspec bench` takes them; else the packaged ones")
    parser.add_argument("-n", type=int, default=72, help="tokens of each answer")
    parser.add_argument("-c", type=int, default=2048)
    parser.add_argument("-t", type=int, default=None)
    options = parser.parse_args()
    target = Target(options.target, ctx_size=options.c, threads=options.t)
    drafts = {path.stem: Memory(Target(path, ctx_size=options.c, threads=options.t)) for path in options.draft}
    answers = Memory(target)
    plain: Any = AnswerModel(answers, None)
    alone = SpeculativeDecoder(
        plain, vocabulary=target.vocabulary, drafter=None, exact="off", times=find_curves("flat")["flat"]
    )
    ngrams = {curve: Configuration(answers, curve) for curve in options.curve}
    ways = {
        (curve, x, name, combined): Configuration(answers, curve, drafts[name], x, combined)
        for curve in options.curve
        for x in options.x
        for name in drafts
        for combined in (False, True)
    }
    hindsight = {
        (curve, x, name): Hindsight(find_curves(curve)[curve], x)
        for curve in options.curve
        for x in options.x
        for name in drafts
    }
    ngram_drafter = MixtureDrafter()
    cases, _ = prepare(target.vocabulary, load_prompts(options.prompts), options.n + LARGEST, options.c)
    tokens = 0
    for number, case in enumerate(cases, 1):
        text = [token for step in alone.generate(case.tokens, max_tokens=options.n) for token in step.tokens]
        tokens += len(text)
        for way in (*ngrams.values(), *ways.values()):
            way.play(case.tokens, case.category, options.n, text)
        copies = check_ngrams(ngram_drafter, case.tokens, text)
        guesses = {name: check_model(memory, case.tokens, text) for name, memory in drafts.items()}
        for (_, _, name), model_hindsight in hindsight.items():
            model_hindsight.add(copies, guesses[name])
        print(f"{number} of {len(cases)}", file=sys.stderr)
    print(f"{len(cases)} prompts of {len({case.category for case in cases})} kinds, {tokens} tokens, greedy\n")
    heads = ["curve", "c", "n-grams", *(head for name in drafts for head in (name, "both", "gain"))]
    print("".join(f"| {head} " for head in heads) + "|\n" + "|---" * len(heads) + "|")
    for curve in options.curve:
        for x in options.x:
            line = f"| {curve} | {x:g} | {ngrams[curve].gain():.2f} |"
            for name in drafts:
                model, combined = (ways[curve, x, name, combined].gain() for combined in (False, True))
                gain = combined / max(model, ngrams[curve].gain()) - 1
                line += f" {model:.2f} | {combined:.2f} | {100 * gain:+.1f} % |"
            print(line)
    print()
    for curve in options.curve:
        together = [way for key, way in ways.items() if key[0] == curve and key[3]]
        print(f"{curve}: slowest kind {find_slowest([ngrams[curve]])} with n-grams, {find_slowest(together)} with both")
        possible = [
            f"{100 * model_hindsight.gain:+.0f} % ({key[2]}, {key[1]:g})"
            for key, model_hindsight in hindsight.items()
            if key[0] == curve
        ]
        print(f"    with hindsight both gain {', '.join(possible)}")


if __name__ == "__main__":
    main()
