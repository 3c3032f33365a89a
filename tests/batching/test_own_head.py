"""Tests of a model's own NextN layer in the engine: it drafts for several texts and changes none."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
from architectures.files import write_model
from support.ear import WAIT, ask, run_engine
from support.grid import grid
from support.mock_target import Clock
from support.pools import use_pooled_cache

from ngramspec.backend import ExactnessMode, SharedModel
from ngramspec.batching.request import Done
from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.drafting.draft_model.hybrid import HybridDrafter
from ngramspec.drafting.draft_model.model import ModelDrafter
from ngramspec.llama.head import Heads
from ngramspec.llama.target import Target
from ngramspec.request import Request
from ngramspec.sampling.settings import Sampling

NAMES = ("glm4moe", "qwen35", "qwen3next")
"""Models with a KV cache, a recurrent state with snapshots, and a recurrent state that is evaluated again."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    return {name: write_model(folder / f"{name}.gguf", name, head=True, half=False) for name in NAMES}


class Timed:
    """Engine on a model with a head, with given durations of passes on a mock clock.

    Args:
        file: Path of the model.
        texts: Maximum number of simultaneous texts.
        cost: Cost of a pass of the head; `None` means that the model is loaded without it and there are no drafts.
        slope: Cost of each further token in a pass of either model, relative to the pass.
    """

    def __init__(self, file: Path, texts: int, cost: float | None, slope: float = 0.02) -> None:
        self.clock, self._slope, self._opened = Clock(1e-7), slope, ExitStack()
        now, drafter = self.clock.perf_counter, None
        loading: dict[str, Any] = {"ctx_size": 400, "threads": 1, "exact": "off", "mtp": cost is not None}
        target = self._opened.enter_context(Target(file, texts=texts, **loading))
        self._charge(target.passes, 1.0)
        if (heads := target.heads) is not None and cost is not None:
            self._charge(heads, cost)
            shared = cast(SharedModel, heads)
            drafter = HybridDrafter(ModelDrafter(heads.sequences[0], clock=now, shared_model=shared))
        times, exactness = make_fixed_curve({1: 1.0, 64: 1 + 63 * slope}), ExactnessMode(range(1, 33))
        settings: dict[str, Any] = {"drafter": drafter, "draft_max": 8, "cache_room": 1 << 26, "clock": now}
        self.engine = self._opened.enter_context(run_engine(target, times=times, exactness=exactness, **settings))

    def _charge(self, passes: Any, cost: float) -> None:
        decode = passes.decode

        def charged(feeds: Sequence[Any], **options: Any) -> Any:
            tokens = sum(len(feed.tokens if isinstance(passes, Heads) else feed[1]) for feed in feeds)
            self.clock.now += cost * (1 + self._slope * (tokens - 1))
            return decode(feeds, **options)

        self._opened.enter_context(mock.patch.object(passes, "decode", charged))

    def answers(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return the response tokens of each request; all requests arrive before the first pass."""
        gate = threading.Event()
        self.engine.on_slot(0, lambda _: gate.wait(WAIT))
        ears = [ask(self.engine, r.prompt, r.max_tokens, sampling=r.sampling) for r in requests]
        gate.set()
        assert all(isinstance(ear.wait(), Done) for ear in ears)
        return [ear.tokens for ear in ears]

    def __enter__(self) -> Timed:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


@grid(name=NAMES, clients=(4, 1), pooled=(False, True))
def test_nextn_head_keeps_texts_of_plain_decoding(
    files: dict[str, Path], name: str, clients: int, pooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Next turns, whose beginnings are in other sequences' caches, also get the same texts."""
    if pooled:
        use_pooled_cache(monkeypatch)
    with Timed(files[name], clients, None) as plain, Timed(files[name], clients, 0.02) as own:
        chance = random.Random(name)
        drawn = [[chance.randrange(10, 4000) for _ in range(40 + 5 * i)] for i in range(4)]
        requests = [Request(prompt, 15 + 10 * i, Sampling(0.7 * (i % 2), seed=i)) for i, prompt in enumerate(drawn)]
        found = own.answers(requests)
        assert found == plain.answers(requests)
        later = [Request([*drawn[i], *found[i], 9], 12) for i in (3, 1, 0, 2)]
        assert own.answers(later) == plain.answers(later)
        # Recurrent models only draft while a single text is generated.
        assert own.engine.report().stats.accepted > 0
        assert own.clock.now < plain.clock.now
