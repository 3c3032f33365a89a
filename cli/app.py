"""The `ngramspec` command: its subcommands, and the one place where errors become a line and an exit code."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import ngramspec
from ngramspec.errors import NGramSpecError

from .console import FAILED, INTERRUPTED, TERMINATED, USAGE, Terminated, fail, prepare_streams, raise_on_sigterm
from .subcommands import Subcommands

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
    raise_on_sigterm()
    try:
        try:
            prepare_streams()
            if os.environ.get("_NGRAMSPEC_COMPLETE") == "complete_bash":  # typer's name for a Tab in bash
                from .completion import join_at_colons

                join_at_colons(os.environ)
            code = app(args=arguments, prog_name="ngramspec", standalone_mode=False)
            return code if isinstance(code, int) else 0
        except NGramSpecError as error:
            fail(str(error))
        except MemoryError:
            fail("out of memory; try a smaller -c/--ctx-size or a smaller model")
        except OSError as error:
            reason = error.strerror or str(error)
            fail(f"{error.filename}: {reason}" if error.filename else reason)
        except Exception as error:
            # Typer carries its own copy of click in some versions; its errors know how to word themselves.
            if not hasattr(error, "format_message"):
                raise
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "ngramspec"
            fail(f"{error.format_message()} (see {command} --help)", USAGE)
    except typer.Exit as exit_:
        return exit_.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Terminated:
        return TERMINATED
    return FAILED


if __name__ == "__main__":
    main()
