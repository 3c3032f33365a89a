"""Tests of a model's NextN layer: for one text and for several, its predictions are those of a reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import product
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
from architectures.files import architecture
from architectures.reference_head import HeadReference
from support.machines import use_pooled_cache
from support.model_files import tiny

from ngramspec.backend import Part
from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting.draft_model.model import ModelDrafter
from ngramspec.llama import bindings, head
from ngramspec.llama.head import ARCHITECTURES, Head, Heads, HiddenStates
from ngramspec.llama.passes import Passes
from ngramspec.llama.sequence import CacheSequence
from ngramspec.llama.target import Target
from ngramspec.models.check import read_headers
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Step

FREE = make_fixed_curve({1: 1.0, 64: 1.0})
SETTINGS: dict[str, Any] = {"ctx_size": 400, "threads": 1, "exact": "off"}
CLOSE = 0.05
"""Tolerance for rounding by half-precision caches and batch sizes; wrong states change logits by more than 1."""


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with Target(architecture("qwen35", head=True), **SETTINGS, mtp=True) as loaded:
        yield loaded


@pytest.fixture
def sequence(target: Target) -> CacheSequence:
    """Return the empty sequence of the target."""
    target.sequences[0].clear()
    return target.sequences[0]


@pytest.fixture
def own(target: Target) -> Head:
    """Return the empty head of the target."""
    target.head.clear()
    return cast(Head, target.head)


@pytest.fixture
def name() -> str:
    """Return the architecture for tests that are not parametrized with one."""
    return "qwen35"


@pytest.fixture
def reference(name: str) -> Iterator[HeadReference]:
    """Yield the expected predictions of the head."""
    with closing(HeadReference(architecture(name, head=True))) as opened:
        yield opened


def agree(head: Head, text: Sequence[int], reference: HeadReference) -> None:
    """Check the head's prediction for a text of which the target has evaluated all tokens except the last."""
    assert head.prefill(text) == pytest.approx(reference.rows(text)[-1], abs=CLOSE)
    assert head.owed == 0


def test_head_rollback_by_single_tokens_restores_logits(
    sequence: CacheSequence, own: Head, reference: HeadReference
) -> None:
    text = list(range(20, 40))
    sequence.prefill(text[:-1])
    own.prefill(text)
    first = [own.evaluate([token])[0].copy() for token in (7, 8, 9)]
    for length in (2, 1, 0):
        own.rollback(20 + length)
        again = [own.evaluate([token])[0].copy() for token in (7, 8, 9)[length:]]
        assert np.array_equal(again, first[length:])
    many = own.evaluate([10, 11])
    assert many == pytest.approx(reference.rows([*text, 7, 8, 9, 10, 11], own=5)[-2:], abs=CLOSE)


def test_head_prefill_reuses_common_prefix_and_catches_up(
    sequence: CacheSequence, own: Head, reference: HeadReference
) -> None:
    text = list(range(20, 60))
    sequence.prefill(text[:-1])
    own.prefill(text)
    other = [*text[:25], *range(90, 100)]
    sequence.prefill(other[:-1])
    agree(own, other, reference)
    own.clear()
    assert (own.tokens, own.owed) == ([], 0)
    agree(own, other, reference)
    for token in range(110, 190):  # too many for one `evaluate`
        sequence.evaluate(other[-1:])
        other.append(token)
    agree(own, other, reference)


def test_head_without_hidden_states_starts_at_first_available_state(
    sequence: CacheSequence, own: Head, reference: HeadReference
) -> None:
    text = list(range(20, 60))
    sequence.prefill(text[:-1], aligned=True)  # returns no states
    assert np.isfinite(own.prefill(text)).all()
    sequence.evaluate(text[-1:])
    for token in (5, 6):
        own.evaluate([token])
        sequence.evaluate([token])
    late = own.evaluate([7])[0].copy()
    assert own.owed == 0
    sequence.clear()
    sequence.prefill([*text, 5, 6])
    own.clear()
    agree(own, [*text, 5, 6, 7], reference)
    assert not np.allclose(late, own.prefill([*text, 5, 6, 7]), atol=CLOSE)  # The head only saw the last tokens.


def test_head_prefill_of_long_text_skips_start_without_states(
    sequence: CacheSequence, own: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, kept = list(range(20, 320)), HiddenStates(128, n_states=64)
    monkeypatch.setattr(sequence.cache, "states", kept)
    monkeypatch.setattr(own, "_states", kept)
    sequence.prefill(text[:-1])
    assert kept.first > 100
    passes, decode = list[int](), own._heads.decode
    monkeypatch.setattr(
        own._heads, "decode", lambda feeds: passes.extend(len(feed.tokens) for feed in feeds) or decode(feeds)
    )
    assert np.isfinite(own.evaluate(text[:8])).all()
    assert passes == [8]
    late = own.prefill(text).copy()
    assert sum(passes[1:]) == len(text) - kept.first - 1
    own.clear()
    assert np.array_equal(own.prefill(text), late)


@pytest.mark.usefixtures("sequence")
def test_target_collects_hidden_states_only_for_drafting_decoder(
    target: Target, own: Head, reference: HeadReference
) -> None:
    text, (states,) = list(range(20, 60)), target._states
    plain = SpeculativeDecoder(target, drafter=None, exact="off", times=FREE)
    drafted = SpeculativeDecoder(target, drafter=ModelDrafter(own), exact="off", times=FREE)
    drafted.read(text)
    written = [token for step in plain.generate(text, max_tokens=8) for token in step.tokens]
    assert states.count_known([*text, *written]) == len(text) - 1  # The target evaluated the prompt's last token again.
    drafted.read(text)
    assert states.count_known([*text, *written]) == len(text)
    agree(own, [*text, 7], reference)


def test_head_after_tokens_without_states_starts_after_the_gap(
    target: Target, sequence: CacheSequence, own: Head
) -> None:
    text = list(range(20, 50))
    sequence.prefill(text[:-1])
    own.prefill(text)
    for wanted, count in ((False, 4), (True, 3)):
        target.feeds_head = wanted
        for token in range(count):
            sequence.evaluate(text[-1:])
            text.append(90 + token)
    late = own.prefill(text).copy()
    own.clear()
    assert np.array_equal(own.prefill(text), late)
    assert own.evaluate([5]).shape == (1, own.n_vocab)
    assert own.owed == 1


def test_target_with_head_returns_logits_of_target_without_head(target: Target, sequence: CacheSequence) -> None:
    text = list(range(20, 60))
    with Target(target.weights.path, **SETTINGS) as plain:
        assert plain.head is None
        assert sequence.fingerprint != plain.sequences[0].fingerprint  # Its passes return states.
        assert np.array_equal(plain.sequences[0].prefill(text), sequence.prefill(text))
        assert np.array_equal(plain.sequences[0].evaluate([5, 6, 7]), sequence.evaluate([5, 6, 7]))


def test_head_rejects_invalid_calls(target: Target, own: Head) -> None:
    for call in (lambda: own.prefill([]), lambda: own.evaluate([]), lambda: own.evaluate([1] * 65)):
        with pytest.raises(ValueError, match="tokens"):
            call()
    with pytest.raises(ValueError, match="cannot roll back to 1"):
        own.rollback(1)
    with pytest.raises(ValueError, match="n_seq above 1"):
        Target(target.weights.path, n_seq=2, mtp=True)


def test_target_after_interrupt_while_requesting_states_evaluates(
    sequence: CacheSequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Passes, "_request_states", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        sequence.evaluate([5])
    monkeypatch.undo()
    assert sequence.evaluate([5]).shape == (1, sequence.n_vocab)


def test_hidden_states_of_long_text_keep_latest_tokens(target: Target, sequence: CacheSequence) -> None:
    states, (kept,) = HiddenStates(128, n_states=8), target._states
    text: list[int] = []
    for size in (3, 4, 20, 5, 6, 7, 1):
        tokens = list(range(len(text), len(text) + size))
        sequence.evaluate(tokens)
        states.copy_rows(states.output_address(target._ctx), len(text), tokens)
        text += tokens
        truth = kept.before(1, len(text) + 1)
        assert states.count_known(text) == len(text)
        assert min(8, len(text)) <= len(text) - states.first <= 16
        assert np.array_equal(states.before(states.first + 1, len(text) + 1), truth[states.first :])
        assert not states.before(0, states.first + 1).any()
    assert states.count_known([*text[:-1], 4000]) == len(text) - 1
    assert states.count_known([4000]) == 0
    states.forget()
    assert states.count_known(text) == 0


def on_head(target: Target) -> SpeculativeDecoder:
    drafter = ModelDrafter(target.head, n_vocab=target.vocabulary.n_vocab)
    return SpeculativeDecoder(target, drafter=drafter, policy="fixed", draft_max=4, exact=target.exact, times=FREE)


def decoded(decoder: SpeculativeDecoder, **options: Any) -> tuple[list[int], list[Step]]:
    steps = list(decoder.generate([*range(40, 70)], max_tokens=50, **options))
    return [token for step in steps for token in step.tokens], steps


DRAFTING = ["qwen35", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("glm4moe", "qwen3next"))]
"""Models with a recurrent state with snapshots, a KV cache, and a recurrent state that is evaluated again."""


@pytest.mark.parametrize("name", DRAFTING)
def test_head_drafts_keep_texts_of_plain_decoding(name: str) -> None:
    path = architecture(name, head=True, half=False)
    with Target(path, **SETTINGS) as loaded, Target(path, **SETTINGS, mtp=True) as target:
        plain = SpeculativeDecoder(loaded, drafter=None, exact="off", times=FREE)
        for sampling in (None, Sampling(0.4, seed=3), Sampling(0.4, top_k=3, seed=5)):
            method = None if sampling is None else "coupled"
            text, steps = decoded(on_head(target), sampling=sampling, acceptance=method)
            assert text == decoded(plain, sampling=sampling)[0]
            # Some drafts fail at the first token, some at the second, and some later.
            assert {min(step.accepted, 2) for step in steps if step.drafted} == {0, 1, 2}
        # Rejection keeps only the distribution.
        text, steps = decoded(on_head(target), sampling=Sampling(0.7, seed=2), acceptance="rejection")
    assert len(text) == 50
    assert any(step.accepted for step in steps)


@pytest.mark.parametrize("name", DRAFTING)
def test_head_in_exact_mode_keeps_text_of_target_without_head(name: str) -> None:
    path = architecture(name, head=True, half=False)
    with Target(path, **SETTINGS | {"exact": "on"}) as loaded:
        expected = decoded(SpeculativeDecoder(loaded, drafter=None, exact="on"))[0]
    with Target(path, **SETTINGS | {"exact": "on", "mtp": True}) as loaded:
        text, steps = decoded(on_head(loaded))
    assert text == expected
    # If tokens are evaluated again after a refusal, exact mode drafts nothing.
    assert any(step.accepted for step in steps) == loaded.sequences[0].exact_rollback


def test_head_when_unavailable_reports_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    file = architecture("qwen35", head=True)
    with Target(tiny("llama"), ctx_size=64, threads=1, mtp=True) as plain:
        assert plain.head is None
        assert "its file contains no NextN layer" in plain.weights.notes[0]
    with monkeypatch.context() as patched:
        patched.setattr(head, "ARCHITECTURES", frozenset())
        assert head.head_missing(file) == "NextN layers of qwen35 are not supported"
    with monkeypatch.context() as patched:
        patched.setattr(head, "read_headers", lambda path: 2 * read_headers(path))
        assert "2 NextN layers" in head.head_missing(file)
    with monkeypatch.context() as patched:
        patched.setattr(bindings, "head_functions", lambda: None)
        assert "this build of llama-cpp-python" in head.head_missing(file)
        with Target(file, ctx_size=64, threads=1, mtp=True) as without:
            assert without.head is None
            assert np.isfinite(without.sequences[0].prefill([5, 6])).all()


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


@contextmanager
def loaded(name: str, texts: int = 3, **options: Any) -> Iterator[tuple[Target, Heads]]:
    with Target(
        architecture(name, head=True), texts=texts, ctx_size=400, threads=1, mtp=True, **{"exact": "off"} | options
    ) as target:
        assert target.heads is not None
        yield target, target.heads


def random_text(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(10, 4000, length)]


@CASES
def test_heads_in_joint_batch_return_logits_of_each_text_alone(
    name: str, reference: HeadReference, pooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pooled:
        use_pooled_cache(monkeypatch)
    with loaded(name) as (target, heads):
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
    name: str, reference: HeadReference, pooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pooled:
        use_pooled_cache(monkeypatch)
    with loaded(name) as (target, heads):
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


def test_target_prefill_of_long_prompt_keeps_latest_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded("glm4moe", 2, ubatch_size=64) as (target, _):
        states = HiddenStates(128, n_states=100)
        monkeypatch.setattr(target.sequences[0].cache, "states", states)
        text = random_text(1, 300)
        target.sequences[0].prefill(text)
        assert (states.first, states.count_known(text)) == (192, 300)
        target.sequences[1].adopt(target.sequences[0], 250)
        assert target._states[1].count_known(text[:250]) == 250


def test_target_prefill_in_exact_mode_returns_no_hidden_states() -> None:
    with loaded("glm4moe", 2, exact="on") as (target, heads):
        text = random_text(1, 40)
        for _ in target.sequences[0].reading(text[:-1]):
            pass
        assert target._states[0].count_known(text) == 0
        target.sequences[0].evaluate(text[-1:])
        assert target._states[0].count_known(text) == 40
        assert np.isfinite(heads.sequences[0].prefill([*text, 5])).all()
