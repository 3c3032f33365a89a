"""`time_passes`: passes that only show what they cost, for reports on a model that was not used yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ngramspec.backend import Model
from ngramspec.cost.times import FEW, SIZES, PassTimes


def time_passes(
    model: Model,
    tokens: Sequence[int],
    times: PassTimes,
    clock: Callable[[], float] = time.perf_counter,
    max_seconds: float = 5.0,
) -> None:
    """Time passes over parts of a text after the cached tokens, roll each of them back, and teach `times`.

    A pass over one token precedes each pass over more, so that load hits both. The tokens are those of a text, because
    the time of a mixture of experts depends on them. Sizes for which they or the context are too short are left out,
    and no further size is begun after `max_seconds`. The model must have a cached token.
    """
    start, end = len(model.tokens), clock() + max_seconds
    largest = min(len(tokens), model.max_batch, model.n_ctx - start)
    for _ in range(FEW):
        for size in SIZES[1:]:
            # The third pass in a row of a size does not contain the cost of a change of size.
            for n in (1, 1, 1, size, size, size) if size <= largest and clock() < end else ():
                model.checkpoint()
                began = clock()
                model.evaluate(tokens[:n])
                seconds = clock() - began
                model.rollback(start)
                times.observe(n, seconds)
