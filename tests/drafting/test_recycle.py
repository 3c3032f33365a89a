"""Successors read from logits, and the loop that shows them to who reads them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from support.cli_runner import run
from support.mock_target import MockTarget
from support.successors import check_blind_drafts, rows_to

from ngramspec.cost.given import GivenCurve
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.decoding.step import Stats
from ngramspec.drafting import DRAFTERS, REMEMBERING, make_drafter
from ngramspec.drafting.draft import Draft, Drafter
from ngramspec.drafting.price import TokenPrice
from ngramspec.drafting.recycle import RecycleDrafter
from ngramspec.drafting.successors import top_two
from ngramspec.replay.replay import Replay

FREE = GivenCurve({1: 1.0, 64: 1.0})


def logits(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


def knowing(pairs: Mapping[int, int], times: int = 1) -> RecycleDrafter:
    drafter = RecycleDrafter()
    for _ in range(times):
        drafter.see(list(pairs), rows_to(list(pairs.values())))
    return drafter


# --------------------------------------------------------------------------- the best two


@settings(max_examples=200, deadline=None, derandomize=True)
@given(row=arrays.arrays(np.float32, st.integers(1, 40), elements=st.floats(-30, 30, width=32)))
def test_the_best_two_are_those_of_a_sort(row: NDArray[np.float32]) -> None:
    best, law = top_two(row)
    order = sorted(range(row.size), key=lambda token: -row[token])
    assert best == int(row.argmax())
    assert sum(law.values()) == pytest.approx(1)
    assert min(law.values()) > 0
    assert sorted((row[t] for t in law), reverse=True) == [row[t] for t in order[: len(law)]]
    if len(law) == 2:
        (a, p), (b, q) = law.items()
        assert np.log(p / q) == pytest.approx(float(row[a]) - float(row[b]), abs=1e-6)
    else:
        assert row.size == 1


def test_logits_that_are_no_numbers() -> None:
    nan, inf = float("nan"), float("inf")
    assert top_two(logits(1, nan, 3))[1] == {}
    assert top_two(logits(1, inf, 3))[1] == {}
    assert top_two(logits(-inf, -inf))[1] == {}
    assert top_two(logits(-inf, 2, -inf)) == (1, {1: 1.0})
    drafter = knowing({1: 2})
    drafter.see([1], logits(*[nan] * 12)[np.newaxis])
    drafter.begin([1])
    assert drafter.propose(1).tokens == (2,)


# --------------------------------------------------------------------------- the drafter


def test_the_chain_of_best_successors() -> None:
    drafter = knowing({1: 2, 2: 3, 3: 4, 4: 9}, times=9)
    drafter.begin([7, 1])
    draft = drafter.propose(10)
    assert draft.tokens == (2, 3, 4, 9)
    assert draft.match == (1,) * 4
    assert draft.q == draft.support == ()
    assert draft.source == drafter.name == make_drafter("recycle").name == "recycle"
    assert drafter.propose(2).tokens == (2, 3)
    drafter.accept([2, 3])
    assert drafter.propose(10).tokens == (4, 9)
    drafter.see([3], rows_to([8]))  # the latest logits count
    assert drafter.propose(10).tokens == (8,)


def test_what_was_never_evaluated_has_no_successor() -> None:
    drafter = RecycleDrafter()
    for prompt in ([], [5]):
        drafter.begin(prompt)
        assert len(drafter.propose(4)) == len(drafter.propose(4, blind=True)) == 0
        assert drafter.accept([]) == 0
    drafter.accept([1])
    assert len(drafter.propose(4)) == 0


def test_successors_outlast_a_request_but_not_a_model() -> None:
    drafter = knowing({1: 2})
    drafter.begin([1])
    drafter.begin([3, 1])
    assert drafter.propose(4).tokens == (2,)
    drafter.see([4], rows_to([5], n_vocab=9))
    assert len(drafter.propose(4)) == 0
    drafter.accept([4])
    assert drafter.propose(4).tokens == (5,)


def test_what_stays_the_best_is_surer() -> None:
    chances = []
    for times in (1, 2, 4):
        drafter = knowing({1: 2}, times)
        drafter.begin([1])
        chances += drafter.propose(1).chances
    assert chances == sorted(chances)
    assert chances[0] < chances[-1]


def test_a_price_ends_a_draft() -> None:
    drafter = knowing({i: i + 1 for i in range(10)}, times=5)
    drafter.begin([0])
    free, dear = drafter.propose(9), drafter.propose(9, price=TokenPrice(1.0, [0.3] * 10))
    assert 0 < len(dear) < len(free)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), limit=st.integers(1, 15))
def test_a_blind_estimate_does_not_look_at_the_draw(seed: int, limit: int) -> None:
    rng = random.Random(seed)
    drafter = RecycleDrafter()
    drafter.begin([1])
    for _ in range(40):
        drafter.propose(3)
        tokens = [rng.randrange(5) for _ in range(3)]
        drafter.see(tokens, np.array([[rng.gauss(0, 2) for _ in range(5)] for _ in tokens], np.float32))
        drafter.accept(tokens)
    check_blind_drafts(drafter, limit, rng)
    with pytest.raises(ValueError, match="not among"):
        drafter.propose(3, lambda offset, weights: 77)


# --------------------------------------------------------------------------- the loop


class Reader(Drafter):
    """Keeps what it is shown, and drafts a constant."""

    name = "reader"
    wants_logits = True

    def __init__(self, guess: int) -> None:
        self.guess = guess
        self.seen: list[tuple[tuple[int, ...], NDArray[np.float32]]] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self.prompt = list(prompt)

    def propose(self, limit: int, choose: Any = None, *, blind: bool = False, price: Any = None) -> Draft:
        return Draft((self.guess,) * limit, chances=(0.9,) * limit, source=self.name)

    def accept(self, tokens: Sequence[int]) -> int:
        return 0

    def see(self, tokens: Sequence[int], rows: NDArray[np.float32], accepted: int = 0) -> None:
        self.seen.append((tuple(tokens), rows.copy()))


def test_the_loop_shows_the_logits_of_all_positions_refused_ones_too(tmp_path: Path) -> None:
    mock, reader = MockTarget(12, peak=6.0), Reader(5)
    decoder = SpeculativeDecoder(
        mock, drafter=reader, policy="fixed", draft_max=3, curve=FREE, calibration_folder=tmp_path
    )
    context = [1, 2]
    steps = list(decoder.generate(context, max_tokens=30))
    assert len(reader.seen) == len(steps)
    refused = 0
    for step, (tokens, rows) in zip(steps, reader.seen, strict=True):
        assert tokens == (context[-1], *step.drafted)
        assert rows.shape == (len(tokens), 12)
        for i, row in enumerate(rows):
            assert row.tolist() == mock.row([*context, *step.drafted[:i]]).tolist()
        refused += len(step.refused)
        context += step.tokens
    assert refused > 20


def test_only_who_reads_logits_is_shown_any() -> None:
    drafters = {name: make_drafter(name, memory=name in REMEMBERING) for name in DRAFTERS}
    assert [name for name, drafter in drafters.items() if drafter.wants_logits] == ["recycle", "nasd", "lookahead"]


def test_recycled_successors_save_passes(tmp_path: Path) -> None:
    # The next token follows from the last one almost alone: a refused position tells what comes after its token.
    class Chain(MockTarget):
        def row(self, context: Sequence[int]) -> NDArray[np.float32]:
            row = np.zeros(self.n_vocab, np.float32)
            row[(7 * context[-1] + 1) % self.n_vocab] = 5.0
            if len(context) % 5 == 0:
                row[(context[-1] + 11) % self.n_vocab] = 9.0
            return row

    stats = Stats()
    decoder = SpeculativeDecoder(
        Chain(200), drafter="recycle", policy="fixed", draft_max=4, curve=FREE, calibration_folder=tmp_path
    )
    for step in decoder.generate([3], max_tokens=600):
        stats.add(step)
    assert stats.tokens_per_pass > 1.5


# --------------------------------------------------------------------------- records have no logits


def test_a_record_has_no_logits_to_read(env: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'recycle' needs a model's logits"):
        Replay(make_drafter("recycle"), curve=FREE)
    file = tmp_path / "talk.txt"
    file.write_text("=== prompt\nSay hello.\n=== response\nHello there!\n")
    done = run(env, "replay", str(file), "--drafter", "recycle")
    assert (done.code, done.out) == (2, "")
    assert "'recycle' needs a model's logits" in done.err
    assert done.err.count("\n") == 1
