"""`OutputFile`: where `--json FILE|-` and its like go."""

from __future__ import annotations

import os
from contextlib import suppress
from errno import EACCES
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn, Self

from .console import fail, guarded_stdout, write_stdout


class OutputFile:
    """A file that is known to be writable from the start and appears whole at the end.

    Devices and pipes are written as they are: replacing them would be a surprise.

    Args:
        name: the file; "-" for stdout; None: nothing is written.
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

    @property
    def wanted(self) -> bool:
        """Whether there is anywhere to write to."""
        return self._name is not None

    def __enter__(self) -> Self:
        return self

    def write_text(self, text: str) -> None:
        """Write the whole text, once; ends the program where that fails."""
        if self._file is None:
            if self.wanted:
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
