"""Tests of the scheduler: a long prompt shares the time with responses, and prompts take turns."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ngramspec.batching.writer import AHEAD, LONGEST, MIN_CHUNK, PAUSE, SHARE, Scheduler


def run(
    turns: Scheduler, readers: dict[str, int], writers: list[str], cost: float, write: float
) -> list[tuple[str, float]]:
    """Return the events until all prompts are processed, as (text, seconds)."""
    done = []
    while readers:
        reader = turns.reads(list(readers), writers)
        if reader is None:
            turns.record_pass(write)
            done.append(("writers", write))
            continue
        turns.read(100, cost)
        done.append((reader, cost))
        readers[reader] -= 1
        if not readers[reader]:
            del readers[reader]
    return done


def test_scheduler_prefills_first_then_keeps_share() -> None:
    done = run(Scheduler(), {"a": 50}, ["w"], cost=0.5, write=0.03)
    first = round(AHEAD / 0.5) + 1
    assert [who for who, _ in done[:first]] == ["a"] * first
    done = done[first:]
    read = sum(seconds for who, seconds in done if who == "a")
    wrote = sum(seconds for who, seconds in done if who == "writers")
    assert SHARE * wrote == pytest.approx(read, rel=0.1)
    # No response waits for more than one chunk.
    assert not any(a == b == "a" for (a, _), (b, _) in pairwise(done))


@pytest.mark.parametrize(("seconds", "most"), [(0.05, 11), (0.25, 3), (0.4, 2), (0.6, 1), (0.9, 1), (3.0, 1)])
def test_scheduler_with_running_text_limits_consecutive_chunks(seconds: float, most: int) -> None:
    """All chunks of this size together take at most a second, or there is only one."""
    turns = Scheduler()
    waits = [0]
    for _ in range(500):
        if turns.reads(["a", "b"], ["w"]) is None:
            turns.record_pass(0.01)
            waits.append(0)
        else:
            turns.read(128, seconds)
            waits[-1] += 1
    assert max(waits) == most
    assert most == 1 or most * seconds <= LONGEST


def test_scheduler_with_many_clients_limits_wait_to_a_second() -> None:
    """Prompts of 100 to 4,000 tokens, whose prefill slows down with their length, in simulated seconds."""
    turns, readers, waited, longest = Scheduler(), dict.fromkeys("abcdefgh", 0), 0.0, 0.0
    for turn in range(5000):
        reader = turns.reads(list(readers), ["w"])
        if reader is None:
            turns.record_pass(0.0095)
            longest, waited = max(longest, waited), 0.0
            continue
        tokens, done = turns.chunk(512), readers[reader]
        seconds = tokens * (0.003 + 5.6e-7 * done)
        turns.read(tokens, seconds)
        waited += seconds
        readers[reader] = 0 if done + tokens > 100 + turn % 40 * 100 else done + tokens
    assert PAUSE < longest <= LONGEST


def test_scheduler_with_several_prompts_alternates_between_them() -> None:
    done = run(Scheduler(), {"long": 20, "short": 2, "other": 3}, [], cost=0.5, write=0.1)
    assert [who for who, _ in done][:6] == ["long", "short", "other", "long", "short", "other"]
    assert len(done) == 25


def test_scheduler_without_prompts_or_texts_resets_balance() -> None:
    turns = Scheduler()
    turns.read(100, AHEAD + 1)
    assert turns.reads(["a"], ["w"]) is None
    assert turns.reads(["a"], []) == "a"
    assert turns.reads([], ["w"]) is None
    assert turns.reads(["a"], ["w"]) == "a"


def test_scheduler_chunk_size_matches_allowed_wait() -> None:
    turns = Scheduler()
    assert turns.chunk(512) == MIN_CHUNK
    turns.read(100, 0.1)
    assert turns.chunk(8192) == round(PAUSE / 1e-3)
    turns.read(int(1000 * AHEAD), AHEAD)
    assert turns.chunk(512) == round(PAUSE / 1e-3)
    assert turns.chunk(128) == 128
    turns.read(100, 100.0)
    assert turns.chunk(512) == MIN_CHUNK
    assert turns.chunk(8) == 8
