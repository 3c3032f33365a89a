"""Entry point of the `ngramspec` command, which turns errors into one line and an exit code.

Each subcommand is imported only when it runs or its own help is shown. Importing llama.cpp, numpy and the line editor
takes longer than `ngramspec --help` may take.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import ngramspec
from ngramspec.data import NGramSpecError

from .console import FAILED, USAGE, Terminated, exit_code, fail, prepare_streams, raise_on_signals, usage_error

COMMANDS = {
    "chat": "Chat with a model.",
    "complete": "Continue a text from a file or from stdin.",
    "edit": "Change a file as an instruction says.",
    "serve": "Serve a model over HTTP: OpenAI, Anthropic, Ollama and llama-server APIs, chat page.",
    "bench": "Measure the speed-up from drafting, by category of text.",
    "replay": "Estimate the speed-up on recorded conversations, without a model.",
    "trace": "Show a trace: every draft, and which tokens were accepted.",
    "verify": "Check that drafting does not change the output of a model on this machine.",
    "models": "List the models on this machine.",
    "info": "Show the build, the model, the cost of a batch and the bit-identical batch sizes.",
    "tune": "Find the fastest settings for a model on this machine.",
    "memory": "Manage the files and answers to draft from.",
    "rpc-worker": "Make this machine available to a model that runs on another one.",
}


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
        if args == ["--"]:
            example = f"{ctx.command_path} {next(iter(self.commands))}"
            usage_error(f"a command is required, such as {example} (see {ctx.command_path} --help)")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, (command.help or "").partition("\n\n")[0]) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
        records = (parameter.get_help_record(ctx) for parameter in self.get_params(ctx))
        with formatter.section("Options"):
            formatter.write_dl([record for record in records if record is not None])


class Subcommands(CommandList):
    """Command group that knows the names and help lines of its commands and imports a command only when it is used."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=line) for name, line in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        names = {"run": "chat", "list": "models", "ls": "models"}  # ollama's
        if replacement := f"chat {args[0]}" if args[0].endswith(".gguf") else names.get(args[0]):
            usage_error(f"there is no command {args[0]!r}; use ngramspec {replacement} (see ngramspec --help)")
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None:
            from .options import REASONS, SHORT

            command = import_command(str(name))
            flags = {flag for parameter in command.params for flag in parameter.opts}
            for word in rest:  # the parser would read a short option that the command lacks, such as -md, as -m d
                if word in REASONS and len(word) > 2 and not word.startswith("--"):
                    usage_error(f"{word} is not supported: {REASONS[word]}")
                if word in SHORT and word not in flags:
                    usage_error(f"No such option: {word} (see ngramspec {name} --help)")
        return name, command, rest


_PLAIN: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}


def import_command(name: str) -> Any:
    """Import a command: the function of its module with its name, or the `COMMANDS` of `memory`."""
    from .options import expand_groups

    module_name = name.replace("-", "_")
    module = import_module(f".{module_name}", __package__)
    if name == "memory":
        group, functions = typer.Typer(cls=CommandList, name=name, help=module.HELP, **_PLAIN), module.COMMANDS
    else:
        group, functions = typer.Typer(**_PLAIN), {name: getattr(module, module_name)}
    for each, function in functions.items():
        group.command(each, cls=GroupedCommand)(expand_groups(function))
    return typer.main.get_command(group)


app = typer.Typer(
    cls=Subcommands,
    name="ngramspec",
    help="Faster text generation from local GGUF models, without a draft model and without changing the output.",
    **_PLAIN | {"add_completion": True},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 160},
)


def _show_version(is_set: bool) -> None:
    if is_set:
        print(f"ngramspec {ngramspec.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    code = run(sys.argv[1:])
    if sys.argv[1:2] == ["serve"]:
        # Python would take seconds to free the model and the prompt cache, and `exit_on_timeout` no longer guards them.
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # the stream is missing or its reader is gone
                stream.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    raise_on_signals()
    try:
        try:
            prepare_streams()
            if os.environ.get("_NGRAMSPEC_COMPLETE") == "complete_bash":  # typer's name for completion in bash
                from .models import join_at_colons

                join_at_colons(os.environ)
            return int(_run_command(arguments) or 0)
        except (NGramSpecError, OSError) as error:
            fail(error)
        except MemoryError:
            fail("out of memory; try a smaller -c/--ctx-size or a smaller model")
        except Exception as error:
            # Some versions of typer contain a copy of click, so its errors are recognized by their method.
            if not hasattr(error, "format_message"):
                raise
            context = getattr(error, "ctx", None)
            command = context.command_path if context else "ngramspec"
            fail(f"{_format_usage_error(error)} (see {command} --help)", USAGE)
    except typer.Exit as exit_:
        return exit_.exit_code
    except (KeyboardInterrupt, typer.Abort, Terminated) as error:
        return exit_code(error)
    return FAILED


def _run_command(arguments: list[str]) -> Any:
    """Run a command; an unknown option with underscores is tried again with hyphens, as in llama.cpp."""
    try:
        return app(args=arguments, prog_name="ngramspec", standalone_mode=False)
    except Exception as error:
        name: str = getattr(error, "option_name", "")
        if "_" not in name:
            raise
    pattern = re.compile(f"^{re.escape(name)}(?=$|=)")
    return _run_command([pattern.sub(name.replace("_", "-"), argument) for argument in arguments])


def _format_usage_error(error: Any) -> str:
    message: str = error.format_message()
    if "extra argument" in message and ".gguf)" in message:
        return f"{message}; pass one model"
    if "extra argument" in message and any("-p" in parameter.opts for parameter in error.ctx.command.params):
        return f"{message}; pass a text with -p/--prompt"
    if option := getattr(error, "option_name", ""):
        from .options import REASONS

        if option in REASONS:
            return f"{option} is not supported: {REASONS[option]}"
        is_early = error.ctx is not None and isinstance(error.ctx.command, Subcommands)
        if is_early and not option.startswith("--"):
            return f"{option} must follow a command, such as ngramspec chat"
    if not hasattr(error.__cause__, "errors"):
        return message
    # Newer versions of typer parse numbers with pydantic.
    detail = error.__cause__.errors()[0]
    reason, limits = detail["msg"].removeprefix("Value error, ").rstrip("."), detail.get("ctx", {})
    if detail["type"].startswith(("int_", "float_", "finite")):
        reason = f"{detail['input']!r} is not a {'whole ' if detail['type'].startswith('int_') else ''}number"
    elif limits.keys() & {"ge", "le"}:
        which, limit = ("below the minimum", limits["ge"]) if "ge" in limits else ("above the maximum", limits["le"])
        reason = f"{detail['input']} is {which} of {limit:g}"
    return message.replace(error.message, reason)


if __name__ == "__main__":
    main()
