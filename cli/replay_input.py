"""What a replay replays: files, vocabulary, recordings, cost curves; every mistake in them ends in one clear line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ngramspec.cost.calibration import Calibration
from ngramspec.cost.given import GivenCurve, find_curves, frozen
from ngramspec.errors import CurveError
from ngramspec.llama.target import Target
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.replay.recording import Recording
from ngramspec.replay.transcripts import TranscriptReader, Transcripts, sample

from .console import fail, note, prefill_bar, usage_error

LISTED = 10
"""Broken entries named; the rest are counted."""

MEASURED = "measured"
"""Name of the curve that is measured on --model before the replay."""

FRONT = 512
"""Tokens of context on which the passes of --model are timed."""


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


def measured_curve(target: Target) -> GivenCurve:
    """What passes of a model cost here and now."""
    front = np.random.default_rng(0).integers(0, target.n_vocab, min(FRONT, target.n_ctx // 2))
    target.prefill(front.tolist())
    calibration = Calibration.load(target)
    curve = frozen(calibration.ensure_curve(target))
    calibration.save()
    return curve
