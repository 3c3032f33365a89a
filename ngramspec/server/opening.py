"""`open_engine`: from a model file to an engine that answers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

from ngramspec.batching.engine import Engine
from ngramspec.batching.ready import ready
from ngramspec.drafting.asked_model import AskedModel
from ngramspec.drafting.hybrid import HybridDrafter
from ngramspec.drafting.mixture.drafter import MixtureDrafter
from ngramspec.drafting.recall import Recall
from ngramspec.llama.shared import SharedTarget


def open_engine(
    shared: SharedTarget,
    *,
    drafts: bool,
    draft_max: int,
    model: AskedModel | None = None,
    memory: Recall | None,
    kept: Path | None,
    cache_room: int,
    crashed: Callable[[BaseException], None],
    executor: Executor,
) -> Engine:
    """An engine on a loaded model; what is not known of its costs is measured first.

    Args:
        shared: the model; the engine has it to itself.
        drafts: whether anything is drafted.
        draft_max, cache_room, crashed, executor: see `Engine`.
        model: drafts too, and is asked where that pays; it has as many lanes as `shared`.
        memory: what is drafted from beside the contexts; it hears every answer. None: neither.
        kept: see `MixtureDrafter`.
    """
    calibration, footing = ready(shared, exact=shared.exact == "on")
    drafter = None
    if drafts and shared.can_rollback:
        drafter = MixtureDrafter(memory, kept) if model is None else HybridDrafter(model, memory, kept)
    return Engine(
        shared,
        shared,
        shown=shared.shown,
        calibration=calibration,
        footing=footing,
        drafter=drafter,
        draft_max=draft_max,
        memory=memory,
        cache_room=cache_room,
        crashed=crashed,
        executor=executor,
    )
