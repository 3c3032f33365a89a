"""Thoughts in tags: which tags a chat template knows, whether a prompt has opened one, and a grammar of thoughts."""

from __future__ import annotations

from collections.abc import Mapping

from ngramspec.tool_calls.json_text import quote

_TAGS = {
    "<think>": "</think>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought\n": "<channel|>",
}


def thought_tags(template: str | None) -> dict[str, str]:
    """The tags around thoughts that a chat template speaks of, closing ones by opening ones."""
    source = template or ""
    return {start: end for start, end in _TAGS.items() if start.strip() in source or end in source}


def opened(tags: Mapping[str, str], opening: str) -> str | None:
    """The tag that the end of a prompt has opened, so that the answer begins within thoughts; None for none."""
    return next((tag for tag in tags if opening.rstrip().endswith(tag.rstrip())), None)


def thoughts_first(rest: str, template: str | None, opening: str) -> list[str]:
    """GBNF rules whose root is the rule `rest`, with thoughts before it where the model thinks.

    Where the prompt has opened thoughts, they must end first; where the template knows tags, there may be thoughts.
    """
    tags = thought_tags(template)
    begun = opened(tags, opening)
    if begun is not None:
        return [f"root ::= thoughts [ \\n]* {rest}", *_up_to("thoughts", tags[begun])]
    rules, choices = [], []
    for number, (start, end) in enumerate(tags.items()):
        choices.append(f"{quote(start)} thoughts-{number}")
        rules += _up_to(f"thoughts-{number}", end)
    return [f"root ::= (({' | '.join(choices)}) [ \\n]*)? {rest}" if choices else f"root ::= {rest}", *rules]


def _up_to(name: str, end: str) -> list[str]:
    """Rules of any text up to the first occurrence of `end`, which is read: one for each length of it that has come."""
    rules = []
    known = "".join(sorted(set(end)))
    for done in range(len(end)):
        choices = []
        for character in known:
            text = end[:done] + character
            begun = next(n for n in range(len(text), -1, -1) if end.startswith(text[len(text) - n :]) or n == 0)
            after = f" {name}-{begun}" if begun < len(end) else ""
            choices.append(f"{quote(character)}{after if begun else f' {name}-0'}")
        choices.append(f"[^{''.join(map(_in_class, known))}] {name}-0")
        rules.append(f"{name}-{done} ::= {' | '.join(choices)}")
    return [f"{name} ::= {name}-0", *rules]


def _in_class(character: str) -> str:
    return f"\\x{ord(character):02X}" if ord(character) < 256 else character
