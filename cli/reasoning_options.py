"""Options for the reasoning of a model in chats, of `ngramspec chat` and `ngramspec serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ngramspec.chat.families import reasoning_tags
from ngramspec.sampling.settings import allow_range, option

from .console import note

UNLIMITED = -1
ENABLE = "enable_thinking"  # variable of chat templates that turns reasoning on or off


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    reasoning: Literal["auto", "on", "off"] = option(
        "auto",
        "-rea",
        help="Reasoning before answers, if the chat template can turn it off; auto: on if it can reason.",
    )
    reasoning_budget: int = option(
        UNLIMITED,
        help="Maximum number of tokens in each block of reasoning; 0: end it at once; -1: no limit.",
        allowed=allow_range(UNLIMITED),
    )
    reasoning_budget_message: str = option(
        "", help="Text to insert when the reasoning budget is used up; default: none."
    )

    @property
    def limited(self) -> bool:
        return self.reasoning_budget != UNLIMITED

    @property
    def restriction(self) -> str:
        """The budget, as `TextRules.restriction` names it."""
        return "a reasoning budget" if self.limited else ""

    @property
    def variables(self) -> dict[str, Any]:
        return {} if self.reasoning == "auto" else {ENABLE: self.reasoning == "on"}

    def check(self, template: str | None) -> None:
        """Print a warning for each option that has no effect with a chat template."""
        if self.variables and ENABLE not in (template or ""):
            note(f"warning: --reasoning has no effect: the chat template has no variable {ENABLE}")
        if self.limited and not reasoning_tags(template):
            note("warning: --reasoning-budget has no effect: the chat template has no reasoning tags")
        if self.reasoning_budget_message and not self.limited:
            note("warning: --reasoning-budget-message has no effect without --reasoning-budget")
