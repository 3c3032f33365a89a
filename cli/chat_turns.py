"""The commands of chat that are about what was said last, or is said next. Each raises NGramSpecError if it fails."""

from __future__ import annotations

import base64
import re
import sys
from pathlib import Path

from ngramspec.conversation import Turn
from ngramspec.errors import NGramSpecError
from ngramspec.storage import NotUtf8, utf8

from .chat_session import Session
from .chat_view import said
from .console import command_terminal, note
from .markdown_rows import code_blocks

LARGEST = 8 * 2**20
"""Bytes of a file that is read."""

_SHOWN = 60
"""Characters of a message that was taken back."""


def _last(session: Session) -> Turn:
    if not session.conversation.turns:
        raise NGramSpecError("nothing was said yet")
    return session.conversation.turns[-1]


def retry(session: Session, _argument: str) -> bool:
    """Have the last message answered again."""
    _last(session)
    if session.sampling.greedy:
        note("at temperature 0 the answer stays the same; /set temp 0.8 makes it vary")
    return session.ask_again()


def edit(session: Session, text: str) -> bool | None:
    """Have another message answered in the place of the last one: `text`, or what the user makes of the last one."""
    _last(session)
    if text:
        return session.ask_again(text)
    if not session.interactive:
        raise NGramSpecError("/edit needs the new message behind it: there is no terminal to change the old one at")
    session.editing = True
    return None


def undo(session: Session, _argument: str) -> None:
    """Take the last turn back."""
    _last(session)
    message = " ".join(session.undo().user.split())
    note(f"took back: {message if len(message) <= _SHOWN else message[: _SHOWN - 3] + '...'}")


def file(session: Session, name: str) -> None:
    """Put a file in front of the next message; "-" takes back those that are there."""
    if name == "-":
        session.attached.clear()
        note("your next message goes without files")
        return
    message = _as_message(name)
    tokens = len(session.target.tokenize(message, add_bos=False))
    if tokens > session.room():
        raise NGramSpecError(f"{name} has {tokens} tokens, but the context has room for {session.room()}")
    session.attached.append(message)
    lines = message.count("\n") - 3
    note(f"{name} ({lines} lines, {tokens} tokens) goes in front of your next message")


def _as_message(name: str) -> str:
    """A file's name and its text between fences. Raises NGramSpecError, in words that begin with the name."""
    path = Path(name).expanduser()
    try:
        if path.stat().st_size > LARGEST:
            raise NGramSpecError(f"{name} has more than {LARGEST // 2**20} MiB")
        text = utf8(path.read_bytes(), marked=True)
    except (OSError, ValueError) as error:
        if isinstance(error, NotUtf8):
            raise NGramSpecError(f"{name} is {error}") from error
        raise NGramSpecError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from error
    if not text.strip():
        raise NGramSpecError(f"{name} is empty")
    longest = max(map(len, re.findall("`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    ending = "" if text.endswith("\n") else "\n"
    return f"{path.name}:\n\n{fence}{path.suffix[1:]}\n{text}{ending}{fence}"


def copy(session: Session, number: str) -> None:
    """Put the last answer, or a block of its code, on the clipboard."""
    if not sys.stdout.isatty():
        raise NGramSpecError("/copy needs a terminal")
    text = said(session.thoughts(), _last(session).assistant)
    what = "the answer"
    if number:
        blocks = code_blocks(text)
        if not number.isdecimal() or not 0 < int(number) <= len(blocks):
            raise NGramSpecError(f"the last answer has {len(blocks)} blocks of code; /copy {number} is none of them")
        text, what = blocks[int(number) - 1], f"block {number}"
    if not text:
        raise NGramSpecError(f"there is nothing in {what}")
    raw = base64.b64encode(text.encode("utf-8", "replace")).decode()
    command_terminal(f"\x1b]52;c;{raw}\x07")
    note(f"{what} went to the terminal for its clipboard: {len(text)} characters")
