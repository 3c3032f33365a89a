"""Where the command line talks to the user: stdout holds the answer, stderr everything else.

Errors are one line on stderr and an exit code: 0 done, 1 failed, 2 bad usage, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID

from ngramspec.errors import NGramSpecError
from ngramspec.instruments.reports.report import CONTROLS
from ngramspec.storage import utf8

FAILED, USAGE, INTERRUPTED, TERMINATED = 1, 2, 130, 143

stderr = Console(stderr=True, highlight=False, emoji=False)
"""For notes, statistics and progress."""

_SYMBOLS = {**CONTROLS, ord("\r"): None}


_WRITE_SECONDS = 0.5  # maximum time to write a note before the process is ended

_line_open = threading.Event()
"""Set where what was last written to stdout ends in the middle of a line."""


ENDING = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
"""Signals that end the program; the second tells that its terminal was closed."""


class Terminated(BaseException):
    """A signal of `ENDING` arrived. Like KeyboardInterrupt, it passes through `except Exception`."""


def printable(text: str) -> str:
    """Text that cannot command a terminal: a control character becomes its symbol (ESC: ␛), except \\n and \\t."""
    return text.translate(_SYMBOLS)


def counted(number: int, noun: str, nouns: str = "") -> str:
    """A number of things in words."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def note(text: str) -> None:
    """A line for the user on stderr, whatever characters a file or a model put into it."""
    _print(text, "dim")


def complain(error: str | Exception) -> None:
    """An error, in one line on stderr."""
    _print(f"ngramspec: {' '.join(in_words(error).split())}", "red")


def _print(text: str, style: str) -> None:
    # A terminal gets lines broken between words; a log gets them whole. A stderr that cannot be written ends nothing.
    with suppress(OSError):
        if _in_the_middle_of_a_line():
            stderr.print()
            _line_open.clear()
        stderr.print(printable(text), style=style, markup=False, soft_wrap=not stderr.is_terminal)


def _in_the_middle_of_a_line() -> bool:
    """Whether what goes to stderr would stand behind text on the same terminal."""
    if not _line_open.is_set() or not stderr.is_terminal:
        return False
    with suppress(OSError, ValueError):
        return sys.stdout.isatty() and os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    return False


def in_words(error: str | Exception) -> str:
    """An error as the user reads it: of the system's, which file it is about, and why."""
    if not isinstance(error, OSError):
        return str(error)
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason


def fail(error: str | Exception, code: int = FAILED) -> NoReturn:
    """End the program with one line on stderr."""
    complain(error)
    raise typer.Exit(code)


def usage_error(message: str) -> NoReturn:
    """End the program: the command line itself is wrong."""
    fail(message, USAGE)


def raise_on_signals() -> None:
    """Let signals unwind the stack, so that what was generated is still written; nor is a Ctrl-C lost.

    Where llama.cpp calls back into Python, as it does for each line of its log, an exception goes no further than that
    call. If a signal raised it, the signal is sent once more.
    """
    sent_again = {Terminated: signal.SIGTERM, KeyboardInterrupt: signal.SIGINT}

    def terminate(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise Terminated

    def dropped(lost: sys.UnraisableHookArgs) -> None:
        number = sent_again.get(lost.exc_type)
        if number is None:
            sys.__unraisablehook__(lost)
        else:  # not at once: it would be raised in here
            threading.Timer(0.01, _signal_main_thread, [number]).start()

    for number in ENDING:
        # Programs started by nohup ignore SIGHUP and must continue.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, terminate)
    sys.unraisablehook = dropped


def _signal_main_thread(number: int) -> None:
    """Send a signal so that the main thread wakes up, even if it waits for a lock."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        signal.raise_signal(number)


@dataclass(slots=True)
class Outcome:
    """How a long-running job ended: by what it was interrupted or failed, None where all went well."""

    error: BaseException | None = None

    @property
    def word(self) -> str:
        return "failed" if isinstance(self.error, NGramSpecError) else "interrupted"


@contextmanager
def outcome() -> Iterator[Outcome]:
    """Run a block that may be interrupted or fail, and continue to report; the yielded `Outcome` says how it ended."""
    ended = Outcome()
    try:
        yield ended
    except (KeyboardInterrupt, Terminated, NGramSpecError) as error:
        ended.error = error


def read_text(path: Path) -> str:
    """A text file whole. Raises NGramSpecError if it is not UTF-8."""
    return _decoded(path.read_bytes(), str(path))


def read_source(name: str, wanted: str) -> str:
    """A text file, or standard input for "-", whole; where that is a terminal, `wanted` says what is missing."""
    if name != "-":
        return read_text(Path(name))
    if sys.stdin is None or sys.stdin.isatty():
        usage_error(wanted)
    return _decoded(sys.stdin.buffer.read(), "standard input")


def _decoded(raw: bytes, name: str) -> str:
    try:
        return utf8(raw)
    except UnicodeError as error:
        raise NGramSpecError(f"{name} is {error}; convert it to UTF-8") from error


def leave(ended: Outcome) -> None:
    """End the program as a job ended, unless all went well."""
    if ended.error is not None:
        raise ended.error


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait for the end of the block; a second one ends the program at once.

    llama.cpp calls back into Python while it loads. An exception raised in there is printed and lost.
    """
    came: list[int] = []

    def wait(number: int, _frame: FrameType | None) -> None:
        if came:
            os._exit(128 + number)
        came.append(number)

    # An ignored signal (nohup, a job in the background) stays ignored.
    numbers = [n for n in (signal.SIGINT, *ENDING) if callable(signal.getsignal(n))]
    handlers = {n: signal.signal(n, wait) for n in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


@contextmanager
def ends_within(seconds: float, code: int) -> Iterator[None]:
    """End the process with an exit code if the block takes longer, even if threads do not end."""

    def end() -> None:
        text = f"warning: a request did not end within {seconds:g} s; exiting without it"
        # Writing to stderr does not return if the reader of a pipe has stopped reading.
        writer = threading.Thread(target=note, args=(text,), daemon=True)
        writer.start()
        writer.join(_WRITE_SECONDS)
        os._exit(code)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def progress_bar(*columns: str | ProgressColumn, auto_refresh: bool = True) -> Iterator[Progress]:
    """A bar on stderr that goes away at the end. It is drawn only once started, and only where somebody watches."""
    off = not stderr.is_terminal or _in_the_middle_of_a_line()
    bar = Progress(*columns, console=stderr, transient=True, auto_refresh=auto_refresh, disable=off)
    try:
        yield bar
    finally:
        bar.stop()


def prefill_bar() -> AbstractContextManager[Callable[[int, int], None]]:
    """A callback for the progress of a prefill, in tokens; its bar goes away when the prompt is read."""
    return _counting_bar("reading", MofNCompleteColumn())


def index_bar() -> AbstractContextManager[Callable[[int, int], None]]:
    """A callback for the progress of reading files, in bytes."""
    return _counting_bar("indexing", DownloadColumn())


@contextmanager
def _counting_bar(doing: str, count: ProgressColumn) -> Iterator[Callable[[int, int], None]]:
    with progress_bar(doing, BarColumn(), count) as bar:
        task = bar.add_task("")

        def show(done: int, total: int) -> None:
            if done == total:
                bar.stop()
                return
            bar.start()
            bar.update(task, completed=done, total=total)

        yield show


@contextmanager
def download_bar() -> Iterator[Callable[[str, int, int | None], None]]:
    """A callback for the progress of downloads, by file name."""
    with progress_bar("{task.description}", BarColumn(), DownloadColumn()) as bar:
        tasks: dict[str, TaskID] = {}

        def show(name: str, done: int, total: int | None) -> None:
            bar.start()
            if name not in tasks:
                tasks[name] = bar.add_task(name)
            bar.update(tasks[name], completed=done, total=total)

        yield show


def prepare_streams() -> None:
    """Make stdout hold any text, as it is; ends the program if there is no stdout."""
    # A stream that the shell closed leaves its number to the next file that is opened.
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if stream is None:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        fail("cannot write the output: stdout is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace", newline="\n")


def write_stdout(text: str) -> None:
    """Write and flush."""
    sys.stdout.write(text)
    sys.stdout.flush()
    if text.endswith("\n"):
        _line_open.clear()
    elif text:
        _line_open.set()


@contextmanager
def guarded_stdout() -> Iterator[None]:
    """End the program properly when stdout fails: quietly on a closed pipe, with a message on a full disk."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
        raise typer.Exit(0) from None
    except OSError as error:
        if error.filename is not None:
            raise
        _forget_stdout()
        fail(f"cannot write the output: {error.strerror}")


def _forget_stdout() -> None:
    """Python flushes stdout once more at exit; give it somewhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
