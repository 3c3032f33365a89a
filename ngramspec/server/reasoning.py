"""The fields that enable and limit the reasoning of chats, and the budget of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ngramspec.chat.families import find_open_tag, reasoning_tags
from ngramspec.chat.template import ChatPrompt
from ngramspec.sampling.settings import ReasoningBudget, budget_for
from ngramspec.server.fields import Fields
from ngramspec.server.state import UNLIMITED, ServedModel

_BUDGETS = ("reasoning_budget_tokens", "thinking_budget_tokens")
_MESSAGE = "reasoning_budget_message"


NO_REASONING: Mapping[str, Any] = {"enable_thinking": False, "reasoning_effort": None}
"""Variables of the chat template that disable reasoning; an effort that the server sets has no effect then."""


def read_thinking(fields: Fields) -> bool | None:
    """Return whether `thinking`, a field of Anthropic, DeepSeek and others, enables reasoning; `None` if absent."""
    thinking = fields.object("thinking")
    if thinking is None:
        return None
    return thinking.require_choice("type", ("enabled", "disabled", "adaptive", "between_tools")) != "disabled"


def read_thinking_budget(fields: Fields) -> int | None:
    """Return `thinking.budget_tokens`, which only enabled thinking has."""
    thinking = fields.object("thinking")
    return thinking.integer("budget_tokens") if thinking is not None and thinking.string("type") == "enabled" else None


def read_reasoning_variables(fields: Fields) -> dict[str, Any]:
    """Return the variables of the chat template for the fields by which clients of chat completions set reasoning.

    These are, by priority, OpenAI's `reasoning_effort`, OpenRouter's `reasoning`, Anthropic's `thinking`, Ollama's
    `think` and Qwen's `enable_thinking`.
    """
    effort: str | bool | None = fields.string("reasoning_effort") or None
    reasoning = fields.object("reasoning") or Fields({})
    if effort is None:
        effort = reasoning.string("effort") or (reasoning.boolean("enabled") if "enabled" in reasoning else None)
    if effort is None:
        effort = read_thinking(fields)
    if effort is None and "think" in fields:
        effort = think if isinstance(think := fields.data["think"], str) else fields.boolean("think")
    if effort is None and "enable_thinking" in fields:
        effort = fields.boolean("enable_thinking")
    match effort:
        case None:
            return {}
        case True:
            return {"enable_thinking": True}
        case False | "none":
            return dict(NO_REASONING)
        case _:
            return {"reasoning_effort": effort}


def read_budget(
    fields: Fields, model: ServedModel, prompt: ChatPrompt, own: int | None = None
) -> ReasoningBudget | None:
    """Return the budget of a chat; `None` if it has no limit, or the model does not reason.

    llama-server's fields override the budget in a field of the API (`own`), which overrides the server's.
    """
    default = model.reasoning_budget if own is None else own
    budget = fields.integer(fields.name(*_BUDGETS), UNLIMITED, minimum=UNLIMITED)
    message = fields.string(_MESSAGE)
    limit = default if budget is None or budget == UNLIMITED else budget
    if limit == UNLIMITED:
        return None
    vocabulary = model.vocabulary
    tags = reasoning_tags(vocabulary.chat_template)
    return budget_for(
        limit,
        model.reasoning_message if message is None else message,
        tags,
        vocabulary,
        vocabulary.display_piece,
        prompt=prompt.tokens,
        start=find_open_tag(tags, prompt.opening),
    )


def refuse_budget(fields: Fields) -> None:
    """Refuse a budget in a request that is not a chat, whose tags of reasoning are unknown."""
    for name in _BUDGETS:
        if name in fields and fields.data[name] != UNLIMITED:
            raise fields.field_error(name, "is supported in chats only; use /v1/chat/completions")
