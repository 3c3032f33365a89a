"""Values of load settings: the allowed ones, and how texts of the command line are parsed."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ngramspec.llama.devices import ALL
from ngramspec.sampling.settings import FINITE, Allowed, allow_int_range


class LoadSettingsError(ValueError):
    """A setting cannot have its value, or two contradict each other; the text has settings as {draft_model}."""

    def __str__(self) -> str:
        return self.message({})

    def message(self, names: Mapping[str, str]) -> str:
        """Format the message, replacing field names by the given display names (such as command-line flags)."""
        return re.sub(r"\{(\w+)\}", lambda match: names.get(match[1], match[1]), self.args[0])


MODEL_ONLY = "model"
"""Value of `drafter` for a draft model without n-grams."""

NO_DEVICE = "none"
"""Value of `device` for the CPU."""

MIN_CONTEXT = 16
CONTEXT = Allowed(
    lambda x: isinstance(x, int) and (x == 0 or MIN_CONTEXT <= x <= 2**24),
    f"0 or from {MIN_CONTEXT} to {2**24}",
    0,
)
LAYERS = allow_int_range(ALL, 9999)
DEVICES = Allowed(
    lambda x: isinstance(x, str) and all(x.split(",")) and len({*x.split(",")}) == x.count(",") + 1,
    "a list of different device names, or 'none'",
)


def _is_split(text: Any) -> bool:
    """Return True if a text is a list of shares."""
    try:
        shares = [float(share) for share in re.split("[,/]", text)]
    except (TypeError, ValueError):
        return False
    return all(0 <= share < math.inf for share in shares) and sum(shares) > 0


SPLIT = Allowed(_is_split, "a list of numbers of at least 0 with a positive sum")


def _are_overrides(value: Any) -> bool:
    """Return True if a value consists of pairs of a regular expression and a device."""
    try:
        return all(re.compile(pattern) and pattern and device for pattern, device in value)
    except (TypeError, ValueError, re.error):
        return False


OVERRIDES = Allowed(_are_overrides, "valid regular expressions of tensor names with a device each")


def parse_overrides(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Parse REGEX=DEVICE,REGEX=DEVICE of each occurrence of the option; "=" in a regular expression is allowed."""
    parts = [item.rpartition("=") for row in csv.reader(texts) for item in row or [""]]
    pairs = tuple((pattern, device) for pattern, _, device in parts)
    if not _are_overrides(pairs):
        raise LoadSettingsError(f"{{override_tensor}} must be REGEX=DEVICE, got {','.join(texts)!r}")
    return pairs


def allow_adapters(words: str) -> Allowed:
    """Return the allowed values of a list of adapter files with their scales."""

    def holds(value: Any) -> bool:
        try:
            return all(str(name) and FINITE.accepts(scale) for name, scale in value)
        except (TypeError, ValueError):  # the items are not pairs
            return False

    return Allowed(holds, words)


def parse_lora(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Parse FILE,FILE of each occurrence of the option; a name with a comma must be in quotation marks."""
    names = [name for row in csv.reader(texts) for name in row or [""]]
    if not all(names):
        raise LoadSettingsError(f"{{lora}} must be a list of file names, got {','.join(texts)!r}")
    return tuple((name, 1.0) for name in names)


def parse_scaled(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Parse FILE:SCALE,FILE:SCALE of each occurrence of the option."""
    try:
        pairs = [item.rpartition(":") for item, _ in parse_lora(texts)]
        return tuple((name, float(scale)) for name, _, scale in pairs)
    except ValueError:
        raise LoadSettingsError(f"{{lora_scaled}} must be FILE:SCALE, got {','.join(texts)!r}") from None
