"""Prompts as text completion takes them: a text, token ids, a mix of both, or a list of such."""

from __future__ import annotations

from typing import Any

from ngramspec.server.common_fields import MOST_ANSWERS
from ngramspec.server.errors import ApiError, bad_field
from ngramspec.server.fields import Fields, shown
from ngramspec.server.served import ServedModel


def read_prompts(model: ServedModel, given: Fields) -> list[list[int]]:
    """The token ids of each prompt. Control tokens that a text spells out are control tokens: clients put them there.

    Raises:
        ApiError: there is none, one is empty, or is no prompt.
    """
    value = given.data.get("prompt")
    if value is None:
        raise bad_field("prompt", "prompt is missing")
    prompts = [_tokens(model, one) for one in (value if several(value) else [value])]
    if not prompts or not all(prompts):
        raise bad_field("prompt", "prompt is empty: there is nothing to continue")
    if len(prompts) > MOST_ANSWERS:
        raise bad_field("prompt", f"prompt holds {len(prompts)} prompts, but must hold at most {MOST_ANSWERS}")
    return prompts


def several(value: Any) -> bool:
    """Whether the value of `prompt` is a list of prompts, not one of tokens and texts."""
    if not isinstance(value, list):
        return False
    return any(isinstance(item, list) for item in value) or all(isinstance(item, str) for item in value)


def _tokens(model: ServedModel, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(model.vocabulary.tokenize(prompt, special=True))
    if not isinstance(prompt, list):
        raise bad_field("prompt", f"prompt holds {shown(prompt)}, but must hold text, token ids or lists of them")
    tokens: list[int] = []
    for i, item in enumerate(prompt):
        if isinstance(item, str):
            tokens += model.vocabulary.tokenize(item, special=True, add_bos=i == 0)
        else:
            tokens.append(check_token(model, item, "prompt"))
    return tokens


def check_token(model: ServedModel, value: Any, name: str) -> int:
    """A token id of this model.

    Raises:
        ApiError: it is none; `name`: the field that holds it.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < model.vocabulary.n_vocab:
        most = model.vocabulary.n_vocab - 1
        raise bad_field(name, f"{name} holds {shown(value)}, but must hold text or token ids from 0 to {most}")
    return value


def one_prompt(prompts: list[list[int]]) -> list[int]:
    """The prompt, where there may be only one."""
    if len(prompts) != 1:
        raise ApiError(400, "prompt holds several prompts, but must hold one", param="prompt")
    return prompts[0]
