"""Tests of the device of this build, GPU or CPU: texts, rollbacks, drafts, layers on two devices, and batch sizes.

    pytest -m gpu                   # on a CPU, where the other kinds of memory are tested by `test_model_contract.py`
    pytest -m gpu --exhaustive      # on a GPU, whose shaders may take longer to compile than the limit of a test

Every test compares `ngramspec` with llama.cpp on the same device, in a plain loop that never rolls back or in a pass
of the same shape. The comparison of rows in passes of constant width also runs on fake models, whose faults it must
find. The workflow `vulkan.yml` runs the tests on Mesa's Vulkan driver for CPUs, so all models are tiny, and batches
have at most 8 tokens: larger ones use other kernels, whose rounding is coarser. They passed on CUDA (H200); those of
constant width have not been run there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from architectures.files import architecture
from architectures.oracle import Oracle
from architectures.reference import Reference, Rows
from support.cli_runner import DEMO
from support.mock_target import MockTarget

from ngramspec.backend import Logits, Model, Part
from ngramspec.cost.bits import COMPARED, probe
from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.llama.target import Target
from ngramspec.llama.trial import N_COMPARED, REAL, random_tokens
from ngramspec.sampling.settings import Sampling

pytestmark = pytest.mark.gpu

KINDS = ("llama", "qwen3moe", "gemma3", "mamba", "jamba", "falcon-h1", "lfm2", "nemotron_h", "qwen35")
"""Architectures by memory: attention twice, a sliding window, states without snapshots (3) and with snapshots (3)."""

ALL = 99
LONGEST = 6  # maximum draft length in tokens
PROMPT = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return"

CLOSE = 0.05
"""Maximum difference of two logits whose order rounding may change; half precision moved logits by up to 0.01."""


@pytest.fixture(
    scope="module", params=["lfm2", *(pytest.param(k, marks=pytest.mark.exhaustive) for k in KINDS if k != "lfm2")]
)
def path(request: pytest.FixtureRequest) -> Path:
    return architecture(request.param)


@pytest.fixture(scope="module")
def target(path: Path) -> Iterator[Target]:
    """Return a target with all layers on the device."""
    with Target(path, ctx_size=256, gpu_layers=ALL, threads=1, exact="off", draft_max=LONGEST) as opened:
        yield opened


@pytest.fixture
def empty(target: Target) -> Target:
    target.sequences[0].clear()
    return target


def plain(path: Path, prompt: Sequence[int], count: int, layers: int = ALL) -> tuple[list[int], Rows]:
    """Return the text of a plain loop on the same device, and the logits that decided on each token."""
    settings = {"n_ctx": 320, "n_batch": 256, "flash": -1, "threads": 1}
    with closing(Reference(path, **settings, gpu_layers=layers)) as reference:
        return reference.text(prompt, count)


def check(text: Sequence[int], expected: Sequence[int], rows: Rows) -> None:
    """Fail at the first difference of two texts, unless the logits of the two tokens are as close as rounding."""
    assert len(text) == len(expected)
    different = next((i for i, pair in enumerate(zip(text, expected, strict=True)) if len({*pair}) > 1), None)
    if different is not None:
        row = rows[different]
        assert abs(row[text[different]] - row[expected[different]]) < CLOSE, (different, text, expected)


def generate(target: Target, prompt: Sequence[int], count: int, sampling: Sampling, **options: object) -> list[int]:
    """Return the tokens of a generation whose passes cost the same for all sizes."""
    times = make_fixed_curve({1: 1.0, 64: 1.0})
    decoder = SpeculativeDecoder(target, exact="off", times=times, draft_max=LONGEST, **options)
    steps = decoder.generate(prompt, max_tokens=count, sampling=sampling)
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("layers", [ALL, 3, 0])
def test_target_with_layers_on_device_keeps_text_of_plain_loop(layers: int) -> None:
    with Target(DEMO, ctx_size=256, gpu_layers=layers, threads=1, exact="off") as target:
        on_gpus = sum(count for name, count in target.weights.layers.items() if name != "CPU")
        assert on_gpus == (min(layers, target.weights.layers.total()) if target.weights.on_gpu else 0)
        prompt = target.vocabulary.tokenize(PROMPT)
        expected, rows = plain(DEMO, prompt, 24, layers)
        for options in ({"drafter": None}, {"policy": "fixed"}, {"policy": "cost"}):
            check(generate(target, prompt, 24, Sampling(0.0), **options), expected, rows)


def test_drafts_on_device_keep_sampled_text() -> None:
    with Target(DEMO, ctx_size=256, gpu_layers=ALL, threads=1, exact="off") as target:
        if probe(target.sequences[0], sizes=(1, 2)).class_of(1) == (1,):
            # On CUDA, rounding then decides between two tokens of a sampled text now and then.
            pytest.skip("no two batch sizes have the same bits on this device")
        prompt = target.vocabulary.tokenize(PROMPT)
        sampling = Sampling(0.8, seed=7)
        expected = generate(target, prompt, 16, sampling, drafter=None)
        assert generate(target, prompt, 16, sampling, policy="fixed") == expected


def test_rejected_drafts_on_each_memory_kind_keep_text_of_plain_loop(path: Path, empty: Target) -> None:
    prompt = random_tokens(empty.vocabulary.n_vocab, 1, 80)
    expected, rows = plain(path, prompt, 24)
    oracle = Oracle(lambda _: expected, empty.vocabulary.n_vocab)
    check(generate(empty, prompt, 24, Sampling(0.0), drafter=oracle, policy="fixed"), expected, rows)


def test_evaluate_together_returns_logits_of_each_sequence_alone() -> None:
    """CUDA rounds a pass over three tokens differently from a pass over one, by up to 0.12."""
    with Target(DEMO, texts=3, ctx_size=256, gpu_layers=ALL, threads=1, exact="off") as target:
        prompts = [random_tokens(target.vocabulary.n_vocab, seed, 20 + seed) for seed in range(3)]
        for sequence, prompt in zip(target.sequences, prompts, strict=True):
            sequence.prefill(prompt)
        together = target.evaluate_together([Part(sequence, [9], 1) for sequence in target.sequences])
        together = [rows.copy() for rows in together]
    with closing(Reference(DEMO, n_ctx=320, n_batch=256, flash=-1, threads=1, gpu_layers=ALL)) as reference:
        for prompt, rows in zip(prompts, together, strict=True):
            np.testing.assert_allclose(rows[0], reference.rows([*prompt, 9])[-1], atol=4 * CLOSE)


def after(target: Target, length: int, token: int, junk: Sequence[int], following: int) -> Logits:
    """Return the logits of a token that follows `token`, after a draft of `junk` between them was rejected."""
    target.sequences[0].rollback(length)
    target.sequences[0].checkpoint()
    target.sequences[0].evaluate([token, *junk])
    target.sequences[0].rollback(length + 1)
    return target.sequences[0].evaluate([following])[-1].copy()


@pytest.mark.parametrize("size", [1, 3])
def test_rollback_of_rejected_draft_restores_exact_logits(size: int, empty: Target) -> None:
    text = random_tokens(empty.vocabulary.n_vocab, 1, 80)
    empty.sequences[0].prefill(text)
    empty.sequences[0].checkpoint()
    first = empty.sequences[0].evaluate([11]).copy()
    for seed in range(3):
        junk, other = (random_tokens(empty.vocabulary.n_vocab, 10 * seed + i, size) for i in range(2))
        rows = after(empty, len(text), 11, junk, 12), after(empty, len(text), 11, other, 12)
        assert rows[0].tobytes() == rows[1].tobytes()
        empty.sequences[0].rollback(len(text))
        assert empty.sequences[0].owed == 0
        assert empty.sequences[0].evaluate([11]).tobytes() == first.tobytes()


def test_cache_checkpoint_before_draft_stays_where_the_state_is(empty: Target) -> None:
    if not empty.sequences[0].replays:
        pytest.skip("this memory needs no checkpoint")
    empty.sequences[0].prefill(random_tokens(empty.vocabulary.n_vocab, 1, 20))
    with mock.patch.object(llama, "llama_state_seq_get_data_ext", wraps=llama.llama_state_seq_get_data_ext) as saved:
        empty.sequences[0].checkpoint()
    assert [call.args[-1] for call in saved.mock_calls] == [3 if empty.weights.on_gpu else 1]


def test_trial_agreeing_sizes_match_those_of_target() -> None:
    with Target(DEMO, ctx_size=256, gpu_layers=ALL, threads=1, exact="off") as target:
        with target.trials.trial("fast") as trial:
            largest = trial.largest_agreeing(0)
        text = random_tokens(target.vocabulary.n_vocab, 0, REAL + COMPARED[-1])
        target.sequences[0].evaluate(text[:REAL])
        tail = text[REAL:]
        singles = np.concatenate([target.sequences[0].evaluate([token]).copy() for token in tail[:N_COMPARED]])
        for size in COMPARED[1 : COMPARED.index(largest) + 2]:
            target.sequences[0].rollback(REAL)
            rows = target.sequences[0].evaluate(tail[:size])[:N_COMPARED]
            assert (size <= largest) == (rows.tobytes() == singles[: len(rows)].tobytes()), size


class ConstantWidth:
    """A model whose passes all have `width` rows: random tokens follow the given ones, as in wrong drafts.

    So `probe` of it puts numbers of given tokens into one class if their rows have the same bits.
    """

    def __init__(self, model: Model, width: int) -> None:
        self.n_vocab, self.n_ctx = model.n_vocab, model.n_ctx - width
        self.clear, self.prefill = model.clear, model.prefill
        self.checkpoint, self.rollback = model.checkpoint, model.rollback
        self._model, self._width, self._rng = model, width, np.random.default_rng(width)

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        drafted = self._rng.integers(0, self.n_vocab, self._width - len(tokens)).tolist()
        length = len(self._model.tokens) + len(tokens)
        rows = self._model.evaluate([*tokens, *drafted])[: len(tokens)].copy()
        self.rollback(length)
        return rows


def classes(model: Any, depth: int) -> tuple[tuple[int, ...], ...]:
    return probe(model, (depth,), ROWS).classes


WIDTH = 8
ROWS = tuple(range(1, WIDTH + 1))
EACH = tuple((n,) for n in ROWS)
INSIDE, CROSSING = 96, 246
"""Depths before 16 compared tokens: inside of a block of 256 cells, over which llama.cpp's attention is computed, and
before the end of one."""

Fault = Callable[[Sequence[int], int, int], int]
"""(tokens of a pass, index of a row, tokens in the cache before) -> kernel of the row, of which 0 is exact."""


class FakeModel(MockTarget):
    def __init__(self, kernel: Fault) -> None:
        super().__init__()
        self._kernel = kernel

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        start = len(self.tokens)
        noise = [1e-3 * self._kernel(tokens, i, start) for i in range(len(tokens))]
        return super().evaluate(tokens) + np.array(noise, np.float32)[:, None]


@pytest.mark.parametrize(
    ("kernel", "depth", "of_changing_width", "of_constant_width"),
    [
        pytest.param(lambda *_: 0, CROSSING, (ROWS,), (ROWS,), id="exact"),
        pytest.param(lambda tokens, *_: len(tokens), CROSSING, EACH, (ROWS,), id="width"),
        pytest.param(lambda tokens, i, _: sum(tokens) - tokens[i], INSIDE, EACH, EACH, id="other rows"),
        pytest.param(lambda tokens, *_: tokens[-1], INSIDE, EACH, EACH, id="last row"),
        pytest.param(lambda _, i, __: i > 4, INSIDE, (ROWS[:5], *EACH[5:]), (ROWS[:5], *EACH[5:]), id="sixth row"),
        pytest.param(lambda tokens, _, start: start + len(tokens) > 256, INSIDE, (ROWS,), (ROWS,), id="inside a block"),
        pytest.param(
            lambda tokens, _, start: start + len(tokens) > 256,
            CROSSING,
            ((1, 2, 5), (3,), (4, 8), (6,), (7,)),
            ((1, 3), (2, 4), *EACH[4:]),
            id="end of a block",
        ),
    ],
)
def test_classes_of_fake_model_name_numbers_of_rows_that_differ(
    kernel: Fault,
    depth: int,
    of_changing_width: tuple[tuple[int, ...], ...],
    of_constant_width: tuple[tuple[int, ...], ...],
) -> None:
    assert classes(FakeModel(kernel), depth) == of_changing_width
    assert classes(ConstantWidth(FakeModel(kernel), WIDTH), depth) == of_constant_width


@pytest.mark.parametrize("depth", [INSIDE, CROSSING])
@pytest.mark.parametrize("kind", ["demo", *(pytest.param(k, marks=pytest.mark.exhaustive) for k in KINDS[:3])])
def test_rows_of_constant_width_have_same_bits_whatever_is_drafted(kind: str, depth: int) -> None:
    path = DEMO if kind == "demo" else architecture(kind)
    with Target(path, ctx_size=512, gpu_layers=ALL, threads=1, exact="off") as target:
        found = classes(ConstantWidth(target.sequences[0], WIDTH), depth)
        if depth == CROSSING and target.weights.on_gpu and found != (ROWS,):
            pytest.xfail(f"not known for GPUs: classes {found} where drafts cross a block's end")
    assert found == (ROWS,)
