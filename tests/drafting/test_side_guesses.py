"""Questions of the mixture, and what it makes of the answers."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
from support.uncompiled import plain_modules

from ngramspec.drafting.draft import Question
from ngramspec.drafting.mixture import drafter as mixture
from ngramspec.drafting.mixture.drafter import MixtureDrafter
from ngramspec.drafting.price import TokenPrice

FREE = TokenPrice(0.0, [0.0] * 65)


def taught(module: ModuleType = mixture, rounds: int = 80, seed: int = 1) -> MixtureDrafter:
    """A drafter of a text in which 1 2 goes on with 3 or 4, each followed by tokens of its own; it ends with 1 2."""
    rng = random.Random(seed)
    drafter: MixtureDrafter = module.MixtureDrafter()
    drafter.begin([1, 2])
    for _ in range(rounds):
        drafter.propose(12)
        drafter.accept([*rng.choice([[3, 5, 6], [4, 7, 8]]), 1, 2])
    return drafter


def asked(
    drafter: MixtureDrafter, sent: int, limit: int = 30, leaves: int = 8, price: TokenPrice = FREE
) -> list[Question]:
    return list(drafter.questions(sent, limit, leaves, price))


def test_the_other_branch_is_asked_with_its_own_tokens() -> None:
    drafter = taught()
    draft = drafter.propose(3)
    assert draft.tokens in ((3, 5, 6), (4, 7, 8))
    other = {3: (4, 7, 8), 4: (3, 5, 6)}[draft.tokens[0]]
    found = {(q.fork, q.path): q.chance for q in asked(drafter, 3)}
    assert {(0, other[:i]) for i in (1, 2, 3)} <= set(found)
    assert found[0, other[:1]] == pytest.approx(1 - draft.chances[0], abs=0.1)
    # Behind a draft that was sent whole, its next guess is a question too.
    assert (3, (1,)) in found
    # Behind one that was not, what was left out is.
    drafter.propose(3)
    assert (1, draft.tokens[1:2]) in {(q.fork, q.path) for q in asked(drafter, 1)}


@pytest.mark.parametrize("leaves", [1, 2, 5])
def test_the_likeliest_first_each_behind_its_path_and_no_more_than_allowed(leaves: int) -> None:
    rng = random.Random(2)
    drafter = MixtureDrafter()
    drafter.begin([rng.randrange(4) for _ in range(200)])
    for _ in range(60):
        draft = drafter.propose(rng.randrange(1, 20))
        sent = rng.randint(0, len(draft))
        found = asked(drafter, sent, limit := rng.randint(1, 40), leaves)
        assert len(found) <= limit
        assert [q.chance for q in found] == sorted((q.chance for q in found), reverse=True)
        seen: set[tuple[int, tuple[int, ...]]] = set()
        for fork, path, _ in found:
            assert fork <= sent
            assert path[0] != draft.tokens[fork : min(fork + 1, sent)][:1]
            assert len(path) == 1 or (fork, path[:-1]) in seen
            assert (fork, path) not in seen
            seen.add((fork, path))
        ends = [1 for fork, path in seen if not any(f == fork and p[:-1] == path for f, p in seen)]
        assert len(ends) <= leaves
        for fork in range(sent):
            reach = 1.0
            for p in draft.chances[:fork]:
                reach *= p
            beside = sum(q.chance for q in found if q.fork == fork and len(q.path) == 1)
            assert beside <= reach * (1 - draft.chances[fork]) + 1e-9
        drafter.accept([rng.randrange(4) for _ in range(rng.randint(1, 4))])


def test_questions_that_cannot_pay_are_not_asked() -> None:
    drafter = taught()
    drafter.propose(3)
    found = asked(drafter, 3, price=TokenPrice(1.0, [0.2] * 65))
    assert found
    assert min(q.chance for q in found) >= 0.2
    assert not asked(drafter, 3, price=TokenPrice(1.0, [0.9] * 65))


@pytest.mark.parametrize("how", ["greedy", "coupled", "blind"])
def test_answers_begin_the_next_draft_until_they_are_wrong(how: str) -> None:
    drafter = taught()
    choose = None if how == "greedy" else (lambda _at, law: max(law, key=lambda token: law[token]))
    for turn in range(40):
        drafter.hear((77, 78))
        drafter.accept([3])
        draft = drafter.propose(6, choose, blind=how == "blind", price=FREE)
        assert draft.tokens[:2] == (77, 78)
        assert len(draft.chances) >= 2
        if choose is not None:
            assert draft.q[:2] == ({77: 1.0}, {78: 1.0})
        if turn == 0:
            assert min(draft.chances[:2]) > 0.9
        assert drafter.accept([77, 5]) == 1
        assert drafter.propose(6).tokens[:1] != (77,)
        drafter.accept([1, 2])
    # Half of what was said came true.
    assert draft.chances[0] == draft.chances[1] < 0.85
    drafter.hear((77,))
    drafter.begin([1, 2])
    assert drafter.propose(6).tokens[:1] != (77,)


def test_what_is_asked_teaches_nothing() -> None:
    one, other = taught(), taught()
    for _ in range(20):
        draft = one.propose(8)
        assert draft == other.propose(8)
        asked(one, len(draft))
        assert one.accept([3, 5, 6, 1, 2]) == other.accept([3, 5, 6, 1, 2])


def test_uncompiled_it_asks_the_same() -> None:
    plain = plain_modules()
    ours, theirs = taught(rounds=25), taught(plain["drafter"], rounds=25)
    free = plain["price"].TokenPrice(0.0, [0.0] * 65)
    for _ in range(3):
        assert ours.propose(5).tokens == theirs.propose(5).tokens
        one, other = asked(ours, 4), asked(theirs, 4, price=free)
        assert [q[:2] for q in one] == [q[:2] for q in other]
        assert [q.chance for q in one] == pytest.approx([q.chance for q in other])
        for drafter in (ours, theirs):
            drafter.accept([4, 7, 8, 1, 2])
