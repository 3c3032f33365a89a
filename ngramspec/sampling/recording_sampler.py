"""`RecordingSampler`: a sampler that keeps the distributions that tokens were drawn from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ngramspec.sampling.distribution import Distribution
from ngramspec.sampling.sampler import Sampler, WrappedSampler


class RecordingSampler(WrappedSampler):
    """A sampler that keeps the distribution of every token that it draws, after all samplers.

    Args:
        sampler: Sampler that draws the tokens.
    """

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self._distributions: list[Distribution] = []

    def pop_distributions(self) -> list[Distribution]:
        """Return the distributions since the last call, one for each token."""
        distributions, self._distributions = self._distributions, []
        return distributions

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        distribution = self._sampler.distribution(logits)
        self._distributions.append(distribution)
        return distribution

    def draw(self, logits: NDArray[np.float32], position: int, distributions: list[Distribution] | None = None) -> int:
        distributions = [] if distributions is None else distributions
        token = self._sampler.draw(logits, position, distributions)
        self._distributions.append(distributions[-1])
        return token
