"""`ngramspec chat`: a conversation with the model in a terminal or line by line through a pipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter, WordCompleter
from prompt_toolkit.document import Document

from ngramspec.chat.conversation import Conversation
from ngramspec.data import NGramSpecError
from ngramspec.loading.settings import LoadSettings
from ngramspec.models.find import list_models
from ngramspec.sampling.settings import TextRules, option

from . import chat_commands
from .chat_input import Terminal, read_lines
from .chat_session import PREDICT, ChatOptions, Session, load_last, open_session
from .console import FAILED, fail, note, pluralize, print_error, printable, read_source, usage_error, usage_errors
from .options import CHAT_TEMPERATURE, STOP, TRACE, Model, SamplingOptions, setting
from .reasoning_options import ReasoningOptions


def chat(
    load: LoadSettings,
    sampling: Annotated[SamplingOptions, {"temperature": setting("temperature", CHAT_TEMPERATURE)}],
    reasoning: ReasoningOptions,
    rules: TextRules,
    model: Model = None,
    predict: int = PREDICT,
    system: str | None = option(None, "-sys", help="System message."),
    file: str | None = option(None, "-f", metavar="FILE|-", help="File with the first user message; -: all of stdin."),
    prompt: str | None = option(None, "-p", help="First user message, unchanged."),
    stop: tuple[str, ...] = STOP,
    show_drafts: bool = option(
        False, help="Show accepted draft tokens in green, rejected ones in red, corrections in blue."
    ),
    no_markdown: bool = option(False, help="Show answers as plain text instead of rendering Markdown."),
    keep: bool = option(False, help="Save the conversation on this machine, for --resume."),
    resume: bool = option(False, help="Continue the last saved conversation and keep saving it."),
    trace: Path | None = TRACE,
) -> None:
    """Chat with a model.

    Example: ngramspec chat model.gguf (/help lists the commands)

    The chat uses the model's own chat template and reuses the KV cache between turns. Input lines can be edited and are
    saved in a history. Ctrl-C stops an answer and keeps the session. When the context is full, the oldest turns are
    dropped, with a note. Control tokens in messages, such as <|im_end|>, are treated as text.

    In a terminal, Markdown is rendered and reasoning is dimmed. Plain text is shown if the terminal is dumb or smaller
    than 20 columns and 10 lines, or if NO_COLOR is set. /copy N copies a block of code unchanged. The conversation is
    not saved at the end, unless --keep, --resume or /set keep on is used. Then it is in one file, readable only by you,
    until the next saved conversation replaces it or /set keep off deletes it.

    After the answer to -f FILE or -p TEXT, the chat continues if stdin is a terminal. Otherwise that is the only
    message; without it, each line of stdin is a turn. stdout then contains only the answers, and stderr the reasoning.
    """
    sampling_settings, acceptance = sampling.choose(load, reasoning.restriction or rules.restriction)
    first = _read_first(file, prompt)
    interactive = sys.stdin is not None and sys.stdin.isatty()
    conversation, recorded_model = load_last() if resume else (Conversation(), "")
    conversation.system = system or conversation.system
    options = ChatOptions(
        load,
        sampling_settings,
        acceptance,
        reasoning,
        rules,
        random_seed=sampling.seed == -1,
        predict=predict,
        stop=stop,
        markdown=not no_markdown,
        keep=keep or resume,
    )
    session = open_session(model, options, trace, conversation=conversation, interactive=interactive)
    if show_drafts:
        with usage_errors("--show-drafts: ", NGramSpecError):
            chat_commands.set_drafts(session, True)
    session.stop_key.install()
    if resume:
        chat_commands.print_resumed(session, recorded_model)
    if interactive:
        _talk(session, first)
    elif not _answer_all(session, first):
        raise typer.Exit(FAILED)


def _read_first(file: str | None, prompt: str | None) -> str | None:
    """Return the first message or `None`; the program ends if it is empty or not UTF-8, or both options are set."""
    if file is not None and prompt is not None:
        usage_error(f"two first messages were given: -f/--file {file} and -p/--prompt; remove one")
    if file is None:
        name, text = "-p/--prompt", prompt
    else:
        name = "standard input" if file == "-" else file
        text = read_source(file, "no message on standard input; pipe one in or set -p/--prompt").rstrip("\r\n")
    if text is not None and not text.strip():
        fail(f"{name} is empty")
    return text


def _talk(session: Session, first: str | None) -> None:
    if first is not None:
        session.ask(first)
    note(f"{'' if first is None else 'the chat continues; '}/help lists commands, Ctrl-D exits")
    terminal = Terminal(ChatCompleter(), lambda: _toolbar(session))
    session.edit_line = terminal.edit
    with suppress(EOFError):
        for line in filter(str.strip, terminal):
            _handle(session, line)


def _toolbar(session: Session) -> str:
    """Return the line below the prompt: model, used part of the context, number of attached files and "saved"."""
    size = session.target.n_ctx
    used = min(session.n_tokens, size)  # a longer conversation loses its oldest turns
    parts = [session.source.label, f"{used} of {size} tokens ({used / size:.0%})"]
    if session.attachments:
        parts.append(f"{pluralize(len(session.attachments), 'file')} attached")
    if session.options.keep:
        parts.append("saved")
    return printable(" · ".join(parts))


def _answer_all(session: Session, first: str | None) -> bool:
    """Answer every line of stdin, or only the first message, and return True if all turns succeeded."""
    success = True
    with suppress(EOFError):
        for line in read_lines() if first is None else [first]:
            if line is None:
                print_error("skipped input that is not UTF-8 text")
            success = line is not None and (session.ask(line) if line is first else _handle(session, line)) and success
            if session.stop_key.pressed:
                raise KeyboardInterrupt
    return success


def _handle(session: Session, line: str) -> bool:
    """Run a command or answer a message, and return True if it succeeded; EOFError exits the chat."""
    parsed_line = chat_commands.parse(line)
    return session.ask(parsed_line) if isinstance(parsed_line, str) else chat_commands.run(session, *parsed_line)


class ChatCompleter(Completer):
    _paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        match = re.fullmatch(r"/(\w+)\s+(.*)", document.text_before_cursor, re.DOTALL)
        words, with_paths = list[str](), False
        if match is None:
            words = chat_commands.NAMES if document.text_before_cursor.startswith("/") else []
        elif (name := match[1].lower()) == "set":
            words = list(chat_commands.SETTINGS)
        elif with_paths := name in ("file", "save", "load", "model"):
            words = [model for model, _ in list_models()] if name == "model" else []
        argument = document if match is None else Document(match[2])
        yield from WordCompleter(words, ignore_case=True, sentence=True).get_completions(argument, complete_event)
        yield from self._paths.get_completions(argument, complete_event) if with_paths else ()
