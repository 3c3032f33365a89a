"""`ngramspec edit`: the model changes a file; only the new file goes to stdout."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Annotated

import typer

from ngramspec.chat.stream import Delta
from ngramspec.instruments.reports.report import MAX_LISTED, Piece
from ngramspec.loading.settings import LoadSettings
from ngramspec.sampling.settings import TextRules, option
from ngramspec.steps import Stats, Step

from .chat_commands import format_attachment
from .chat_session import ChatOptions, Session, open_session
from .chat_view import AnswerView
from .console import (
    MAX_COLUMNS,
    Outcome,
    fail,
    note,
    pluralize,
    printable,
    read_source,
    usage_error,
    write_stdout,
)
from .edited_file import find_file, format_diff, is_complete, merge_lines, replace_text
from .options import MODEL, TRACE, SamplingOptions, choose_model, is_model, keep, predict_option, token_limit
from .reasoning_options import ReasoningOptions
from .show import LIMITS, check_writable, counting_bar


def edit(
    load: LoadSettings,
    sampling: SamplingOptions,
    reasoning: ReasoningOptions,
    rules: TextRules,
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="[MODEL] FILE INSTRUCTION", help="File to change (-: stdin), and what to change in it."),
    ],
    model_option: str | None = MODEL,
    predict: int | None = predict_option(
        None, "Maximum number of tokens; -1: until the context is full; default: 1024 + twice the file's."
    ),
    diff: bool = option(False, help="Print a unified diff instead of the new file."),
    write: bool = option(False, "-w", help="Replace the file instead of printing the new one."),
    trace: Path | None = TRACE,
) -> None:
    """Change a file as an instruction says.

    Example: ngramspec edit app.py "Rename load to read_users." --write

    Only the new file goes to stdout, without the code fence and the words around it. --diff prints a diff for patch -p1
    or git apply instead. --write replaces the file when the answer is complete, and keeps its mode and line ends.

    If the answer contains no file or a limit cut it, nothing is written: the answer goes to stderr, and the exit code
    is 1. If the context is too small for the file and a new one of its length, that is an error before the generation.
    """
    sampling_settings, acceptance = sampling.choose(load, reasoning.restriction or rules.restriction)
    model, name, instruction = _parse(arguments)
    file = read_source(name, "no file on standard input; pipe one in or name it")
    if write:
        if not Path(name).is_file():
            usage_error(f"--write requires a file, got {name}")
        check_writable(name)
    label, text = "stdin" if name == "-" else name, file.replace("\r\n", "\n")
    n = -1 if predict is None else predict
    options = ChatOptions(load, sampling_settings, acceptance, reasoning, rules, random_seed=True, predict=n)
    session = open_session(choose_model(model, model_option), options, trace)
    drafter = session.decoder.drafter
    session.prediction = text if drafter is not None and drafter.prediction is not None else ""
    answer, ending, stats = _generate(session, label, text, instruction, is_bounded=predict is None)
    new_text = find_file(answer, text)
    lines, n_changed = merge_lines(file, new_text or "")
    problem = ""  # reason for which nothing is written
    if ending in LIMITS:
        problem = "the answer was cut; raise -n/--predict or -c/--ctx-size"
        if predict is None and ending == "length":
            problem = "the answer is far longer than the file, as if the model repeated itself; set -n to allow that"
    elif new_text is None:
        problem = "the answer contains no file"
    elif write and read_source(name, "") != file:
        problem = f"{name} has changed since it was read"
        note(answer)
    if problem and (ending in LIMITS or new_text is None):
        rows = [row for line in answer.splitlines() for row in wrap(line, MAX_COLUMNS) or [""]]
        note("\n".join(rows[:MAX_LISTED]))
        if len(rows) > MAX_LISTED:
            note(f"{pluralize(len(rows) - MAX_LISTED, 'more line')} of the answer left out")
    if not problem:
        if write and n_changed:
            replace_text(Path(name).resolve(), "".join(lines))
        if diff or not write:
            output = "".join(format_diff(label, file, lines) if diff else lines)
            write_stdout(printable(output) if sys.stdout.isatty() else output)
    session.show_report(stats, ending, intro="" if problem else f"{pluralize(n_changed, 'line')} changed")
    if problem:
        fail(f"{problem}; nothing was written")


class _HiddenView(AnswerView):
    """View that shows the reasoning of an answer, and only the number of tokens of its content.

    The content ends when it contains the whole new file, or at `limit` tokens. `on_tokens` gets the number of tokens
    and the `expected` one, which may grow.
    """

    def __init__(self, original: str, expected: int, limit: int, on_tokens: Callable[[int, int], None]) -> None:
        super().__init__()
        self._original, self._expected, self._limit, self._on_tokens = original, expected, limit, on_tokens
        self._n_tokens, self._content = 0, ""

    def show(self, step: Step, deltas: Iterable[Delta], piece: Piece) -> None:
        super().show(step, deltas, piece)
        if text := "".join(delta.text for delta in deltas if delta.kind == "text"):
            start, before = self._content.rfind("\n") + 1, len(self._content)
            self._content += text
            self._n_tokens += len(step.tokens)
            self._on_tokens(self._n_tokens, max(self._expected, self._n_tokens + 1))
            # A step may contain several lines, of which the first completes the file.
            ends = (before + line.end() for line in re.finditer("\n", text))
            if any(is_complete(self._original, self._content[:end], start) for end in ends):
                self.ending = "stop"
            elif self._n_tokens >= self._limit:
                self.ending = "length"

    def write(self, deltas: Iterable[Delta]) -> None:
        super().write(delta for delta in deltas if delta.kind == "reasoning")


def _generate(session: Session, name: str, text: str, instruction: str, *, is_bounded: bool) -> tuple[str, str, Stats]:
    """Return the answer of the model up to the end of the file, its stop reason and its counters."""
    attachment = format_attachment(name, text)
    n_tokens = len(session.target.vocabulary.tokenize(attachment, add_bos=False))
    message = f"{attachment}\n\n{instruction}"
    system = "You edit files. Reply with the complete edited file in one code block and nothing else."
    prompt = session.encode([{"role": "system", "content": system}, {"role": "user", "content": message}])
    limit = token_limit(session.options.predict)
    if (size := len(prompt) + min(limit, n_tokens)) > (n_ctx := session.target.n_ctx):
        fail(f"the context of {n_ctx} tokens is too small: prompt and new file need {size}; raise -c/--ctx-size")
    steps, deltas, stats = list[Step](), list[Delta](), Stats()
    # Small models may repeat lines without end; reasoning does not count.
    limit = 2 * n_tokens + 1024 if is_bounded else limit
    with Outcome() as outcome, counting_bar("writing") as show_progress:
        session.view = _HiddenView(text, n_tokens, limit, show_progress)
        session.generate(prompt, steps, deltas)
    for step in steps:
        stats.add(step)
    ending = steps[-1].stop if steps else None
    if ending is None:
        session.show_report(stats, outcome.word)
        outcome.reraise()
        raise KeyboardInterrupt
    keep(session.memory, session.target.vocabulary, steps)
    return "".join(delta.text for delta in deltas if delta.kind == "text"), ending, stats


def _parse(arguments: Sequence[str]) -> tuple[str | None, str, str]:
    first = arguments[0]
    if len(arguments) > 3 or (len(arguments) == 3 and os.path.exists(first) and not is_model(first)):
        usage_error(f"edit changes one file, and the instruction must be in quotes; got {len(arguments)} arguments")
    if len(arguments) == 1 or (len(arguments) == 2 and is_model(first)) or not arguments[-1].strip():
        usage_error('edit requires a file and an instruction: ngramspec edit app.py "Add type hints."')
    return None if len(arguments) == 2 else first, arguments[-2], arguments[-1]
