"""`ready`: what an engine must know of a model before it answers: what batches cost, and which sizes agree."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ngramspec.backend import SharedModel
from ngramspec.cost.calibration import Calibration
from ngramspec.cost.measure import SHARED_ORDER
from ngramspec.exactness.auto import UNMEASURED, Footing

DEPTH = 64
"""Tokens of context on which batches are timed."""

TOKENS = 4000
"""What measuring is worth: as much as for one text of so many tokens."""


def ready(model: SharedModel, *, exact: bool, folder: Path | None = None) -> tuple[Calibration, Footing]:
    """Measure a model whose lanes are empty, or take up what was measured before.

    Args:
        model: to measure, in its first lane.
        exact: whether texts must be the same bit for bit whatever is drafted, and whoever else is in a pass.
        folder: where measurements are kept; None for the user's cache folder.
    """
    lane = model.lanes[0]
    known = Calibration.load(lane, folder)
    tokens = np.random.default_rng(0).integers(0, lane.n_vocab, min(DEPTH, lane.n_ctx // 2))
    lane.prefill([int(token) for token in tokens])
    known.ensure_curve(lane, TOKENS, SHARED_ORDER)
    footing = Footing(bound=UNMEASURED)
    if exact and lane.can_rollback and lane.exact_rollback:
        whole = known.ensure_exact(lane, together=True)
        sizes = tuple(size for size in whole if size <= lane.max_batch) or (1,)
        footing = Footing(sizes, aligned=not known.ensure_reading(lane), same=True)
    elif exact:
        footing = Footing((1,), aligned=True, same=True)
    lane.clear()
    known.save()
    return known, footing
