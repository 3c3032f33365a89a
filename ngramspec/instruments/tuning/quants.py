"""The cost of each quantisation of a model on this machine: timing (`QuantTiming`), scaling, and the recommendation.

A few layers of each quantisation are timed, and so is each type of output layer. With k of n layers timed, a pass takes

    T(size) = n / k * T_layers(size) + T_output(size)

README.md describes the method.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.cost.times import STEEP
from ngramspec.data import decode
from ngramspec.instruments.tuning.typical import typical_gain
from ngramspec.models.shape import QuantisedShape
from ngramspec.storage import read_cache, write_cache_json

SIZES = (1, 2, 4, 8, 16)
"""Numbers of tokens in the timed passes."""

RUN = 3
"""Passes of one size for each model in a round; the first rebuilds llama.cpp's graph and does not count."""

MIN_ROUNDS, MAX_ROUNDS = 2, 8  # minimum and maximum number of rounds

IMPOSSIBLE = 4.0
"""T(4) / T(1) from which on a measurement was disturbed: four passes over one token would be faster."""

MAX_SPREAD = 0.3  # maximum part by which medians may exceed minima; above it, nothing is recommended or stored

ANSWER, REQUEST = 250, 1000
"""Tokens of the answer and of the prompt in the request that quantisations are compared by."""

ALIKE = 0.95
"""Speed relative to the fastest quantisation from which a more precise one is recommended instead."""

FASTER = 1.15  # minimum gain for advice to use another quantisation

SIMILAR = 0.75
"""Minimum size of a quantisation to recommend to the owner of another one, as a part of that one's size."""

QUANTISATIONS = ("Q4_0", "IQ4_NL", "Q4_K_M", "Q4_1", "Q5_0", "Q5_K_M", "Q6_K", "Q8_0")
"""Compared quantisations, by llama.cpp's names."""

PRECISION = (
    *("Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_0", "Q4_1", "IQ4_XS", "IQ4_NL", "Q4_K_S", "Q4_K_M", "Q5_0", "Q5_K_S"),
    *("Q5_1", "Q5_K_M", "Q6_K", "Q8_0", "BF16", "F16"),
)
"""Quantisations that can be measured, about from the least to the most precise, by llama.cpp's published perplexities.
Those with fewer bits require statistics of a text, and are not recommended."""

MORE_PRECISE = "Q5_0"  # first one in PRECISION with more than four bits per weight

Timer = Callable[[str, int], float]
"""Function that returns the seconds of a pass, by the name of a model and the number of tokens."""


@dataclass(frozen=True, slots=True)
class QuantCost:
    """Cost of a quantisation of a whole model."""

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
    def speed(self) -> float:
        """Tokens per second without drafts."""
        return 1 / self.seconds[1]

    @property
    def draft_speed(self) -> float:
        """Tokens per second with drafts."""
        return self.gain / self.seconds[1]

    @property
    def request_seconds(self) -> float:
        """Time of a typical request (see `REQUEST`)."""
        return REQUEST * self.prompt_seconds + ANSWER / self.draft_speed


@dataclass(slots=True)
class QuantTiming:
    """Interleaved timing of models that contain some layers of each quantisation, or an output layer.

    After an interruption it contains the times so far.
    """

    timer: Timer  # function that times a pass
    files: Mapping[str, QuantisedShape]  # quantisations of the whole model
    outputs: Mapping[str, str]  # quantisation of the one layer in front of each output layer
    layers: int  # number of layers of the whole model
    timed_layers: int  # number of layers in the model of a quantisation
    prompt: int  # number of tokens in a timed prompt
    deadline: float  # time by `clock` after which no round begins, except the first ones
    clock: Callable[[], float] = time.monotonic
    rounds: int = 0  # number of finished rounds
    times: dict[tuple[str, int], list[float]] = field(default_factory=dict)  # seconds by model and number of tokens

    def run(self) -> Iterator[str]:
        """Time all models in rounds, and yield a text before each group of passes."""
        duration = 0.0
        while self.rounds < MIN_ROUNDS or (self.rounds < MAX_ROUNDS and self.clock() + duration < self.deadline):
            start = self.clock()
            names = [*self.files, *self.outputs]
            turn = self.rounds % len(names)
            for size in SIZES:
                yield f"T({size})"
                # Passes of different models alternate, so that each reads its weights from memory and not from a cache.
                for number in range(RUN):
                    for name in names[turn:] + names[:turn]:
                        self._time(name, size, counts=number > 0)
            yield "prompts"
            for name in self.files:
                self._time(name, self.prompt)
            self.rounds += 1
            duration = self.clock() - start

    def _time(self, name: str, size: int, *, counts: bool = True) -> None:
        seconds = self.timer(name, size)
        if counts:
            self.times.setdefault((name, size), []).append(seconds)

    @property
    def spread(self) -> float:
        """Largest difference between the median and the minimum of one-token passes, as a part of the minimum."""
        one_token_times = [times for (name, size), times in self.times.items() if size == 1 and name in self.files]
        return max((statistics.median(times) / min(times) - 1 for times in one_token_times), default=0.0)

    def costs(self) -> list[QuantCost]:
        """Return the costs of the whole model, ordered by size; empty before the end of the first round."""
        if not self.rounds:
            return []
        return sorted(map(self._cost, self.files), key=lambda cost: cost.size_bytes)

    def _cost(self, name: str) -> QuantCost:
        output = self.files[name].output
        seconds = {size: self._layers(name, size) + self._output(output, size) for size in SIZES}
        # A prompt needs the logits of one token.
        prompt = (self._layers(name, self.prompt) + self._output(output, 1)) / self.prompt
        return QuantCost(name, self.files[name].size_bytes, seconds, prompt, typical_gain(make_fixed_curve(seconds)))

    def _layers(self, name: str, size: int) -> float:
        return self.layers / self.timed_layers * min(self.times[name, size])

    def _output(self, output: str, size: int) -> float:
        """Return the time of an output layer: that of its model without the one layer in front of it."""
        layer = min(self.times[self.outputs[output], size]) / self.timed_layers
        return max(0.0, min(self.times[output, size]) - layer)


# --------------------------------------------------------------------------- conclusions


def recommend(costs: Sequence[QuantCost]) -> str:
    """Return one sentence that recommends a quantisation, and a more precise one if there is one."""
    best = _fastest(costs)
    slowest = max(costs, key=lambda cost: cost.request_seconds)
    ratio = slowest.request_seconds / best.request_seconds
    line = f"Recommended: {best.name}"
    if ratio >= FASTER:
        line += f", {ratio:.1f} times as fast as {slowest.name}"
    line += f" for a prompt of {REQUEST:,} tokens and an answer of {ANSWER}"
    precise = [cost for cost in costs if _precision(cost) >= PRECISION.index(MORE_PRECISE)]
    if precise and _precision(best) < PRECISION.index(MORE_PRECISE):
        precise_best = _fastest(precise)
        ratio = best.request_seconds / precise_best.request_seconds
        line += f"; more precise: {precise_best.name}, {ratio:.2f} times as fast"
    return f"{line}."


def _fastest(costs: Sequence[QuantCost]) -> QuantCost:
    """Return the most precise of the usual quantisations that are about as fast as the fastest one."""
    costs = [cost for cost in costs if cost.name in QUANTISATIONS] or costs
    min_seconds = min(cost.request_seconds for cost in costs)
    return max((cost for cost in costs if min_seconds >= ALIKE * cost.request_seconds), key=_precision)


def _precision(cost: QuantCost) -> int:
    return PRECISION.index(cost.name)


def advice(quantisation: str | None, steepness: float, costs: Sequence[QuantCost]) -> str | None:
    """Return a note on a quantisation that is slow in batches on this machine; `None` if it is not slow.

    Args:
        quantisation: Name of the model's quantisation; `None` means unknown.
        steepness: Measured T(4) / T(1) of the model.
        costs: Costs of the quantisations of this shape; empty if they were not measured.
    """
    if not STEEP <= steepness < IMPOSSIBLE:
        return None
    slow = f"note: a batch of 4 tokens costs {steepness:.1f} times one token here"
    if not costs:
        return f"{slow}; ngramspec tune --quants measures whether another quantisation of this model is faster"
    own = next((cost for cost in costs if cost.name == quantisation), None)
    if own is None:
        better = _fastest(costs)
        better_slow = f"but {better.steepness:.1f} times in a file with {better.name} (ngramspec tune --quants)"
        return f"{slow}, {better_slow}" if better.steepness < STEEP else None
    better = _fastest([cost for cost in costs if cost.size_bytes >= SIMILAR * own.size_bytes])
    if own.request_seconds < FASTER * better.request_seconds:
        return None
    return (
        f"{slow} ({own.name}); with {better.name}, this model would answer about"
        f" {better.draft_speed / own.draft_speed:.1f} times as fast, and read prompts"
        f" {own.prompt_seconds / better.prompt_seconds:.1f} times as fast (ngramspec tune --quants)"
    )


# --------------------------------------------------------------------------- storage


@dataclass(frozen=True, slots=True)
class QuantCosts:
    """Stored costs."""

    costs: tuple[QuantCost, ...]


def keep_costs(path: Path, costs: Sequence[QuantCost]) -> None:
    """Store the costs for `advice`; errors are ignored."""
    write_cache_json(path, asdict(QuantCosts(tuple(costs))))


def load_costs(path: Path) -> Sequence[QuantCost]:
    """Return the stored costs; empty if nothing is stored, or the file is invalid."""
    with suppress(ValueError):
        costs = decode(QuantCosts, json.loads(read_cache(path) or "")).costs
        if all(cost.seconds.keys() >= set(SIZES) and cost.name in PRECISION for cost in costs):
            return costs
    return ()
