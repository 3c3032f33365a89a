"""`ngramspec replay`: estimate of the gain from drafting on recorded conversations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import typer

import ngramspec
from ngramspec.cost.fixed_curves import CURVES, SWITCH, find_curves, freeze
from ngramspec.cost.store import StoredTimes, load_last_times, time_passes
from ngramspec.cost.times import PassTimes
from ngramspec.data import CLASS_FORM, NGramSpecError
from ngramspec.drafting import DEFAULT, DRAFTERS, make_drafter
from ngramspec.instruments.replay.comparison import MEASURED_CURVE, CurveComparison, replay_report
from ngramspec.instruments.replay.replay import Recording, Replay
from ngramspec.instruments.replay.transcripts import TranscriptReader, Transcripts, sample
from ngramspec.instruments.reports.report import MAX_LISTED, draft_section
from ngramspec.llama.target import Target
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.llama.weights import model_key
from ngramspec.loading.load import find, open_alone
from ngramspec.loading.settings import GPUS, LoadSettings
from ngramspec.sampling.settings import allow_range, option

from .conditions import Load
from .console import fail, note, pluralize, read_bytes, usage_error, usage_errors
from .options import DISPLAY, open_vocabulary
from .show import Output, command_line, counting_bar, run_pieces, slow_core

FRONT = 512  # context tokens for timing the passes of --model
_CURVES = ", ".join(CURVES)

POLICY, MODEL = ("policy", "draft_max"), ("ctx_size", *GPUS, "threads")

_LOAD = {
    "ctx_size": "Context size of --model in tokens.",
    "gpu_layers": "Number of layers of --model on the GPU; auto (-1): as many as fit, all (-2): all.",
}


def replay(
    load: Annotated[LoadSettings, (*POLICY, *MODEL), _LOAD],
    output: Annotated[Output, {"as_json": "Write all figures as JSON; -: to stdout instead of the table."}],
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Recorded conversations, as JSON Lines or plain text pairs; -: stdin."),
    ],
    drafter: str = option(
        DEFAULT, metavar=f"NAME|{CLASS_FORM}", help=f"Drafter: {', '.join(DRAFTERS)}, or your own class."
    ),
    memory: Literal["on", "off"] = option(
        "off", help="Also draft from the answers of earlier conversations of this run."
    ),
    curve: list[str] | None = option(
        None,
        metavar="NAME|FILE",
        help="Cost of a batch by its size; repeatable, one replay each. A JSON file with {size: cost, ...} or"
        f" {{name: {{...}}, ...}}, in which {SWITCH!r} is the cost of a change of size; or one of:"
        f" {_CURVES}.",
    ),
    model: str | None = option(
        None, "-m", metavar="MODEL", help="Use the costs of this model here; measured if it never ran here."
    ),
    vocab: Path | None = option(
        None,
        metavar="FILE.gguf",
        help="Tokenizer to use; the file needs no weights. Default: that of --model or the default model.",
    ),
    limit: int | None = option(
        None,
        help="Maximum number of conversations per category, chosen at random; default: all.",
        allowed=allow_range(1),
    ),
    strict: bool = option(False, help="Fail on broken entries instead of skipping them."),
    include_text: bool = option(False, help="Show the first answer of each category with its drafts in --html."),
) -> None:
    """Estimate the speed-up from drafting on recorded conversations.

    Replay treats the answers as the greedy output of a model. It needs only a tokenizer, not the model itself. The cost
    of a pass (one decode call) by the number of tokens is given by a curve, and the policy drafts according to it. The
    report shows, for each category and overall: tokens per pass, the acceptance rate, passes without a draft, the gain,
    and acceptance by position. The time of drafting is not included in the gain; --json contains it.

    Without --curve and --model, the curve is that of the tokenizer's model on this machine if the model has run here;
    otherwise a batch costs the same as one token, and the gain is an upper bound.

    A file contains JSON Lines, a JSON array or a JSON object of one of these forms: {"messages": [...], "response":
    "..."}, conversations that end with an assistant message, {"prompt": "...", "response": "..."}, or OpenAI requests
    and responses. It can also be plain text in pairs, after lines "=== prompt" and "=== response".

    Ctrl-C ends the replay and shows the results so far.

    To share the results, --markdown prints a table, --svg draws the gains, and --html writes a page with all figures.
    They contain no text of the conversations, unless --include-text adds the first answer of each category to the page.
    """
    if include_text and output.html is None:
        usage_error("--include-text requires --html")
    if model is None and any(getattr(load, name) != getattr(LoadSettings(), name) for name in MODEL):
        usage_error("-c, -ngl, --device and other options for loading a model require --model")

    output.check()
    with usage_errors():
        Replay(make_drafter(drafter), load.policy, load.draft_max, curve=find_curves("flat")["flat"])
    curves = _find_curves(curve or [])
    sources = {name: "from a file" for name in curves if name not in CURVES}
    with ExitStack() as stack:
        transcripts = _read(files, strict=strict)
        target = None
        if model is not None:
            source = find(model, load, DISPLAY)
            target = stack.enter_context(open_alone(source, load, DISPLAY))
        if target is not None and vocab is None:
            vocabulary = target.vocabulary
        else:
            no_model = "no --vocab or --model given; using the tokenizer of"
            vocabulary = stack.enter_context(open_vocabulary(vocab, None, no_model))
        recordings = _record(transcripts, vocabulary, limit)
        if target is not None:
            responses = [row.response for row in transcripts.usable[:FRONT]]
            curves[MEASURED_CURVE], sources[MEASURED_CURVE] = _measure_curve(target, source.label, responses)
        elif not curves and (stored := load_last_times(model_key(vocabulary.path))) is not None:
            curves[MEASURED_CURVE], sources[MEASURED_CURVE] = freeze(stored), f"{vocabulary.path.name} on this machine"
        elif not curves:
            curves, sources["flat"] = find_curves("flat"), "an upper bound: a batch costs the same as one token"
            note(f"using the cost curve flat: {sources['flat']}; --model MODEL uses the costs of a model here")
        piece, replays = vocabulary.piece if include_text else None, dict[str, Replay]()
        for name, costs in curves.items():
            fresh = make_drafter(drafter, memory=memory == "on")  # without learned state
            replays[name] = Replay(fresh, load.policy, load.draft_max, curve=costs, piece=piece)
        comparison = CurveComparison(recordings, drafter, replays)
        names = (recording.category for recording in comparison.run())
        outcome = run_pieces(names, len(recordings), "replaying")
        drafting = {"drafter": drafter} | {name: getattr(load, name) for name in POLICY}
        own = {
            "--vocab": vocab,
            "--curve": curve,
            "--model": model,
            "--memory": "on" if memory == "on" else None,
            "--limit": limit,
            "--strict": strict,
        }
        document = {
            "ngramspec": ngramspec.__version__,
            "files": files,
            "vocabulary": str(vocabulary.path),
            "model": None if target is None else str(target.weights.path),
            "settings": {**drafting, "memory": memory, "limit": limit},
            "skipped": {"broken": len(transcripts.broken), "empty": transcripts.empty},
            **comparison.document(),
            "command": command_line("replay", files, own, load),
        }
        about = f"The first answer of each category, on the curve {next(iter(curves))}."
        texts = draft_section(about, comparison.texts, vocabulary.piece) if include_text else None
        warnings = filter(None, [slow_core()])
        report = replay_report(document, len(recordings), vocabulary.path.name, sources, [*warnings], texts)
        document["headline"] = report.headline
        output.write(report, document, outcome)


def _find_curves(names: Sequence[str]) -> dict[str, PassTimes]:
    curves: dict[str, PassTimes] = {}
    for name in names:
        with usage_errors(kinds=NGramSpecError):
            matches = find_curves(name)
        for key, curve in matches.items():
            if key in curves or key == MEASURED_CURVE:
                usage_error(f"--curve {name}: there is already a curve named {key}; use another name")
            curves[key] = curve
    return curves


def _read(files: Sequence[str], *, strict: bool) -> Transcripts:
    transcripts = Transcripts()
    for name in files:
        raw = read_bytes(name, "no conversations on standard input; pipe a file in")
        transcripts.read("stdin" if name == "-" else name, raw, strict=strict)
    for problem in transcripts.broken[:MAX_LISTED]:
        note(f"skipped {problem}")
    counts = {"broken": len(transcripts.broken), "without a response": transcripts.empty}
    skipped = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
    if not transcripts.usable:
        fail(f"no conversations to replay in {', '.join(files)}{f' ({skipped})' if skipped else ''}")
    if skipped:
        note(f"skipped: {skipped}; conversations left: {len(transcripts.usable)}")
    return transcripts


def _record(transcripts: Transcripts, vocabulary: Vocabulary, limit: int | None) -> list[Recording]:
    """Return the conversations as tokens, ordered by category."""
    recorder = TranscriptReader(vocabulary)
    if recorder.spelled:
        note("the vocabulary has no chat template; using ChatML with ordinary tokens")
    selection = sample(transcripts.usable, limit)
    recordings = []
    with counting_bar("reading") as progress:
        for number, transcript in enumerate(selection, 1):
            recordings.append(recorder.record(transcript))
            progress(number, len(selection))
    usable = [recording for recording in recordings if recording is not None]
    if not usable:
        fail("no conversations to replay: the chat template rejects them, or they are too short")
    if len(usable) < len(recordings):
        note(f"skipped: {len(recordings) - len(usable)} that the chat template rejects or that are too short")
    return usable


def _measure_curve(target: Target, label: str, responses: Sequence[str]) -> tuple[PassTimes, str]:
    """Return the costs of a model on this machine, measured if it never ran here, and a description of them."""
    other_programs = Load()
    sequence, stored = target.sequences[0], StoredTimes(target.sequences[0])
    how = f"{label} on this machine, {pluralize(target.weights.n_threads, 'thread')}"
    if not stored.times.pairs:
        text = target.vocabulary.tokenize("\n".join(responses)[: 8 * FRONT])
        sequence.prefill(text[: min(FRONT, sequence.n_ctx // 2)])
        time_passes(sequence, text, stored.times)
        stored.save()
        how += f"; {other_programs}"
    return freeze(stored.times), how
