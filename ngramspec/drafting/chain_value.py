"""`ChainValue`: what a chain of guesses is expected to gain by the cost of the pass that it is sent in.

>>> price = TokenPrice(1.0, [0.4, 0.1, 0.1], costs=lambda: [0.0, 1.0, 1.1, 1.2])
>>> one = ChainValue().then(0.9, price)
>>> one.most, round(one.along([0.9, 0.9], price), 3)
(0.0, 1.239)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ngramspec.drafting.price import TokenPrice


class ChainValue(NamedTuple):
    """What a chain is expected to gain, in tokens.

    Attributes:
        tokens: expected number of its tokens that are accepted.
        reach: the probability that all are.
        most: what the best beginning of it gains, beyond the time that its tokens take.
        length: of the chain.
    """

    tokens: float = 0.0
    reach: float = 1.0
    most: float = 0.0
    length: int = 0

    def then(self, chance: float, price: TokenPrice) -> ChainValue:
        """With a guess more."""
        reach = self.reach * chance
        tokens, length = self.tokens + reach, self.length + 1
        return ChainValue(tokens, reach, max(self.most, tokens - price.worth * price.costs[length]), length)

    def along(self, chances: Sequence[float], price: TokenPrice) -> float:
        """What it gains with these guesses more."""
        tokens, reach, most, worth, costs = self.tokens, self.reach, self.most, price.worth, price.costs
        for length, chance in enumerate(chances, self.length + 1):
            reach *= chance
            tokens += reach
            most = max(most, tokens - worth * costs[length])
        return most
