"""Settings of `/set`, derived from the groups of options of a chat; each has its name on the command line."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.data import NGramSpecError
from ngramspec.grammars.json_schema import schema_grammar
from ngramspec.loading.settings import LoadSettings
from ngramspec.sampling.settings import Option, Sampling, TextRules, options

from .chat_session import ChatOptions, Session, conversation_path, draw_seed
from .options import AUTO
from .reasoning_options import ReasoningOptions
from .sampling_options import CHAT_TEMPERATURE, SamplingOptions

DEFAULT = "default"
"""Value that resets a setting."""

LOAD_SETTINGS = (
    *("threads", "threads_batch", "ctx_size", "no_draft", "drafter", "policy", "draft_max"),
    *("memory", "no_memory"),
)
"""Settings of `LoadSettings` that a chat can change by loading the model again."""

_DEFAULTS = ChatOptions(
    LoadSettings(), SamplingOptions().settings({"temperature": CHAT_TEMPERATURE, "seed": 0}), Acceptance()
)


class Setting(NamedTuple):
    """Setting that can be changed in a chat."""

    spec: Option
    kind: Any  # type of the value
    group: str  # field of `ChatOptions` with the group of the setting; "" means `ChatOptions` itself
    field: str  # field of the group

    def get(self, chat_options: ChatOptions) -> Any:
        return getattr(getattr(chat_options, self.group) if self.group else chat_options, self.field)

    def show(self, session: Session) -> str:
        value = self.get(session.options)
        if self.spec.parse is schema_grammar:
            return "see grammar"
        if isinstance(value, bool):
            return "on" if value else "off"
        if value is None or value == ():
            return DEFAULT if self.group == "load" else "none"
        if isinstance(value, tuple) and self.spec.repeatable:
            return shlex.join(f"{v[0]}{v[1]:+g}" if isinstance(v, tuple) else repr(v)[1:-1] for v in value)
        if isinstance(value, tuple):
            return ";".join(value)
        return f"{value:g}" if isinstance(value, float) else str(value)

    def change(self, session: Session, text: str) -> None:
        """Change the value for the following answers; NGramSpecError or ValueError if the text is not allowed."""
        value = self.get(_DEFAULTS) if text == DEFAULT else self._parse(text)
        if self.field == "markdown" and text == "on" and not session.view.can_render:
            raise NGramSpecError("Markdown can only be rendered in a terminal with styles and at least 20 columns")
        if self.field == "keep" and not value:
            conversation_path().unlink(missing_ok=True)
        changed = session.options
        if self.field == "seed":
            is_random = text in (DEFAULT, "-1")
            changed = replace(changed, random_seed=is_random)
            value = draw_seed() if is_random else value
        if self.group:
            value = replace(getattr(changed, self.group), **{self.field: value})
        session.use(replace(changed, **{self.group or self.field: value}))

    def _parse(self, text: str) -> Any:
        spec, kind = self.spec, (get_args(self.kind) or (self.kind,))[0]  # int for int | None
        if spec.parse is not None:
            return spec.read(_split_texts(text) if spec.repeatable else text)
        if self.field == "threads" and text == AUTO:
            return None
        choices = {"on": True, "off": False} if kind is bool else {}
        if get_origin(self.kind) is Literal:
            choices = {choice: choice for choice in get_args(self.kind)}
        if choices and text not in choices:
            raise NGramSpecError(f"must be {' or '.join(choices)}, got {text!r}")
        if kind not in (int, float):
            return choices.get(text, text)
        try:
            value = kind(text)
        except ValueError:
            raise NGramSpecError(f"{text!r} is not a {'whole ' if kind is int else ''}number") from None
        if self.group != "sampling" and spec.allowed is not None and not spec.allowed.accepts(value):
            raise NGramSpecError(f"must be {spec.allowed.description}, got {value}")
        return value


def _split_texts(value: str) -> list[str]:
    """Split texts at spaces.

    A text that contains spaces is quoted, and escapes such as \\n have their meaning in Python.
    """
    words = shlex.shlex(value, posix=True, punctuation_chars=False)
    words.whitespace_split, words.escape, words.commenters = True, "", ""
    return [word.encode("latin-1", "backslashreplace").decode("unicode-escape") for word in words]


def _normalize(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def _derive() -> tuple[dict[str, Setting], dict[str, str]]:
    """Return all settings by name, and their names by other names and flags."""
    settings: dict[str, Setting] = {}
    names: dict[str, str] = {}
    groups: dict[str, type] = {
        "sampling": Sampling,
        "rules": TextRules,
        "load": LoadSettings,
        "": ChatOptions,
        "reasoning": ReasoningOptions,
    }
    for group, owner in groups.items():
        hints = get_type_hints(owner)
        for field, spec in options(owner).items():
            if group != "load" or field in LOAD_SETTINGS:
                flag = next((flag for flag in spec.flags if flag.startswith("--")), spec.flags[0])
                name = "think" if field == "reasoning" else _normalize(flag)
                settings[name] = Setting(spec, hints[field], group, field)
                names |= {_normalize(alias): name for alias in (name, field, *spec.flags)}
    help_text = "JSON schema for the answers, instead of a grammar."
    settings["json-schema"] = Setting(Option((), help_text, parse=schema_grammar), str, "sampling", "grammar")
    return settings, names | {"json-schema": "json-schema"}


SETTINGS, _NAMES = _derive()
"""All settings by name."""


def find(name: str) -> Setting:
    key = _NAMES.get(_normalize(name))
    if key is None:
        raise NGramSpecError(f"unknown setting {name!r}; choose from: {', '.join(SETTINGS)}")
    return SETTINGS[key]
