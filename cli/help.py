"""Help of commands: options in groups, with the ones that people use first at the top, and texts of any length."""

from __future__ import annotations

import re
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from .console import USAGE


class GroupedCommand(TyperCommand):
    """Command whose help shows its example, its options by group, and then the rest of its description."""

    def __init__(self, name: str | None, *, help: str | None = None, **attributes: Any) -> None:
        first, *rest = (help or "").split("\n\n")
        if rest and rest[0].startswith("Example:"):
            first = f"{first}\n\n{rest.pop(0)}"
        super().__init__(name, **attributes | {"help": first, "epilog": "\n\n".join(rest)})

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, the options that people use first, those of this command only, and the other groups."""
        from .options import COMMON, GROUPS

        arguments, rows = [], {}
        for parameter in self.get_params(ctx):
            flags, text = parameter.get_help_record(ctx) or ("", "")  # nothing if it is hidden
            if flags and parameter.param_type_name == "argument":
                arguments.append((flags.partition(" <")[0], text.replace("  [", " [")))
            elif flags:
                rows[parameter.name] = _shorten(flags), text.replace("  [", " [")
        own = [name for name in rows if name not in COMMON and not any(name in names for names in GROUPS.values())]
        groups = {"Common options": COMMON, f"Options of {ctx.info_name}": own, **GROUPS}
        if len(rows) <= 10:  # so few need no groups
            groups = {"Options": [*rows]}
        sections = {"Arguments": arguments}
        sections |= {title: [rows.pop(name) for name in names if name in rows] for title, names in groups.items()}
        for title, section in sections.items():
            if section:
                with formatter.section(title):
                    formatter.write_dl(section, col_max=22 if formatter.width < 98 else 30)


def _shorten(flags: str) -> str:
    """Leave out all but the first short and the first long name of an option, as "-n, --predict N"."""
    names = re.findall(r"(?:(?<=^)|(?<=, ))-[\w-]+", flags)
    short = [name for name in names if not name.startswith("--")]
    long = [name for name in names if name.startswith("--")]
    return ", ".join(short[:1] + long[:1]) + flags.removeprefix(", ".join(names))


class CommandList(TyperGroup):
    """Group whose help, also shown without a command, lists the commands before the options, with full lines."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            print(ctx.get_help(), file=sys.stderr)
            raise typer.Exit(USAGE)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, (command.help or "").partition("\n\n")[0]) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
        records = (parameter.get_help_record(ctx) for parameter in self.get_params(ctx))
        with formatter.section("Options"):
            formatter.write_dl([record for record in records if record is not None])
