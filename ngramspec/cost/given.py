"""Cost curves that are given, not measured: those of other machines, by name, and those in JSON files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ngramspec.cost.curve import CostCurve
from ngramspec.errors import NGramSpecError
from ngramspec.storage import utf8

LARGEST = 64  # tokens in the largest batch: what `Target.evaluate` takes
Points = Mapping[int, float]  # size of a batch -> what it costs
SWITCH = "switch"  # what a curve in JSON calls the cost of a change of size

CURVES: dict[str, tuple[dict[int, float], str]] = {
    name: ({int(size): cost for size, cost in curve["points"].items()}, curve["source"])
    for name, curve in json.loads(Path(__file__).with_name("curves.json").read_bytes()).items()
}
"""By name: the points, and where they come from."""


def given_curve(points: Points, switch: float = 0.0) -> CostCurve:
    """A fixed curve, in units of T(1): linear between its points, and past the last one as between the last two.

    Args:
        points: what a batch costs by its size; size 1 must be there.
        switch: what a change of size costs beyond that, in the same unit.

    Raises:
        ValueError: size 1 is missing, or a batch of 1 to LARGEST tokens would cost nothing, or infinitely much.
    """
    if any(not 0 < cost < math.inf for cost in points.values()) or any(size < 1 for size in points):
        raise ValueError("sizes and costs must be positive numbers")
    if 1 not in points:
        raise ValueError("the entry for batch size 1 is missing")
    last = max(points)
    if last < LARGEST:
        before = max((size for size in points if size < last), default=last)
        slope = (points[last] - points[before]) / (last - before) if before < last else 0.0
        points = {**points, LARGEST: points[last] + slope * (LARGEST - last)}
        if points[LARGEST] <= 0:
            raise ValueError(
                f"the costs decrease so fast after size {before} that a batch of {LARGEST} would cost nothing"
            )
    scaled = {size: cost / points[1] for size, cost in points.items()}
    return CostCurve(scaled, switch / points[1], measured=False)


def stated(curve: CostCurve) -> dict[str, float]:
    """A curve in JSON, as `parse_curve` takes it."""
    found: dict[str, Any] = curve.to_json()
    return {**found["seconds"], **({SWITCH: curve.switch} if curve.switch else {})}


def frozen(curve: CostCurve) -> CostCurve:
    """A measured curve as it is now, held fixed."""
    return given_curve({size: curve.seconds(size) for size in range(1, LARGEST + 1)}, curve.switch)


def find_curves(name: str) -> dict[str, CostCurve]:
    """The curves that a user means by the name of one in CURVES, or of a JSON file; NGramSpecError for any other.

    A file holds one curve, {"1": 1.0, "8": 2.5}, which takes its name, or several, {"name": {"1": 1.0, ...}, ...}.
    """
    if name in CURVES:
        return {name: given_curve(CURVES[name][0])}
    path = Path(name)
    try:
        text = utf8(path.read_bytes())
    except FileNotFoundError as error:
        raise NGramSpecError(f"unknown curve {name!r}; pass a file or one of {', '.join(CURVES)}") from error
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a name with a null character
        raise NGramSpecError(f"cannot read the curve {name}: {getattr(error, 'strerror', error)}") from error
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NGramSpecError(f"{name} is not JSON: {error}") from error
    if not isinstance(data, dict) or not data:
        raise NGramSpecError(
            f'{name} contains no curve; use the form {{"1": 1.0, "8": 2.5}} or {{"name": {{"1": 1.0, "8": 2.5}}}}'
        )
    several = all(isinstance(value, dict) for value in data.values())
    curves = data if several else {path.stem: data}
    return {key: parse_curve(points, f"{name}, curve {key}" if several else name) for key, points in curves.items()}


def parse_curve(points: Mapping[str, Any], where: str = "the curve") -> CostCurve:
    """A curve from JSON's {"1": 1.0, ...}, where "switch" may say what a change of size costs.

    Raises NGramSpecError where it makes no sense; the message begins with `where`.
    """
    parsed: dict[int, float] = {}
    switch = points.get(SWITCH, 0.0)
    if isinstance(switch, bool) or not isinstance(switch, int | float) or not 0 <= switch < 1e300:
        raise NGramSpecError(f"{where}: the cost of a change of size must be a number of at least 0, got {switch!r}")
    for size, cost in points.items():
        if size == SWITCH:
            continue
        is_size = size.isascii() and size.isdecimal() and len(size) < 10
        if not is_size or isinstance(cost, bool) or not isinstance(cost, int | float):
            raise NGramSpecError(f"{where}: {size!r}: {cost!r} is not a batch size and its cost")
        if not 0 < cost < 1e300:
            raise NGramSpecError(f"{where}: the cost of a batch of {size} must be finite and above 0, got {cost}")
        parsed[int(size)] = float(cost)
    try:
        return given_curve(parsed, float(switch))
    except ValueError as error:
        raise NGramSpecError(f"{where}: {error}") from error
