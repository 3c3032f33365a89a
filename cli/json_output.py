"""Where `--json FILE|-` goes."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from errno import EACCES
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn

import typer

from .console import fail, guarded_stdout, write_stdout


def json_option(what: str) -> Any:
    """The option that names the file, of a command that writes `what` to it."""
    return typer.Option(
        "--json", metavar="FILE|-", help=f"Write {what} as JSON; -: to stdout, and no table.", show_default=False
    )


class JsonOutput:
    """A file that is known to be writable from the start and appears whole at the end.

    Devices and pipes are written as they are: replacing them would be a surprise.
    """

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._temporary: Path | None = None
        self._file: IO[str] | None = None
        if name is None or name == "-":
            return
        path = Path(name)
        try:
            if path.exists() and not path.is_file():
                self._file = path.open("w", encoding="ascii")
                return
            self._final = path.resolve()
            if self._final.exists() and not os.access(self._final, os.W_OK):
                raise PermissionError(EACCES, os.strerror(EACCES))
            temporary = self._final.with_name(f".ngramspec-{os.getpid()}.tmp")
            self._file = temporary.open("x", encoding="ascii")
            self._temporary = temporary
        except OSError as error:
            self._fail(error)

    def __enter__(self) -> JsonOutput:
        return self

    def write(self, document: dict[str, Any]) -> None:
        text = json.dumps(document, indent=2) + "\n"
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):
            if self._file is not None:
                self._file.close()
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)

    def _fail(self, error: OSError) -> NoReturn:
        fail(f"cannot write {self._name}: {error.strerror or error}")
