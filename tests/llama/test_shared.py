"""`Target` on real files: every kind of memory, sequences in one pool and sequences with caches of their own.

The tiny models have weights and caches in single precision here, so that what is wrong stands out from rounding.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, Literal

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from architectures.files import write_model
from architectures.reference import Reference
from support.cli_runner import DEMO

from ngramspec.backend import Logits
from ngramspec.cost.calibration import Calibration
from ngramspec.cost.measure import probe
from ngramspec.errors import ModelError, TargetError
from ngramspec.exactness.decision import Measured
from ngramspec.llama import devices
from ngramspec.llama.cache import bytes_per_token
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.llama.sequence import CacheSequence
from ngramspec.llama.target import Target
from ngramspec.llama.weights import GRAIN
from ngramspec.shared_model import Part

KINDS = ("llama", "deepseek2", "gemma3", "mamba", "jamba", "qwen35", "lfm2", "deepseek4", "qwen4exp")
"""A KV cache, a compressed one, windows, a recurrent state, hybrids without snapshots and with; and what has states of
its own, or a cache of its own in any case."""

Exact = Literal["on", "off"]
EXACT: tuple[Exact, ...] = ("on", "off")
WALKED: list[tuple[str, Exact]] = [
    ("llama", "off"),
    ("deepseek2", "on"),
    ("gemma3", "off"),
    ("mamba", "on"),
    ("qwen35", "off"),
]
WALKED_TOO = [case for case in product(KINDS, EXACT) if case not in WALKED]
ROOM = 110
"""Longest text of a walk, in tokens."""

RIGHT = 1e-3
"""The windowed model's logits are off by up to half of that in one pool, the others' by 1e-5; wrong ones by 0.1."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def tiny(folder: Path, kind: str) -> Path:
    path = folder / f"{kind}.gguf"
    return path if path.exists() else write_model(path, kind, half=False)


def opened(path: Path, sequences: int = 4, exact: Any = "off", **options: Any) -> Target:
    settings: dict[str, Any] = {"n_ctx": ROOM + 50, "threads": 1, "flash_attn": "off", "draft_max": 6}
    settings |= {"cache_type_k": "f32", "cache_type_v": "f32"}
    return Target(path, texts=sequences, exact=exact, **(settings | options))


@pytest.fixture
def shared(folder: Path) -> Iterator[Target]:
    with opened(tiny(folder, "llama")) as target:
        yield target


@pytest.fixture(scope="module")
def demo() -> Iterator[Target]:
    with Target(DEMO, texts=3, n_ctx=480, threads=1, exact="on") as target:
        yield target


def some(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(10, 4000, n)]


class SequenceWalk:
    """A random walk over the sequences of a shared target; its rows of logits are those of each text read on its own.

    Attributes:
        texts: the tokens that each sequence must hold.
        worst: largest difference of a logit to the reference.
        seen: how often what was done.
    """

    def __init__(self, shared: Target, reference: Reference) -> None:
        self.shared, self.reference = shared, reference
        self.texts: list[list[int]] = [[] for _ in shared.sequences]
        self.worst = 0.0
        self.seen: Counter[str] = Counter()
        self._rng = random.Random(3)
        self._saved: list[tuple[list[int], bytes]] = []

    def walk(self, steps: int) -> None:
        """Do so many things, and look at all sequences after each."""
        doing: list[tuple[Callable[[CacheSequence], None], int]] = [
            (self._prefill, 12),
            (self._together, 45),
            (self._alone, 12),
            (self._take_back, 6),
            (self._adopt, 10),
            (self._save, 6),
            (self._restore, 6),
            (self._clear, 6),
        ]
        for _ in range(steps):
            sequence = self._rng.choice(self.shared.sequences)
            (what,) = self._rng.choices(*zip(*doing, strict=True)) if self.texts[sequence.number] else (self._prefill,)
            what(sequence)
            self.seen[what.__name__] += 1
            for number, text in enumerate(self.texts):
                assert self.shared.sequences[number].tokens == text, what

    def new(self, count: int) -> list[int]:
        """Tokens that no text has yet."""
        return [self._rng.randrange(10, 4000) for _ in range(count)]

    def check(self, sequence: CacheSequence, rows: Logits) -> None:
        """Compare the last rows of a sequence's text."""
        text = self.texts[sequence.number]
        if len(rows):
            self.worst = max(self.worst, float(np.abs(rows - self.reference.rows(text)[-len(rows) :]).max()))

    def _drop(self, sequence: CacheSequence, length: int) -> None:
        sequence.rollback(length)
        del self.texts[sequence.number][length:]

    def _prefill(self, sequence: CacheSequence) -> None:
        other = self._rng.choice(self.texts)
        text = [*other[: self._rng.randrange(len(other) + 1)], *self.new(self._rng.choice((1, 20, 80)))][-ROOM + 20 :]
        row = sequence.prefill(text, aligned=self._rng.random() < 0.3)
        self.texts[sequence.number] = text
        self.check(sequence, row[np.newaxis])

    def _together(self, _sequence: CacheSequence) -> None:
        ready = [sequence for sequence in self.shared.sequences if 0 < len(self.texts[sequence.number]) < ROOM]
        parts = []
        for sequence in self._rng.sample(ready, self._rng.randint(min(1, len(ready)), len(ready))):
            tokens = self.new(self._rng.choice((1, 1, 1, 2, 4, 7)))
            parts.append(Part(sequence, tokens, self._rng.randint(0, len(tokens))))
        found = self.shared.evaluate_together(parts) if parts else []
        for (_, tokens, count), part, rows in zip(parts, parts, found, strict=True):
            assert isinstance(part.sequence, CacheSequence)
            self.texts[part.sequence.number] += tokens
            assert rows.shape == (count, self.shared.n_vocab)
            self.check(part.sequence, rows)
        for sequence, tokens, _ in parts:
            if self._rng.random() < 0.6:
                assert isinstance(sequence, CacheSequence)
                self._drop(sequence, len(self.texts[sequence.number]) - self._rng.randrange(len(tokens)))

    def _alone(self, sequence: CacheSequence) -> None:
        tokens = self.new(self._rng.randint(1, 5))
        if self._rng.random() < 0.5:
            sequence.checkpoint()
        rows = sequence.evaluate(tokens)
        self.texts[sequence.number] += tokens
        self.check(sequence, rows)
        self._drop(sequence, len(self.texts[sequence.number]) - self._rng.randrange(len(tokens) + 1))
        if len(sequence.tokens) > ROOM:
            self._clear(sequence)

    def _take_back(self, sequence: CacheSequence) -> None:
        self._drop(sequence, self._rng.randrange(len(sequence.tokens) + 1))

    def _adopt(self, sequence: CacheSequence) -> None:
        other = self._rng.choice([other for other in self.shared.sequences if other is not sequence])
        held = len(other.tokens)
        length = self._rng.choice((held, held, max(0, held - 3), self._rng.randint(0, held)))
        sequence.adopt(other, length)
        self.texts[sequence.number] = other.tokens[: len(sequence.tokens)]
        assert len(sequence.tokens) <= length
        self.seen["adopted"] += bool(sequence.tokens)

    def _save(self, sequence: CacheSequence) -> None:
        self._saved = [*self._saved, (list(sequence.tokens), sequence.saved())][-4:]

    def _restore(self, sequence: CacheSequence) -> None:
        if self._saved:
            tokens, state = self._rng.choice(self._saved)
            sequence.restore(tokens, state)
            self.texts[sequence.number] = list(tokens)

    def _clear(self, sequence: CacheSequence) -> None:
        sequence.clear()
        self.texts[sequence.number] = []


@pytest.mark.parametrize(
    ("kind", "exact"), [*WALKED, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in WALKED_TOO)]
)
def test_each_sequence_says_what_its_text_says_alone(kind: str, exact: Exact, folder: Path) -> None:
    path = tiny(folder, kind)
    with opened(path, sequences=4, exact=exact) as shared:
        reference = Reference(path, n_ctx=512, n_batch=shared.n_batch, flash=0, threads=1, cache_type=0)
        try:
            walk = SequenceWalk(shared, reference)
            walk.walk(60)
        finally:
            reference.close()
    assert walk.worst < RIGHT
    assert len(walk.seen) == 9
    assert min(walk.seen.values()) > 0


def test_sequences_with_caches_of_their_own_change_no_bit(demo: Target) -> None:
    if len(probe(demo.sequences[0]).classes) > 1:
        pytest.skip("sizes of batches do not agree on this machine")
    texts = [some(n, seed=n) for n in (30, 200, 140)]
    more = [some(6, seed=n) for n in (1, 2, 3)]
    with Target(DEMO, n_ctx=480, threads=1, exact="on") as target:
        alone = []
        for text, tail in zip(texts, more, strict=True):
            target.prefill(text, aligned=True)
            alone.append(np.concatenate([target.evaluate([token]).copy() for token in tail]))
    for sequence, text in zip(demo.sequences, texts, strict=True):
        sequence.prefill(text, aligned=True)
    # One token each, then drafts of unequal lengths.
    for sequence, tail, rows in zip(demo.sequences, more, alone, strict=True):
        assert np.array_equal(sequence.evaluate(tail), rows)
        sequence.rollback(len(sequence.tokens) - len(tail))
    first = demo.evaluate_together(
        [Part(sequence, tail[:1], 1) for sequence, tail in zip(demo.sequences, more, strict=True)]
    )
    assert all(np.array_equal(rows, expected[:1]) for rows, expected in zip(first, alone, strict=True))
    parts = [Part(demo.sequences[i], more[i][1:end], end - 1) for i, end in ((2, 2), (0, 6), (1, 4))]
    for part, rows in zip(parts, demo.evaluate_together(parts), strict=True):
        assert np.array_equal(rows, alone[part.sequence.number][1 : 1 + part.rows])
        part.sequence.rollback(len(part.sequence.tokens) - part.rows + 1)
    # Copies of another sequence, and saved states, have the same bits too.
    demo.sequences[0].adopt(demo.sequences[1], len(demo.sequences[1].tokens))
    assert np.array_equal(demo.sequences[0].evaluate(more[1][2:]), alone[1][2:])
    state, held = demo.sequences[2].saved(), list(demo.sequences[2].tokens)
    demo.sequences[1].restore(held, state)
    assert np.array_equal(demo.sequences[1].evaluate(more[2][2:]), alone[2][2:])


def test_an_aligned_prefill_takes_up_what_was_adopted_or_restored(demo: Target) -> None:
    first, second, third = demo.sequences
    text = some(400)
    fresh = first.prefill(text, aligned=True).copy()
    second.adopt(first, 300)
    third.restore(text, first.saved())
    for sequence, chunks in ((second, 144), (third, 16)):
        seen: list[tuple[int, int]] = []
        assert np.array_equal(sequence.prefill(text, aligned=True, progress=lambda *at, to=seen: to.append(at)), fresh)
        assert seen[0][0] == min(400, 400 - chunks + demo.n_batch)


def test_a_sequence_is_measured_and_probed(demo: Target, tmp_path: Path) -> None:
    sequence, other = demo.sequences[1], demo.sequences[0]
    other.prefill(some(40))
    sequence.prefill(some(20))
    calibration = Calibration.load(sequence, tmp_path)
    assert calibration.path is not None
    assert calibration.ensure_curve(sequence).seconds(1) > 0
    assert sequence.tokens == some(20)
    assert calibration.ensure_exact(sequence)
    assert other.tokens == some(40)
    assert Calibration.load(other, tmp_path).exact_sizes == calibration.exact_sizes
    with Target(DEMO, texts=2, n_ctx=480, threads=1, exact="on") as fewer:
        assert fewer.sequences[0].fingerprint != sequence.fingerprint  # passes of more sequences cost more


FAILING = [("llama", "after"), ("gemma3", "before"), ("mamba", "after"), ("qwen35", "after")]
FAILING_TOO = [("llama", "before"), ("gemma3", "after"), ("mamba", "before"), ("qwen35", "before")]


@pytest.mark.parametrize(
    ("kind", "when"), [*FAILING, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in FAILING_TOO)]
)
def test_a_failed_pass_leaves_every_sequence_as_it_was(
    kind: str, when: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny(folder, kind)
    decode = llama.llama_decode

    def failing(context: Any, batch: Any) -> int:
        if when == "after":
            decode(context, batch)
        return -3

    with opened(path) as shared:
        reference = Reference(path, n_ctx=512, n_batch=shared.n_batch, flash=0, threads=1, cache_type=0)
        texts = [some(80 + sequence.number, seed=sequence.number) for sequence in shared.sequences]
        for sequence, text in zip(shared.sequences, texts, strict=True):
            sequence.prefill(text)
        parts = [Part(sequence, [7, 8, 9], 2) for sequence in shared.sequences[1:]]
        with monkeypatch.context() as patched:
            patched.setattr(llama, "llama_decode", failing)
            with pytest.raises(TargetError, match="returned -3"):
                shared.evaluate_together(parts)
        assert [sequence.tokens for sequence in shared.sequences] == texts
        for sequence, text in zip(shared.sequences, texts, strict=True):
            assert sequence.owed == 0 or shared.drafts_alone
            (rows,) = shared.evaluate_together([Part(sequence, [5, 6], 2)])
            assert np.abs(rows - reference.rows([*text, 5, 6])[-2:]).max() < RIGHT
        reference.close()


def test_what_is_owed_is_evaluated_in_front_of_a_pass(folder: Path) -> None:
    path = tiny(folder, "mamba")
    with opened(path, n_ctx=600) as shared:
        reference = Reference(path, n_ctx=1024, n_batch=shared.n_batch, flash=0, threads=1, cache_type=0)
        texts = [some(n, seed=n) for n in (400, 150, 30, 90)]
        for sequence, text in zip(shared.sequences, texts, strict=True):
            sequence.prefill(text)
        for sequence, length in zip(shared.sequences, (350, 149, 30, 40), strict=True):
            sequence.rollback(length)
        assert [sequence.owed > shared.max_tokens // 3 for sequence in shared.sequences] == [True, False, False, False]
        parts = [Part(sequence, [5, 6, 7], 3) for sequence in shared.sequences]
        for part, rows in zip(parts, shared.evaluate_together(parts), strict=True):
            assert part.sequence.owed == 0
            assert np.abs(rows - reference.rows(part.sequence.tokens)[-3:]).max() < RIGHT
        reference.close()


def test_a_sequence_is_full_alone(shared: Target) -> None:
    full, other = shared.sequences[0], shared.sequences[1]
    for sequence in shared.sequences:
        sequence.prefill(some(shared.n_ctx, seed=sequence.number))
    # Room for the padding of a pass, in all sequences at once, and no more.
    size = MAX_EVALUATE // len(shared.sequences)
    for _ in range(len(shared.sequences)):
        shared.evaluate_together([Part(sequence, [5] * size, 0) for sequence in shared.sequences])
    with pytest.raises(ValueError, match="do not fit"):
        shared.evaluate_together([Part(other, [5], 1), Part(full, [5], 1)])
    assert [len(sequence.tokens) for sequence in shared.sequences] == [shared.n_ctx + MAX_EVALUATE] * 4
    full.rollback(10)
    assert np.isfinite(full.evaluate([5])).all()


def test_wrong_calls_change_nothing(shared: Target, demo: Target) -> None:
    one, two = shared.sequences[:2]
    one.prefill([1, 5, 6])
    wrong: list[tuple[list[Part], str]] = [
        ([], "one part"),
        ([Part(one, [5], 1), Part(one, [6], 1)], "one for each"),
        ([Part(one, [], 0)], "has tokens"),
        ([Part(one, [5], 2)], "for as many at most"),
        ([Part(one, [5] * (shared.max_tokens + 1), 1)], f"than the {shared.max_tokens}"),
        ([Part(one, [5] * 40, 40), Part(two, [5] * 40, 40)], f"and {shared.max_rows}"),
        ([Part(demo.sequences[0], [5], 1)], "of this model"),
    ]
    for parts, message in wrong:
        with pytest.raises(ValueError, match=message):
            shared.evaluate_together(parts)
    with pytest.raises(ValueError, match="has 3"):
        two.adopt(one, 4)
    for stranger in (demo.sequences[0], two):
        with pytest.raises(ValueError, match="the same context"):
            two.adopt(stranger, 0)
    assert (one.tokens, two.tokens) == ([1, 5, 6], [])


def test_what_no_sequence_saved_is_not_restored(shared: Target) -> None:
    one, two = shared.sequences[:2]
    one.prefill(some(50))
    for tokens in (some(49), some(one.n_ctx + 65)):
        two.prefill([1, 2, 3])
        with pytest.raises(TargetError):
            two.restore(tokens, one.saved())
        assert two.tokens == []
        assert np.isfinite(two.prefill([1, 2, 3])).all()
    two.clear()
    one.restore([], two.saved())
    assert one.tokens == []


def test_bad_arguments_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny(folder, "llama")
    for sequences in (0, -1, MAX_EVALUATE + 1):
        with pytest.raises(ValueError, match="texts"):
            opened(path, sequences=sequences)
    with pytest.raises(ValueError, match="exact"):
        opened(path, exact="yes")
    with pytest.raises(ValueError, match="n_ctx"):
        opened(path, n_ctx=2**30)
    monkeypatch.setattr(devices, "total_bytes", lambda *_: 2**24)
    with pytest.raises(ModelError, match="4 of them"):
        opened(path, n_ctx=8000)


def test_memory_is_divided_among_sequences(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    per_token = bytes_per_token(("f32", "f32"), 4, 2, (32, 32))
    monkeypatch.setattr(devices, "free_bytes", lambda *_: int(2 * per_token * 6000))
    sizes = {}
    for sequences in (1, 4):
        with opened(tiny(folder, "llama"), sequences=sequences, n_ctx=None) as shared:
            sizes[sequences] = shared.n_ctx
            assert sequences == 1 or any("4 times" in note for note in shared.notes)
    assert sizes[1] == pytest.approx(4 * sizes[4], abs=4 * GRAIN)


def test_sequences_end_with_their_target(folder: Path) -> None:
    with opened(tiny(folder, "llama")) as shared:
        sequence = shared.sequences[2]
        sequence.prefill([1, 2, 3])
    for call in (sequence.clear, lambda: sequence.evaluate([5]), lambda: sequence.rollback(1), sequence.saved):
        with pytest.raises(ValueError, match="closed"):
            call()
    with pytest.raises(ValueError, match="closed"):
        shared.evaluate_together([Part(sequence, [5], 1)])


def test_exact_texts_of_an_architecture_that_would_end_the_process_are_refused(folder: Path) -> None:
    path = tiny(folder, "minimax-01")
    with pytest.raises(ModelError, match="minimax-01"):
        opened(path, exact="on")
    with opened(path, sequences=3) as shared:
        shared.evaluate_together([Part(sequence, [5], 1) for sequence in shared.sequences])


def test_auto_takes_exact_settings_where_they_can_be_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def auto(kind: str, exact: str, flash: str) -> None:
        with opened(tiny(folder, kind), sequences=3, exact="auto", flash_attn="auto") as shared:
            assert (shared.exact, shared.flash_attn) == (exact, flash)
            shared.evaluate_together([Part(sequence, [5], 1) for sequence in shared.sequences])

    def refuse(shared: Target, n_ctx: int, setting: str) -> None:
        if setting == "exact":
            raise ModelError("no memory")
        open_context(shared, n_ctx, setting)

    auto("llama", "off", "auto")  # nothing is measured
    monkeypatch.setattr(Measured, "choose", lambda _, ways: ways[-1])
    auto("llama", "on", "off")
    auto("minimax-01", "off", "auto")
    open_context = Target._open_context
    monkeypatch.setattr(Target, "_open_context", refuse)
    auto("llama", "off", "auto")
