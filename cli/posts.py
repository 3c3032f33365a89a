"""What is made to be posted: `--markdown`, `--svg FILE|-`, `--html FILE|-`, and the command line that is told in it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self, get_type_hints

import typer

from ngramspec.reports.html import html
from ngramspec.reports.report import Report, markdown
from ngramspec.reports.svg import svg

from .console import usage_error
from .output_file import OutputFile


@dataclass(frozen=True, slots=True)
class PostOptions:
    """What is made to be posted."""

    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown table with the line that reproduces it, and no more.")
    ] = False
    svg: Annotated[
        str | None, typer.Option("--svg", metavar="FILE|-", help="Draw a chart; -: to stdout.", show_default=False)
    ] = None
    html: Annotated[
        str | None,
        typer.Option(
            "--html", metavar="FILE|-", help="Write a page with tables and charts; -: to stdout.", show_default=False
        ),
    ] = None


class Posts:
    """The files that are asked for: known to be writable from the start, and whole at the end.

    Args:
        options: what is asked for.
        as_json: what `--json` names, which takes stdout too if that is "-".

    Attributes:
        silent: whether stdout is taken, so that nothing else may be written to it.
    """

    _WRITERS: Mapping[str, Callable[[Report], str]] = {"--markdown": markdown, "--svg": svg, "--html": html}

    def __init__(self, options: PostOptions, as_json: str | None) -> None:
        names = {"--markdown": "-" if options.markdown else None, "--svg": options.svg, "--html": options.html}
        taking = [flag for flag, name in {**names, "--json": as_json}.items() if name == "-"]
        if len(taking) > 1:
            usage_error(f"{' and '.join(taking)} cannot both be written to stdout; name a file")
        self.silent = bool(taking)
        self._names = names
        self._open = ExitStack()
        self._files: dict[str, OutputFile] = {}

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            self._files = {flag: opening.enter_context(OutputFile(name)) for flag, name in self._names.items()}
            self._open = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    @property
    def page(self) -> bool:
        """Whether a page is asked for, which shows most."""
        return self._files["--html"].wanted

    def write(self, report: Callable[[], Report]) -> None:
        """Write what is asked for; the report is not made where nothing is."""
        wanted = {flag: file for flag, file in self._files.items() if file.wanted}
        if wanted:
            made = report()
            for flag, file in wanted.items():
                file.write_text(self._WRITERS[flag](made))


# --------------------------------------------------------------------------- the command line


def command_line(command: str, arguments: Sequence[str | None], told: Mapping[str, Any], *groups: Any) -> str:
    """What is typed to run a command again. Of files only the names are told, not where they are.

    Args:
        command: its name.
        arguments: as they were typed; None: left out.
        told: the values of its own options by their flags; None and False say that one was left out.
        groups: of options; those that are not as by default are told, but for flags that stand in `told`.
    """
    words = ["ngramspec", *command.split(), *(_file_name(one) for one in arguments if one is not None)]
    grouped = {flag: value for group in groups for flag, value in _flags(group)}
    for flag, value in (dict(told) | {flag: value for flag, value in grouped.items() if flag not in told}).items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None and one is not False:
                words += [flag] if one is True else [flag, _file_name(str(one))]
    return shlex.join(words)


def _flags(group: Any) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(type(group), include_extras=True)
    for field in fields(group):
        value = getattr(group, field.name)
        if value != field.default:
            (known,) = hints[field.name].__metadata__
            # typer takes the first flag for a default where the description stands in an annotation.
            flags = [flag for flag in (known.default, *(known.param_decls or ())) if isinstance(flag, str)]
            yield (flags or [f"--{field.name.replace('_', '-')}"])[0], value


def _file_name(text: str) -> str:
    return Path(text).name or text if {"/", os.sep} & set(text) and Path(text).exists() else text
