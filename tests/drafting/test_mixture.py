"""Tests of features only `MixtureDrafter` has: estimates of drawn tokens, memory, and stored estimators."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.memories import make_document, open_store

from ngramspec.drafting import make_drafter
from ngramspec.drafting.draft import Ask
from ngramspec.drafting.mixture import drafter as mixture
from ngramspec.drafting.mixture import weight_files
from ngramspec.drafting.mixture.drafter import MixtureDrafter, TextIndexSet
from ngramspec.drafting.mixture.guesser import Guesser
from ngramspec.memory.memory import Memory

FREE, TOKENS = 1 << 12, 1 << 17
NOVEL = random.Random(5).sample(range(10, 10**5), 60)
TEXT = random.Random(7).sample(range(30), 20) * 20


@pytest.mark.parametrize("fixed_length", [False, True])
def test_mixture_estimates_of_drawn_tokens_are_calibrated(fixed_length: bool) -> None:
    # A token drawn from q for a fair coin is correct half the time, whatever the mixture's estimate is.
    rng = random.Random(0)
    drafter = MixtureDrafter()
    drafter.begin([rng.randrange(2) for _ in range(200)])

    def draw(_offset: int, weights: Mapping[int, float]) -> int:
        return rng.choices(list(weights), list(weights.values()))[0]

    predicted = right = count = 0.0
    for step in range(3000):
        draft = drafter.propose(Ask(1, draw, fixed_length=fixed_length))
        token = rng.randrange(2)
        if step >= 1000:
            count += 1
            predicted += draft.acceptance_probs[0]
            right += draft.tokens[0] == token
        drafter.accept([token])
    assert predicted / count == pytest.approx(right / count, abs=0.04)
    assert right / count == pytest.approx(0.5, abs=0.05)


def test_mixture_learns_tokens_without_guesses_before_next_draft() -> None:
    late, early = MixtureDrafter(), MixtureDrafter()
    for drafter in (late, early):
        drafter.begin(TEXT[:50])
    for token in TEXT[50:70]:
        assert late.accept([token]) == 0
    assert late.guesser.text() == TEXT[:50]
    early.guesser.accept(TEXT[50:70])
    assert late.propose(Ask(8)) == early.propose(Ask(8))
    assert late.guesser.text() == TEXT[:70]
    late.accept([7])
    late.begin(NOVEL)
    assert late.guesser.text() == NOVEL


# --------------------------------------------------------------------------- memory


def test_mixture_memory_stores_repeated_conversation_once() -> None:
    drafter: Any = make_drafter("mixture", memory=True)
    drafter.begin([1, 2, 3])
    drafter.accept(NOVEL)
    talk = [1, 2, 3, *NOVEL]
    for turn in range(5):  # Each prompt of a conversation has all earlier turns and a question.
        talk = [*talk, 7, turn]
        drafter.begin(talk)
        drafter.accept([8, turn])
        talk = [*talk, 8, turn]
    drafter.begin([9])
    (index,) = drafter.guesser.memory
    tokens = list(index.tokens[: index.size])
    assert [t for t in tokens if t >= 0] == talk
    assert tokens.count(NOVEL[30]) == 1
    drafter.begin([4, 5, 6, *NOVEL[20:23]])
    assert drafter.propose(Ask(5)).tokens == tuple(NOVEL[23:28])
    with pytest.raises(ValueError, match="one sequence at a time"):
        drafter.clone_for_sequence()


def test_mixture_with_given_memory_reads_without_changing_it() -> None:
    memory = Memory()
    drafter = make_drafter("mixture", memory=memory)
    drafter.begin(NOVEL)
    drafter.accept([1, 2])
    drafter.begin(NOVEL[20:23])
    assert drafter.propose(Ask(5)).tokens == ()  # Its owner did not enable the memory.
    memory.add_text(NOVEL)
    assert drafter.propose(Ask(5)).tokens == tuple(NOVEL[23:28])
    drafter.begin([])
    assert memory.indexes[-1].size == len(NOVEL) + 1


def test_mixture_with_store_follows_its_updates_at_next_text(tmp_path: Path) -> None:
    text = random.Random(5).sample(range(200), 60)
    store = open_store(tmp_path)
    first = MixtureDrafter(Memory(store.read(), store=store))
    for drafter in (first, first.clone_for_sequence()):
        store.update(lambda _: [make_document("new", text)])
        drafter.begin(text[20:23])
        assert drafter.propose(Ask(5)).tokens == tuple(text[23:28])
        store.clear()
        drafter.begin(text[20:23])
        assert drafter.propose(Ask(5)).tokens == ()


def test_memory_drafter_uses_only_its_memory() -> None:
    memory = Memory()
    memory.add_text(range(20))
    drafter = make_drafter("memory", memory=memory)
    drafter.begin([100, 101, 102, 103] * 5)
    drafter.accept([100, 101, 102])  # From here on, the drafter could follow a position of the request.
    assert not drafter.propose(Ask(4)).tokens
    drafter.begin([5, 6, 7])
    assert drafter.propose(Ask(3)).tokens[:2] == (8, 9)
    assert not drafter.wants_logits


def test_mixture_memory_keeps_size_within_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ngramspec.drafting.mixture.drafter.MAX_TOKENS", 100)
    memory = TextIndexSet()
    drafter = MixtureDrafter(memory)
    drafter.begin([1, 2, 3])
    for number in range(50):
        memory.add_text([number, 1, 2, 3, 4, 5, 6, 7, 8])
        assert memory.indexes[-1].size <= 110
        assert drafter.propose(Ask(4)).tokens == (4, 5, 6, 7)


# --------------------------------------------------------------------------- stored estimators


def practised(drafter: Any, text: list[int] = TEXT) -> Any:
    """Return the drafter after some correct drafts."""
    drafter.begin(text[:100])
    for token in text[100:160]:
        drafter.propose(Ask(4))
        drafter.accept([token])
    return drafter


def arrays(drafter: Any) -> dict[str, Any]:
    return {name: np.array(array, np.float32) for name, array in drafter.guesser.token_weights.items()}


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_mixture_begin_resets_to_packaged_estimators() -> None:
    drafter = MixtureDrafter()
    guesser = drafter.guesser
    shipped = weight_files.read(weight_files.START)
    for _ in range(2):
        assert same({name: np.array(array, np.float32) for name, array in guesser.global_weights.items()}, shipped)
        practised(drafter)
        for name in ("rate", "first_weights", "last_weights", "blend", "bias", "correction_height"):
            assert not np.array_equal(guesser.global_weights[name], shipped[name]), name
        drafter.begin([])
    # In a first request, a copy of 20 earlier tokens is already likely to continue.
    first = MixtureDrafter()
    first.begin([*range(100, 160), 7, *range(100, 120)])
    draft = first.propose(Ask(8))
    assert draft.tokens == tuple(range(120, 128))
    assert min(draft.acceptance_probs) > 0.7
    first.begin([1, 2, 3, 4, 1])
    assert first.propose(Ask(1)).acceptance_probs[0] < 0.5


def test_mixture_in_new_process_loads_saved_state(tmp_path: Path) -> None:
    path = tmp_path / "made" / "judge.npz"
    last = practised(MixtureDrafter(state_path=path))
    last.save_state()
    assert path.stat().st_mode & 0o077 == 0
    following, stranger = MixtureDrafter(state_path=path), MixtureDrafter()
    assert same(arrays(following), arrays(last))
    for drafter in (following, stranger):
        drafter.begin(TEXT[:100])
    ours, theirs = following.propose(Ask(4)), stranger.propose(Ask(4))
    assert ours.tokens == theirs.tokens
    assert all(p > q for p, q in zip(ours.acceptance_probs, theirs.acceptance_probs, strict=True))
    assert path.stat().st_size < 2_000_000
    path.unlink()
    last.save_state()  # not so soon after the last time
    assert not path.exists()


def test_mixture_with_damaged_state_file_ignores_and_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixture, "SAVE_SECONDS", 0.0)
    path = tmp_path / "judge.npz"
    learner = practised(MixtureDrafter(state_path=path))
    learner.save_state()
    whole, fresh = path.read_bytes(), arrays(MixtureDrafter())
    rng, ignored = random.Random(1), 0
    broken = [whole[:n] for n in (0, 1, 30, len(whole) // 2, len(whole) - 1)]
    for at in [*range(0, 200, 30), *rng.sample(range(len(whole)), 15), *range(len(whole) - 200, len(whole), 30)]:
        broken.append(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
    for raw in broken:
        path.write_bytes(raw)
        found = arrays(MixtureDrafter(state_path=path))
        assert same(found, fresh) or same(found, arrays(learner))  # The files may differ in dates.
        ignored += same(found, fresh)
    assert ignored > len(broken) // 2
    learner.save_state()
    assert path.read_bytes() == whole


def test_mixture_with_other_layout_ignores_state_file(tmp_path: Path) -> None:
    path = tmp_path / "judge.npz"
    held: dict[str, Any] = {"layout": np.int32(weight_files.LAYOUT), **arrays(practised(MixtureDrafter()))}
    np.savez(path, **held)
    fresh = arrays(MixtureDrafter())
    assert not same(arrays(MixtureDrafter(state_path=path)), fresh)
    changes: list[dict[str, Any]] = [
        {"layout": np.int32(weight_files.LAYOUT + 1)},
        {"layout": None},
        {"layout": np.array(["x"])},
        {"bias": np.zeros(TOKENS - 1, np.float32)},
        {"bias": np.zeros((TOKENS, 1), np.float32)},
        {"bias": np.full(TOKENS, np.nan, np.float32)},
        {"bias": np.full(TOKENS, "x")},
        {"slope": None},
        {"more": np.zeros(3)},
    ]
    for change in changes:
        np.savez(path, **{name: array for name, array in (held | change).items() if array is not None})
        assert same(arrays(MixtureDrafter(state_path=path)), fresh), change


def test_mixture_save_state_after_write_error_keeps_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "judge.npz"
    learner = practised(MixtureDrafter(state_path=path))
    learner.save_state()
    before = path.read_bytes()

    def full(file: Any, **_: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_files.np, "savez", full)
    learner._save_at = 0.0
    learner.save_state()
    MixtureDrafter(state_path=path / "no folder").save_state()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_mixture_state_excludes_facts_of_token_pairs() -> None:
    # n tokens give n facts of a kind, and their pairs n times as many; those must be outside the stored part.
    n = 24
    kept, beyond = set(), set()
    guesser = Guesser()
    for a in range(n):
        for b in range(n):
            guesser.begin([1000, a, b, 1000, a])
            assert guesser.score_position(0) == 0
            facts = [fact for fact in list(guesser.mixer.facts)[: len(guesser.mixer.facts) // 640] if fact >= FREE]
            kept |= {fact for fact in facts if fact < FREE + TOKENS}
            beyond |= {fact for fact in facts if fact >= FREE + TOKENS}
    assert n < len(kept) < 8 * n
    assert len(beyond) > n * n / 2
    about = Guesser().token_weights
    assert {name: len(array) for name, array in about.items()} == {
        "weights": 1024 * 9,
        "bias": TOKENS,
        "slope": TOKENS,
        "correction_height": ((1 << 13) - 512) * 9,
        "correction_slope": ((1 << 13) - 512) * 9,
    }


def test_mixture_beside_starts_fresh_and_leaves_other_unchanged() -> None:
    one = MixtureDrafter()
    other, stranger = one.clone_for_sequence(), MixtureDrafter()
    practised(one)
    learnt_by_then = {name: np.array(array) for name, array in one.guesser.global_weights.items()}
    for drafter in (other, stranger):
        drafter.begin(TEXT[:50])
    assert same(dict(other.guesser.global_weights), dict(stranger.guesser.global_weights))
    assert same(arrays(other), arrays(one))
    ours, theirs = other.propose(Ask(8)), stranger.propose(Ask(8))
    assert ours.tokens == theirs.tokens
    assert all(p > q for p, q in zip(ours.acceptance_probs, theirs.acceptance_probs, strict=True))
    practised(other)
    assert all(np.array_equal(array, learnt_by_then[name]) for name, array in one.guesser.global_weights.items())
