"""Tests of the prompt cache: it finds the longest prefix, stores nothing twice, and evicts the oldest entry first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.mock_shared import MockShared

from ngramspec.batching.slots import MIN_COPY, WORTH, PromptCache, Slots
from ngramspec.tokens import common_prefix

TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=8)


@given(st.lists(TEXT, max_size=12), TEXT)
def test_prompt_cache_best_returns_longest_common_prefix(texts: list[list[int]], prompt: list[int]) -> None:
    cache = PromptCache(1 << 20)
    for text in texts:
        cache.put(text, b"state")
    kept, common = cache.best(prompt)
    assert common == max((common_prefix(text, prompt) for text in texts), default=0)
    assert common_prefix(kept, prompt) == common
    assert all(cache.holds(text) for text in texts)


def test_prompt_cache_put_of_longer_text_replaces_its_prefix() -> None:
    cache = PromptCache(100)
    cache.put([1, 2], b"a" * 10)
    cache.put([1, 2, 3], b"b" * 10)
    cache.put([4], b"c" * 10)
    assert cache.size == 20
    assert cache.best([1, 2])[0] == cache.best([1, 2, 3])[0] == (1, 2, 3)


def test_prompt_cache_when_full_evicts_least_recently_used() -> None:
    cache = PromptCache(30)
    for number in range(3):
        cache.put([number], bytes(10))
    cache.put([0], cache.take(cache.best([0])[0]))
    cache.put([3], bytes(10))
    assert [cache.holds([number]) for number in range(4)] == [True, False, True, True]
    cache.put([4], bytes(31))
    assert not cache.holds([4])
    assert cache.size <= 30
    cache.take((0,))
    assert not cache.holds([0])


def test_slots_take_copies_prefix_from_shortest_sequence() -> None:
    model = MockShared(sequences=4)
    long, short, other, free = model.sequences
    system = list(range(MIN_COPY))
    long.tokens[:] = [*system, *[7] * 90]
    short.tokens[:] = [*system, *[8] * 40]
    other.tokens[:] = [*system[:-1], *[9] * 40]
    taken = Slots(model.sequences).take([*system, 5], preferred_number=free.number)
    assert (taken, taken.tokens) == (free, system)
    free.tokens.clear()
    short.tokens.clear()
    long.tokens.clear()
    # Evaluating one token less is faster than a copy.
    assert Slots(model.sequences).take([*system, 5], preferred_number=free.number).tokens == []


def test_slots_take_with_other_adapter_scales_does_not_reuse_tokens() -> None:
    model = MockShared(sequences=3)
    text, room = list(range(2 * WORTH)), 1 << 20
    slots = Slots(model.sequences, room, scales=(1.0,))
    first = slots.take(text, scales=(0.5,))
    first.tokens[:] = text
    # With other scales, the cache reuses neither a copy of a running sequence nor its own tokens.
    second = slots.take(text, scales=(1.0,))
    assert (second is first, second.tokens) == (False, [])
    second.tokens[:] = text
    assert slots.take(text, scales=(0.5,)).tokens == text
    slots.give_back(first)
    assert (
        slots.take(text, preferred_number=first.number, scales=(1.0,)).tokens == text
    )  # copied from the second sequence
    for sequence in (first, second):
        slots.give_back(sequence)
    # The cache does not keep evicted states of other scales than the default, and drops states of an earlier default.
    slots.take([9] * 40, preferred_number=first.number)
    slots.take([8] * 40, preferred_number=second.number)
    slots.set_scales((0.25,))
    assert slots.normalise(model.sequences[2]).tokens == []
    for sequence in (first, second):
        sequence.tokens.clear()
        slots.give_back(sequence)
    assert slots.take(text).tokens == []


def test_slots_take_with_separate_caches_keeps_numbers_consecutive() -> None:
    """Separate caches share a batch only if their numbers are consecutive."""
    model = MockShared(sequences=6, split=True)
    slots = Slots(model.sequences, needs_neighbours=True)
    working = []
    for text in range(4):
        working.append(slots.take([text] * 40))
        working[-1].tokens[:] = [text] * 50
    assert [sequence.number for sequence in working] == [0, 1, 2, 3]
    for number in (1, 2):
        slots.give_back(working[number])
        assert slots.take([9] * 40).number == number
        working[number].tokens[:] = [9 + number] * 50
    slots.give_back(working[0])
    assert slots.take([8] * 40).number in (0, 4)


def test_slots_save_only_while_reading_again_takes_longer() -> None:
    """On a GPU, a save of interleaved texts takes longer than to evaluate them again."""
    model = MockShared(sequences=1, n_vocab=100)
    sequence, now, save_seconds = model.sequences[0], [0.0], 0.1
    save_state, n_saves = sequence.save_state, 0

    def save() -> bytes:
        nonlocal n_saves
        n_saves += 1
        now[0] += save_seconds
        return save_state()

    sequence.save_state = save  # type: ignore[method-assign]
    slots = Slots(model.sequences, 1 << 20, clock=lambda: now[0])

    def use(first: int, times: int) -> int:
        before = n_saves
        for number in range(first, first + times):
            taken = slots.take(prompt := [number] * 2 * WORTH)
            taken.prefill(prompt)
            slots.give_back(taken)
        return n_saves - before

    assert use(0, 10) == 9, "the speed of reading is not known"
    slots.read_seconds = 2 * save_seconds / (2 * WORTH)
    assert use(10, 10) == 10
    slots.read_seconds = save_seconds / (2 * WORTH) / 2
    assert 0 < use(20, 60) < 10, "it is tried again now and then"
