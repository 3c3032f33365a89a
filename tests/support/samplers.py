"""A sampler for tests that need no vocabulary."""

from __future__ import annotations

from support.numpy_sampler import NumpySampler

from ngramspec.sampling.settings import Sampling


def make_sampler(sampling: Sampling, n_vocab: int) -> NumpySampler:
    return NumpySampler(sampling, n_vocab)
