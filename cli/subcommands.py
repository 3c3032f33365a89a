"""The subcommands, known by a name and a line of help. Each is imported only when it runs or its own help is shown.

llama.cpp, numpy and the line editor take longer to import than `ngramspec --help` may take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

COMMANDS = {
    "chat": "Chat with a model.",
    "complete": "Continue a text from a file or a pipe.",
    "serve": "Answer OpenAI's, Anthropic's and llama-server's clients over HTTP.",
    "bench": "Compare drafted with plain decoding, by kind of text.",
    "replay": "Replay recorded conversations: what would drafting have gained?",
    "trace": "Show a trace, one line a pass.",
    "verify": "Check on your model and machine that drafts change nothing.",
    "models": "List the models on this disk.",
    "info": "Show build, model, cost of a batch, and sizes that agree bit for bit.",
    "tune": "Find the settings that are fastest on this machine.",
    "memory": "Texts of yours to draft from.",
    "rpc-worker": "Lend this machine to a model run elsewhere.",
}


class Subcommands(TyperGroup):
    """A group whose help imports none of its commands."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Imported()  # type: ignore[assignment]  # never changed, as all that adds to it is in COMMANDS

    def format_commands(self, _context: Any, formatter: Any) -> None:
        """List the commands in the help."""
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """What Tab offers here. Stand-ins tell the commands' names: typer would import all of them to ask."""
        self.commands, commands = {n: TyperCommand(n, help=line) for n, line in COMMANDS.items()}, self.commands
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self.commands = commands


class _Imported(Mapping[str, Any]):
    """Commands by name, each from the module of that name ("-" is "_"): its `app`, or its function of that name."""

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        from .options import grouped

        called = name.replace("-", "_")
        module = import_module(f".{called}", __package__)
        app = getattr(module, "app", None)
        if app is None:
            app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
            app.command(name)(grouped(getattr(module, called)))
        return typer.main.get_command(app)
