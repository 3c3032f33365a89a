"""Cost curves that are not measured: named curves of other machines, and curves in JSON files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ngramspec.cost.times import LARGEST, PassTimes
from ngramspec.data import NGramSpecError, get_reason
from ngramspec.storage import utf8

Points = Mapping[int, float]  # cost of a batch by its size
SWITCH = "switch"  # key of the cost of a change of size in JSON

# Points and source of each curve, by name. The points are those of `parse_curve`, also with the cost of a change.
CURVES: dict[str, tuple[dict[str, float], str]] = {
    name: (curve["points"], curve["source"])
    for name, curve in json.loads(Path(__file__).with_name("curves.json").read_bytes()).items()
}


def make_fixed_curve(points: Points, switch: float = 0.0) -> PassTimes:
    """Return a fixed curve in units of T(1), linear between its points and after the last two.

    `switch` is the additional cost of a change of size, in the unit of the points. A ValueError means that size 1 is
    missing, or that the cost of a batch of 1 to `LARGEST` tokens is not positive and finite.
    """
    if any(not 0 < cost < math.inf for cost in points.values()) or any(size < 1 for size in points):
        raise ValueError("sizes and costs must be positive numbers")
    if 1 not in points:
        raise ValueError("the entry for batch size 1 is missing")
    *_, before, last = 1, *sorted(points)
    if last < LARGEST:
        slope = (points[last] - points[before]) / max(1, last - before)
        points = {**points, LARGEST: points[last] + slope * (LARGEST - last)}
        if points[LARGEST] <= 0:
            raise ValueError(
                f"the costs decrease so fast after size {before} that a batch of {LARGEST} would cost nothing"
            )
    ratios = {size: cost / points[1] for size, cost in points.items()}
    return PassTimes(ratios, (switch / points[1], 0.0), is_fixed=True)


def to_json(curve: PassTimes) -> dict[str, float]:
    """Return a curve as a JSON object for `parse_curve`."""
    ratios: dict[str, float] = curve.to_json()["ratios"]
    return {**ratios, **({SWITCH: curve.change} if curve.change else {})}


def freeze(curve: PassTimes) -> PassTimes:
    return make_fixed_curve({size: curve.ratio(size) for size in range(1, LARGEST + 1)}, curve.change)


def find_curves(name: str) -> dict[str, PassTimes]:
    """Return the curves that a user selected, by name; an NGramSpecError means that there is no such curve.

    `name` is one of `CURVES`, or the path of a JSON file with one curve, which gets the name of the file, or several.
    """
    if name in CURVES:
        return {name: parse_curve(CURVES[name][0])}
    path = Path(name)
    try:
        text = utf8(path.read_bytes())
    except FileNotFoundError as error:
        raise NGramSpecError(f"unknown curve {name!r}; pass a file or one of {', '.join(CURVES)}") from error
    except (OSError, ValueError) as error:  # a ValueError means not UTF-8, or a null character in the name
        raise NGramSpecError(f"cannot read the curve {name}: {get_reason(error)}") from error
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


def parse_curve(points: Mapping[str, Any], where: str = "the curve") -> PassTimes:
    """Return the curve of a JSON object {"1": 1.0, ...}, which may contain the key "switch"; see `make_fixed_curve`."""
    costs = dict(points)
    switch = costs.pop(SWITCH, 0.0)
    if isinstance(switch, bool) or not isinstance(switch, int | float) or not 0 <= switch < 1e300:
        raise NGramSpecError(f"{where}: the cost of a change of size must be a number of at least 0, got {switch!r}")
    for size, cost in costs.items():
        is_size = size.isascii() and size.isdecimal() and len(size) < 10
        if not is_size or isinstance(cost, bool) or not isinstance(cost, int | float):
            raise NGramSpecError(f"{where}: {size!r}: {cost!r} is not a batch size and its cost")
        if not 0 < cost < 1e300:
            raise NGramSpecError(f"{where}: the cost of a batch of {size} must be finite and above 0, got {cost}")
    try:
        return make_fixed_curve({int(size): float(cost) for size, cost in costs.items()}, float(switch))
    except ValueError as error:
        raise NGramSpecError(f"{where}: {error}") from error
