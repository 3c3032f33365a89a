"""Grids of test cases, of which a few run by default."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def grid(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test over all combinations of the values of some axes.

    By default a diagonal runs: as few combinations as cover every value of every axis. The others are exhaustive.
    """
    values = [list(axis) for axis in axes.values()]
    diagonal = {tuple(case % len(axis) for axis in values) for case in range(max(map(len, values)))}
    cases = [
        pytest.param(
            *(axis[i] for axis, i in zip(values, at, strict=True)),
            marks=() if at in diagonal else pytest.mark.exhaustive,
        )
        for at in product(*(range(len(axis)) for axis in values))
    ]
    return pytest.mark.parametrize(list(axes), cases)
