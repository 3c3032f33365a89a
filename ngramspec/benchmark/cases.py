"""Benchmark prompts as the tokens of a target: those that can be run on it, and those that cannot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ngramspec.errors import ModelError
from ngramspec.prompts import Prompt


class PromptTarget(Protocol):
    """What turns prompts into tokens; see `ngramspec.llama.target.Target`."""

    n_ctx: int

    def tokenize(self, text: str) -> list[int]: ...

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt as token ids."""

    category: str
    id: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A prompt that cannot be run on this target, and why."""

    category: str
    id: str
    reason: str


def prepare(target: PromptTarget, prompts: Iterable[Prompt], max_tokens: int) -> tuple[list[Case], list[Skipped]]:
    """Tokenize prompts; those that leave no room for `max_tokens`, or that the chat template refuses, are skipped."""
    cases: list[Case] = []
    skipped: list[Skipped] = []
    for prompt in prompts:
        try:
            if prompt.text is not None:
                tokens = target.tokenize(prompt.text)
            else:
                tokens = target.chat_prompt(prompt.messages or ())
        except ModelError as error:
            skipped.append(Skipped(prompt.category, prompt.id, str(error)))
            continue
        if not tokens:
            skipped.append(Skipped(prompt.category, prompt.id, "no tokens"))
        elif len(tokens) + max_tokens > target.n_ctx:
            reason = f"{len(tokens)} tokens and {max_tokens} to generate are too long for a context of {target.n_ctx}"
            skipped.append(Skipped(prompt.category, prompt.id, reason))
        else:
            cases.append(Case(prompt.category, prompt.id, tuple(tokens)))
    return cases, skipped
