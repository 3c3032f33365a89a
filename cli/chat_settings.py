"""Settings of `/set`: every sampling option by its name on the command line, and other settings of a chat."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, get_args, get_type_hints

from ngramspec.chat.families import reasoning_tags
from ngramspec.data import NGramSpecError
from ngramspec.grammars.json_schema import schema_grammar
from ngramspec.loading.settings import LoadSettings
from ngramspec.sampling.settings import NO_RULES, Option, Sampling, TextRules, options

from .chat_session import Session, conversation_path
from .options import AUTO, NO_LIMIT
from .reasoning_options import ENABLE, UNLIMITED
from .sampling_options import CHAT_TEMPERATURE, SamplingOptions

DEFAULT = "default"
"""Value that resets a setting."""

LOAD_SETTINGS = (
    "threads",
    "threads_batch",
    "ctx_size",
    "no_draft",
    "drafter",
    "policy",
    "draft_max",
    "memory",
    "no_memory",
)
"""Settings of `LoadSettings` that a chat can change by loading the model again."""

_HINTS, _LOADING = get_type_hints(Sampling), get_type_hints(LoadSettings)
_CHAT = SamplingOptions().settings({"temperature": CHAT_TEMPERATURE, "seed": 0})  # default values of a chat


class Setting(NamedTuple):
    """Setting that can be changed in a chat."""

    help: str  # help text of one line
    show: Callable[[Session], str]  # function that returns the value as text
    # The function takes a value as text, or `None` for the default; it raises NGramSpecError or ValueError.
    change: Callable[[Session, str | None], None]


def _flag_name(spec: Option) -> str:
    """Return the name of an option: its first flag in words."""
    return next((flag for flag in spec.flags if flag.startswith("--")), spec.flags[0]).lstrip("-")


def _normalize(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def find(name: str) -> Setting:
    """Return a setting by its name or one of its flags."""
    key = _ALIASES.get(_normalize(name))
    if key is None:
        raise NGramSpecError(f"unknown setting {name!r}; choose from: {', '.join(SETTINGS)}")
    return SETTINGS[key]


# ---------------------------------------------------------------------- sampling


def _sampling(field: str, spec: Option) -> Setting:
    kind = _HINTS[field]

    def change(session: Session, value: str | None) -> None:
        new_value = getattr(_CHAT, field) if value is None else _parse(spec, kind, value)
        _use(session, replace(session.sampling, **{field: new_value}))

    return Setting(spec.help, lambda session: _format_value(getattr(session.sampling, field)), change)


def _parse(spec: Option, kind: Any, value: str) -> Any:
    if spec.parse is not None:
        return spec.read(_split_texts(value) if spec.repeatable else value)
    if kind is bool:
        return _parse_switch(value)
    if kind not in (int, float):
        return value
    try:
        return kind(value)
    except ValueError:
        raise NGramSpecError(f"{value!r} is not a {'whole ' if kind is int else ''}number") from None


def _parse_switch(value: str) -> bool:
    if value not in ("on", "off"):
        raise NGramSpecError(f"must be on or off, got {value!r}")
    return value == "on"


def _split_texts(value: str) -> list[str]:
    """Split texts at spaces.

    A text that contains spaces is quoted, and escapes such as \\n have their meaning in Python.
    """
    words = shlex.shlex(value, posix=True, punctuation_chars=False)
    words.whitespace_split, words.escape, words.commenters = True, "", ""
    return [word.encode("latin-1", "backslashreplace").decode("unicode-escape") for word in words]


def _format_value(value: Any) -> str:
    """Return a value as the user would type it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple):
        return shlex.join(f"{v[0]}{v[1]:+g}" if isinstance(v, tuple) else repr(v)[1:-1] for v in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _use(session: Session, sampling: Sampling) -> None:
    """Set the sampling for the following answers, after checking that model and acceptance support it."""
    session.target.vocabulary.sampler(sampling)
    limited = session.reasoning_budget != UNLIMITED
    session.acceptance.rule(sampling, "a reasoning budget" if limited else session.rules.restriction)
    session.sampling = sampling


def _set_seed(session: Session, value: str | None) -> None:
    seed = -1 if value is None else _parse(options(Sampling)["seed"], int, value)
    if seed == -1:
        session.draw_seed()
    else:
        _use(session, replace(session.sampling, seed=seed))
    session.random_seed = seed == -1


def _set_schema(session: Session, value: str | None) -> None:
    _use(session, replace(session.sampling, grammar=None if value is None else schema_grammar(value)))


# ---------------------------------------------------------------------- rules of the text


def _rule(field: str, spec: Option) -> Setting:
    assert spec.allowed is not None
    holds, words = spec.allowed.accepts, spec.allowed.description

    def change(session: Session, value: str | None) -> None:
        number = getattr(NO_RULES, field) if value is None else _parse(spec, int, value)
        if not holds(number):
            raise NGramSpecError(f"must be {words}, got {number}")
        rules = replace(session.rules, **{field: number})
        session.acceptance.rule(session.sampling, rules.restriction)
        session.rules = rules

    return Setting(spec.help, lambda session: str(getattr(session.rules, field)), change)


# ---------------------------------------------------------------------- other settings


def _set_limit(session: Session, value: str | None) -> None:
    if value in (None, "-1"):
        session.limit = NO_LIMIT
    elif value.isdecimal() and int(value) > 0:
        session.limit = int(value)
    else:
        raise NGramSpecError(f"must be a whole number of at least 1, or -1 (until the context is full), got {value!r}")


def _set_stop(session: Session, value: str | None) -> None:
    stop = _split_texts(value or "")
    if not all(stop):
        raise NGramSpecError("a stop string must not be empty")
    session.stop = tuple(stop)


def _set_think(session: Session, value: str | None) -> None:
    if value is None:
        session.variables.pop(ENABLE, None)
        return
    on = _parse_switch(value)
    if ENABLE not in (session.target.vocabulary.chat_template or ""):
        raise NGramSpecError(f"this model's chat template has no variable for reasoning ({ENABLE})")
    session.variables[ENABLE] = on


def _set_budget(session: Session, value: str | None) -> None:
    if value in (None, str(UNLIMITED)):
        session.reasoning_budget = UNLIMITED
        return
    if not value.isdecimal():
        raise NGramSpecError(f"must be a whole number of at least 0, or -1 (no limit), got {value!r}")
    if not reasoning_tags(session.target.vocabulary.chat_template):
        raise NGramSpecError("this model's chat template has no reasoning tags")
    session.acceptance.rule(session.sampling, "a reasoning budget")
    session.reasoning_budget = int(value)


def _set_keep(session: Session, value: str | None) -> None:
    on = _parse_switch(value or "off")
    if not on:
        conversation_path().unlink(missing_ok=True)
    session.keep = on
    session.save_changes()


def _set_markdown(session: Session, value: str | None) -> None:
    if value == "on" and not session.view.can_render:
        raise NGramSpecError("Markdown can only be rendered in a terminal with styles and at least 20 columns")
    session.view.markdown = _parse_switch(value or "on")


# ---------------------------------------------------------------------- loading and drafting


def _loading(field: str, spec: Option) -> Setting:
    kind = (get_args(_LOADING[field]) or (_LOADING[field],))[0]  # int for int | None
    default = getattr(LoadSettings(), field)

    def change(session: Session, value: str | None) -> None:
        if field == "threads" and value == AUTO:
            value = None
        changes = {field: default if value is None else _parse(spec, kind, value)}
        session.reload_model(session.source, replace(session.load, **changes))

    def show(session: Session) -> str:
        value = getattr(session.load, field)
        return DEFAULT if value is None else _format_value(value)

    return Setting(spec.help, show, change)


_GROUPS = (
    (_sampling, options(Sampling)),
    (_rule, options(TextRules)),
    (_loading, {name: spec for name, spec in options(LoadSettings).items() if name in LOAD_SETTINGS}),
)

SETTINGS = {_flag_name(spec): make(field, spec) for make, group in _GROUPS for field, spec in group.items()} | {
    "json-schema": Setting("JSON schema for the answers, instead of a grammar.", lambda _: "see grammar", _set_schema),
    "predict": Setting(
        "Maximum number of tokens per answer; -1: until the context is full.",
        lambda session: "-1" if session.limit == NO_LIMIT else str(session.limit),
        _set_limit,
    ),
    "stop": Setting("Stop strings, quoted as in a shell.", lambda s: _format_value(tuple(s.stop)), _set_stop),
    "think": Setting(
        "Reasoning before the answer (if the chat template supports it): on or off.",
        lambda s: _format_value(s.variables[ENABLE]) if ENABLE in s.variables else "as the model does",
        _set_think,
    ),
    "reasoning-budget": Setting(
        "Maximum number of tokens in each block of reasoning; 0: end it at once; -1: no limit.",
        lambda session: str(session.reasoning_budget),
        _set_budget,
    ),
    "markdown": Setting("Render Markdown: on or off.", lambda s: _format_value(s.view.markdown), _set_markdown),
    "keep": Setting(
        "Save this conversation for chat --resume: on, or off (which deletes the saved one).",
        lambda s: _format_value(s.keep),
        _set_keep,
    ),
}
"""All settings by name."""

SETTINGS["seed"] = SETTINGS["seed"]._replace(change=_set_seed)
SETTINGS["samplers"] = SETTINGS["samplers"]._replace(show=lambda session: ";".join(session.sampling.samplers))

_ALIASES = {name: name for name in SETTINGS} | {
    _normalize(alias): _flag_name(spec)
    for _, group in _GROUPS
    for field, spec in group.items()
    for alias in (field, *spec.flags)
}
