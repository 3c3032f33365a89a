"""Input of the chat from a terminal with line editing and history or from a pipe, and the handling of Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app, run_in_terminal
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import Completer
from prompt_toolkit.filters import Condition, is_searching
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.styles import Style

from ngramspec.storage import FOLDERS, UTF16, is_utf16, utf8

from .console import fail, note

_QUOTED_TEXT = re.compile(r'(/system\s+)?"""(?:\n)?(.*?)(?:\n)?"""\s*', re.DOTALL)
_OPEN = re.compile(r'(?:/system\s+)?"""')


class StopKey:
    """Flag for SIGINT that is read between target passes, so that no exception is raised inside llama.cpp.

    Between answers Ctrl-C raises KeyboardInterrupt. With `keep_session` it is ignored there, because a second press
    right after the one that stopped an answer must not end the session. At the prompt the line editor handles the key.
    """

    def __init__(self, *, keep_session: bool) -> None:
        self._keep_session = keep_session
        self._answering = False
        self.pressed = False

    def __enter__(self) -> StopKey:
        self._answering, self.pressed = True, False
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._answering = False

    def install(self) -> None:
        # A background job of a shell without job control starts with SIGINT ignored, which must not change.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, _signal: int, _frame: FrameType | None) -> None:
        if not self._answering and not self._keep_session:
            raise KeyboardInterrupt
        self.pressed = True


@contextmanager
def disable_echo() -> Iterator[None]:
    """Hide keys typed during the block, such as Ctrl-C; the next prompt receives them one by one."""
    if os.name != "posix" or sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    quiet = [*before]
    # Without this change the terminal would turn Enter into Ctrl-J.
    quiet[0] &= ~termios.ICRNL
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


class _CleanHistory(FileHistory):
    """History file that replaces pasted bytes that are not UTF-8, because they would break the file."""

    def store_string(self, string: str) -> None:
        super().store_string(clean(string))


class Terminal:
    """User turns typed at a terminal; `toolbar` returns the line below the prompt at every key."""

    def __init__(self, completer: Completer, toolbar: Callable[[], str]) -> None:
        self._editing = self._warned = False
        self._session: PromptSession[str] = PromptSession(
            history=_history(),
            completer=completer,
            complete_while_typing=False,
            # The other styles reserve lines below the prompt for a menu.
            complete_style=CompleteStyle.READLINE_LIKE,
            key_bindings=self._bindings(),
            bottom_toolbar=toolbar,
            style=Style.from_dict({"bottom-toolbar": "noreverse", "bottom-toolbar.text": "fg:ansibrightblack"}),
            enable_suspend=True,
            enable_open_in_editor=True,
            tempfile_suffix=".md",
            # stdout may be a file while stdin and stderr are the terminal.
            output=create_output(always_prefer_tty=True),
        )
        self._session.default_buffer.on_text_changed += self._calm

    def __iter__(self) -> Iterator[str]:
        """Yield turns and commands until Ctrl-D."""
        with suppress(EOFError):
            while True:
                self._warned = False
                yield unquote(clean(self._session.prompt("> ", handle_sigint=False)))

    def edit(self, text: str) -> str:
        """Return a line as the user changes it; "" if Ctrl-C cancels that."""
        self._editing = True
        try:
            return unquote(clean(self._session.prompt("edit> ", default=text, handle_sigint=False)))
        except KeyboardInterrupt:
            return ""
        finally:
            self._editing = False

    def _calm(self, _buffer: Buffer) -> None:
        self._warned = False

    def _bindings(self) -> KeyBindings:
        bindings = KeyBindings()

        @bindings.add("c-c", filter=~is_searching)
        def _clear(event: KeyPressEvent) -> None:
            if self._editing:
                event.app.exit(exception=KeyboardInterrupt, style="class:aborting")
            elif event.current_buffer.text:
                event.current_buffer.reset()
            elif self._warned:
                event.app.exit(exception=EOFError, style="class:exiting")
            else:
                run_in_terminal(lambda: note("press Ctrl-C again, or use Ctrl-D or /quit, to exit"))
                self._warned = True

        @bindings.add("escape", "enter")
        @bindings.add("c-j")
        @bindings.add("enter", filter=_in_quotes)
        def _newline(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        return bindings


@Condition
def _in_quotes() -> bool:
    text = get_app().current_buffer.text
    return _OPEN.match(text) is not None and text.count('"""') % 2 == 1


def clean(text: str) -> str:
    """Replace every byte from the terminal that is not valid UTF-8 with U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def unquote(text: str) -> str:
    """Return the text between triple quotes, if the input is a quoted message or a quoted /system argument."""
    match = _QUOTED_TEXT.fullmatch(text)
    return f"{match[1] or ''}{match[2]}" if match else text


def _history() -> History:
    path = FOLDERS.user_state_path / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        path.open("ab").close()
        path.open("rb").close()
    except OSError as error:
        note(f"warning: the input history is not saved: {path}: {error.strerror}")
        return InMemoryHistory()
    return _CleanHistory(path)


def read_lines() -> Iterator[str | None]:
    """Yield the lines of stdin that are not blank, one per turn, and `None` for each line that is not UTF-8."""
    if sys.stdin is None:
        return
    for number, raw in enumerate(sys.stdin.buffer):
        try:
            line = utf8(raw).rstrip("\r\n")
        except UnicodeError:
            if number == 0 and is_utf16(raw):
                fail(f"standard input is {UTF16}")
            yield None
            continue
        if line.strip():
            yield line
