"""The longest suffix: `SuffixAutomaton`, compiled and as plain Python, and the drafter on it."""

from __future__ import annotations

import importlib.util
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.drafting import make_drafter, suffix_automaton
from ngramspec.drafting.chances import ChanceEstimator, length_class
from ngramspec.drafting.price import TokenPrice
from ngramspec.drafting.suffix import CLEARLY, SuffixDrafter

SOURCE = Path(__file__).parents[2] / "ngramspec" / "drafting" / "suffix_automaton.py"
ARRAYS = ("length", "link", "first", "best", "latest", "total", "origin", "token", "goal", "count", "sibling", "slots")


def plain() -> ModuleType:
    """The module as plain Python, whether it was compiled or not."""
    spec = importlib.util.spec_from_file_location("plain_suffix_automaton", SOURCE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PLAIN = plain()
BOTH = pytest.mark.parametrize("module", [suffix_automaton, PLAIN], ids=["installed", "plain"])

TEXTS = st.one_of(
    st.lists(st.integers(0, 1), max_size=40),
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.sampled_from([0, 7, 150_000, 2**31 - 2]), max_size=40),
    st.lists(st.integers(0, 2), min_size=1, max_size=5).map(lambda loop: loop * 12),
)


def built(module: ModuleType, tokens: Sequence[int]) -> Any:
    automaton = module.SuffixAutomaton()
    automaton.extend(tokens)
    return automaton


def longest_match(text: Sequence[int]) -> tuple[int, list[int]]:
    """Naively: the length of the longest suffix that has a continuation, and what followed it, in order."""
    n = len(text)
    for length in range(n - 1, 0, -1):
        followed = [text[i] for i in range(length, n) if text[i - length : i] == text[n - length :]]
        if followed:
            return length, followed
    return 0, []


# --------------------------------------------------------------------------- the automaton


@BOTH
@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=TEXTS)
def test_the_match_is_the_longest_suffix_seen_before(module: ModuleType, text: list[int]) -> None:
    automaton = module.SuffixAutomaton()
    for n, token in enumerate(text):
        automaton.add(token)
        length, followed = longest_match(text[: n + 1])
        state = automaton.link[automaton.last]
        assert automaton.length[state] == length
        if length:
            counts = automaton.counts(state)
            assert set(counts) == set(followed)
            assert sum(counts.values()) == automaton.total[state]
            assert all(1 <= counts[t] <= seen for t, seen in Counter(followed).items())
            assert automaton.token[automaton.latest[state]] == followed[-1]
            assert automaton.count[automaton.best[state]] == max(counts.values())
    assert automaton.size == len(text)


@BOTH
def test_counts_are_exact_while_few_suffixes_were_seen_before(module: ModuleType) -> None:
    # COUNTED steps along the suffix links are counted: in texts of this kind there are no more.
    rng = random.Random(1)
    for _ in range(40):
        text = [rng.randrange(5) for _ in range(300)]
        automaton = built(module, text)
        state = automaton.link[automaton.last]
        assert automaton.counts(state) == Counter(longest_match(text)[1])


def hard_texts(n: int) -> dict[str, list[int]]:
    fibonacci, before = [0, 1], [0]
    while len(fibonacci) < n:
        fibonacci, before = fibonacci + before, fibonacci
    rng = random.Random(0)
    return {
        "one token": [3] * n,
        "all different": list(range(n)),
        "fibonacci": fibonacci[:n],
        "random bits": [rng.randrange(2) for _ in range(n)],
        "random, large": [rng.randrange(n) for _ in range(n)],
        "loop": list(range(17)) * (n // 17 + 1),
        "a, then b after each": [1] * (n // 2) + [1, 2] * (n // 4),
        "most states": [0] + [1] * (n - 1),
        "copies": [t for _ in range(4) for t in range(n // 4)],
    }


@pytest.mark.parametrize("name", hard_texts(8))
def test_a_token_takes_constant_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every loop of `add` looks a transition up once per round, or makes a new one.
    steps = 0
    find = PLAIN.SuffixAutomaton.find

    def counted(self: Any, state: int, token: int) -> int:
        nonlocal steps
        steps += 1
        return int(find(self, state, token))

    monkeypatch.setattr(PLAIN.SuffixAutomaton, "find", counted)
    for n in (500, 2000, 8000):
        steps = 0
        automaton = built(PLAIN, hard_texts(n)[name][:n])
        assert steps + automaton.edges < (PLAIN.COUNTED + 10) * n


@pytest.mark.parametrize("name", hard_texts(8))
@pytest.mark.parametrize("n", [1000, 20_000])
def test_size_stays_in_its_bounds(n: int, name: str) -> None:
    automaton = built(suffix_automaton, hard_texts(n)[name][:n])
    assert automaton.states <= 2 * n
    assert automaton.edges <= 3 * n
    assert sum(4 * len(getattr(automaton, array)) for array in ARRAYS) < 300 * n


def test_compiled_and_plain_agree() -> None:
    rng = random.Random(2)
    text = [rng.randrange(40) for _ in range(6000)] * 2
    one, other = built(suffix_automaton, text), built(PLAIN, text)
    assert (one.states, one.edges, one.last) == (other.states, other.edges, other.last)
    for name in ARRAYS:
        a, b = (list(getattr(automaton, name)) for automaton in (one, other))
        assert a == b


@BOTH
def test_cleared_is_as_new(module: ModuleType) -> None:
    automaton = built(module, [1, 2, 3] * 900)
    automaton.clear()
    assert (automaton.size, automaton.find(0, 1)) == (0, -1)
    automaton.extend([4, 5, 4])
    state = automaton.link[automaton.last]
    assert (automaton.length[state], automaton.counts(state)) == (1, {5: 1})


# --------------------------------------------------------------------------- the drafter


def expected_draft(text: Sequence[int], limit: int) -> tuple[list[int], list[int]]:
    """Tokens and match lengths by the rule, naively: a guess is context for the next, but it is no evidence."""
    state_length, draft, matches = len(text), [], []
    while len(draft) < limit:
        context = [*text, *draft]
        for length in range(min(state_length, len(context)), 0, -1):
            suffix = context[len(context) - length :]
            followed = [text[i] for i in range(length, len(text)) if list(text[i - length : i]) == suffix]
            if followed:
                break
        else:
            break
        best = max(Counter(followed).values())
        latest = followed[-1]
        if best >= CLEARLY * followed.count(latest):
            # Among equals the one seen last.
            draft.append(next(t for t in reversed(followed) if followed.count(t) == best))
        else:
            draft.append(latest)
        matches.append(length)
        state_length = length + 1
    return draft, matches


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.lists(st.integers(0, 3), max_size=40), more=st.lists(st.integers(0, 3), max_size=5))
def test_drafts_are_those_of_the_naive_rule(text: list[int], more: list[int]) -> None:
    drafter = SuffixDrafter()
    drafter.begin(text)
    drafter.accept(more)
    draft = drafter.propose(8)
    tokens, matches = expected_draft([*text, *more], len(draft))
    assert list(draft.tokens) == tokens
    assert list(draft.match) == matches
    assert bool(tokens) == bool(expected_draft([*text, *more], 1)[0])
    assert len(draft.chances) == len(draft.support) == len(draft)
    assert draft.source == drafter.name == make_drafter("suffix").name == "suffix"


def test_a_context_of_any_length_decides() -> None:
    # 400 tokens on which two passages agree, and 40 equally long ones that differ in the token before them.
    same = list(range(100, 500))
    text: list[int] = []
    for i in range(40):
        text += [i, *same, 1000 + i]
    drafter = SuffixDrafter()
    for i in (0, 17, 39):
        drafter.begin([*text, i, *same])
        draft = drafter.propose(1)
        assert (draft.tokens, draft.match, draft.support) == ((1000 + i,), (401,), (1,))
    drafter.begin([*text, 77, *same])
    assert drafter.propose(1).match == (400,)
    assert drafter.propose(1).support == (40,)


def test_a_loop_goes_on_past_the_end_of_the_text() -> None:
    drafter = SuffixDrafter()
    drafter.begin([9, 1, 2, 3, 1, 2, 3])
    for _ in range(30):  # until long drafts are worth it
        drafter.accept(drafter.propose(3).tokens)
    assert drafter.propose(20).tokens == (1, 2, 3) * 6 + (1, 2)


def test_the_frequent_one_must_be_clearly_ahead() -> None:
    drafter = SuffixDrafter()
    for frequent, guess in ((1, 8), (2, 7), (3, 7)):
        drafter.begin([t for i in range(frequent) for t in (10 + i, 5, 7)] + [20, 5, 8, 30, 5])
        assert drafter.propose(1).tokens == (guess,)


def test_a_price_ends_a_draft() -> None:
    drafter = SuffixDrafter()
    drafter.begin([1, 2, 3, 4, 5, 6, 7, 8, 9] * 3)
    free = drafter.propose(8)
    dear = drafter.propose(8, price=TokenPrice(1.0, [0.3] * 9))
    assert 0 < len(dear) < len(free)
    assert dear.tokens == free.tokens[: len(dear)]


def picker(rng: random.Random) -> Any:
    def choose(offset: int, counts: Mapping[int, float]) -> int:
        return rng.choice(list(counts))

    return choose


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), limit=st.integers(1, 15), cheap=st.booleans())
def test_a_blind_estimate_does_not_look_at_the_draw(seed: int, limit: int, cheap: bool) -> None:
    rng = random.Random(seed)
    drafter = SuffixDrafter()
    drafter.begin([rng.randrange(3) for _ in range(60)])
    for _ in range(30):
        drafter.propose(3)
        drafter.accept([rng.randrange(3) for _ in range(rng.randrange(1, 4))])
    price = None if cheap else TokenPrice(1.2, [0.1] * 20)
    drafts = [drafter.propose(limit, picker(rng), blind=True, price=price) for _ in range(12)]
    assert len({draft.chances for draft in drafts}) == 1
    assert all(len(draft.chances) == limit >= len(draft) for draft in drafts)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), limit=st.integers(1, 15), blind=st.booleans())
def test_q_is_the_counts_that_the_token_was_picked_from(seed: int, limit: int, blind: bool) -> None:
    rng = random.Random(seed)
    drafter = SuffixDrafter()
    drafter.begin([rng.randrange(4) for _ in range(80)])
    asked: list[dict[int, float]] = []

    def choose(offset: int, counts: Mapping[int, float]) -> int:
        assert offset == len(asked)
        asked.append(dict(counts))
        return rng.choice(list(counts))

    draft = drafter.propose(limit, choose, blind=blind)
    assert len(asked) == len(draft) == len(draft.q)
    for token, q, counts, support in zip(draft.tokens, draft.q, asked, draft.support, strict=True):
        assert sum(q.values()) == pytest.approx(1)
        assert token in q
        assert {t: p * support for t, p in q.items()} == pytest.approx(counts)


def test_a_draft_never_ends_before_the_token_that_made_it_end() -> None:
    # If a draw could take itself out of the draft, q would not be the law of what is in it.
    rng = random.Random(3)
    drafter = SuffixDrafter()
    drafter.begin([rng.randrange(3) for _ in range(100)])
    for _ in range(300):  # all wrong: hopeless at once
        drafter.accept([(drafter.propose(4).tokens[0] + 1) % 3])
    drawn: list[int] = []

    def choose(offset: int, counts: Mapping[int, float]) -> int:
        drawn.append(rng.choice(list(counts)))
        return drawn[-1]

    for _ in range(50):
        drawn.clear()
        assert drafter.propose(15, choose, blind=True).tokens == tuple(drawn) != ()


def test_a_choice_that_was_not_offered_is_an_error() -> None:
    drafter = SuffixDrafter()
    drafter.begin([1, 2, 1])
    with pytest.raises(ValueError, match="9, which is not among"):
        drafter.propose(3, lambda offset, counts: 9)


def test_begin_forgets_the_text_but_not_the_rates() -> None:
    drafter = SuffixDrafter()
    assert len(drafter.propose(3)) == 0
    drafter.begin([1, 2, 3] * 30)
    first = drafter.propose(3).chances
    for _ in range(40):
        assert drafter.accept(drafter.propose(3).tokens) == 3
    drafter.begin([4, 5, 6])
    assert len(drafter.propose(3)) == len(drafter.propose(3, blind=True)) == 0
    drafter.begin([1, 2, 3] * 30)
    assert drafter.propose(3).chances > first


# --------------------------------------------------------------------------- the judge


def test_long_matches_share_classes() -> None:
    classes = [length_class(match) for match in range(1, 100_000)]
    assert classes == sorted(classes)
    assert classes[:8] == [1, 2, 3, 4, 5, 6, 7, 9]
    assert classes[-1] == 11


def test_wrong_guesses_lower_the_estimate_of_their_class_alone() -> None:
    judge = ChanceEstimator()
    judge.open(None)
    judge.go_on(3, 4, 4)
    before = judge.chances[0]
    for _ in range(50):
        judge.open(None)
        judge.go_on(20, 4, 4)
        judge.close([7])
        assert judge.settle([8, 7]) == 0
    judge.open(None)
    judge.go_on(30, 4, 4)
    assert judge.chances[0] < 0.1
    judge.open(None)
    judge.go_on(3, 4, 4)
    assert judge.chances[0] == before
