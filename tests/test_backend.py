"""The contract of `ngramspec.backend`, on every runner: the tests for whoever writes another one.

Add a line to `RUNNERS`. What is expected of the texts needs no knowledge of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.cli_runner import DEMO
from support.decoder_loop import drive
from support.mock_target import MockTarget
from support.numpy_sampler import NumpySampler

from ngramspec.backend import Model, ModelBase, Progress, Vocabulary
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.sampling.distribution import Distribution
from ngramspec.sampling.settings import Sampling


class Bigrams(ModelBase):
    """The least that a model is: nothing measured, its logits a table of the last token, and perhaps no rollback."""

    max_batch = 16

    def __init__(self, *, can_rollback: bool) -> None:
        self.tokens: list[int] = []
        self.n_vocab, self.n_ctx, self.can_rollback = 30, 200, can_rollback
        self._table = (4 * np.random.default_rng(1).standard_normal((30, 30))).astype(np.float32)

    def prefill(
        self, tokens: Sequence[int], *, aligned: bool = False, progress: Progress | None = None
    ) -> NDArray[np.float32]:
        self.tokens = list(tokens)
        row: NDArray[np.float32] = self._table[tokens[-1]]
        return row

    def evaluate(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self.tokens += tokens
        return self._table[list(tokens)]

    def rollback(self, length: int) -> None:
        assert self.can_rollback or length == len(self.tokens), "nothing can be taken back"
        del self.tokens[length:]

    def clear(self) -> None:
        self.tokens.clear()


class Letters:
    """The least that a vocabulary is."""

    n_vocab = 30

    def tokenize(self, text: str, *, special: bool = False, add_bos: bool = True) -> list[int]:
        return [ord(letter) - 97 for letter in text]

    def piece(self, token: int) -> bytes:
        return bytes([97 + token])

    def is_eog(self, token: int) -> bool:
        return False

    def sampler(self, sampling: Sampling) -> NumpySampler:
        return NumpySampler(sampling, self.n_vocab)


def llama(sequence: bool) -> tuple[Model, Vocabulary]:
    """A model of its own, or one of several texts in a cache, while the others hold something else."""
    pytest.importorskip("llama_cpp")
    from ngramspec.llama.target import Target

    if not sequence:
        target = Target(DEMO, n_ctx=256, threads=1, exact="on")
        return target, target
    shared = Target(DEMO, texts=3, n_ctx=256, threads=1, exact="on")
    shared.sequences[0].prefill([1, 2, 3])
    shared.sequences[2].prefill([6] * 50)
    return shared.sequences[1], shared


RUNNERS: dict[str, Callable[[], tuple[Model, Vocabulary]]] = {
    "no rollback": lambda: (Bigrams(can_rollback=False), Letters()),
    "rollback": lambda: (Bigrams(can_rollback=True), Letters()),
    "mock": lambda: ((mock := MockTarget(60)), mock),
    "mock, replays": lambda: ((mock := MockTarget(60, replays=True)), mock),
    "llama": lambda: llama(sequence=False),
    "llama, a sequence": lambda: llama(sequence=True),
}


@pytest.fixture(scope="module", params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> Iterator[tuple[Model, Vocabulary]]:
    model, vocabulary = RUNNERS[request.param]()
    yield model, vocabulary
    if hasattr(vocabulary, "close"):
        vocabulary.close()


@pytest.fixture
def model(runner: tuple[Model, Vocabulary]) -> Model:
    runner[0].clear()
    return runner[0]


PROMPT = [5, 6, 7, 8, 9, 6, 7]
MORE = [8, 9, 6, 7]
PENALISED = Sampling(1.0, seed=4, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.2)
SAMPLINGS = [Sampling(), Sampling(0.8, seed=3), PENALISED]


def test_tokens_have_pieces(runner: tuple[Model, Vocabulary]) -> None:
    _, vocabulary = runner
    tokens = vocabulary.tokenize("abba", add_bos=False)
    assert b"".join(map(vocabulary.piece, tokens)).strip() == b"abba"
    assert all(0 <= token < vocabulary.n_vocab and not vocabulary.is_eog(token) for token in tokens)


def test_a_sampler_draws_from_its_law(runner: tuple[Model, Vocabulary]) -> None:
    model, vocabulary = runner
    row = model.prefill(PROMPT).copy()
    for sampling in SAMPLINGS:
        sampler, judge = vocabulary.sampler(sampling), vocabulary.sampler(sampling)
        sampler.begin(PROMPT)
        judge.begin(PROMPT)
        law = judge.distribution(row)
        seen: list[Distribution] = []
        token = sampler.draw(row, len(PROMPT), seen)
        assert law.probability(token) > 0
        assert law.probs.sum() == pytest.approx(1)
        assert all((one.ids == law.ids).all() and (one.probs == law.probs).all() for one in seen)
        assert not sampling.greedy or law.ids.tolist() == [int(row.argmax())]


def test_a_batch_says_what_single_tokens_say(model: Model) -> None:
    """Up to rounding: kernels differ by size, and a sum of some thousand float32 in another order by 1e-4."""
    last = model.prefill(PROMPT[:1]).copy()
    assert (last.shape, last.dtype) == ((model.n_vocab,), np.float32)
    singles = [last, *(model.evaluate([token])[0].copy() for token in PROMPT[1:])]
    model.clear()
    np.testing.assert_allclose(model.prefill(PROMPT), singles[-1], atol=1e-2)
    model.clear()
    model.prefill(PROMPT[:1])
    rows = model.evaluate(PROMPT[1:])
    assert (rows.shape, rows.dtype) == ((len(PROMPT) - 1, model.n_vocab), np.float32)
    assert list(model.tokens) == PROMPT
    np.testing.assert_allclose(rows, singles[1:], atol=1e-2)


def test_a_prompt_is_read_anew_or_taken_up_and_says_the_same(model: Model) -> None:
    fresh = model.prefill(PROMPT).copy()
    model.evaluate(MORE)
    np.testing.assert_allclose(model.prefill(PROMPT), fresh, atol=1e-2)
    assert list(model.tokens) == PROMPT
    aligned = model.prefill(PROMPT, aligned=True).copy()
    model.clear()
    assert list(model.tokens) == []
    assert (model.prefill(PROMPT, aligned=True) == aligned).all()


def test_what_was_taken_back_leaves_no_trace(model: Model) -> None:
    model.prefill(PROMPT)
    expected = model.evaluate(MORE).copy()
    model.rollback(len(PROMPT + MORE))
    assert list(model.tokens) == PROMPT + MORE
    for kept in range(len(MORE)) if model.can_rollback else ():
        model.prefill(PROMPT)
        model.checkpoint()
        model.evaluate([*MORE[:kept], 20, 21, 22])
        model.rollback(len(PROMPT) + kept)
        assert list(model.tokens) == PROMPT + MORE[:kept]
        assert model.owed in (range(kept + 1) if model.replays else (0,))
        np.testing.assert_allclose(model.evaluate(MORE[kept:]), expected[kept:], atol=1e-2)
        assert model.owed == 0


@pytest.fixture(scope="module")
def decoders(runner: tuple[Model, Vocabulary], tmp_path_factory: pytest.TempPathFactory) -> list[SpeculativeDecoder]:
    """Without drafts and with them, after what has to be measured for that."""
    model, vocabulary = runner
    options: dict[str, Any] = {"vocabulary": vocabulary, "policy": "fixed", "draft_max": 4}
    options["exact"] = "off" if model.replays else "on"
    plain = SpeculativeDecoder(model, drafter=None, calibration_folder=tmp_path_factory.mktemp("costs"), **options)
    list(plain.generate(PROMPT, max_tokens=2))
    return [plain, SpeculativeDecoder(model, drafter="ngram", calibration=plain.calibration, **options)]


def test_drafts_do_not_change_the_text(decoders: list[SpeculativeDecoder]) -> None:
    plain, drafted = decoders
    for sampling in SAMPLINGS:
        expected, _ = drive(plain, PROMPT, max_tokens=30, sampling=sampling)
        text, steps = drive(drafted, PROMPT, max_tokens=30, sampling=sampling)
        assert text == expected
        assert plain.target.can_rollback or not any(step.drafted for step in steps)


def test_a_model_alone_is_not_enough() -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        SpeculativeDecoder(Bigrams(can_rollback=True))
