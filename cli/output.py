"""The files that a command is asked for: `--json FILE|-`, and `--markdown`, `--svg FILE|-`, `--html FILE|-` to post."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from errno import EACCES
from pathlib import Path
from typing import Any, Self

from ngramspec.instruments.reports.render import html, markdown
from ngramspec.instruments.reports.report import Report
from ngramspec.instruments.reports.svg import svg
from ngramspec.sampling.option import option, options

from .console import fail, guarded_stdout, usage_error, write_stdout


def json_option(what: str) -> Any:
    """The option that names the file, of a command that writes `what` to it."""
    return option(None, "--json", metavar="FILE|-", help=f"Write {what} as JSON; -: to stdout, and no table.")


@dataclass(frozen=True, slots=True)
class PostOptions:
    """What is made to be posted."""

    markdown: bool = option(False, help="Print a Markdown table with the line that reproduces it, and no more.")
    svg: str | None = option(None, metavar="FILE|-", help="Draw a chart; -: to stdout.")
    html: str | None = option(None, metavar="FILE|-", help="Write a page with tables and charts; -: to stdout.")


class Output:
    """What a command found: shown on stdout, and in the files that are asked for.

    The files are known to be writable from the start, and whole at the end. Where one of them takes stdout (`silent`),
    nothing else may be written to it. `page`: a page is asked for, which shows most.
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
            self._files = {flag: opening.enter_context(_writing(name)) for flag, name in self._names.items()}
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
            if "--json" in self._files:
                self._files["--json"](json.dumps(document(), indent=2) + "\n")
            posts = {flag: write for flag, write in self._files.items() if flag != "--json"}
            if posts and report is not None:
                made = report()
                for flag, write in posts.items():
                    write(self._WRITERS[flag](made))


@contextmanager
def _writing(name: str) -> Iterator[Callable[[str], None]]:
    """How to write a file whole, once: it can be written, as far as is known at the start; "-" is stdout.

    It appears at the end. Devices and pipes are written as they are: replacing them would be a surprise.
    """
    if name == "-":
        yield _to_stdout
        return
    final = temporary = None
    try:
        if Path(name).exists() and not Path(name).is_file():
            file = open(name, "w", encoding="utf-8")  # noqa: SIM115 - closed below
        else:
            final = Path(name).resolve()
            if final.exists() and not os.access(final, os.W_OK):
                raise PermissionError(EACCES, os.strerror(EACCES))
            temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
            file = temporary.open("x", encoding="utf-8")
    except OSError as error:
        fail(f"cannot write {name}: {error.strerror or error}")

    def write(text: str) -> None:
        try:
            file.write(text)
            file.close()
            if temporary is not None and final is not None:
                temporary.replace(final)
        except OSError as error:
            fail(f"cannot write {name}: {error.strerror or error}")

    try:
        yield write
    finally:
        with suppress(OSError):
            file.close()
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _to_stdout(text: str) -> None:
    with guarded_stdout():
        write_stdout(text)


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
    grouped = {
        options(group)[field.name].flags[0]: value
        for group in groups
        for field in fields(group)
        if (value := getattr(group, field.name)) != field.default
    }
    for flag, value in (dict(told) | {flag: value for flag, value in grouped.items() if flag not in told}).items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None and one is not False:
                words += [flag] if one is True else [flag, _file_name(str(one))]
    return shlex.join(words)


def _file_name(text: str) -> str:
    return Path(text).name or text if {"/", os.sep} & set(text) and Path(text).exists() else text
