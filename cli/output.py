"""Output files of a command: `--json FILE|-`, and `--markdown`, `--svg FILE|-` and `--html FILE|-` for sharing."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from errno import EACCES, EISDIR
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from ngramspec.instruments.reports.render import html, markdown, svg
from ngramspec.instruments.reports.report import Report
from ngramspec.sampling.settings import option, options
from ngramspec.storage import atomic_path

from .console import fail, guard_stdout, usage_error, write_stdout
from .view import print_report, report_parts


def json_option(what: str) -> Any:
    """Return the option for the JSON file of a command, which contains `what`."""
    return option(None, "--json", metavar="FILE|-", help=f"Write {what} as JSON; -: to stdout instead of the table.")


@dataclass(frozen=True, slots=True)
class PostOptions:
    """Options for sharing results."""

    markdown: bool = option(False, help="Print only a Markdown table and the command that reproduces it.")
    svg: str | None = option(None, metavar="FILE|-", help="Write a chart as SVG; -: to stdout.")
    html: str | None = option(None, metavar="FILE|-", help="Write an HTML page with tables and charts; -: to stdout.")


class Output:
    """Results of a command, shown on stdout and written to the requested files.

    The constructor checks that the files are writable, and each file is written completely or not at all. If one of
    them is written to stdout (`silent`), nothing else may be written there.
    """

    _WRITERS: Mapping[str, Callable[[Report], str]] = {"--markdown": markdown, "--svg": svg, "--html": html}

    def __init__(self, as_json: str | None, post: PostOptions | None = None) -> None:
        post = post or PostOptions()
        names = {"--markdown": "-" if post.markdown else None, "--svg": post.svg, "--html": post.html}
        self._names = {flag: name for flag, name in {**names, "--json": as_json}.items() if name is not None}
        stdout_flags = [flag for flag, name in self._names.items() if name == "-"]
        if len(stdout_flags) > 1:
            usage_error(f"{' and '.join(stdout_flags)} cannot both be written to stdout; name a file")
        self.silent = bool(stdout_flags)
        flags: dict[str, str] = {}  # flags by the files that they name
        for flag, name in self._names.items():
            check_writable(name)
            other_flag = flags.setdefault(os.path.realpath(name), flag)
            if other_flag != flag and not _in_place(Path(name)):
                usage_error(f"{other_flag} and {flag} cannot both be written to {name}; name another file")

    def write(self, report: Report, document: dict[str, Any]) -> None:
        """Show a report unless a file is written to stdout, and create and write only the requested files."""
        try:
            if not self.silent:
                with guard_stdout():
                    print_report([*report_parts(report)])
        finally:
            # The files are written even if the reader of stdout, such as head, has ended.
            for flag, name in self._names.items():
                write = self._WRITERS.get(flag)
                _write(name, json.dumps(document, indent=2) + "\n" if write is None else write(report))


def check_writable(name: str) -> None:
    """End the program if a file is known not to be writable."""
    if name == "-":
        return
    path = Path(name)
    try:
        if path.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
        if not _in_place(path):
            TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        fail(f"cannot write {name}: {error.strerror or error}")


def _in_place(path: Path) -> bool:
    """Return True for devices and pipes, which must be written in place and not replaced by a file."""
    return path.exists() and not path.is_file()


def _write(name: str, text: str) -> None:
    """Write a file completely or not at all; "-" means stdout."""
    if name == "-":
        with guard_stdout():
            write_stdout(text)
        return
    try:
        if _in_place(Path(name)):
            Path(name).write_text(text, "utf-8")
            return
        with atomic_path(Path(name).resolve(), mode=0o666) as temporary:
            temporary.write_text(text, "utf-8")
    except OSError as error:
        fail(f"cannot write {name}: {error.strerror or error}")


# --------------------------------------------------------------------------- command line for reproduction


def command_line(command: str, arguments: Sequence[str | None], option_values: Mapping[str, Any], *groups: Any) -> str:
    """Return the command line that reproduces this run; file arguments are reduced to their base names.

    Args:
        command: Name of the command.
        arguments: Arguments of the command; `None` is omitted.
        option_values: Values of the command's own options by flag; `None` and `False` are omitted.
        groups: Groups of options; values that differ from the default and are not in `option_values` are included.
    """
    words = ["ngramspec", *command.split(), *(_file_name(name) for name in arguments if name is not None)]
    group_values = {
        options(group)[field.name].flags[0]: value
        for group in groups
        for field in fields(group)
        if (value := getattr(group, field.name)) != field.default
    }
    for flag, value in (
        dict(option_values) | {flag: value for flag, value in group_values.items() if flag not in option_values}
    ).items():
        for item in value if isinstance(value, list | tuple) else [value]:
            if item is not None and item is not False:
                words += [flag] if item is True else [flag, _format_value(flag, item)]
    return shlex.join(words)


def _format_value(flag: str, value: Any) -> str:
    """Return a value as the user types it; an adapter's name that contains a comma is quoted."""
    if not isinstance(value, tuple):
        return _file_name(str(value))
    name, scale = value
    text = _file_name(name) if flag == "--lora" else f"{_file_name(name)}:{scale:.9g}"
    return '"{}"'.format(text.replace('"', '""')) if {",", '"'} & set(text) else text


def _file_name(text: str) -> str:
    return Path(text).name or text if {"/", os.sep} & set(text) and Path(text).exists() else text
