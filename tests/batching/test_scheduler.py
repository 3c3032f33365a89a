"""Scheduling: a long prompt shares the time with answers, and prompts take turns."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ngramspec.batching.scheduler import AHEAD, LEAST, PAUSE, Scheduler


def run(
    turns: Scheduler, readers: dict[str, int], writers: list[str], cost: float, write: float
) -> list[tuple[str, float]]:
    """Return the events until all prompts are processed: (who, seconds)."""
    done = []
    while readers:
        reader = turns.reads(list(readers), writers)
        if reader is None:
            turns.wrote(write)
            done.append(("writers", write))
            continue
        turns.read(100, cost)
        done.append((reader, cost))
        readers[reader] -= 1
        if not readers[reader]:
            del readers[reader]
    return done


def test_reading_comes_first_and_then_both_get_the_same_time() -> None:
    done = run(Scheduler(), {"a": 50}, ["w"], cost=0.5, write=0.03)
    first = round(AHEAD / 0.5) + 1
    assert [who for who, _ in done[:first]] == ["a"] * first
    done = done[first:]
    read = sum(seconds for who, seconds in done if who == "a")
    wrote = sum(seconds for who, seconds in done if who == "writers")
    assert wrote == pytest.approx(read, rel=0.1)
    # No answer waits for more than one chunk.
    assert not any(a == b == "a" for (a, _), (b, _) in pairwise(done))


def test_prompts_take_turns() -> None:
    done = run(Scheduler(), {"long": 20, "short": 2, "other": 3}, [], cost=0.5, write=0.1)
    assert [who for who, _ in done][:6] == ["long", "short", "other", "long", "short", "other"]
    assert len(done) == 25


def test_nothing_is_owed_once_one_kind_is_gone() -> None:
    turns = Scheduler()
    turns.read(100, AHEAD + 1)
    assert turns.reads(["a"], ["w"]) is None
    assert turns.reads(["a"], []) == "a"
    assert turns.reads([], ["w"]) is None
    assert turns.reads(["a"], ["w"]) == "a"


def test_a_chunk_takes_as_long_as_answers_may_wait() -> None:
    turns = Scheduler()
    assert turns.chunk(512) == LEAST
    turns.read(100, 0.1)
    assert turns.chunk(8192) == int((AHEAD - 0.1) / 1e-3)
    turns.read(int(1000 * AHEAD), AHEAD)
    assert turns.chunk(512) == round(PAUSE / 1e-3)
    assert turns.chunk(128) == 128
    turns.read(100, 100.0)
    assert turns.chunk(512) == LEAST
    assert turns.chunk(8) == 8
