"""Tests of the number of Python calls in a pass, and of the files that they are in; both are the same everywhere.

Outside `llama_decode`, a pass spends nearly all its time in these calls. The limits are the counts of the present code,
so a change that adds calls to every token has to change them here.
"""

from __future__ import annotations

import sys
import threading
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import pytest
from support.cli_runner import DEMO, PATIENCE

import ngramspec
from ngramspec.batching.engine import Engine
from ngramspec.batching.request import Done, Event
from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.cost.store import StoredTimes
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.llama.target import Target
from ngramspec.request import Request
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Step

PROMPT = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\n" * 6
PACKAGE = Path(ngramspec.__file__).parent
STEADY = 10  # number of passes after which the caches of tokens and shapes are filled


class Calls:
    """Counter of the calls of Python functions, and the files of these functions."""

    def __init__(self) -> None:
        self.count = 0
        self.files: set[str] = set()

    def note(self, frame: FrameType, event: str, _arg: Any) -> None:
        if event == "call":
            self.count += 1
            self.files.add(frame.f_code.co_filename)


@pytest.mark.parametrize(
    ("drafter", "temperature", "max_calls", "max_files"),
    [
        (None, 0.0, 20, 7),
        (None, 0.8, 23, 9),
        ("ngram", 0.0, 39, 9),
        ("mixture", 0.0, 40, 9),
        ("mixture", 0.8, 58, 11),
    ],
)
def test_decode_call_keeps_python_calls_and_files_within_limit(
    drafter: str | None, temperature: float, max_calls: int, max_files: int
) -> None:
    counts, n_files = list[int](), list[int]()
    with Target(DEMO, ctx_size=1024, exact="off", threads=1) as target:
        decoder = SpeculativeDecoder(target, drafter=drafter, policy="fixed", exact="off")
        steps = decoder.generate(
            target.vocabulary.tokenize(PROMPT), max_tokens=120, sampling=Sampling(temperature, seed=3)
        )
        for _ in range(STEADY):
            next(steps)
        while True:
            calls = Calls()
            sys.setprofile(calls.note)
            step = next(steps, None)
            sys.setprofile(None)
            if step is None:
                break
            if len(step.drafted) == (0 if drafter is None else 4) == step.accepted:
                counts.append(calls.count)
                n_files.append(sum(Path(path).is_relative_to(PACKAGE) for path in calls.files))
    assert len(counts) >= 5
    assert median(counts) <= max_calls
    assert median(n_files) <= max_files


def test_engine_token_keeps_python_calls_within_limit() -> None:
    calls, counts, ended = Calls(), list[int](), threading.Event()

    def listen(event: Event) -> None:
        # The listener runs on the engine's thread, so the calls between two steps are the calls of one token.
        if isinstance(event, Step):
            counts.append(calls.count)
            if len(counts) == STEADY:
                sys.setprofile(calls.note)
            elif len(counts) == 10 * STEADY:
                sys.setprofile(None)
        if isinstance(event, Done):
            ended.set()

    with Target(DEMO, texts=2, ctx_size=1024, exact="off", threads=1) as target:
        stored = StoredTimes(target.sequences[0])
        stored.times = make_fixed_curve({1: 1.0, 64: 64.0})
        engine = Engine(target, target.vocabulary, stored=stored)
        engine.submit(Request(target.vocabulary.tokenize(PROMPT), 11 * STEADY), listen)
        assert ended.wait(PATIENCE)
        engine.stop()
    per_token = [after - before for before, after in pairwise(counts[STEADY : 10 * STEADY])]
    assert median(per_token) <= 32
