"""The files that a command is asked for: `--json FILE|-`, and `--markdown`, `--svg FILE|-`, `--html FILE|-` to post."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from errno import EACCES
from pathlib import Path
from typing import IO, Annotated, Any, NoReturn, Self, get_type_hints

import typer

from ngramspec.instruments.reports.render import html, markdown
from ngramspec.instruments.reports.report import Report
from ngramspec.instruments.reports.svg import svg
from ngramspec.sampling.option import options

from .console import fail, guarded_stdout, usage_error, write_stdout


def json_option(what: str) -> Any:
    """The option that names the file, of a command that writes `what` to it."""
    return typer.Option(
        "--json", metavar="FILE|-", help=f"Write {what} as JSON; -: to stdout, and no table.", show_default=False
    )


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


class Output:
    """What a command found: shown on stdout, and in the files that are asked for.

    The files are known to be writable from the start, and whole at the end.

    Args:
        as_json: what `--json` names.
        post: what else is asked for.

    Attributes:
        silent: whether one of them takes stdout, so that nothing else may be written to it.
        page: whether a page is asked for, which shows most.
    """

    _WRITERS: Mapping[str, Callable[[Report], str]] = {"--markdown": markdown, "--svg": svg, "--html": html}

    def __init__(self, as_json: str | None, post: PostOptions | None = None) -> None:
        post = post or PostOptions()
        names = {"--markdown": "-" if post.markdown else None, "--svg": post.svg, "--html": post.html}
        self._names = {flag: name for flag, name in {**names, "--json": as_json}.items() if name is not None}
        taking = [flag for flag, name in self._names.items() if name == "-"]
        if len(taking) > 1:
            usage_error(f"{' and '.join(taking)} cannot both be written to stdout; name a file")
        self.silent = bool(taking)
        self.page = post.html is not None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            self._files = {flag: opening.enter_context(_File(name)) for flag, name in self._names.items()}
            self._open = opening.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def write(
        self,
        show: Callable[[], None],
        document: Callable[[], dict[str, Any]],
        report: Callable[[], Report] | None = None,
    ) -> None:
        """Show what was found unless stdout is taken, and write the files; what nobody asked for is not made."""
        try:
            if not self.silent:
                with guarded_stdout():
                    show()
        finally:
            # Even where the reader of stdout has gone, as head does.
            posts = {flag: file for flag, file in self._files.items() if flag != "--json"}
            if "--json" in self._files:
                self._files["--json"].write(json.dumps(document(), indent=2) + "\n")
            if posts and report is not None:
                made = report()
                for flag, file in posts.items():
                    file.write(self._WRITERS[flag](made))


class _File:
    """A file that is known to be writable from the start and appears whole at the end; "-" is stdout.

    Devices and pipes are written as they are: replacing them would be a surprise.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._temporary: Path | None = None
        self._file: IO[str] | None = None
        if name == "-":
            return
        path = Path(name)
        try:
            if path.exists() and not path.is_file():
                self._file = path.open("w", encoding="utf-8")
                return
            self._final = path.resolve()
            if self._final.exists() and not os.access(self._final, os.W_OK):
                raise PermissionError(EACCES, os.strerror(EACCES))
            temporary = self._final.with_name(f".{self._final.name}.{os.getpid()}.tmp")
            self._file = temporary.open("x", encoding="utf-8")
            self._temporary = temporary
        except OSError as error:
            self._fail(error)

    def __enter__(self) -> Self:
        return self

    def write(self, text: str) -> None:
        """Write the whole text, once; ends the program where that fails."""
        if self._file is None:
            with guarded_stdout():
                write_stdout(text)
            return
        try:
            self._file.write(text)
            self._file.close()
            if self._temporary is not None:
                self._temporary.replace(self._final)
                self._temporary = None
        except OSError as error:
            self._fail(error)

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            if self._file is not None:
                self._file.close()
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)

    def _fail(self, error: OSError) -> NoReturn:
        fail(f"cannot write {self._name}: {error.strerror or error}")


# --------------------------------------------------------------------------- the line that reproduces it


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
            if (setting := options(group).get(field.name)) is not None:
                yield setting.flags[0], value
                continue
            (known,) = hints[field.name].__metadata__
            # typer takes the first flag for a default where the description stands in an annotation.
            flags = [flag for flag in (known.default, *(known.param_decls or ())) if isinstance(flag, str)]
            yield (flags or [f"--{field.name.replace('_', '-')}"])[0], value


def _file_name(text: str) -> str:
    return Path(text).name or text if {"/", os.sep} & set(text) and Path(text).exists() else text
