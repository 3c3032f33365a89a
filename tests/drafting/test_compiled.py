"""Tests that the modules with C types give the same results as the same modules in plain Python."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.uncompiled import plain_modules

from ngramspec.decoding.branches import BranchFinder
from ngramspec.drafting import draft as draft_module
from ngramspec.drafting import token_index
from ngramspec.drafting.draft import Chooser
from ngramspec.drafting.mixture.drafter import MixtureDrafter
from ngramspec.tokens import common_prefix

PLAIN = plain_modules()
MODULES: tuple[Any, Any] = draft_module, PLAIN["draft"]
FINDERS = BranchFinder, PLAIN["branches"].BranchFinder
MANY = [(0, 80), *(pytest.param(seed, 300, marks=pytest.mark.exhaustive) for seed in range(1, 6))]
"""(seed, length) of the random texts in the test of `SuffixAutomaton`."""


def copying(rng: random.Random, vocabulary: int, length: int) -> list[int]:
    """Return a text of new parts and of copies of old ones with an edit."""
    text: list[int] = []
    while len(text) < length:
        if len(text) < 50 or rng.random() < 0.3:
            text += [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 30))]
            continue
        start = rng.randrange(len(text) - 30)
        copy = text[start : start + 30]
        copy[(at := rng.randrange(30)) : at + rng.randrange(3)] = [rng.randrange(vocabulary)] * rng.randrange(2)
        text += copy
    return text[:length]


class Pair:
    """A drafter and its plain counterpart, which must agree in all results.

    A compiler may fuse a multiplication with an addition, which rounds once less, so chances agree only approximately.
    """

    def __init__(self) -> None:
        self.drafters: list[Any] = [MixtureDrafter(), PLAIN["drafter"].MixtureDrafter()]
        self.indexes: list[Any] = [token_index.TokenIndex(), PLAIN["token_index"].TokenIndex()]
        for drafter, index in zip(self.drafters, self.indexes, strict=True):
            drafter.guesser.memory = [index]

    def agree(self, method: str, *args: Any) -> Any:
        one, other = (getattr(drafter, method)(*args) for drafter in self.drafters)
        assert one == other
        return one

    def propose(self, limit: int, seed: int, price: tuple[float, list[float]] | None, how: str) -> Any:
        def picking() -> Chooser | None:
            """Return a chooser that ignores the weights and gives both drafters the same choices."""
            rng = random.Random(seed)
            return None if how == "greedy" else lambda _, weights: rng.choice(list(weights))

        one, other = (
            drafter.propose(
                module.Ask(limit, picking(), fixed_length=how == "blind", price=price and module.MarginalCost(*price))
            )
            for drafter, module in zip(self.drafters, MODULES, strict=True)
        )
        assert (one.tokens, one.match_lengths) == (other.tokens, other.match_lengths)
        assert one.acceptance_probs == pytest.approx(other.acceptance_probs, rel=1e-9)
        assert [list(q) for q in one.q] == [list(q) for q in other.q]
        assert [p for q in one.q for p in q.values()] == pytest.approx([p for q in other.q for p in q.values()])
        return one

    def ask(self, chances: Sequence[float], sent: int) -> int:
        prices = [module.MarginalCost(0.0, [0.0] * 65) for module in MODULES]
        one, other = (
            kind(drafter.guesser).find(chances, sent, 20, 5, price)
            for kind, drafter, price in zip(FINDERS, self.drafters, prices, strict=True)
        )
        assert [branch[:2] for branch in one] == [branch[:2] for branch in other]
        assert [branch.probability for branch in one] == pytest.approx([branch.probability for branch in other])
        return len(one)


@pytest.mark.parametrize(("seed", "length"), MANY)
def test_compiled_mixture_equals_plain_python(seed: int, length: int) -> None:
    """The session has a growing memory, edits, refused rows that are read, prices, and answers to questions."""
    rng, pair = random.Random(seed), Pair()
    vocabulary = (12, 3, 60)[seed % 3]
    drafted = questions = heard = 0
    for _ in range(3):
        text = copying(rng, vocabulary, 2 * length)
        pair.agree("begin", text[:length])
        at = length
        while at < len(text):
            price = (1.0, [rng.choice([0.0, 0.02, 0.1])] * 64) if rng.random() < 0.7 else None
            draft = pair.propose(rng.randrange(1, 12), at, price, rng.choice(["greedy", "coupled", "blind"]))
            drafted += len(draft)
            questions += pair.ask(draft.acceptance_probs, rng.randint(0, len(draft)))
            truth = text[at : at + rng.randrange(1, 6)]
            accepted = common_prefix(draft.tokens, truth)
            assert len({drafter.wants_logits for drafter in pair.drafters}) == 1
            if pair.drafters[0].wants_logits:
                rows = np.random.default_rng(at).standard_normal((len(draft) + 1, vocabulary)).astype(np.float32)
                pair.agree("observe_logits", [text[at - 1], *draft.tokens], rows, accepted)
                heard += len(draft) > accepted
            known: list[int] = []
            if rng.random() < 0.1:
                known = text[at + len(truth) :][:2]
            pair.agree("accept", truth)
            for drafter in pair.drafters:
                drafter.known_prefix, drafter.prefix_probability = known, 0.95
            at += len(truth)
        for index in pair.indexes:
            index.extend(text)
            index.append(token_index.SEAM)
    assert min(drafted, questions, heard) > 50
    for learnt in ("global_weights", "token_weights"):
        one, other = (getattr(drafter.guesser, learnt) for drafter in pair.drafters)
        assert one.keys() == other.keys()
        for name, values in one.items():
            np.testing.assert_allclose(np.asarray(values), np.asarray(other[name]), rtol=1e-6, atol=1e-9, err_msg=name)
