"""The fields that limit the reasoning of chats, and the budget of a request."""

from __future__ import annotations

from ngramspec.chat_template.template import ChatPrompt
from ngramspec.sampling.reasoning_budget import ReasoningBudget, budget_for
from ngramspec.server.fields import Fields
from ngramspec.server.state import UNLIMITED, ServedModel
from ngramspec.tool_calls.families import find_open_tag, reasoning_tags

_BUDGETS = ("reasoning_budget_tokens", "thinking_budget_tokens")
_MESSAGE = "reasoning_budget_message"


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
