"""`ngramspec trace`: a traced generation with one row per decode call, in colour or, without colours, in brackets.

The colours green, red and blue for accepted, rejected and corrected tokens follow figure 1 of Leviathan, Kalman,
Matias 2023, "Fast inference from transformers via speculative decoding".
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ngramspec.acceptance.rules import TokenDecision
from ngramspec.data import NGramSpecError, encode, get_reason
from ngramspec.instruments.reports.report import MAX_LISTED
from ngramspec.instruments.trace import TracedPass, TraceHeader, read_trace
from ngramspec.sampling.settings import Sampling, option
from ngramspec.steps import Stats, Step

from .console import Outcome, fail, note, print_stdout, printable, usage_error, write_stdout
from .show import ACCEPTED, CORRECTION, REFUSED, format_gain, format_speed


def trace(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="Trace file written by --trace; -: stdin.")],
    numbers: bool = option(
        False, help="Also show why each draft had its length, and p, q and other numbers of each token."
    ),
) -> None:
    """Show a trace, one line per pass.

    Example: ngramspec trace run.jsonl

    chat, complete and edit record a trace with --trace. Each pass (one decode call) is one JSON object: position,
    context, draft with q and source, p of each token, the accepted and rejected tokens with the reasons, batch size and
    seconds. The format is documented in ngramspec/instruments/trace.py.

    With --policy cost, the default, --numbers shows why a draft had its length: P(k), the probability that its first k
    tokens are all accepted, T(1 + k), the cost of the pass in units of T(1), and V(k), the value of the draft: its
    expected tokens, minus lambda T(1 + k), plus the value of later passes that continue the chain of guesses. lambda is
    the recent number of tokens per T(1). The draft has the k with the largest V among those with T(1 + k) up to the
    cap, which limits the possible loss. The rows end at the length of the proposal, or at the largest batch that may be
    tried now. V does not contain charges for changes of the batch size and discounts of padded batches, which can also
    decide. Some lengths are probes, which show what a batch costs.

    Each token has p, the model's probability, q, the drafter's, match, the length of the matching context, and
    expected, the estimated probability of acceptance, whose products are P(k). At temperature 0, margin is how far its
    logit is below the highest one.

    Accepted draft tokens are green, rejected ones are red and struck through, and the model's own token is blue.
    Without colours (not a terminal, or NO_COLOR): [+accepted] [-rejected] [.after a rejected one] [>the model's own]
    [~after the end of the text]. Broken lines are reported and skipped. A truncated trace is shown as far as it goes.
    """
    name = "standard input" if file == "-" else file
    n_broken, cut = 0, False
    view = TraceView(numbers=numbers)
    with Outcome() as outcome:
        for item in read_trace(_lines(file, name)):
            if isinstance(item, TracedPass):
                view.show(item)
            elif isinstance(item, TraceHeader):
                view.header(item)
            else:
                number, reason, is_incomplete = item
                cut |= is_incomplete
                n_broken += not is_incomplete
                if is_incomplete:
                    note(f"warning: {name}: line {number}, the last one, is incomplete; its writer was interrupted")
                elif n_broken <= MAX_LISTED:
                    note(f"{name}: skipped line {number}: {reason}")
    view.total()
    if n_broken > MAX_LISTED:
        note(f"{name}: skipped {n_broken} broken lines in total")
    if isinstance(outcome.error, NGramSpecError):
        fail(f"{name}: {outcome.error}")
    outcome.reraise()
    if view.open and not cut:
        note(f"{name}: the last text is incomplete; its generation was interrupted or is still running")


def _lines(file: str, name: str) -> Iterator[bytes]:
    if file == "-" and (sys.stdin is None or sys.stdin.isatty()):
        usage_error("no trace on standard input; pipe a file in")
    try:
        with sys.stdin.buffer if file == "-" else Path(file).open("rb") as lines:
            while line := lines.readline(1 << 26):  # a file that is not a trace must not fill the memory
                yield line
    except (OSError, ValueError) as error:  # a name with a null character raises ValueError
        fail(f"cannot read {name}: {get_reason(error)}")


CONTEXT = 24  # width of the context column in cells; a narrow terminal gets a fifth of its width

_STYLES = {"+": ACCEPTED, "-": REFUSED, ".": f"dim {REFUSED}", ">": CORRECTION, "~": "dim"}


class TraceView:
    """Writer of a trace to stdout, one part at a time; `open` is True while the last text has no end.

    A mark replaces the colour of a token or precedes its numbers. The marks are "+" for accepted, "-" for rejected, "."
    after a rejected token, ">" for the target's own token and "~" after the end of the text.
    """

    def __init__(self, *, numbers: bool) -> None:
        self._numbers = numbers
        self._console = Console(highlight=False, emoji=False)
        # Without colours, marks distinguish accepted tokens from the target's own.
        self._coloured = self._console.color_system is not None and not self._console.no_color
        self._context = min(CONTEXT, self._console.width // 5) if self._coloured else CONTEXT
        self._sources: dict[str, Stats] = {}  # counters by source of the draft
        self.open = False

    def header(self, header: TraceHeader) -> None:
        facts = [header.model, _settings(header.sampling), f"acceptance {header.acceptance}"]
        facts += [f"CHANGES THE OUTPUT: {header.lossy}"] if header.lossy else []
        facts += [f"drafter {header.drafter}, policy {header.policy}" if header.drafter else "plain decoding"]
        facts += [*(["exact"] if header.exact else []), header.date, header.program]
        self._line(Text(_escape_line("; ".join(filter(None, facts))), "bold"))
        columns = _columns("pos", "batch", "ms", "source") + "context".rjust(self._context)
        self._line(Text(f"{columns} draft and own token", "dim"))

    def show(self, traced_pass: TracedPass) -> None:
        step = traced_pass.step
        self._sources.setdefault(_short_source(step), Stats()).add(step)
        self.open = step.stop is None
        source = _short_source(step) or ("-" if step.batch else "prefill")
        text = Text(_columns(str(step.position), str(step.batch), f"{step.seconds * 1e3:.1f}", _escape_line(source)))
        text.append(_context(traced_pass, self._context), "dim").append(" ")
        if self._coloured:
            for mark, group in groupby(_mark_tokens(step), lambda entry: entry[0]):
                text.append(_readable(traced_pass, *(token for _, token, _ in group)), _STYLES[mark])
        else:
            text.append("".join(f"[{mark}{_readable(traced_pass, token)}]" for mark, token, _ in _mark_tokens(step)))
        if step.stop is not None:
            ending = step.stop if step.stop_string is None else f"{step.stop} {step.stop_string!r}"
            text.append(f"  end: {_escape_line(ending)}", "dim")
        self._line(text)
        if self._numbers:
            self._show_numbers(traced_pass)

    def total(self) -> None:
        stats, by_source = Stats(), []
        for source, counts in self._sources.items():
            stats.merge(counts)
            if counts.drafted:
                by_source.append(f"{_escape_line(source)} {counts.accepted} of {counts.drafted}")
        if not stats.generated:
            return
        parts = [f"passes: {stats.passes}, {stats.passes_without_draft} of them without a draft"]
        parts.append(", ".join(filter(None, [format_speed(stats), format_gain(stats)])))
        parts.append(f"{stats.tokens_per_pass:.2f} tokens per pass")
        if stats.acceptance_rate is not None:
            parts.append(f"{stats.acceptance_rate:.0%} of {stats.drafted} draft tokens accepted")
        parts += [f"accepted: {', '.join(by_source)}"] if by_source else []
        self._line(Text("; ".join(parts), "bold"))

    def _show_numbers(self, traced_pass: TracedPass) -> None:
        indent = " " * 9
        for line in _policy_lines(traced_pass.step.policy_details):
            self._line(Text(indent + _escape_line(line), "dim"))
        for mark, token, numbers in _mark_tokens(traced_pass.step):
            if numbers:
                text = f'{mark} "{_readable(traced_pass, token)}"'
                self._line(Text(indent).append(text, _STYLES[mark]).append(f"  {numbers}"))

    def _line(self, text: Text) -> None:
        if self._coloured:
            print_stdout(self._console, text, soft_wrap=True)
        else:
            write_stdout(text.plain + "\n")


def _policy_lines(details: Mapping[str, float | str]) -> Iterator[str]:
    """Yield the numbers that the policy decided by: first the general ones, then those of each draft length."""
    texts = {name: f": {value}" if isinstance(value, str) else f" {value:.4g}" for name, value in details.items()}
    labels = {"gamma": "maximum draft length"}
    parts = [f"{labels.get(name, name)}{text}" for name, text in texts.items() if not re.match(r"[PTV]\(\d", name)]
    if parts:
        yield ", ".join(parts)
    k = 0
    while f"V({k})" in details:
        numbers = ", ".join(f"{name}{texts[name]}" for name in (f"P({k})", f"T({1 + k})", f"V({k})"))
        yield f"  {numbers}{'  <- planned' if k == details.get('planned') else ''}"
        k += 1


def _short_source(step: Step) -> str:
    """Return the name of the drafter; of FILE.py:Class only the class, because the header has the whole name."""
    return step.source.rpartition(":")[2]


def _columns(position: str, batch: str, ms: str, source: str) -> str:
    return f"{position:>6} {batch:>5} {ms:>7}  {source:<8} "


def _mark_tokens(step: Step) -> Iterator[tuple[str, int, str]]:
    """Yield the mark (see `TraceView`) of each draft token and of the target's own, the token, and its numbers."""
    decisions = [decision for decision in step.decisions if decision.accepted is not None]
    at_end = step.accepted == len(step.tokens)
    for i, (token, decision) in enumerate(
        zip_longest(step.verified_draft.tokens, decisions[: len(step.verified_draft)])
    ):
        mark = "~" if at_end else "-" if decision is not None and not decision.accepted else "."
        yield "+" if i < step.accepted else mark, token, "" if decision is None else _numbers(step, i, decision)
    for decision in step.decisions[len(decisions) :] if not at_end else ():
        yield ">", decision.token, f"p {decision.p:.4g}"


def _numbers(step: Step, i: int, decision: TokenDecision) -> str:
    draft = step.verified_draft
    parts = [f"p {decision.p:.4g}"]
    parts += [f"q {q[decision.token]:.4g}" for q in draft.q[i : i + 1] if decision.token in q]
    parts += [f"{name} {value:.4g}" for name, value in decision.why.items() if name != "q"]
    parts += [f"expected {chance:.4g}" for chance in draft.acceptance_probs[i : i + 1]]
    parts += [f"match {length}" for length in draft.match_lengths[i : i + 1]]
    parts += ["forbidden by the grammar, not verified"] if i >= len(step.drafted) else []
    return _escape_line(", ".join(parts))


def _settings(sampling: Mapping[str, Any]) -> str:
    defaults = encode(asdict(Sampling()))
    settings = {name: value for name, value in sampling.items() if name == "temperature" or value != defaults.get(name)}
    texts = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in settings.items()}
    return ", ".join(f"{name} {text if len(text) <= 40 else text[:40] + '...'}" for name, text in texts.items())


def _escape_line(text: str) -> str:
    return printable(text.translate({ord("\n"): "⏎", ord("\r"): "␍", ord("\t"): "⇥"}))


def _readable(traced_pass: TracedPass, *tokens: int) -> str:
    """Return the text of tokens, with bytes of incomplete characters (\\xe2) and ids of control tokens (<2>)."""
    raw = b"".join(traced_pass.texts.get(token) or b"<%d>" % token for token in tokens)
    return _escape_line(raw.decode(errors="backslashreplace"))


def _context(traced_pass: TracedPass, width: int) -> str:
    """Return the end of the context, padded on the left to `width` cells."""
    raw = b"".join(traced_pass.texts.get(token, b"") for token in traced_pass.context)
    start = next((i for i, byte in enumerate(raw) if byte & 0xC0 != 0x80), 0)  # first start of a character
    text = _escape_line(raw[start:].decode(errors="backslashreplace"))
    while cell_len(text) > width:
        text = text[1:]
    return " " * (width - cell_len(text)) + text
