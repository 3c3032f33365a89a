"""The families, in the order in which they are asked whether a chat template is theirs."""

from __future__ import annotations

from ngramspec.tool_calls.forms import Form
from ngramspec.tool_calls.gemma import GEMMA, GEMMA4
from ngramspec.tool_calls.harmony import HARMONY
from ngramspec.tool_calls.hermes import GLM, GRANITE, HERMES, QWEN_CODER
from ngramspec.tool_calls.invoked import DEEPSEEK_INVOKED, MINIMAX
from ngramspec.tool_calls.llama import LLAMA
from ngramspec.tool_calls.python_calls import LFM2
from ngramspec.tool_calls.sectioned import DEEPSEEK_V3, DEEPSEEK_V31, KIMI, MISTRAL, MISTRAL_LIST

FAMILIES: tuple[Form, ...] = (
    HARMONY,
    DEEPSEEK_INVOKED,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI,
    MINIMAX,
    GLM,
    QWEN_CODER,
    HERMES,
    GRANITE,
    GEMMA4,
    LFM2,
    MISTRAL,
    MISTRAL_LIST,
    LLAMA,
    GEMMA,
)


def family_of(template: str | None) -> Form | None:
    """The family that a chat template belongs to, by what it contains; None for an unknown one."""
    for form in FAMILIES:
        if template and any(all(sign in template for sign in group) for group in form.signs):
            return form
    return None
