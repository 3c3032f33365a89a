"""`ngramspec chat`: a conversation with the model, at a terminal or line by line through a pipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from ngramspec.conversation import Conversation, Saved
from ngramspec.errors import NGramSpecError
from ngramspec.models.on_disk import names
from ngramspec.trace import TraceWriter

from . import chat_commands, chat_kept
from .chat_input import StopKey, Terminal, no_echo, piped_lines
from .chat_kept import Keeper
from .chat_model import Loader
from .chat_session import Session
from .chat_settings import SETTINGS
from .chat_view import AnswerView
from .console import FAILED, complain, counted, fail, note, printable, read_stdin, read_text, usage_error
from .memory_option import suggest_remembering
from .options import DraftOptions, LoadOptions, Model, Stop, TraceFile, check_predict, check_stop
from .sampling_options import SamplingOptions, check_sampling, flag


@dataclass(frozen=True, slots=True)
class ChatSampling(SamplingOptions):
    """llama.cpp's temperature for chat."""

    temperature: Annotated[float, flag("temperature")] = 0.8


def chat(
    load: LoadOptions,
    sampling: ChatSampling,
    draft: DraftOptions,
    model: Model = None,
    predict: Annotated[
        int, typer.Option("-n", "--predict", help="Most tokens of an answer; -1: until the context is full.")
    ] = -1,
    system: Annotated[str | None, typer.Option("-sys", "--system", help="System message.", show_default=False)] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "-f", "--file", help="First user message, from a file; -: from the whole of stdin.", show_default=False
        ),
    ] = None,
    stop: Stop = None,
    show_drafts: Annotated[
        bool,
        typer.Option(
            "--show-drafts",
            help="Show accepted draft tokens in green, refused ones struck through in red, corrections in blue.",
        ),
    ] = False,
    no_markdown: Annotated[
        bool, typer.Option("--no-markdown", help="Show answers as they are written, Markdown and all.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the conversation on this disk, for --resume.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the conversation that was kept last, and keep it.")
    ] = False,
    trace: TraceFile = None,
) -> None:
    """Chat with a model: ngramspec chat model.gguf (/help lists the commands)

    The model's own chat template is used, the KV cache is reused over turns, and lines are edited and kept in a
    history. Ctrl-C stops the answer and keeps the session. When the context is full the oldest turns are left out,
    and a line says so. Only the template writes control tokens: <|im_end|> in a message is text.

    A terminal shows Markdown as what it means, and thoughts dim; one that is dumb, narrower than 20 columns or asked
    for NO_COLOR shows the text. Code can be copied as it stands. The conversation is forgotten at the end, unless
    --keep, --resume or /set keep on says otherwise: then it is in one file, readable by you alone, until the next one
    that is kept takes its place or /set keep off deletes it.

    Without a terminal on stdin, each of its lines is a turn, and stdout gets the answers alone.
    """
    limit = check_predict(predict)
    chosen = sampling.sampling()
    acceptance = sampling.acceptance(chosen)
    draft.check(acceptance)
    stops = check_stop(stop)
    first = None if file is None else _read(file)
    interactive = sys.stdin is not None and sys.stdin.isatty()
    writer = TraceWriter(trace) if trace is not None else None
    conversation, had_with = chat_kept.last() if resume else Saved(Conversation(), "")
    conversation.system = system or conversation.system
    loader = Loader(load, draft)
    with no_echo() if interactive else nullcontext():  # what is typed while the model loads is for the prompt
        target, decoder, memory = loader.open(load.find(model))
    check_sampling(target, chosen)
    session = Session(
        target,
        decoder,
        sampling,
        chosen,
        acceptance,
        limit,
        stops,
        AnswerView(target.piece),
        StopKey(keep_session=interactive),
        conversation,
        memory,
        writer,
        keeper=Keeper(keep or resume),
        interactive=interactive,
        loader=loader,
    )
    session.view.markdown = not no_markdown
    if show_drafts:
        try:
            chat_commands.set_drafts(session, True)
        except NGramSpecError as error:
            usage_error(f"--show-drafts: {error}")
    session.stop_key.install()
    if resume:
        chat_commands.tell_resumed(session, had_with)
    if interactive:
        _talk(session, first)
    elif not _answer_all(session, first):
        raise typer.Exit(FAILED)


def _read(source: str) -> str:
    """The first message; ends the program if there is none or it is not UTF-8."""
    if source == "-":
        text = read_stdin("no message on standard input: pipe one in, or name a file with -f/--file")
    else:
        text = read_text(Path(source))
    text = text.rstrip("\r\n")
    if not text.strip():
        fail(f"{'standard input' if source == '-' else source} is empty: there is nothing to answer")
    return text


def _talk(session: Session, first: str | None) -> None:
    """At a terminal, until the user leaves."""
    note(f"{session.target.name}, context of {session.target.n_ctx} tokens. /help lists commands, Ctrl-D leaves.")
    if session.memory is not None:
        suggest_remembering()
    if first is not None:
        session.ask(first)
    terminal = Terminal(ChatCompleter(), lambda: _toolbar(session), lambda: _edited(session))
    for line in terminal:
        editing, session.editing = session.editing, False
        if not line.strip():
            continue
        parsed = chat_commands.parse(line)
        if editing and isinstance(parsed, str):
            session.ask_again(parsed)
        elif _handle(session, line) is None:
            return


def _toolbar(session: Session) -> str:
    """Below the prompt: the model, the part of its context that is used, and what goes with the next message."""
    size = session.target.n_ctx
    used = min(session.used, size)  # of a longer conversation the oldest turns are left out
    parts = [session.target.name, f"{used} of {size} tokens ({used / size:.0%})"]
    if session.attached:
        parts.append(f"{counted(len(session.attached), 'file')} attached")
    if session.keeper.on:
        parts.append("kept")
    return printable(" · ".join(parts))


def _edited(session: Session) -> str | None:
    """The message that is to be changed, as it would be typed."""
    if not session.editing:
        return None
    text = session.conversation.turns[-1].user
    return text if isinstance(chat_commands.parse(text), str) else f"/{text}"


def _answer_all(session: Session, first: str | None) -> bool:
    """Every line of stdin, or the first message alone; whether all went well."""
    if first is not None:
        well = session.ask(first)
        _leave_if_stopped(session)
        return well
    well = True
    for line in piped_lines():
        if line is None:
            complain("a line of standard input is not UTF-8 text; it is left out")
        done = False if line is None else _handle(session, line)
        if done is None:
            break
        well = well and done
        _leave_if_stopped(session)
    return well


def _leave_if_stopped(session: Session) -> None:
    if session.stop_key.pressed:
        raise KeyboardInterrupt


def _handle(session: Session, line: str) -> bool | None:
    """Carry out a command or answer a message: whether it went well, or None if the user leaves."""
    parsed = chat_commands.parse(line)
    if isinstance(parsed, str):
        return session.ask(parsed)
    name, argument = parsed
    if name == "quit" and not argument:
        return None
    return chat_commands.run(session, name, argument)


# --------------------------------------------------------------------------- what Tab completes

_ARGUMENT = re.compile(r"/(\w+)\s+(.*)", re.DOTALL)


class ChatCompleter(Completer):
    """Completes a command, or what stands behind one."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """What the text before the cursor may become."""
        text = document.text_before_cursor
        found = _ARGUMENT.fullmatch(text)
        if found is None:
            return _words(chat_commands.NAMES, text) if text.startswith("/") else ()
        name, argument = found[1].lower(), found[2]
        match name:
            case "file" | "save" | "load":
                return self._paths.get_completions(Document(argument), complete_event)
            case "set":
                return _words(SETTINGS, argument)
            case "model":
                files = self._paths.get_completions(Document(argument), complete_event)
                return [*_words((model for model, _ in names()), argument), *files]
        return ()


def _words(words: Iterable[str], begun: str) -> list[Completion]:
    return [Completion(word, start_position=-len(begun)) for word in words if word.lower().startswith(begun.lower())]
