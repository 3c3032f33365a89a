"""Where chat's user turns come from: a terminal with line editing and history, or the lines of a pipe.

And Ctrl-C: it stops an answer, not the session.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType

from prompt_toolkit import PromptSession
from prompt_toolkit.application import run_in_terminal
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import is_searching
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle

from ngramspec.storage import NotUtf8, state_folder, utf8

from .console import note


class StopKey:
    """SIGINT as a flag, read between target passes, so that no exception lands inside llama.cpp.

    Between answers Ctrl-C raises KeyboardInterrupt, unless `keep_session`: then it is ignored, since a second press
    right after the one that stopped an answer must not end the session. At the prompt the line editor handles the key.
    """

    def __init__(self, *, keep_session: bool) -> None:
        self._keep_session = keep_session
        self._answering = False
        self.pressed = False

    def __enter__(self) -> StopKey:
        """Watch over an answer."""
        self._answering, self.pressed = True, False
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._answering = False

    def install(self) -> None:
        """Take over SIGINT until the program ends."""
        # A background job of a shell without job control starts with SIGINT ignored, and is to stay so.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, _signal: int, _frame: FrameType | None) -> None:
        if not self._answering and not self._keep_session:
            raise KeyboardInterrupt
        self.pressed = True


@contextmanager
def no_echo() -> Iterator[None]:
    """Keep what is typed during an answer (a Ctrl-C, say) off the screen; the next prompt gets it."""
    try:
        import termios
    except ImportError:  # Windows
        yield
        return
    try:
        before = termios.tcgetattr(sys.stdin)
    except (termios.error, ValueError, OSError, TypeError):  # no terminal; no stdin at all
        yield
        return
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


class _CleanHistory(FileHistory):
    """The history file; pasted bytes that are no UTF-8 must not break it."""

    def store_string(self, string: str) -> None:
        super().store_string(clean(string))


class Terminal:
    """User turns typed at a terminal."""

    def __init__(self, commands: Sequence[str]) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_history(),
            completer=WordCompleter(commands, sentence=True),
            complete_while_typing=False,
            # The other styles keep lines below the prompt free for a menu.
            complete_style=CompleteStyle.READLINE_LIKE,
            key_bindings=_bindings(),
            enable_suspend=True,
            # stdout may be a file while stdin and stderr are the terminal.
            output=create_output(always_prefer_tty=True),
        )

    def __iter__(self) -> Iterator[str]:
        """One turn or command at a time, until Ctrl-D."""
        while True:
            try:
                yield clean(self._session.prompt("> ", handle_sigint=False))
            except EOFError:
                return


def clean(text: str) -> str:
    """The text with U+FFFD for every byte from the terminal that is not valid UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("c-c", filter=~is_searching)
    def _clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            run_in_terminal(lambda: note("Ctrl-D or /quit leaves"))

    @bindings.add("escape", "enter")
    def _newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _history() -> History:
    path = state_folder() / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        path.open("ab").close()
        path.open("rb").close()
    except OSError as error:
        note(f"the history is not kept: {path}: {error.strerror}")
        return InMemoryHistory()
    return _CleanHistory(path)


def piped_lines() -> Iterator[str | None]:
    """The lines of stdin, one turn each, without blank ones; None for a line that is not UTF-8."""
    if sys.stdin is None:
        return
    for raw in sys.stdin.buffer:
        try:
            line = utf8(raw).rstrip("\r\n")
        except NotUtf8:
            yield None
            continue
        if line.strip():
            yield line
