"""Tests of heads of several texts: their predictions do not depend on the other texts in a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures.files import write_model
from architectures.reference_head import HeadReference
from support.pools import use_pooled_cache

from ngramspec.backend import Part
from ngramspec.llama.head import ARCHITECTURES, Head, Heads, HiddenStates
from ngramspec.llama.target import Target

CLOSE = 0.05
"""Tolerance for rounding by half-precision caches and batch sizes; wrong states change logits by more than 1."""

FIRST = (("glm4moe", False), ("qwen35", True))
"""(architecture, True if sequences share a pool of cells): a KV cache, and a recurrent state with snapshots."""

CASES = pytest.mark.parametrize(
    ("name", "pooled"),
    [
        *FIRST,
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in product(sorted(ARCHITECTURES), (False, True))
            if case not in FIRST
        ),
    ],
)


@pytest.fixture
def file(name: str, tmp_path: Path) -> Path:
    return write_model(tmp_path / f"{name}.gguf", name, head=True)


@pytest.fixture
def reference(file: Path) -> Iterator[HeadReference]:
    """Yield the expected predictions of the head."""
    with closing(HeadReference(file)) as opened:
        yield opened


@contextmanager
def loaded(file: Path, texts: int = 3, **options: Any) -> Iterator[tuple[Target, Heads]]:
    with Target(file, texts=texts, ctx_size=400, threads=1, mtp=True, **{"exact": "off"} | options) as target:
        assert target.heads is not None
        yield target, target.heads


def random_text(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(10, 4000, length)]


def agree(head: Head, text: Sequence[int], reference: HeadReference) -> None:
    """Check the head's prediction for a text of which the target has evaluated all tokens except the last."""
    assert head.prefill(text) == pytest.approx(reference.rows(text)[-1], abs=CLOSE)
    assert head.owed == 0


@CASES
def test_heads_in_joint_batch_return_logits_of_each_text_alone(
    file: Path, reference: HeadReference, pooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pooled:
        use_pooled_cache(monkeypatch)
    with loaded(file) as (target, heads):
        texts = [random_text(seed, 9 + 4 * seed) for seed in range(3)]
        for sequence, text in zip(target.sequences, texts, strict=True):
            sequence.prefill(text[:-1])
        lengths = (1, 1, 1) if target.drafts_alone else (3, 1, 4)
        for turn in range(4):
            # The heads draft chains after their texts in the same pass.
            drafts = [random_text(100 + 10 * turn + i, n - 1) for i, n in enumerate(lengths)]
            parts = [
                Part(head, [*text[len(head.tokens) :], *draft], 1 + len(draft))  # type: ignore[arg-type]
                for head, text, draft in zip(heads.sequences, texts, drafts, strict=True)
            ]
            together = heads.evaluate_together(parts)
            for rows, text, draft in zip(together, texts, drafts, strict=True):
                wanted = reference.rows([*text, *draft], own=len(draft))[-1 - len(draft) :]
                assert rows == pytest.approx(wanted, abs=CLOSE)
            order = [1, 2, 0] if turn % 2 else [0, 1, 2]
            target.evaluate_together([Part(target.sequences[i], [texts[i][-1], *drafts[i]], lengths[i]) for i in order])
            for i, (sequence, head, text) in enumerate(zip(target.sequences, heads.sequences, texts, strict=True)):
                accepted = min(turn, len(drafts[i]))
                sequence.rollback(len(text) + accepted)
                head.rollback(len(text) + accepted)
                text += [*drafts[i][:accepted], 50 + turn + i]
        for head, text in zip(heads.sequences, texts, strict=True):
            agree(head, text, reference)


@CASES
def test_sequence_adopt_copies_hidden_states_for_its_head(
    file: Path, reference: HeadReference, pooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pooled:
        use_pooled_cache(monkeypatch)
    with loaded(file) as (target, heads):
        one, two, three = target.sequences
        old, text = random_text(1, 90), random_text(2, 120)
        for sequence, head in zip(target.sequences, heads.sequences, strict=True):
            sequence.prefill(old)
            head.prefill([*old, 5])
        one.prefill(text[:-1])
        agree(heads.sequences[0], text, reference)
        two.adopt(one, len(text) - 1)
        assert len(two.tokens) == len(text) - 1
        agree(heads.sequences[1], text, reference)
        three.adopt(one, len(text) - 1)
        one.prefill(old)
        agree(heads.sequences[2], text, reference)
        # A prefix can be copied as far as the memory can be cut.
        one.clear()
        one.adopt(three, 100)
        shorter = [*text[:100], 7]
        one.prefill(shorter[:-1])
        agree(heads.sequences[0], shorter, reference)
        state = three.save_state()
        two.restore(three.tokens, state)  # The head begins after the restored text.
        assert np.isfinite(heads.sequences[1].prefill(text)).all()


def test_hidden_states_adopt_copies_states_of_the_prefix() -> None:
    states, other = HiddenStates(4, n_states=8), HiddenStates(4, n_states=8)
    rows = np.arange(4 * 40, dtype=np.float32).reshape(40, 4)
    for start in (0, 15):
        states.copy_rows(rows.ctypes.data + start * 16, start, range(start, start + 15))
    other.adopt(states, 30)
    assert other.count_known(range(30)) == 30
    assert np.array_equal(other.before(23, 31), rows[22:30])
    other.adopt(states, 25)
    assert (other.first, other.count_known(range(30))) == (states.first, 25)
    other.adopt(states, 3)
    assert other.count_known(range(30)) == 0


@pytest.mark.parametrize("name", ["glm4moe"])
def test_target_prefill_of_long_prompt_keeps_latest_hidden_states(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded(file, 2, ubatch_size=64) as (target, _):
        states = HiddenStates(128, n_states=100)
        monkeypatch.setattr(target.sequences[0].cache, "states", states)
        text = random_text(1, 300)
        target.sequences[0].prefill(text)
        assert (states.first, states.count_known(text)) == (192, 300)
        target.sequences[1].adopt(target.sequences[0], 250)
        assert target._states[1].count_known(text[:250]) == 250


@pytest.mark.parametrize("name", ["glm4moe"])
def test_target_prefill_in_exact_mode_returns_no_hidden_states(file: Path) -> None:
    with loaded(file, 2, exact="on") as (target, heads):
        text = random_text(1, 40)
        for _ in target.sequences[0].reading(text[:-1]):
            pass
        assert target._states[0].count_known(text) == 0
        target.sequences[0].evaluate(text[-1:])
        assert target._states[0].count_known(text) == 40
        assert np.isfinite(heads.sequences[0].prefill([*text, 5])).all()
