"""The `ngramspec` command: its subcommands, and the one place where errors become a line and an exit code.

Each subcommand is imported only when it runs or its own help is shown: llama.cpp, numpy and the line editor take longer
to import than `ngramspec --help` may take.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import ngramspec
from ngramspec.errors import NGramSpecError

from .console import FAILED, INTERRUPTED, TERMINATED, USAGE, Terminated, fail, prepare_streams, raise_on_signals

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
    """A group that knows its commands' names and lines of help, and imports a command when it is asked for."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=line) for name, line in COMMANDS.items()}

    def format_commands(self, _context: Any, formatter: Any) -> None:
        """List the commands in the help, each with its whole line."""
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that was typed, with what was typed behind it."""
        name, known, rest = super().resolve_command(ctx, args)
        return name, known and imported(str(name)), rest


def imported(name: str) -> Any:
    """A command from the module of its name ("-" is "_"): its `app`, or its function of that name."""
    from .options import grouped

    called = name.replace("-", "_")
    module = import_module(f".{called}", __package__)
    found = getattr(module, "app", None)
    if found is None:
        found = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        found.command(name)(grouped(getattr(module, called)))
    return typer.main.get_command(found)


app = typer.Typer(
    cls=Subcommands,
    name="ngramspec",
    help="Faster local GGUF generation without a draft model and without changing the output.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"ngramspec {ngramspec.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(USAGE)


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line; returns the exit code."""
    raise_on_signals()
    try:
        try:
            prepare_streams()
            if os.environ.get("_NGRAMSPEC_COMPLETE") == "complete_bash":  # typer's name for a Tab in bash
                from .models import join_at_colons

                join_at_colons(os.environ)
            code = app(args=arguments, prog_name="ngramspec", standalone_mode=False)
            return code if isinstance(code, int) else 0
        except (NGramSpecError, OSError) as error:
            fail(error)
        except MemoryError:
            fail("out of memory; try a smaller -c/--ctx-size or a smaller model")
        except Exception as error:
            # Typer carries its own copy of click in some versions; its errors know how to word themselves.
            if not hasattr(error, "format_message"):
                raise
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "ngramspec"
            fail(f"{_worded(error)} (see {command} --help)", USAGE)
    except typer.Exit as exit_:
        return exit_.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Terminated:
        return TERMINATED
    return FAILED


def _worded(error: Any) -> str:
    """What is wrong with the command line. Newer versions of typer check values by pydantic, and hand on its words."""
    message: str = error.format_message()
    cause = error.__cause__
    if not hasattr(cause, "errors"):
        return message
    (found, *_) = cause.errors()
    value, bounds = found["input"], found.get("ctx", {})
    match found["type"]:
        case "int_parsing" | "int_from_float" | "int_parsing_size":
            plain = f"{value!r} is no whole number"
        case "float_parsing" | "finite_number":
            plain = f"{value!r} is no number"
        case "greater_than_equal":
            plain = f"{value} is less than {bounds['ge']:g}"
        case "less_than_equal":
            plain = f"{value} is more than {bounds['le']:g}"
        case _:
            plain = found["msg"].removeprefix("Value error, ").rstrip(".")
    return message.replace(error.message, plain)


if __name__ == "__main__":
    main()
