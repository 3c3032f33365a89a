"""Output of the command line: stdout contains the answer, stderr everything else.

An error is one line on stderr and an exit code: 0 done, 1 failed, 2 bad usage, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer
from rich.console import Console

from ngramspec.data import NGramSpecError, get_reason
from ngramspec.instruments.reports.report import CONTROLS
from ngramspec.storage import utf8

FAILED, USAGE = 1, 2
MAX_COLUMNS = 100  # width of tables in a pipe, and of lists

stderr = Console(stderr=True, highlight=False, emoji=False)

_SYMBOLS = {**CONTROLS, ord("\r"): None}
_line_open = threading.Event()  # set while the output on stdout ends in the middle of a line

ENDING = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
"""Signals that end the program; the system sends the second one when the terminal is closed."""


class Terminated(BaseException):
    """Exception for a signal of `ENDING`; `except Exception` does not catch it, as with KeyboardInterrupt."""


def exit_code(error: BaseException) -> int:
    return 143 if isinstance(error, Terminated) else 130


def printable(text: str) -> str:
    r"""Replace control characters except \n and \t with symbols (ESC: ␛), so that text cannot control a terminal."""
    return text.translate(_SYMBOLS)


def pluralize(number: int, noun: str) -> str:
    return f"{number:,} {noun if number == 1 else noun + 's'}"


def note(text: str) -> None:
    """Print a note on stderr; control characters from a file or a model become symbols."""
    _print(text, "dim")


def print_error(error: str | Exception) -> None:
    _print(f"ngramspec: {' '.join(format_error(error).split())}", "red")


def _print(text: str, style: str) -> None:
    # Lines are wrapped only in a terminal, because a log needs them whole. A failing stderr must not end the program.
    with suppress(OSError):
        if is_mid_line():
            stderr.print()
            _line_open.clear()
        stderr.print(printable(text), style=style, markup=False, soft_wrap=not stderr.is_terminal)


def is_mid_line() -> bool:
    """Return True if output to stderr would continue an unfinished stdout line on the same terminal."""
    if not _line_open.is_set() or not stderr.is_terminal:
        return False
    with suppress(OSError, ValueError):
        return sys.stdout.isatty() and os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    return False


def format_error(error: str | Exception) -> str:
    """Return the message of an error; for an OSError, the file and the reason."""
    if not isinstance(error, OSError):
        return str(error)
    return f"{error.filename}: {get_reason(error)}" if error.filename else get_reason(error)


def fail(error: str | Exception, code: int = FAILED) -> NoReturn:
    print_error(error)
    raise typer.Exit(code)


def usage_error(message: str) -> NoReturn:
    fail(message, USAGE)


@contextmanager
def usage_errors(start: str = "", kinds: type[Exception] | tuple[type[Exception], ...] = ValueError) -> Iterator[None]:
    """End the program with exit code 2 if the block raises one of these errors; `start` begins the message."""
    try:
        yield
    except kinds as error:
        usage_error(f"{start}{error}")


def raise_on_signals() -> None:
    """Make signals raise exceptions, so that the generated text is still written."""
    # An exception in a function that llama.cpp calls, such as for its log, is lost. So the signal is sent again.
    signals_by_error = {Terminated: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}

    def terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise Terminated

    def on_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
        number = signals_by_error.get(unraisable.exc_type)
        if number is None:
            sys.__unraisablehook__(unraisable)
        else:  # a delay is needed, because the exception would be raised inside this hook
            threading.Timer(0.01, os.kill, [os.getpid(), number]).start()

    for number in ENDING:
        # Programs started by nohup ignore SIGHUP and must continue.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, terminate)
    sys.unraisablehook = on_unraisable


class Outcome:
    """Result of a block that may be interrupted or fail; the program continues after it.

    `error` is the exception that interrupted the block or made it fail, or `None` on success.
    """

    error: BaseException | None = None

    def __enter__(self) -> Outcome:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if isinstance(error, KeyboardInterrupt | Terminated | NGramSpecError):
            self.error = error
        return self.error is not None

    @property
    def word(self) -> str:
        return "failed" if isinstance(self.error, NGramSpecError) else "interrupted"

    def reraise(self) -> None:
        if self.error is not None:
            raise self.error


def read_text(path: Path) -> str:
    return _decode(path.read_bytes(), str(path))


def read_bytes(name: str, message: str) -> bytes:
    """Read a file, or standard input for "-"; the program ends with `message` if that is a terminal."""
    if name != "-":
        return Path(name).read_bytes()
    if sys.stdin is None or sys.stdin.isatty():
        usage_error(message)
    return sys.stdin.buffer.read()


def read_source(name: str, message: str) -> str:
    return _decode(read_bytes(name, message), "standard input" if name == "-" else name)


def _decode(raw: bytes, name: str) -> str:
    try:
        return utf8(raw)
    except UnicodeError as error:
        raise NGramSpecError(f"{name} is {error}") from error


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer the signals that end the program to the end of the block; a second one ends the program immediately.

    llama.cpp calls back into Python while it loads. An exception that a signal raises there is printed and lost.
    """
    pending: list[int] = []

    def wait(number: int, _frame: FrameType | None) -> None:
        if pending:
            os._exit(128 + number)
        pending.append(number)

    # A signal that is ignored (nohup, background job) stays ignored.
    numbers = [n for n in (signal.SIGINT, *ENDING) if callable(signal.getsignal(n))]
    handlers = {n: signal.signal(n, wait) for n in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if pending:
            signal.raise_signal(pending[0])


def prepare_streams() -> None:
    """Make stdout accept any text unchanged; the program ends if stdout is closed."""
    # The next opened file would get the descriptor of a stream that the shell closed, so each one is filled here.
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if stream is None:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        fail("cannot write the output: stdout is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace", newline="\n")


def write_stdout(text: str) -> None:
    with guard_stdout():
        sys.stdout.write(text)
        sys.stdout.flush()
    if text.endswith("\n"):
        _line_open.clear()
    elif text:
        _line_open.set()


def print_stdout(console: Console, *parts: Any, **options: Any) -> None:
    with console.capture() as capture:
        console.print(*parts, **options)
    write_stdout(capture.get())


@contextmanager
def guard_stdout() -> Iterator[None]:
    """End the program cleanly when stdout fails: silently on a closed pipe, with a message on a full disk."""
    try:
        yield
    except BrokenPipeError:
        _forget_stdout()
        raise typer.Exit(0) from None
    except OSError as error:
        if error.filename is not None:
            raise
        _forget_stdout()
        fail(f"cannot write the output: {error.strerror}")


def _forget_stdout() -> None:
    """Redirect stdout to the null device, because Python flushes it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
