"""`ngramspec replay`: what drafting would have gained on recorded conversations."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import RenderableType
from rich.table import Table

import ngramspec
from ngramspec.cost.given import CURVES, GivenCurve
from ngramspec.drafting import DEFAULT, DRAFTERS, make_drafter
from ngramspec.drafting.draft import Drafter
from ngramspec.instruments.replay.comparison import CurveComparison, Figures
from ngramspec.instruments.replay.replay import Replay, check_replayable
from ngramspec.instruments.replay.report import replay_report
from ngramspec.instruments.replay.transcripts import MAX_RESPONSE, MAX_TOTAL
from ngramspec.instruments.reports.report import figure
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.loading.settings import LoadSettings
from ngramspec.policies import make_policy

from .console import leave, usage_error
from .options import load_flag, open_vocabulary
from .output import Output, PostOptions, command_line, json_option
from .replay_input import MEASURED, MODEL, CostOptions, named_curves, read_transcripts, record
from .view import figures_table, print_report, run_counted, slow_core

SHOWN = (2, 3, 4, 6, 8, 12, 16, 32, 64)
"""Sizes of a batch whose cost is printed."""

POSITIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Draft positions shown; --json has all."""

UNNAMED = "no --vocab or --model: the texts are cut into the tokens of"


@dataclass(frozen=True, slots=True)
class DraftingOptions:
    """What drafts in a replay."""

    drafter: Annotated[str, load_flag("drafter", f"What drafts: {', '.join(DRAFTERS)}.")] = DEFAULT
    policy: Annotated[str, load_flag("policy")] = "cost"
    draft_max: Annotated[int | None, load_flag("draft_max")] = None
    memory: Annotated[
        Literal["on", "off"], typer.Option(help="Remember the answers of earlier conversations of the run.")
    ] = "off"

    def __post_init__(self) -> None:
        try:
            check_replayable(self.make(), make_policy(self.policy, self.draft_max))
        except ValueError as error:
            usage_error(str(error))

    def make(self) -> Drafter:
        """A drafter that has seen nothing yet."""
        return make_drafter(self.drafter, memory=self.memory == "on")

    def replay(self, curve: GivenCurve) -> Replay:
        """A replay by a curve, with a drafter of its own."""
        return Replay(self.make(), self.policy, self.draft_max, curve=curve)


def replay(
    drafting: DraftingOptions,
    cost: CostOptions,
    load: Annotated[LoadSettings, MODEL],
    post: PostOptions,
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Recorded conversations, JSONL or plain text pairs; -: from stdin."),
    ],
    vocab: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.gguf",
            help="Whose tokens; weights need not be in it. Default: the model's, or the default model's.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Most conversations per category, drawn at random once; default: all.")
    ] = None,
    no_oracle: Annotated[bool, typer.Option("--no-oracle", help="Leave the copy-oracle out.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse broken entries instead of skipping them.")] = False,
    with_texts: Annotated[
        bool, typer.Option("--with-texts", help="Show in --html what was drafted of the first answer of each category.")
    ] = False,
    as_json: Annotated[str | None, json_option("all figures")] = None,
) -> None:
    """Replay recorded conversations: what would drafting have gained?

    The answers are taken to be a model's own greedy output, so it takes no model, only a vocabulary. A pass over n
    tokens costs what a curve says, and the policy drafts by that curve. "oracle" is the most that any drafter could
    gain that copies one span of the context per pass. Shown per category, overall, and as the mean of the categories
    (macro): tokens per pass, acceptance rate, passes without a draft, the speedup; microseconds of drafting per pass
    and per token of the prompt; acceptance by position; and how well the predicted acceptance fits the observed one.

    A file is JSON lines, one JSON array, or one object, of {"messages": [...], "response": "..."}, of conversations
    that end with the assistant's message, of {"prompt": "...", "response": "..."}, or of OpenAI's requests and
    responses; or plain text in pairs, after lines "=== prompt" and "=== response".

    Ctrl-C shows what was replayed so far.

    To post: --markdown prints a table, --svg draws the gains, --html writes one page with all figures. Nothing that the
    conversations say is in them, unless --with-texts puts the first answer of each category on the page.
    """
    if with_texts and post.html is None:
        usage_error("--with-texts is for the page that --html writes")
    if cost.model is None and load != LoadSettings():
        usage_error("-c, -ngl, --rpc and -t load a model: name it with --model")
    named_curves(cost.curve or [])
    with ExitStack() as stack:
        output = stack.enter_context(Output(as_json, post))
        transcripts = read_transcripts(files, strict=strict)
        target = cost.load(load)
        if target is not None:
            stack.enter_context(target)
        vocabulary: Vocabulary = (
            target if target and not vocab else stack.enter_context(open_vocabulary(vocab, None, UNNAMED))
        )
        recordings = record(transcripts, vocabulary, limit)
        curves = cost.curves(target)
        replays = {name: drafting.replay(curve) for name, curve in curves.items()}
        piece = vocabulary.piece if with_texts else None
        comparison = CurveComparison(recordings, drafting.drafter, replays, oracle=not no_oracle, piece=piece)
        names = (recording.category for recording in comparison.run())
        ended = run_counted(names, len(recordings), "replaying", still=False)
        document = {
            "ngramspec": ngramspec.__version__,
            "files": files,
            "vocabulary": str(vocabulary.path),
            "model": None if target is None else str(target.path),
            "settings": {**asdict(drafting), "limit": limit},
            "skipped": {"broken": len(transcripts.broken), "empty": transcripts.empty},
            **comparison.document(),
        }
        own = {"--vocab": vocab, "--limit": limit, "--no-oracle": no_oracle, "--strict": strict}
        typed = command_line("replay", files, own, drafting, cost, load)
        output.write(
            lambda: _show(document, curves, len(recordings)),
            lambda: document,
            lambda: replay_report(document, vocabulary.path.name, typed, comparison.passages if with_texts else None),
        )
    leave(ended)


def _show(document: Figures, curves: Mapping[str, GivenCurve], total: int) -> None:
    settings = document["settings"]
    heading = [
        f"{document['transcripts']} conversations, {document['decode_tokens']} tokens to decode,"
        f" {document['prompt_tokens']} tokens of prompts; tokens of {document['vocabulary']}",
        f"drafter {settings['drafter']}, policy {settings['policy']}, memory {settings['memory']}; one drafter for all"
        " conversations, in order",
        f"a response's first token is the prefill's; responses are cut at {MAX_RESPONSE} tokens, prompts at the front"
        f" so that both have {MAX_TOTAL}",
    ]
    if not document["complete"]:
        heading.append(f"INCOMPLETE: stopped after {document['transcripts']} of {total} conversations")
    if (slow := slow_core()) is not None:
        heading.append(slow)
    parts: list[RenderableType] = [*heading]
    for name, curve in curves.items():
        rows = document["results"][f"{settings['drafter']}@{name}"]
        costs = " ".join(f"{size}:{curve.ratio(size):.2f}" for size in SHOWN)
        about = CURVES[name][1] if name in CURVES else "from a file"
        if name == MEASURED:
            about = "passes of the model, measured here before the replay"
        switch = f"; a change of size: {curve.switch:.2f}" if curve.switch else ""
        limits = {
            category: row[name]["oracle_copy1"] for category, row in (document["oracle"] or {}).items() if name in row
        }
        parts += ["", f"Curve {name}: {about}\nT(n)/T(1): {costs}{switch}", _gains(rows, name, limits)]
        if rows and rows["overall"]["max_draft"]:
            parts += ["", "Acceptance by position in the draft, of the drafts that reach so far:", _positions(rows)]
        if rows and rows["overall"]["calibration_error"] is not None:
            error = rows["overall"]["calibration_error"]
            parts += ["", f"Predicted against observed acceptance; expected calibration error {error:.4f}:"]
            parts.append(_reliability(rows["overall"]))
    print_report(parts)


def _gains(rows: Mapping[str, Figures], curve: str, limits: Mapping[str, float]) -> Table:
    """What was gained, and what it took."""
    headings = ["tokens", "per\npass", "accepted", "no\ndraft", "speedup", *(["copy-\noracle"] if limits else [])]
    headings += ["us per\npass", "us per\nprompt\ntoken"]
    lines = []
    for category, row in rows.items():
        # A mean of counts tells nothing that their sum does not.
        cells = ["" if category == "macro" else f"{row['tokens']:.0f}", f"{row['tokens_per_pass']:.2f}"]
        cells += [figure(row["acceptance"], ".0%"), f"{row['no_draft_share']:.0%}"]
        cells.append(f"{row['speedup'][curve]:.3f}x")
        if limits:
            cells.append(figure(limits.get(category), ".3f", "x"))
        cells += [f"{row['cpu_us_per_pass']:.1f}", f"{row['start_us_per_prompt_token']:.2f}"]
        lines.append([category, *cells])
    return figures_table(["category", *headings], lines, totals=2)


def _positions(rows: Mapping[str, Figures]) -> Table:
    shown = [p for p in POSITIONS if p <= rows["overall"]["max_draft"]]
    lines = []
    for category, row in rows.items():
        if category == "macro":
            continue
        rates = row["accept_by_position"]
        cells = [f"{row['drafted_per_pass']:.2f}", *(f"{rates[p - 1]:.2f}" if p <= len(rates) else "-" for p in shown)]
        lines.append([category, *cells])
    return figures_table(["category", "drafted", *map(str, shown)], lines, totals=1)


def _reliability(row: Figures) -> Table:
    lines = [
        [
            f"{cell['from']:.1f} - {cell['to']:.1f}",
            str(cell["count"]),
            figure(cell["predicted"], ".3f"),
            figure(cell["observed"], ".3f"),
        ]
        for cell in row["reliability"]
    ]
    return figures_table(["predicted", "positions", "mean", "observed"], lines, totals=0)
