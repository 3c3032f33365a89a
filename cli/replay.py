"""`ngramspec replay`: what drafting would have gained on recorded conversations."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import typer

import ngramspec
from ngramspec.cost.calibration import Calibration
from ngramspec.cost.curve import CostCurve
from ngramspec.cost.given import CURVES, SWITCH, find_curves, frozen
from ngramspec.drafting import DEFAULT, DRAFTERS, make_drafter
from ngramspec.errors import NGramSpecError
from ngramspec.instruments.replay.comparison import MEASURED, CurveComparison, replay_report
from ngramspec.instruments.replay.replay import Recording, Replay
from ngramspec.instruments.replay.transcripts import TranscriptReader, Transcripts, sample
from ngramspec.instruments.reports.report import drafted_texts
from ngramspec.llama.target import Target
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.loading.settings import LoadSettings
from ngramspec.sampling.option import option, within

from .console import fail, leave, note, prefill_bar, usage_error
from .options import find, open_target, open_vocabulary
from .output import Output, PostOptions, command_line, json_option
from .view import LISTED, print_report, run_counted, section_parts, slow_core

FRONT = 512
"""Tokens of context on which the passes of --model are timed."""

_CURVES = ", ".join(CURVES)

UNNAMED = "no --vocab or --model: the texts are cut into the tokens of"

POLICY, MODEL = ("policy", "draft_max"), ("ctx_size", "gpu_layers", "rpc", "threads")
"""The settings of what decides on drafts, and of --model."""

HELPS = {
    "ctx_size": "Context of --model in tokens.",
    "gpu_layers": "Layers of --model on the GPU; -1: all.",
}


def replay(
    load: Annotated[LoadSettings, (*POLICY, *MODEL), HELPS],
    post: PostOptions,
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Recorded conversations, JSONL or plain text pairs; -: from stdin."),
    ],
    drafter: str = option(DEFAULT, help=f"What drafts: {', '.join(DRAFTERS)}."),
    memory: Literal["on", "off"] = option("off", help="Remember the answers of earlier conversations of the run."),
    curve: list[str] | None = option(
        None,
        metavar="NAME|FILE",
        help="What a batch costs by its size; may be repeated, one replay each. A file with JSON, {size: cost, ...}"
        f" or {{name: {{...}}, ...}}, in which {SWITCH!r} beside the sizes is the cost of a change of size; or one"
        f" of: {_CURVES}.",
    ),
    model: str | None = option(None, metavar="MODEL", help="Measure the costs of this model."),
    vocab: Path | None = option(
        None,
        metavar="FILE.gguf",
        help="Whose tokens; weights need not be in it. Default: the model's, or the default model's.",
    ),
    limit: int | None = option(
        None, help="Most conversations per category, drawn at random once; default: all.", allowed=within(1)
    ),
    no_oracle: bool = option(False, help="Leave the copy-oracle out."),
    strict: bool = option(False, help="Refuse broken entries instead of skipping them."),
    with_texts: bool = option(False, help="Show in --html what was drafted of the first answer of each category."),
    as_json: str | None = json_option("all figures"),
) -> None:
    """Replay recorded conversations: what would drafting have gained?

    The answers are taken to be a model's own greedy output, so it takes no model, only a vocabulary. A pass over n
    tokens costs what a curve says, and the policy drafts by that curve. The copy-oracle is the most that any drafter
    could gain that copies one span of the context per pass. Shown per category, overall, and as the mean of the
    categories (macro): tokens per pass, acceptance rate, passes without a draft, the gain; microseconds of drafting per
    pass and per token of the prompt; acceptance by position; and how well the predicted acceptance fits the observed.

    A file is JSON lines, one JSON array, or one object, of {"messages": [...], "response": "..."}, of conversations
    that end with the assistant's message, of {"prompt": "...", "response": "..."}, or of OpenAI's requests and
    responses; or plain text in pairs, after lines "=== prompt" and "=== response".

    Ctrl-C shows what was replayed so far.

    To post: --markdown prints a table, --svg draws the gains, --html writes one page with all figures. Nothing that the
    conversations say is in them, unless --with-texts puts the first answer of each category on the page.
    """
    if with_texts and post.html is None:
        usage_error("--with-texts is for the page that --html writes")
    plain = LoadSettings()
    if model is None and any(getattr(load, name) != getattr(plain, name) for name in MODEL):
        usage_error("-c, -ngl, --rpc and -t load a model: name it with --model")

    def replayed(by: CostCurve) -> Replay:
        # Each has a drafter of its own, which has seen nothing yet.
        made = make_drafter(drafter, memory=memory == "on")
        return Replay(made, load.policy, load.draft_max, curve=by, piece=vocabulary.piece if with_texts else None)

    try:
        Replay(make_drafter(drafter), load.policy, load.draft_max, curve=find_curves("flat")["flat"])
    except ValueError as error:
        usage_error(str(error))
    curves = _named_curves(curve or [])
    output = Output(as_json, post)
    with ExitStack() as stack:
        transcripts = _read(files, strict=strict)
        target = None
        if model is not None:
            target = stack.enter_context(open_target(find(model, load), load))
        vocabulary: Vocabulary = (
            target if target and not vocab else stack.enter_context(open_vocabulary(vocab, None, UNNAMED))
        )
        recordings = _record(transcripts, vocabulary, limit)
        if target is not None:
            curves[MEASURED] = _measured_curve(target)
        if not curves:
            note("no --curve or --model: a batch is taken to cost what one token costs (flat), more than can be had")
            curves = find_curves("flat")
        replays = {name: replayed(by) for name, by in curves.items()}
        comparison = CurveComparison(recordings, drafter, replays, oracle=not no_oracle)
        names = (recording.category for recording in comparison.run())
        ended = run_counted(names, len(recordings), "replaying")
        drafting = {"drafter": drafter} | {name: getattr(load, name) for name in POLICY}
        document = {
            "ngramspec": ngramspec.__version__,
            "files": files,
            "vocabulary": str(vocabulary.path),
            "model": None if target is None else str(target.path),
            "settings": {**drafting, "memory": memory, "limit": limit},
            "skipped": {"broken": len(transcripts.broken), "empty": transcripts.empty},
            **comparison.document(),
        }
        own = {
            "--vocab": vocab,
            "--curve": curve,
            "--model": model,
            "--memory": "on" if memory == "on" else None,
            "--limit": limit,
            "--no-oracle": no_oracle,
            "--strict": strict,
        }
        typed = command_line("replay", files, own, load)
        about = f"The first answer of each kind of text, on the curve {next(iter(curves))}."
        texts = [drafted_texts(about, comparison.texts, vocabulary.piece)] if with_texts else []
        report = replay_report(document, len(recordings), vocabulary.path.name, typed, texts)
        heading = [report.origin, *report.notes, *filter(None, [slow_core()])]
        output.write(
            lambda: print_report([*heading, *section_parts(report.sections)]), lambda: document, lambda: report
        )
    leave(ended)


def _named_curves(names: Sequence[str]) -> dict[str, CostCurve]:
    """The curves asked for."""
    curves: dict[str, CostCurve] = {}
    for name in names:
        try:
            found = find_curves(name)
        except NGramSpecError as error:
            usage_error(str(error))
        for key, curve in found.items():
            if key in curves or key == MEASURED:
                usage_error(f"--curve {name}: there is another curve called {key}; give it another name")
            curves[key] = curve
    return curves


def _read(files: Sequence[str], *, strict: bool) -> Transcripts:
    """All conversations of the files; what is skipped is named and counted on stderr."""
    found = Transcripts()
    for name in files:
        if name != "-":
            found.read(name, Path(name).read_bytes(), strict=strict)
        elif sys.stdin is None or sys.stdin.isatty():
            usage_error("no conversations on standard input: pipe a file in")
        else:
            found.read("stdin", sys.stdin.buffer.read(), strict=strict)
    for problem in found.broken[:LISTED]:
        note(f"skipped {problem}")
    skipped = [f"{len(found.broken)} broken"] if found.broken else []
    skipped += [f"{found.empty} without a response"] if found.empty else []
    if not found.usable:
        fail(f"no conversation to replay in {', '.join(files)}" + (f" ({', '.join(skipped)})" if skipped else ""))
    if skipped:
        note(f"skipped: {', '.join(skipped)}; conversations left: {len(found.usable)}")
    return found


def _record(transcripts: Transcripts, vocabulary: Vocabulary, limit: int | None) -> list[Recording]:
    """The conversations as tokens, category by category."""
    recorder = TranscriptReader(vocabulary)
    if recorder.spelled:
        note("the vocabulary has no chat template: conversations are laid out as ChatML, in ordinary tokens")
    chosen = sample(transcripts.usable, limit)
    recordings = []
    with prefill_bar() as progress:
        for number, transcript in enumerate(chosen, 1):
            recordings.append(recorder.record(transcript))
            progress(number, len(chosen))
    usable = [recording for recording in recordings if recording is not None]
    if not usable:
        fail("no conversation to replay: the chat template refuses them, or they are too short")
    if len(usable) < len(recordings):
        note(f"skipped: {len(recordings) - len(usable)} that the chat template refuses, or that are too short")
    return usable


def _measured_curve(target: Target) -> CostCurve:
    """What passes of a model cost here and now."""
    front = np.random.default_rng(0).integers(0, target.n_vocab, min(FRONT, target.n_ctx // 2))
    target.prefill(front.tolist())
    calibration = Calibration.load(target)
    curve = frozen(calibration.ensure_curve(target))
    calibration.save()
    return curve
