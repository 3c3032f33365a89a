"""Cost curves that are given, not measured: those of other machines, by name, and those in JSON files.

A curve says what one target pass over n tokens costs, in passes over one token. Between its points it is linear;
past the last one it goes on as it went between the last two. It may also say what a pass costs beyond that whose size
is not that of the pass before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ngramspec.cost.curve import CostCurve
from ngramspec.errors import CurveError
from ngramspec.storage import utf8

LARGEST = 64
"""Tokens in the largest batch: what `Target.evaluate` takes."""

Points = Mapping[int, float]
"""Size of a batch -> what it costs."""

SWITCH = "switch"
"""What a curve in JSON calls the cost of a change of size."""

_CPU = (
    "measured: 2 cores of an AMD EPYC (Zen 5, AVX-512), llama-cpp-python 0.3.36, Qwen2 1.5B shape, random weights,"
    " 256 tokens of context, median of 7; 64 extends the slope between 24 and 32"
)

CURVES: dict[str, tuple[dict[int, float], str]] = {
    "flat": (
        {1: 1.0, 64: 1.0},
        "the memory-bound ideal, a batch costs what a token costs (Leviathan et al. 2023, section 3.3)",
    ),
    "apple-silicon-akunu": (
        {1: 1.0, 5: 1.3, 8: 1.525, 64: 7.1},
        "akunu's chapter: a batch of 5 costs 20 to 40 % more than 1; 64 is extrapolated",
    ),
    "cpu-1.5b-q4_0": (
        {
            1: 1.0,
            2: 1.64,
            3: 2.16,
            4: 1.70,
            5: 2.33,
            6: 2.95,
            8: 3.03,
            12: 4.02,
            16: 4.03,
            24: 6.28,
            32: 7.57,
            64: 15.1,
        },
        _CPU,
    ),
    "cpu-1.5b-q4_k_m": (
        {
            1: 1.0,
            2: 1.54,
            3: 1.97,
            4: 2.43,
            5: 3.10,
            6: 3.59,
            8: 4.25,
            12: 5.25,
            16: 4.92,
            24: 7.44,
            32: 8.78,
            64: 17.5,
        },
        _CPU,
    ),
    "cpu-1.5b-q8_0": (
        {
            1: 1.0,
            2: 2.48,
            3: 3.04,
            4: 3.37,
            5: 4.70,
            6: 5.24,
            8: 3.64,
            12: 4.41,
            16: 5.43,
            24: 7.21,
            32: 9.18,
            64: 18.4,
        },
        _CPU,
    ),
    "cuda-34b-q8_0": (
        {1: 1.0, 4: 1.285, 8: 1.72, 9: 3.90, 16: 4.2, 64: 6.0},
        "llama.cpp #5625: 34.7, 108, 161, 80 tokens/s at 1, 4, 8, 9 (another kernel after 8); 64 is extrapolated",
    ),
    "cuda-3090-8b-q4_0": (
        {1: 1.0, 2: 1.12, 3: 1.20, 4: 1.33, 5: 1.54, 6: 1.73, 7: 1.96, 8: 2.15, 16: 2.16, 32: 3.16, 64: 5.04},
        "RTX 3090, llama.cpp #15802: 157, 280, 391, 470, 510, 542, 559, 584 tokens/s at 1 to 8; beyond by the"
        " ratios to 8 of #17505, after 32,768 tokens of context: 440, 874, 1195, 1495 tokens/s at 8, 16, 32, 64",
    ),
    "cuda-4090-8b-q4_0": (
        {1: 1.0, 10: 1.30, 12: 1.30, 16: 1.31, 32: 1.48, 64: 1.87},
        "RTX 4090, llama.cpp #15131: 1217, 1460, 1931 tokens/s at 10, 12, 16; #7676: 3428, 5420 at 32, 64. T(1) is in"
        " neither, 6.3 ms are assumed, and nothing is known from 2 to 9",
    ),
    "cuda-7b-depth-32k": (
        {1: 1.0, 2: 1.07, 4: 1.11, 8: 1.29, 16: 1.27, 32: 1.41, 64: 1.74},
        "RTX 3090, Llama 7B Q4_0 after 32,768 tokens of context, llama.cpp #17891: 40.0, 75.1, 144.7, 247.7, 503, 908,"
        " 1474 tokens/s at 1, 2, 4, 8, 16, 32, 64",
    ),
    "metal-3b-q4_0": (
        {1: 1.0, 5: 2.32, 8: 3.2, 64: 14.0},
        "llama.cpp #10581: 72 tokens/s at 1, 155 at 5; 64 is extrapolated",
    ),
    "metal-7b-q8_0": (
        {1: 1.0, 2: 1.28, 3: 1.22, 4: 1.42, 5: 1.63, 6: 2.23, 7: 2.57, 8: 2.67, 9: 2.91, 32: 2.91, 33: 5.82, 64: 5.82},
        "M1 Pro, llama.cpp #10581: 23.8, 37.0, 58.2, 66.9, 72.9, 64.0, 64.8, 71.2 tokens/s at 1 to 8; from 9"
        " on the matrix kernel's 122 ms, measured at 5 to 8 before that change: it computes 32 tokens at a time"
        " (#27441: 16 and 32 take the same on M3 and M4), 64 assumed to be two turns",
    ),
    "moe-cuda-26b-a4b": (
        {1: 1.0, 2: 1.14, 4: 1.63, 16: 3.34, 64: 10.2},
        "RTX 3090, Gemma 4 Q4_0, all of it in its memory, llama.cpp #29152: 190, 335, 465 tokens/s at 1, 2, 4; 16 from"
        " 911 tokens/s, which was not found there again; 64 extends the slope",
    ),
    "moe-glm-4.5-air": (
        {1: 1.0, 2: 3.05, 4: 3.89, 8: 5.11, 64: 16.0},
        "ik_llama.cpp #1630: 170, 111.5, 174.8, 266 tokens/s at 1, 2, 4, 8; 64 is extrapolated",
    ),
    "moe-mlx": (
        {1: 1.0, 2: 1.59, 3: 1.85, 5: 2.44, 8: 3.32, 64: 14.0},
        "vllm-mlx #763: 8.47, 13.49, 15.64, 20.67, 28.13 ms at 1, 2, 3, 5, 8; 64 is extrapolated",
    ),
}
"""By name: the points, and where they come from."""


class GivenCurve(CostCurve):
    """A fixed curve, in units of T(1): no pass refreshes it.

    Args:
        points: what a batch costs by its size; size 1 must be there.
        switch: what a change of size costs beyond that, in the same unit.

    Raises:
        ValueError: size 1 is missing, or a batch of 1 to LARGEST tokens would cost nothing, or infinitely much.
    """

    def __init__(self, points: Points, switch: float = 0.0) -> None:
        if any(not 0 < cost < math.inf for cost in points.values()) or any(size < 1 for size in points):
            raise ValueError("sizes and costs must be positive numbers")
        if 1 not in points:
            raise ValueError("there is no entry for a batch of 1")
        last = max(points)
        if last < LARGEST:
            before = max((size for size in points if size < last), default=last)
            slope = (points[last] - points[before]) / (last - before) if before < last else 0.0
            points = {**points, LARGEST: points[last] + slope * (LARGEST - last)}
            if points[LARGEST] <= 0:
                raise ValueError(f"it falls so fast after {before} that a batch of {LARGEST} would cost nothing")
        super().__init__({size: cost / points[1] for size, cost in points.items()}, switch / points[1], measured=False)

    def observe(self, size: int, seconds: float) -> None:
        """Note the size of the batch; the curve itself stays."""
        self.last = size

    def stated(self) -> dict[str, float]:
        """The curve in JSON, as `parse_curve` takes it."""
        found: dict[str, Any] = self.to_json()
        return {**found["seconds"], **({SWITCH: self.switch} if self.switch else {})}


def frozen(curve: CostCurve) -> GivenCurve:
    """A measured curve as it is now, held fixed."""
    return GivenCurve({size: curve.seconds(size) for size in range(1, LARGEST + 1)}, curve.switch)


def find_curves(name: str) -> dict[str, GivenCurve]:
    """The curves that a user means, by name.

    Args:
        name: of a curve in CURVES, or of a JSON file. The file holds one curve, {"1": 1.0, "8": 2.5}, which takes the
            file's name, or several, {"name": {"1": 1.0, ...}, ...}; see `parse_curve`.

    Raises:
        CurveError: there is no such curve, or it makes no sense.
    """
    if name in CURVES:
        return {name: GivenCurve(CURVES[name][0])}
    path = Path(name)
    try:
        text = utf8(path.read_bytes())
    except FileNotFoundError as error:
        raise CurveError(f"no curve {name!r}: it is no file, and none of {', '.join(CURVES)}") from error
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a name with a null character
        raise CurveError(f"cannot read the curve {name}: {getattr(error, 'strerror', error)}") from error
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CurveError(f"{name} is not JSON: {error}") from error
    if not isinstance(data, dict) or not data:
        raise CurveError(f'{name} holds no curve; write {{"1": 1.0, "8": 2.5}} or {{"name": {{"1": 1.0, "8": 2.5}}}}')
    several = all(isinstance(value, dict) for value in data.values())
    curves = data if several else {path.stem: data}
    return {key: parse_curve(points, f"{name}, curve {key}" if several else name) for key, points in curves.items()}


def parse_curve(points: Mapping[str, Any], where: str = "the curve") -> GivenCurve:
    """A curve from JSON's {"1": 1.0, ...}, where "switch" may say what a change of size costs.

    Raises:
        CurveError: it makes no sense; the message begins with `where`.
    """
    parsed: dict[int, float] = {}
    switch = points.get(SWITCH, 0.0)
    if isinstance(switch, bool) or not isinstance(switch, int | float) or not 0 <= switch < 1e300:
        raise CurveError(f"{where}: a change of size costs {switch!r}, but must be a number of at least 0")
    for size, cost in points.items():
        if size == SWITCH:
            continue
        is_size = size.isascii() and size.isdecimal() and len(size) < 10
        if not is_size or isinstance(cost, bool) or not isinstance(cost, int | float):
            raise CurveError(f"{where}: {size!r}: {cost!r} is not the size of a batch and what it costs")
        if not 0 < cost < 1e300:
            raise CurveError(f"{where}: a batch of {size} costs {cost}, but must cost more than 0, and not without end")
        parsed[int(size)] = float(cost)
    try:
        return GivenCurve(parsed, float(switch))
    except ValueError as error:
        raise CurveError(f"{where}: {error}") from error
