"""The slash commands of chat. Whatever they print goes to stderr: stdout is the answers'."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import typer
from rich.table import Table
from rich.text import Text

from ngramspec.conversation import load, save
from ngramspec.errors import NGramSpecError
from ngramspec.json_data import encode
from ngramspec.models.find import ModelSource

from . import chat_kept, chat_settings, chat_turns
from .chat_session import Session
from .chat_view import totals
from .console import complain, counted, fail, note, printable, stderr

_VALUE = 18
"""Columns of a setting's value where all are listed."""

COMMANDS = {
    "/help": "show this",
    "/retry": "have the last message answered again, with another seed",
    "/edit [TEXT]": "change the last message and have it answered again",
    "/undo": "take the last message and its answer back",
    "/file FILE": "put a text file in front of the next message; /file - takes files back",
    "/copy [N]": "put the last answer, or its Nth block of code, on the clipboard, if the terminal can (OSC 52)",
    "/set [NAME [VALUE]]": "show the settings, or change one: /set temp 0.7; /set NAME default takes it back",
    "/system [TEXT]": "show the system message, or set it from the next turn on; /system - removes it",
    "/model [MODEL]": "show the model, or go on with another one",
    "/memory": "show what is drafted from beside this conversation, and what is kept",
    "/stats": "show the session's speed and what became of its drafts",
    "/drafts": "turn the display of drafts on or off",
    "/reset": "forget the turns so far, keep the system message; /clear does too",
    "/save FILE": "write the conversation to FILE as JSON",
    "/load FILE": "go on with the conversation in FILE instead of this one",
    "/quit": "leave, as do /exit, /bye and Ctrl-D",
}
ALIASES = {"?": "help", "clear": "reset", "exit": "quit", "bye": "quit"}
"""Other names of commands, without the slash."""

NAMES = [name.split()[0] for name in COMMANDS] + [f"/{name}" for name in ALIASES]

_COMMAND = re.compile(r"/([A-Za-z]+|\?)(?:\s+(.*))?", re.DOTALL)


def parse(line: str) -> tuple[str, str] | str:
    """(command, argument), or the message that a line stands for.

    A command is a slash and letters, up to a space: "/usr/bin" and "/* x */" are messages. A space or a second
    slash in front makes a message of what would be a command.
    """
    command = _COMMAND.fullmatch(line.rstrip())
    if command:
        name = command[1].lower()
        return ALIASES.get(name, name), (command[2] or "").strip()
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
        return _ACTIONS[name](session, argument) is not False
    except NGramSpecError as error:
        complain(str(error))
        return False


def _help(_session: Session, _argument: str) -> None:
    stderr.print(_listed(COMMANDS.items()))
    note(
        'Enter sends; Alt-Enter or Ctrl-J starts a new line, and so does Enter between """ and """.'
        " Ctrl-X Ctrl-E opens your editor, Tab completes. Ctrl-C stops an answer; at an empty prompt, twice, it leaves."
        " To send a text that looks like a command, put a space or a second / in front."
    )


def _listed(rows: Iterable[Sequence[str]]) -> Table:
    """Names and what belongs to them, the last column as wide as the terminal allows."""
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=True)
    for row in rows:
        if not table.columns:
            table.add_column(no_wrap=True)
            for _ in row[1:-1]:
                table.add_column(max_width=_VALUE, overflow="fold")
            table.add_column()
        table.add_row(*map(Text, row))
    return table


# ---------------------------------------------------------------------- settings, model, memory


def _set(session: Session, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if not name:
        settings = chat_settings.SETTINGS.items()
        stderr.print(_listed((each, printable(setting.show(session)), setting.help) for each, setting in settings))
        return
    setting = chat_settings.find(name)
    value = value.strip()
    if not value:
        note(f"{name} is {setting.show(session)}. {setting.help}")
        return
    try:
        setting.change(session, value)
    except (ValueError, NGramSpecError) as error:
        raise NGramSpecError(f"/set {name}: {error}") from error
    note(f"{name} is {setting.show(session)}")


def _model(session: Session, name: str) -> None:
    if not name:
        note(f"{session.target.name} ({session.target.path}); ngramspec models lists what is on this disk")
        return
    assert session.loader is not None
    source = session.loader.find(name)
    before, path = session.target.name, session.target.path
    # Two models may not fit beside each other.
    session.target.close()
    try:
        loaded = session.loader.open(source)
        loaded.target.sampler(session.sampling)
    except (NGramSpecError, ValueError, MemoryError, typer.Exit) as error:
        try:
            session.use(session.loader.open(ModelSource(path, before)))
        except NGramSpecError as gone:
            fail(f"{name} cannot be used ({error}), nor {before} any more: {gone}")
        why = "" if isinstance(error, typer.Exit) else f": {error or 'out of memory'}"
        raise NGramSpecError(f"{name} cannot be used{why} (going on with {before})") from error
    session.use(loaded)
    note(f"{session.target.name}, context of {session.target.n_ctx} tokens, goes on with the conversation")


def _memory(session: Session, _argument: str) -> None:
    memory = session.memory
    if memory is None:
        note("drafts come from this conversation alone")
    elif not memory.stored:
        note(
            "drafts come from this conversation, and what was said before /reset; ngramspec memory add adds your files"
        )
    else:
        note(f"drafts come from this conversation and {memory.stored} tokens of yours (ngramspec memory list)")
    answers = "are kept for later drafts" if memory is not None and memory.keeps else "are not kept for later drafts"
    conversation = f"is kept in {chat_kept.path()}" if session.keeper.on else "is not kept"
    note(f"answers {answers}; the conversation {conversation}")


def _reset(session: Session, _argument: str) -> None:
    session.reset()
    note("the conversation starts afresh")


def _system(session: Session, text: str) -> None:
    conversation = session.conversation
    if not text:
        note(conversation.system if conversation.system is not None else "there is no system message")
    elif text == "-":
        session.set_system(None)
        note("from the next turn on there is no system message")
    else:
        session.set_system(text)
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
        "exact": "on" if decoder.footing.same else "off",
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
    conversation, model = load(path)
    session.go_on_with(conversation)
    note(f"loaded {_turns(session)} from {path}{_had_with(session, model)}; this session's sampling applies")


def tell_resumed(session: Session, model: str) -> None:
    """Say what a resumed conversation is, and show its last turn to a user at a terminal."""
    note(f"going on with {_turns(session)}{_had_with(session, model)}")
    if session.interactive and session.conversation.turns:
        turn = session.conversation.turns[-1]
        note(f"> {turn.user}")
        session.view.begin(session.thoughts())
        session.view.write(turn.assistant)
        session.view.end()


def _turns(session: Session) -> str:
    return counted(len(session.conversation.turns), "turn")


def _had_with(session: Session, model: str) -> str:
    """Names the model of a conversation, if it is another one; the file may name none."""
    return f", had with {model}" if model not in ("", session.target.name) else ""


_ACTIONS: dict[str, Callable[[Session, str], bool | None]] = {
    "help": _help,
    "retry": chat_turns.retry,
    "edit": chat_turns.edit,
    "undo": chat_turns.undo,
    "file": chat_turns.file,
    "copy": chat_turns.copy,
    "set": _set,
    "model": _model,
    "memory": _memory,
    "reset": _reset,
    "system": _system,
    "stats": _stats,
    "drafts": _drafts,
    "save": _save,
    "load": _load,
}
