"""The slash commands of chat. Whatever they print goes to stderr: stdout is the answers'."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from ngramspec.conversation import load, save
from ngramspec.errors import NGramSpecError
from ngramspec.json_data import encode

from .chat_session import Session
from .chat_view import totals
from .console import complain, note, stderr

COMMANDS = {
    "/help": "show this",
    "/reset": "forget the turns so far, keep the system message",
    "/system [TEXT]": "show the system message, or set it from the next turn on; /system - removes it",
    "/stats": "show the session's speed and what became of its drafts",
    "/drafts": "turn the display of drafts on or off",
    "/save FILE": "write the conversation to FILE as JSON",
    "/load FILE": "go on with the conversation in FILE instead of this one",
    "/quit": "leave, as do /exit and Ctrl-D",
}
NAMES = [name.split()[0] for name in COMMANDS] + ["/exit"]

_COMMAND = re.compile(r"/([A-Za-z]+)(?:\s+(.*))?", re.DOTALL)


def parse(line: str) -> tuple[str, str] | str:
    """(command, argument), or the message that a line stands for.

    A command is a slash and letters, up to a space: "/usr/bin" and "/* x */" are messages. A space or a second
    slash in front makes a message of what would be a command.
    """
    command = _COMMAND.fullmatch(line.rstrip())
    if command:
        return command[1].lower(), (command[2] or "").strip()
    if line[:1] in (" ", "/") and _COMMAND.fullmatch(line[1:].rstrip()):
        return line[1:]
    return line


def run(session: Session, name: str, argument: str) -> bool:
    """Carry out a command; False if it failed, after one line that says why."""
    takes = next((c for c in COMMANDS if c.split()[0] == f"/{name}"), None)
    try:
        if takes is None:
            raise NGramSpecError(f"unknown command /{name}; /help lists them, // or a space in front sends it as text")
        if argument and " " not in takes:
            raise NGramSpecError(f"/{name} takes nothing after it")
        if not argument and takes.endswith("FILE"):
            raise NGramSpecError(f"{takes}: a file is needed")
        _ACTIONS[name](session, argument)
    except NGramSpecError as error:
        complain(str(error))
        return False
    return True


def _help(_session: Session, _argument: str) -> None:
    for name, what in COMMANDS.items():
        stderr.print(Text(f"  {name:<15} {what}"))
    note(
        "Enter sends, Alt-Enter starts a new line, Ctrl-C stops an answer."
        " To send a text that looks like a command, put a space or a second / in front."
    )


def _reset(session: Session, _argument: str) -> None:
    session.reset()
    note("the conversation starts afresh")


def _system(session: Session, text: str) -> None:
    conversation = session.conversation
    if not text:
        note(conversation.system if conversation.system is not None else "there is no system message")
    elif text == "-":
        conversation.system = None
        note("from the next turn on there is no system message")
    else:
        conversation.system = text
        kept = "; /reset forgets the turns so far" if conversation.turns else ""
        note(f"the system message applies from the next turn on{kept}")


def _stats(session: Session, _argument: str) -> None:
    target, decoder, sampling = session.target, session.decoder, session.sampling
    drafts = "off" if decoder.drafter is None else f"{decoder.drafter.name}, policy {decoder.policy.name}"
    how = "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}, seed {sampling.seed}"
    facts = {
        "model": target.name,
        "context": f"{len(target.tokens)} of {target.n_ctx} tokens used",
        "sampling": how,
        "drafting": drafts,
        "answers": str(session.answers),
    }
    stderr.print(*totals(session.totals, facts))


def _drafts(session: Session, _argument: str) -> None:
    set_drafts(session, not session.view.drafts)


def set_drafts(session: Session, on: bool) -> None:
    """Turn the display of drafts on or off. Raises NGramSpecError where it cannot be shown."""
    view = session.view
    if on and not view.can_show_drafts:
        raise NGramSpecError("drafts can be shown on a terminal only")
    view.drafts = on
    if not on:
        note("drafts are not shown")
        return
    stderr.print(
        Text.assemble(
            ("drafts are shown: ", "dim"),
            ("accepted", "green"),
            (", ", "dim"),
            ("refused", "strike red"),
            ("the model's own token instead", "bright_blue"),
        )
    )


def _save(session: Session, argument: str) -> None:
    path = Path(argument).expanduser()
    save(session.conversation, path, model=session.target.name, sampling=encode(asdict(session.sampling)))
    note(f"saved {_turns(session)} to {path}")


def _load(session: Session, argument: str) -> None:
    path = Path(argument).expanduser()
    session.conversation, model = load(path)
    by = f", had with {model}" if model not in ("", session.target.name) else ""
    note(f"loaded {_turns(session)} from {path}{by}; this session's sampling applies")


def _turns(session: Session) -> str:
    count = len(session.conversation.turns)
    return "1 turn" if count == 1 else f"{count} turns"


_ACTIONS = {
    "help": _help,
    "reset": _reset,
    "system": _system,
    "stats": _stats,
    "drafts": _drafts,
    "save": _save,
    "load": _load,
}
