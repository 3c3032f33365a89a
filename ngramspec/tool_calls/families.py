"""The families, in the order in which they are asked whether a chat template is theirs."""

from __future__ import annotations

from ngramspec.tool_calls.forms import Form
from ngramspec.tool_calls.hermes import HERMES
from ngramspec.tool_calls.plain import LLAMA

FAMILIES: tuple[Form, ...] = (HERMES, LLAMA)


def family_of(template: str | None) -> Form | None:
    """The family that a chat template belongs to, by what it contains; None for an unknown one."""
    for form in FAMILIES:
        if template and any(all(sign in template for sign in group) for group in form.signs):
            return form
    return None
