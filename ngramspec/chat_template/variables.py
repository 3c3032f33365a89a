"""The variables that every chat template receives, with llama-server's names and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

RESERVED_NAMES = (
    *("messages", "tools", "bos_token", "eos_token"),
    *("add_generation_prompt", "raise_exception", "strftime_now"),
)
"""Variables that a request cannot set."""

_SWITCHES = ("enable_thinking", "preserve_reasoning")

_REASONING = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
    "drop_thinking": False,
}
"""Names by which templates know `preserve_reasoning`, and their value if it is true."""


def check_variables(variables: Any) -> None:
    """Raise a ValueError if variables are not an object, or one of them has a wrong type or cannot be set."""
    if not isinstance(variables, Mapping):
        raise ValueError("the chat template's variables must be a JSON object")
    for name, value in variables.items():
        if name in RESERVED_NAMES:
            raise ValueError(f"the chat template's variable {name!r} cannot be set")
        if name in _SWITCHES and not isinstance(value, bool):
            raise ValueError(f"the chat template's variable {name!r} must be true or false, got {value!r:.60}")


def template_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a template, for those that a request or user gives.

    Dates change once a day, so that the prompts of a day share the cache.
    """
    today = datetime.now()
    values = {
        "enable_thinking": True,
        "preserve_reasoning": True,
        "date_string": today.strftime("%d %b %Y"),
        "datetime": today.strftime("%b %d %Y"),
        "functions": "",  # FireFunction's template concatenates it
    } | dict(variables)
    if isinstance(preserve := values["preserve_reasoning"], bool):
        values = {name: value is preserve for name, value in _REASONING.items()} | values
    if values.get("reasoning_effort") is None:
        values.pop("reasoning_effort", None)
    elif isinstance(effort := values["reasoning_effort"], str):
        values = {"reasoning_strength": effort} | values
    return values
