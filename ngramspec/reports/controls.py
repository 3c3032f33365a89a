"""`CONTROLS`, `shown`: control characters in texts of models and files as symbols, so that they command nothing."""

from __future__ import annotations

from collections.abc import Mapping

CONTROLS: Mapping[int, int] = {
    **{number: 0x2400 + number for number in range(0x20) if chr(number) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
"""For `str.translate`: the symbol of each (ESC: ␛), but not of \\n and \\t."""

_SHOWN = {**CONTROLS, **dict.fromkeys((0xFFFE, 0xFFFF), 0xFFFD)}


def shown(text: str) -> str:
    """Text of a model or a file as XML and terminals may hold it: control characters as their symbols."""
    return text.encode("utf-8", "replace").decode("utf-8").translate(_SHOWN)
