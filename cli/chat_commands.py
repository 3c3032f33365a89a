"""Slash commands of the chat; their output goes to stderr because stdout contains only answers.

The settings of `/set` are derived from the groups of options of a chat; each has its name on the command line.
"""

from __future__ import annotations

import base64
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from rich.table import Column

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.chat.conversation import Turn, load
from ngramspec.chat.stream import Delta
from ngramspec.data import NGramSpecError
from ngramspec.grammars.json_schema import schema_grammar
from ngramspec.loading.load import find
from ngramspec.loading.settings import LoadSettings
from ngramspec.sampling.settings import Option, Sampling, TextRules, options

from .chat_session import ChatOptions, Session, conversation_path
from .chat_view import totals
from .console import note, pluralize, print_error, read_text, stderr
from .markdown import code_blocks
from .options import AUTO, CHAT_TEMPERATURE, DISPLAY, SamplingOptions, draw_seed
from .reasoning_options import ReasoningOptions
from .show import ACCEPTED, CORRECTION, REFUSED, names_table

MAX_FILE_BYTES = 8 * 2**20
ALIASES = {"?": "help", "clear": "reset", "exit": "quit", "bye": "quit"}

_COMMAND = re.compile(r"/([A-Za-z]+|\?)(?:\s+(.*))?", re.DOTALL)


def parse(line: str) -> tuple[str, str] | str:
    """Parse a line into a command and its argument, or a message, such as "/usr/bin", "/* x */" or "//help"."""
    command = _COMMAND.fullmatch(line.rstrip())
    if command:
        name = command[1].lower()
        return ALIASES.get(name, name), (command[2] or "").strip()
    if line[:1] in (" ", "/") and _COMMAND.fullmatch(line[1:].rstrip()):
        return line[1:]
    return line


def run(session: Session, name: str, argument: str) -> bool:
    """Run a command and return True, or print the reason of its failure; EOFError exits the chat."""
    try:
        if name not in COMMANDS:
            raise NGramSpecError(
                f"unknown command /{name}; /help lists the commands; to send it as text, begin with // or a space"
            )
        parameter, action = COMMANDS[name]
        if argument and not parameter:
            raise NGramSpecError(f"/{name} does not accept an argument")
        if not argument and parameter == "FILE":
            raise NGramSpecError(f"/{name} requires a file name")
        return action(session, argument) is not False
    except (NGramSpecError, OSError, ValueError) as error:
        print_error(error)
        return False


def _help(_session: Session, _argument: str) -> None:
    """Show this list."""
    stderr.print(names_table(describe_commands()))
    note(
        'Enter sends; Alt-Enter or Ctrl-J starts a new line, and so does Enter between """ and """.'
        " Ctrl-X Ctrl-E opens your editor, Tab completes. Ctrl-C stops an answer; twice at an empty prompt, it exits."
        " To send text that looks like a command, begin with a space or a second /."
    )


def describe_commands() -> Iterator[tuple[str, str]]:
    for name, (parameter, action) in COMMANDS.items():
        description = action.__doc__ or ""
        yield f"/{name} {parameter}".rstrip(), description[:1].lower() + description[1:].removesuffix(".")


def _last(session: Session) -> Turn:
    if not session.conversation.turns:
        raise NGramSpecError("the conversation is empty")
    return session.conversation.turns[-1]


def _retry(session: Session, _argument: str) -> bool:
    """Regenerate the last answer with another seed."""
    _last(session)
    if session.options.sampling.greedy:
        note("the answer does not change at temperature 0; use /set temp 0.8 for variation")
    return session.regenerate()


def _edit(session: Session, text: str) -> bool | None:
    """Edit the last message and regenerate the answer."""
    message = _last(session).user
    if not text:
        if session.edit_line is None:
            raise NGramSpecError("/edit requires the new message as its argument if input is not a terminal")
        # The message is shown as the user would type it.
        command = parse(session.edit_line(message if isinstance(parse(message), str) else f"/{message}"))
        if not isinstance(command, str):
            return run(session, *command)
        text = command
    return session.regenerate(text) if text.strip() else None


def _undo(session: Session, _argument: str) -> None:
    """Remove the last message and its answer."""
    _last(session)
    message = " ".join(session.undo().user.split())
    note(f"removed: {message if len(message) <= 60 else message[:57] + '...'}")


def _file(session: Session, name: str) -> None:
    """Attach a text file to the next message; /file - removes all attached files."""
    if name == "-":
        session.attachments.clear()
        note("removed all attached files")
        return
    message = format_attachment(name, _read_file(name))
    tokens = len(session.target.vocabulary.tokenize(message, add_bos=False))
    if tokens > session.room():
        raise NGramSpecError(f"{name} has {tokens} tokens, but only {session.room()} fit in the context")
    session.attachments.append(message)
    lines = message.count("\n") - 3
    note(f"{name} ({lines} lines, {tokens} tokens) is attached to your next message")


def _prediction(session: Session, name: str) -> None:
    """Draft the next answer from FILE, if it is likely to repeat that text; /prediction - removes it."""
    if name == "-":
        session.prediction = ""
        note("removed the prediction for the next answer")
        return
    drafter = session.decoder.drafter
    if drafter is None or drafter.prediction is None:
        raise NGramSpecError("/prediction has no effect here: it requires drafting with the drafter 'mixture'")
    session.prediction = _read_file(name)
    note(f"the next answer is also drafted from {name}, which is not part of your message")


def format_attachment(name: str, text: str) -> str:
    """Return a file as a part of a message: its name, and its text in a code fence that is longer than any in it."""
    path = Path(name)
    longest = max(map(len, re.findall("`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    ending = "" if not text or text.endswith("\n") else "\n"
    return f"{path.name}:\n\n{fence}{path.suffix[1:]}\n{text}{ending}{fence}"


def _read_file(name: str) -> str:
    path = Path(name).expanduser()
    if path.stat().st_size > MAX_FILE_BYTES:
        raise NGramSpecError(f"{name} is larger than {MAX_FILE_BYTES // 2**20} MiB")
    text = read_text(path)
    if not text.strip():
        raise NGramSpecError(f"{name} is empty")
    return text


def _copy(session: Session, number: str) -> None:
    """Copy the last answer, or its Nth code block, to the clipboard (if the terminal supports OSC 52)."""
    if not sys.stdout.isatty():
        raise NGramSpecError("/copy requires a terminal")
    text = _last(session).assistant
    what = "the answer"
    if number:
        blocks = code_blocks(text)
        if not number.isdecimal() or not 0 < int(number) <= len(blocks):
            raise NGramSpecError(f"the last answer has {len(blocks)} code blocks; {number!r} is not the number of one")
        text, what = blocks[int(number) - 1], f"block {number}"
    if not text:
        raise NGramSpecError(f"{what} is empty")
    raw = base64.b64encode(text.encode("utf-8", "replace")).decode()
    print(f"\x1b]52;c;{raw}\x07", end="", flush=True)  # the sequence is invisible
    note(f"copied {what}: {len(text)} characters")


DEFAULT = "default"  # value that resets a setting
LOAD_SETTINGS = (
    *("threads", "threads_batch", "ctx_size", "no_draft", "drafter", "policy", "draft_max"),
    *("memory", "no_memory"),
)
"""Settings of `LoadSettings` that a chat can change by loading the model again."""

_DEFAULTS = ChatOptions(
    LoadSettings(), SamplingOptions().settings({"temperature": CHAT_TEMPERATURE, "seed": 0}), Acceptance()
)


class Setting(NamedTuple):
    spec: Option
    kind: Any  # type of the value
    group: str  # field of `ChatOptions` with the group of the setting; "" means `ChatOptions` itself
    field: str  # field of the group

    def get(self, chat_options: ChatOptions) -> Any:
        return getattr(getattr(chat_options, self.group) if self.group else chat_options, self.field)

    def show(self, session: Session) -> str:
        value = self.get(session.options)
        if self.spec.parse is schema_grammar:
            return "see grammar"
        if isinstance(value, bool):
            return "on" if value else "off"
        if value is None or value == ():
            return DEFAULT if self.group == "load" else "none"
        if isinstance(value, tuple) and self.spec.repeatable:
            return shlex.join(f"{v[0]}{v[1]:+g}" if isinstance(v, tuple) else repr(v)[1:-1] for v in value)
        if isinstance(value, tuple):
            return ";".join(value)
        return f"{value:g}" if isinstance(value, float) else str(value)

    def change(self, session: Session, text: str) -> None:
        """Change the value for the following answers; NGramSpecError or ValueError if the text is not allowed."""
        value = self.get(_DEFAULTS) if text == DEFAULT else self._parse(text)
        if self.field == "markdown" and text == "on" and not session.view.can_render:
            raise NGramSpecError("Markdown can only be rendered in a terminal with styles and at least 20 columns")
        if self.field == "keep" and not value:
            conversation_path().unlink(missing_ok=True)
        changed = session.options
        if self.field == "seed":
            is_random = text in (DEFAULT, "-1")
            changed = replace(changed, random_seed=is_random)
            value = draw_seed() if is_random else value
        if self.group:
            value = replace(getattr(changed, self.group), **{self.field: value})
        session.use(replace(changed, **{self.group or self.field: value}))

    def _parse(self, text: str) -> Any:
        spec, kind = self.spec, (get_args(self.kind) or (self.kind,))[0]  # int for int | None
        if spec.parse is not None:
            return spec.read(_split_texts(text) if spec.repeatable else text)
        if self.field == "threads" and text == AUTO:
            return None
        choices = {"on": True, "off": False} if kind is bool else {}
        if get_origin(self.kind) is Literal:
            choices = {choice: choice for choice in get_args(self.kind)}
        if choices and text not in choices:
            raise NGramSpecError(f"must be {' or '.join(choices)}, got {text!r}")
        if kind not in (int, float):
            return choices.get(text, text)
        try:
            value = kind(text)
        except ValueError:
            raise NGramSpecError(f"{text!r} is not a {'whole ' if kind is int else ''}number") from None
        if self.group != "sampling" and spec.allowed is not None and not spec.allowed.accepts(value):
            raise NGramSpecError(f"must be {spec.allowed.description}, got {value}")
        return value


def _split_texts(value: str) -> list[str]:
    """Split texts at spaces, except in quotes; escapes such as \\n have their meaning in Python."""
    words = shlex.shlex(value, posix=True, punctuation_chars=False)
    words.whitespace_split, words.escape, words.commenters = True, "", ""
    return [word.encode("latin-1", "backslashreplace").decode("unicode-escape") for word in words]


def _normalize(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def _derive() -> Iterator[tuple[str, Setting]]:
    """Yield all settings with their names."""
    groups = {"sampling": Sampling, "rules": TextRules, "load": LoadSettings, "": ChatOptions}
    for group, owner in (groups | {"reasoning": ReasoningOptions}).items():
        hints = get_type_hints(owner)
        for field, spec in options(owner).items():
            if group != "load" or field in LOAD_SETTINGS:
                flag = next(flag for flag in spec.flags if flag.startswith("--"))
                yield "think" if field == "reasoning" else _normalize(flag), Setting(spec, hints[field], group, field)
    help_text = "JSON schema for the answers, instead of a grammar."
    yield "json-schema", Setting(Option((), help_text, parse=schema_grammar), str, "sampling", "grammar")


SETTINGS = dict(_derive())


def find_setting(name: str) -> Setting:
    for key, setting in SETTINGS.items():
        if _normalize(name) in map(_normalize, (key, setting.field, *setting.spec.flags)):
            return setting
    raise NGramSpecError(f"unknown setting {name!r}; choose from: {', '.join(SETTINGS)}")


def _set(session: Session, argument: str) -> None:
    """Show the settings, or change one: /set temp 0.7; /set NAME default resets it."""
    name, _, value = argument.partition(" ")
    if not name:
        rows = ((each, setting.show(session), setting.spec.help) for each, setting in SETTINGS.items())
        stderr.print(names_table(rows, Column(max_width=18, overflow="fold")))
        return
    setting = find_setting(name)
    value = value.strip()
    if not value:
        note(f"{name} is {setting.show(session)}. {setting.spec.help}")
        return
    try:
        setting.change(session, value)
    except (ValueError, NGramSpecError) as error:
        raise NGramSpecError(f"/set {name}: {error}") from error
    note(f"{name} is {setting.show(session)}")


def _model(session: Session, name: str) -> None:
    """Show the current model, or switch to another one."""
    if not name:
        note(f"{session.source.label} ({session.source.path}); ngramspec models lists the models on this machine")
        return
    session.load(find(name, session.options.load, DISPLAY), session.options.load)
    note(f"{session.source.label}, context of {session.target.n_ctx} tokens, continues the conversation")


def _memory(session: Session, _argument: str) -> None:
    """Show the texts used for drafting and what is saved."""
    memory, sources = session.memory, "only from this conversation"
    if memory is not None and memory.n_stored_tokens:
        tokens = memory.n_stored_tokens
        sources = f"from this conversation and {tokens} tokens of your memory (ngramspec memory list)"
    elif memory is not None:
        sources = "from this conversation and earlier ones of this session; ngramspec memory add adds your files"
    note(f"drafts come {sources}")
    answers = "are saved" if memory is not None and memory.saves_answers else "are not saved"
    conversation = f"is saved in {conversation_path()}" if session.options.keep else "is not saved"
    note(f"answers {answers} for later drafts; the conversation {conversation}")


def _reset(session: Session, _argument: str) -> None:
    """Start a new conversation with the same system message; also /clear."""
    session.reset()
    note("started a new conversation")


def _system(session: Session, text: str) -> None:
    """Show the system message, or set it for the following turns; /system - removes it."""
    conversation = session.conversation
    if not text:
        note(conversation.system if conversation.system is not None else "there is no system message")
        return
    conversation.system = None if text == "-" else text
    session.save_changes()
    hint = "; /reset starts a new conversation" if conversation.turns else ""
    removed = "removed the system message for the following turns"
    note(removed if text == "-" else f"the system message applies to the following turns{hint}")


def _stats(session: Session, _argument: str) -> None:
    """Show the speed and the draft statistics of this session."""
    target, decoder, sampling = session.target, session.decoder, session.options.sampling
    facts = {
        "model": session.source.label,
        "context": f"{len(target.sequences[0].tokens)} of {target.n_ctx} tokens used",
        "sampling": "greedy" if sampling.greedy else f"temperature {sampling.temperature:g}, seed {sampling.seed}",
        "drafting": "off" if decoder.drafter is None else f"{decoder.drafter.name}, policy {decoder.policy.name}",
        "exact": "on" if decoder.exactness.bit_identical else "off",
        "answers": str(session.answers),
    }
    stderr.print(*totals(session.totals, facts))


def _drafts(session: Session, _argument: str) -> None:
    """Show or hide the drafts in answers."""
    set_drafts(session, not session.view.drafts)


def set_drafts(session: Session, on: bool) -> None:
    view = session.view
    if on and not view.can_show_drafts:
        raise NGramSpecError("drafts can only be shown in a terminal")
    view.drafts = on
    if not on:
        note("drafts are hidden")
        return
    parts = {ACCEPTED: "accepted", REFUSED: "rejected", CORRECTION: "the model's own token instead"}
    legend = "[dim], [/]".join(f"[{style}]{text}[/]" for style, text in parts.items())
    stderr.print(f"[dim]drafts are shown: [/]{legend}")


def _save(session: Session, argument: str) -> None:
    """Write the conversation to FILE as JSON."""
    path = Path(argument).expanduser()
    session.save(path)
    note(f"saved {_turns(session)} to {path}")


def _load(session: Session, argument: str) -> None:
    """Load a conversation from FILE and continue it."""
    path = Path(argument).expanduser()
    conversation, model = load(path)
    session.switch_conversation(conversation)
    note(f"loaded {_turns(session)} from {path}{_model_note(session, model)}; this session's sampling applies")


def print_resumed(session: Session, model: str) -> None:
    """Print a note on the resumed conversation and, in a terminal, its last turn."""
    note(f"continuing a conversation of {_turns(session)}{_model_note(session, model)}")
    if session.interactive and session.conversation.turns:
        turn = session.conversation.turns[-1]
        note(f"> {turn.user}")
        with session.view.answering():
            session.view.write([Delta("reasoning", turn.reasoning)] if turn.reasoning else [])
            session.view.write([Delta("text", turn.assistant)])


def _turns(session: Session) -> str:
    return pluralize(len(session.conversation.turns), "turn")


def _model_note(session: Session, model: str) -> str:
    """Return a phrase with the conversation's model if it is known and differs from the current one."""
    return f", recorded with {model}" if model not in ("", session.source.label) else ""


def _quit(_session: Session, _argument: str) -> None:
    """Exit; also /exit, /bye and Ctrl-D."""
    raise EOFError


COMMANDS: dict[str, tuple[str, Callable[[Session, str], bool | None]]] = {
    "help": ("", _help),
    "retry": ("", _retry),
    "edit": ("[TEXT]", _edit),
    "undo": ("", _undo),
    "file": ("FILE", _file),
    "prediction": ("FILE", _prediction),
    "copy": ("[N]", _copy),
    "set": ("[NAME [VALUE]]", _set),
    "system": ("[TEXT]", _system),
    "model": ("[MODEL]", _model),
    "memory": ("", _memory),
    "stats": ("", _stats),
    "drafts": ("", _drafts),
    "reset": ("", _reset),
    "save": ("FILE", _save),
    "load": ("FILE", _load),
    "quit": ("", _quit),
}
"""Argument and function of each command by name; the docstring of the function is its line in /help."""

NAMES = [f"/{name}" for name in (*COMMANDS, *ALIASES)]
