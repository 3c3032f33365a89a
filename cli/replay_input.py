"""What a replay replays: files, vocabulary, recordings, cost curves; every mistake in them ends in one clear line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from ngramspec.cost.calibration import Calibration
from ngramspec.cost.given import CURVES, SWITCH, GivenCurve, find_curves, frozen
from ngramspec.errors import CurveError
from ngramspec.instruments.replay.replay import Recording
from ngramspec.instruments.replay.transcripts import TranscriptReader, Transcripts, sample
from ngramspec.llama.target import Target
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.loading.settings import LoadSettings

from .console import fail, note, prefill_bar, usage_error
from .options import Only, find, open_target

LISTED = 10
"""Broken entries named; the rest are counted."""

MEASURED = "measured"
"""Name of the curve that is measured on --model before the replay."""

FRONT = 512
"""Tokens of context on which the passes of --model are timed."""

MODEL = Only(
    ("ctx_size", "gpu_layers", "rpc", "threads"),
    {"ctx_size": "Context of --model in tokens.", "gpu_layers": "Layers of --model on the GPU; -1: all."},
)
"""The settings of --model."""


@dataclass(frozen=True, slots=True)
class CostOptions:
    """What a pass costs in a replay: by given curves, or on a model."""

    curve: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE",
            help="What a batch costs by its size; may be repeated, one replay each. A file with JSON, {size: cost, ...}"
            f" or {{name: {{...}}, ...}}, in which {SWITCH!r} beside the sizes is the cost of a change of size; or one"
            f" of: {', '.join(CURVES)}.",
            show_default=False,
        ),
    ] = None
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Measure the costs of this model.", show_default=False)
    ] = None

    def load(self, settings: LoadSettings) -> Target | None:
        """The model, if one is asked for."""
        if self.model is None:
            return None
        return open_target(find(self.model, settings).model, settings)

    def curves(self, target: Target | None) -> dict[str, GivenCurve]:
        """The given curves, and the model's own."""
        curves = named_curves(self.curve or [])
        if target is not None:
            curves[MEASURED] = _measured_curve(target)
        if not curves:
            note("no --curve or --model: a batch is taken to cost what one token costs (flat), more than can be had")
            curves = find_curves("flat")
        return curves


def named_curves(names: Sequence[str]) -> dict[str, GivenCurve]:
    """The curves asked for."""
    curves: dict[str, GivenCurve] = {}
    for name in names:
        try:
            found = find_curves(name)
        except CurveError as error:
            usage_error(str(error))
        for key, curve in found.items():
            if key in curves or key == MEASURED:
                usage_error(f"--curve {name}: there is another curve called {key}; give it another name")
            curves[key] = curve
    return curves


def read_transcripts(files: Sequence[str], *, strict: bool) -> Transcripts:
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


def record(transcripts: Transcripts, vocabulary: Vocabulary, limit: int | None) -> list[Recording]:
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


def _measured_curve(target: Target) -> GivenCurve:
    """What passes of a model cost here and now."""
    front = np.random.default_rng(0).integers(0, target.n_vocab, min(FRONT, target.n_ctx // 2))
    target.prefill(front.tolist())
    calibration = Calibration.load(target)
    curve = frozen(calibration.ensure_curve(target))
    calibration.save()
    return curve
