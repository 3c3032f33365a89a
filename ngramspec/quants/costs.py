"""The cost of each quantisation of a model on this machine, and the recommendation; README.md describes the method.

`typical_gain` replays typical text with a drafter by chance: a Markov chain with the acceptance of ngramspec's drafter
in recorded conversations (`acceptance.json`).
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.cost.times import STEEP, PassTimes
from ngramspec.cpu.cores import machine_name
from ngramspec.data import ModelError, decode
from ngramspec.drafting.draft import Ask, Draft, Drafter
from ngramspec.instruments.replay.replay import Recording, Replay
from ngramspec.instruments.reports.report import Section, Table
from ngramspec.llama.bindings import init_backend
from ngramspec.llama.devices import build, gpu_identity
from ngramspec.llama.weights import Weights
from ngramspec.quants.models import PROMPT, Shape, SyntheticModels, shape_of
from ngramspec.storage import FOLDERS, read_cache, write_cache

SIZES = (1, 2, 4, 8, 16)  # numbers of tokens in the timed passes
RUN = 3  # passes of one size for each model in a round; the first rebuilds llama.cpp's graph and does not count
MIN_ROUNDS, MAX_ROUNDS = 2, 8
MAX_SPREAD = 0.3  # maximum part by which medians may exceed minima; above it, nothing is recommended or stored
ANSWER, REQUEST = 250, 1000  # tokens of the answer and of the prompt by which quantisations are compared
FASTER = 1.15  # minimum gain for advice to use another quantisation

QUANTISATIONS = ("Q4_0", "IQ4_NL", "Q4_K_M", "Q4_1", "Q5_0", "Q5_K_M", "Q6_K", "Q8_0")
"""Compared quantisations, by llama.cpp's names."""

PRECISION = (
    *("Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_0", "Q4_1", "IQ4_XS", "IQ4_NL", "Q4_K_S", "Q4_K_M", "Q5_0", "Q5_K_S"),
    *("Q5_1", "Q5_K_M", "Q6_K", "Q8_0", "BF16", "F16"),
)
"""Quantisations that can be measured, about from the least to the most precise, by llama.cpp's published perplexities.
Those with fewer bits require statistics of a text, and are not recommended."""


RIGHT, WRONG = 1, 2  # token ids of a guess; the answer repeats the first


@dataclass(frozen=True, slots=True)
class QuantCost:
    name: str  # name of the quantisation
    size_bytes: int  # size of the weights
    seconds: Mapping[int, float]  # time of a pass by the number of tokens
    prompt_seconds: float  # time of a prompt, per token
    gain: float  # typical speed with drafts / speed without

    @property
    def steepness(self) -> float:
        """T(4) / T(1)."""
        return self.seconds[4] / self.seconds[1]

    @property
    def draft_speed(self) -> float:
        return self.gain / self.seconds[1]

    @property
    def request_seconds(self) -> float:
        """Time of a typical request (see `REQUEST`)."""
        return REQUEST * self.prompt_seconds + ANSWER / self.draft_speed

    def to_json(self) -> dict[str, Any]:
        return {
            "size_bytes": self.size_bytes,
            "seconds": {str(size): seconds for size, seconds in self.seconds.items()},
            "tokens_per_second": 1 / self.seconds[1],
            "tokens_per_second_with_drafts": self.draft_speed,
            "prompt_tokens_per_second": 1 / self.prompt_seconds,
        }


@dataclass(slots=True)
class QuantTiming:
    """Interleaved timing of models; after an interruption it contains the times so far."""

    models: SyntheticModels  # models that contain some layers of each quantisation, or an output layer
    layers: int  # number of layers of the whole model
    deadline: float  # time by `clock` after which no round begins, except the first ones
    clock: Callable[[], float] = time.monotonic
    rounds: int = 0  # number of finished rounds
    times: dict[tuple[str, int], list[float]] = field(default_factory=dict)  # seconds by model and number of tokens

    def run(self) -> Iterator[str]:
        """Time all models in rounds, and yield a text before each group of passes."""
        duration, names = 0.0, [*self.models.files, *self.models.outputs]
        while self.rounds < MIN_ROUNDS or (self.rounds < MAX_ROUNDS and self.clock() + duration < self.deadline):
            start = self.clock()
            turn = self.rounds % len(names)
            for size in SIZES:
                yield f"T({size})"
                # Passes of different models alternate, so that each reads its weights from memory and not from a cache.
                for number in range(RUN):
                    for name in names[turn:] + names[:turn]:
                        seconds = self.models.seconds(name, size)
                        if number:
                            self.times.setdefault((name, size), []).append(seconds)
            yield "prompts"
            for name in self.models.files:
                self.times.setdefault((name, PROMPT), []).append(self.models.seconds(name, PROMPT))
            self.rounds += 1
            duration = self.clock() - start

    @property
    def spread(self) -> float:
        """Largest difference between the median and the minimum of one-token passes, as a part of the minimum."""
        times = [self.times[name, 1] for name in self.models.files if (name, 1) in self.times]
        return max((statistics.median(of) / min(of) - 1 for of in times), default=0.0)

    def costs(self) -> list[QuantCost]:
        """Return the costs of the whole model, ordered by size; empty before the end of the first round."""
        costs = []
        for name, (size_bytes, _) in self.models.files.items() if self.rounds else ():
            seconds = {size: self._seconds(name, size, size) for size in SIZES}
            prompt = self._seconds(name, PROMPT, 1) / PROMPT  # a prompt needs the logits of one token
            costs.append(QuantCost(name, size_bytes, seconds, prompt, typical_gain(make_fixed_curve(seconds))))
        return sorted(costs, key=lambda cost: cost.size_bytes)

    def _seconds(self, name: str, size: int, outputs: int) -> float:
        """Return the time of a pass of the whole model over `size` tokens that computes the logits of `outputs`."""
        output = self.models.files[name][1]
        # The model with the output layer has one layer in front of it.
        front = min(self.times[self.models.outputs[output], outputs]) / self.models.layers
        layers = self.layers / self.models.layers * min(self.times[name, size])
        return layers + max(0.0, min(self.times[output, outputs]) - front)


def table_section(timing: QuantTiming, costs: Sequence[QuantCost]) -> Section:
    ratios = SIZES[1:]
    headings = ["quantisation", "MiB", "tokens/s", "with drafts", *(f"T({n})/T(1)" for n in ratios), "prompt tokens/s"]
    rows = [
        [
            cost.name,
            f"{cost.size_bytes / 2**20:,.0f}",
            f"{1 / cost.seconds[1]:,.1f}",
            f"{cost.draft_speed:,.1f}",
            *(f"{cost.seconds[n] / cost.seconds[1]:.2f}" for n in ratios),
            f"{1 / cost.prompt_seconds:,.0f}",
        ]
        for cost in costs
    ]
    about = (
        f"T(n) is the time of a pass over n tokens. Measured with random weights in {timing.models.layers} of"
        f" {timing.layers} layers and in the output layer: minima of {timing.rounds} rounds; medians are up to"
        f" {timing.spread:.0%} higher. With drafts: modelled, for text that repeats as much as typical answers."
    )
    return Section("Quantisations", about, [Table(headings, rows)])


def recommend(costs: Sequence[QuantCost]) -> str:
    """Return one sentence that recommends a quantisation, and a more precise one if there is one."""
    best = _fastest(costs)
    slowest = max(costs, key=lambda cost: cost.request_seconds)
    ratio = slowest.request_seconds / best.request_seconds
    line = f"Recommended: {best.name}"
    if ratio >= FASTER:
        line += f", {ratio:.1f} times as fast as {slowest.name}"
    line += f" for a prompt of {REQUEST:,} tokens and an answer of {ANSWER}"
    more_than_four_bits = PRECISION[PRECISION.index("Q5_0") :]
    precise = [cost for cost in costs if cost.name in more_than_four_bits]
    if precise and best not in precise:
        precise_best = _fastest(precise)
        ratio = best.request_seconds / precise_best.request_seconds
        line += f"; more precise: {precise_best.name}, {ratio:.2f} times as fast"
    return f"{line}."


def _fastest(costs: Sequence[QuantCost]) -> QuantCost:
    """Return the most precise of the usual quantisations with 95 % of the speed of the fastest one."""
    costs = [cost for cost in costs if cost.name in QUANTISATIONS] or costs
    limit = min(cost.request_seconds for cost in costs) / 0.95
    return max((cost for cost in costs if cost.request_seconds <= limit), key=lambda cost: PRECISION.index(cost.name))


def advise(quantisation: str | None, steepness: float, costs: Sequence[QuantCost]) -> str | None:
    """Return a note on a quantisation whose T(4) / T(1) is `steepness`, if it is slow here; `costs` may be unknown."""
    if not STEEP <= steepness < 4:  # four passes over one token would be faster, so the measurement was disturbed
        return None
    slow = f"note: a batch of 4 tokens costs {steepness:.1f} times one token here"
    if not costs:
        return f"{slow}; ngramspec tune --quants measures whether another quantisation of this model is faster"
    own = next((cost for cost in costs if cost.name == quantisation), None)
    if own is None:
        better = _fastest(costs)
        better_slow = f"but {better.steepness:.1f} times in a file with {better.name} (ngramspec tune --quants)"
        return f"{slow}, {better_slow}" if better.steepness < STEEP else None
    # A much smaller quantisation would be no replacement.
    better = _fastest([cost for cost in costs if cost.size_bytes >= 0.75 * own.size_bytes])
    if own.request_seconds < FASTER * better.request_seconds:
        return None
    return (
        f"{slow} ({own.name}); with {better.name}, this model would answer about"
        f" {better.draft_speed / own.draft_speed:.1f} times as fast, and read prompts"
        f" {own.prompt_seconds / better.prompt_seconds:.1f} times as fast (ngramspec tune --quants)"
    )


def quant_note(weights: Weights, gpu_layers: int, steepness: float) -> str | None:
    """Return the note of `advise` on a loaded model, with the stored costs of its shape."""
    try:
        shape = shape_of(weights.path)
    except ModelError:  # such as a mixture of experts, whose batches are expensive in every quantisation
        return None
    return advise(weights.quantisation, steepness, load_costs(costs_path(shape, gpu_layers)))


def costs_path(shape: Shape, n_gpu_layers: int) -> Path:
    """Return the file of the costs of a shape; it depends on the build and on the machine."""
    init_backend()
    conditions = f"{shape.text} {build()} {machine_name()}{gpu_identity()} ngl={n_gpu_layers}"
    digest = hashlib.blake2b(conditions.encode(), digest_size=12).hexdigest()
    return FOLDERS.user_cache_path / "quants" / f"{digest}.json"


def keep_costs(path: Path, costs: Sequence[QuantCost]) -> None:
    """Store the costs for `quant_note`; errors are ignored."""
    write_cache(path, json.dumps({"costs": [asdict(cost) for cost in costs]}))


def load_costs(path: Path) -> Sequence[QuantCost]:
    """Return the stored costs; empty if nothing is stored, or the file is invalid."""
    with suppress(ValueError, TypeError, KeyError):
        costs = [decode(QuantCost, cost) for cost in json.loads(read_cache(path) or "")["costs"]]
        if all(cost.seconds.keys() >= set(SIZES) and cost.name in PRECISION for cost in costs):
            return costs
    return ()


class TypicalDrafter(Drafter):
    """A drafter whose guesses have an estimated acceptance that depends on that of the guess before."""

    name = "typical"

    def __init__(self) -> None:
        prior = json.loads(Path(__file__).with_name("acceptance.json").read_bytes())
        self._rates: Sequence[float] = prior["rates"]  # acceptance in each class of guesses; the first has no guess
        # Cumulative probabilities of the class of a guess, by the class of the one before it, and whether it was right.
        self._classes = [[list(accumulate(row)) for row in prior[f"after_{name}"]] for name in ("wrong", "right")]
        self._random = random.Random(1)
        self._last = 0, False  # class of the last guess before the chain, and whether it was right
        self._chain: list[tuple[int, bool]] = []  # the same for the next guesses; class 0 means that there is no guess

    def begin(self, prompt: Sequence[int]) -> None:
        self._chain.clear()

    def propose(self, ask: Ask) -> Draft:
        while len(self._chain) < ask.limit and (not self._chain or self._chain[-1][0]):
            self._extend()
        guesses = [guess for guess in self._chain[: ask.limit] if guess[0]]
        tokens = tuple(RIGHT if right else WRONG for _, right in guesses)
        return Draft(tokens, acceptance_probs=tuple(self._rates[kind] for kind, _ in guesses), source=self.name)

    def accept(self, tokens: Sequence[int]) -> int:
        right = 0
        for _ in tokens:
            if not self._chain:
                self._extend()
            self._last = self._chain.pop(0)
            if self._last[1]:
                right += 1
            else:
                self._chain.clear()
        return right

    def _extend(self) -> None:
        """Add a guess to the chain, or class 0 for its end."""
        kind, was_right = self._chain[-1] if self._chain else self._last
        # The drafter continues a chain as if all of its guesses were right.
        rows = self._classes[bool(self._chain) or was_right]
        new = bisect_right(rows[kind][:-1], self._random.random())
        self._chain.append((new, self._random.random() < self._rates[new]))


def typical_gain(curve: PassTimes) -> float:
    """Return the speed with drafts / the speed of plain decoding, on typical text with these costs of a pass."""
    replay = Replay(TypicalDrafter(), curve=curve)
    return replay.run(Recording("typical", "1", [RIGHT], [RIGHT] * 2000)).speedup(curve)
