"""The contract of `ngramspec.backend`, on every runner: the tests for authors of another one.

Add a function to `RUNNERS`. A random walk does everything that the contract allows, calls that fail included, and
compares all logits with those of a fresh evaluation of the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import llama_cpp.llama_cpp as library
import numpy as np
import pytest
from architectures.files import write_model
from architectures.reference import Reference
from hypothesis import settings
from numpy.typing import NDArray
from support.cli_runner import DEMO
from support.decoder_loop import drive
from support.mock_shared import MockShared
from support.mock_target import MockTarget
from test_recipes import follow

from ngramspec.backend import ExactnessMode, ModelBase, Part, Vocabulary
from ngramspec.data import TargetError
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.llama.target import Target
from ngramspec.sampling.distribution import Distribution
from ngramspec.sampling.settings import Sampling

Rows = NDArray[np.float32]


@dataclass(slots=True)
class Runner:
    """A runner under test."""

    models: Sequence[Any]  # its sequences, or the only model
    vocabulary: Any  # its vocabulary
    rows: Callable[[Sequence[int]], Rows]  # returns the logits after each token of a text by a new evaluation
    tolerance: float = 1e-6  # maximum difference of a logit by rounding; wrong logits of the tiny models differ by 0.1
    shared: Any = None  # model that evaluates several of the models together; `None` means a single model
    checks: bool = True  # true if it rejects wrong calls; the smallest example does not
    can_fail: bool = False  # true if its decode calls can be made to fail
    rolls_back_anywhere: bool = True  # true if it can roll back to a position before the last checkpoint
    room: int = 110  # maximum length of a text in the walk, in tokens


# --------------------------------------------------------------------------- runners


def recipe() -> Runner:
    """Return the smallest runner, which the recipe in ngramspec/README.md makes; it checks no arguments."""
    model, reference = (follow("Add a backend")["runner"] for _ in range(2))
    return Runner([model], model, reference.evaluate, checks=False)


def mocked(**options: Any) -> Runner:
    model = MockTarget(60, n_ctx=300, **options)
    anywhere = not options.get("replays", False)
    return Runner([model], model, lambda tokens: mock_rows(model, tokens), rolls_back_anywhere=anywhere)


def mocked_sequences() -> Runner:
    shared = MockShared(4, n_vocab=60, n_ctx=300)
    first = shared.sequences[0]
    return Runner(shared.sequences, first, lambda tokens: mock_rows(first, tokens), shared=shared)


def mock_rows(model: MockTarget, tokens: Sequence[int]) -> Rows:
    return np.array([model.row(tokens[: i + 1]) for i in range(len(tokens))])


def llama(
    stack: ExitStack, path: Path, texts: int | None = None, *, tolerance: float = 1e-3, room: int = 110, **options: Any
) -> Runner:
    """Open a model in llama.cpp; its reference never rolls back and shares no code with `ngramspec.llama`."""
    settings: dict[str, Any] = {
        "ctx_size": room + 50,
        "threads": 1,
        "exact": "off",
        "flash_attn": "off",
        "draft_max": 6,
    }
    settings |= {"cache_type_k": "f32", "cache_type_v": "f32"} | options
    target = stack.enter_context(Target(path, texts=texts, **settings))
    flash = {"off": 0, "auto": -1}[settings["flash_attn"]]
    reference = Reference(path, n_ctx=room + 400, n_batch=target.n_batch, flash=flash, threads=1, cache_type=0)
    stack.enter_context(closing(reference))
    shared = target if texts else None
    return Runner(target.sequences, target.vocabulary, reference.rows, tolerance, shared, can_fail=True, room=room)


def tiny(kind: str, texts: int | None = None, **options: Any) -> Callable[[ExitStack, Path], Runner]:
    """Return a function that opens a tiny model in single precision, so that errors stand out from rounding."""

    def make(stack: ExitStack, folder: Path) -> Runner:
        path = folder / f"{kind}.gguf"
        return llama(stack, path if path.exists() else write_model(path, kind, half=False), texts, **options)

    return make


EXACT: dict[str, Any] = {"exact": "on"}
RUNNERS: dict[str, Callable[[ExitStack, Path], Runner]] = {
    "recipe": lambda *_: recipe(),
    "mock": lambda *_: mocked(),
    "mock, no rollback": lambda *_: mocked(fail_rollback=True),
    "mock, replays": lambda *_: mocked(replays=True),
    "mock, sequences": lambda *_: mocked_sequences(),
    "attention": tiny("llama", ctx_size=300, flash_attn="auto", tolerance=0.02),
    "attention, sequences": tiny("llama", 4),
    "MLA, sequences": tiny("deepseek2", 4, **EXACT),
    "sliding window": tiny("gemma3"),
    "sliding window, sequences": tiny("gemma3", 4, room=190),  # The texts together exceed its cells.
    "recurrent": tiny("mamba", ctx_size=300),
    "recurrent, sequences": tiny("mamba", 4, **EXACT),
    "hybrid with snapshots": tiny("qwen35"),
    "hybrid with snapshots, sequences": tiny("qwen35", 4),
    "hybrid": tiny("jamba"),
}
MORE: dict[str, Callable[[ExitStack, Path], Runner]] = {
    "demo": lambda stack, _: llama(stack, DEMO, tolerance=1.0),  # quantised: kernels differ by batch size
    "demo, sequences": lambda stack, _: llama(stack, DEMO, 3, tolerance=1.0, exact="on"),
}
MORE |= {
    f"{kind}, {exact}, {texts}": tiny(kind, texts, exact=exact)
    for kind in ("llama", "deepseek2", "gemma3", "mamba", "jamba", "qwen35", "lfm2", "deepseek4", "qwen4exp")
    for exact in ("on", "off")
    for texts in (None, 4)
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=[*RUNNERS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)])
def opened(request: pytest.FixtureRequest, folder: Path) -> Iterator[Runner]:
    with ExitStack() as stack:
        yield (RUNNERS | MORE)[request.param](stack, folder)


@pytest.fixture
def runner(opened: Runner) -> Runner:
    for model in opened.models:
        model.clear()
        assert list(model.tokens) == []
    return opened


# --------------------------------------------------------------------------- texts and logits


class Walk:
    """A random walk over the sequences of a runner."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.worst = runner, 0.0  # largest difference of a logit to the reference
        self.texts: list[list[int]] = [[] for _ in runner.models]  # expected tokens of each sequence
        self.adopted = 0  # number of times a sequence copied tokens of another one
        self._rng = random.Random(3)
        self._saved: list[tuple[list[int], bytes]] = []
        self.actions: list[tuple[Callable[[int], None], int]] = [(self._prefill, 12), (self._alone, 12)]
        self.actions += [(self._clear, 6)]
        if runner.models[0].can_rollback and runner.rolls_back_anywhere:
            self.actions += [(self._take_back, 6)]
        if runner.checks:
            self.actions += [(self._wrong_call, 6)]
        if runner.shared is not None:
            self.actions += [(self._together, 45), (self._adopt, 10), (self._save, 6), (self._restore, 6)]
        if runner.can_fail:
            self.actions += [(self._fail, 6)]

    def walk(self, steps: int) -> None:
        """Do every action once and then random ones; compare the tokens of all sequences after each."""
        every = [*[self._prefill] * len(self.texts), *(action for action, _ in self.actions)]
        for action in [*every, *self._rng.choices(*zip(*self.actions, strict=True), k=steps)]:
            number = self._rng.randrange(len(self.texts))
            (action if self.texts[number] else self._prefill)(number)
            for model, text in zip(self.runner.models, self.texts, strict=True):
                assert list(model.tokens) == text, action

    def _new(self, count: int) -> list[int]:
        most = min(4000, self.runner.models[0].n_vocab)
        return [self._rng.randrange(min(10, most // 2), most) for _ in range(count)]

    def _check(self, number: int, rows: Rows) -> None:
        """Compare the last rows of a text."""
        assert rows.dtype == np.float32
        assert rows.shape[1:] == (self.runner.models[0].n_vocab,)
        if len(rows):
            expected = self.runner.rows(self.texts[number])[-len(rows) :]
            self.worst = max(self.worst, float(np.abs(rows - expected).max()))

    def _drop(self, number: int, count: int) -> None:
        model, text = self.runner.models[number], self.texts[number]
        if model.can_rollback:
            model.rollback(len(text) - count)
            del text[len(text) - count :]

    def _prefill(self, number: int) -> None:
        other = self._rng.choice(self.texts)
        text = [
            *other[: self._rng.randrange(len(other) + 1)],
            *self._new(self._rng.choice((1, 20, self.runner.room * 3 // 4))),
        ][20 - self.runner.room :]
        progress: list[tuple[int, int]] = []
        aligned = self._rng.random() < 0.3
        row = self.runner.models[number].prefill(text, aligned=aligned, progress=lambda *at: progress.append(at))
        assert progress[-1:] == [(len(text), len(text))] or not self.runner.checks
        self.texts[number] = text
        self._check(number, row[np.newaxis])

    def _alone(self, number: int) -> None:
        model, tokens = self.runner.models[number], self._new(self._rng.randint(1, 5))
        if model.replays or self._rng.random() < 0.5:
            model.checkpoint()
        rows = model.evaluate(tokens)
        assert model.owed == 0
        self.texts[number] += tokens
        self._check(number, rows)
        kept = self._rng.randint(0, len(tokens))
        self._drop(number, len(tokens) - kept)
        if kept or model.replays:  # Without a checkpoint, the first token of a pass cannot always be rolled back.
            assert model.owed in (range(kept + 1) if model.replays else (0,))
        if len(model.tokens) > self.runner.room:
            self._clear(number)

    def _take_back(self, number: int) -> None:
        self._drop(number, self._rng.randrange(len(self.texts[number]) + 1))

    def _clear(self, number: int) -> None:
        self.runner.models[number].clear()
        self.texts[number] = []

    def _parts(self) -> list[Part]:
        ready = [number for number, text in enumerate(self.texts) if 0 < len(text) < self.runner.room]
        chosen = self._rng.sample(ready, self._rng.randint(min(1, len(ready)), len(ready)))
        parts = []
        for number in chosen:
            tokens = self._new(self._rng.choice((1, 1, 1, 2, 4, 7)))
            parts.append(Part(self.runner.models[number], tokens, self._rng.randint(0, len(tokens))))
        return parts

    def _together(self, _number: int) -> None:
        parts = self._parts()
        for part, rows in zip(parts, self.runner.shared.evaluate_together(parts) if parts else (), strict=True):
            self.texts[part.sequence.number] += part.tokens
            assert len(rows) == part.rows
            self._check(part.sequence.number, rows)
        for part in parts:
            if self._rng.random() < 0.6:
                self._drop(part.sequence.number, self._rng.randrange(len(part.tokens)))

    def _adopt(self, number: int) -> None:
        other = self._rng.choice([other for other in self.runner.models if other.number != number])
        held, model = len(other.tokens), self.runner.models[number]
        length = self._rng.choice((held, held, max(0, held - 3), self._rng.randint(0, held)))
        model.adopt(other, length)
        self.texts[number] = other.tokens[: len(model.tokens)]
        assert len(model.tokens) <= length
        self.adopted += bool(model.tokens)

    def _save(self, number: int) -> None:
        self._saved = [*self._saved, (list(self.texts[number]), self.runner.models[number].save_state())][-4:]

    def _restore(self, number: int) -> None:
        if self._saved:
            tokens, state = self._rng.choice(self._saved)
            self.runner.models[number].restore(tokens, state)
            self.texts[number] = list(tokens)

    def _wrong_call(self, number: int) -> None:
        model = self.runner.models[number]
        outside = self._rng.choice((-1, model.n_vocab, 10**6))
        named = f"token {outside} is .* vocabulary of {model.n_vocab}"
        wrong: list[tuple[Callable[[Any], object], Any, str]] = [
            (model.evaluate, [], "64"),
            (model.evaluate, [5] * 65, "64"),
            (model.evaluate, [5, outside, 6], named),
            (model.prefill, [], f"1 to {model.n_ctx} tokens, got 0"),
            (model.prefill, [*self.texts[number], outside, 5], named),
            (model.prefill, [5] * (model.n_ctx + 1), f"1 to {model.n_ctx} tokens"),
            (model.rollback, -1, "roll ?back to -1"),
            (model.rollback, 10**6, "roll ?back to 1000000"),
        ]
        for call, argument, message in wrong:
            with pytest.raises(ValueError, match=message):
                call(argument)
            # A prompt may have replaced some tokens before it failed.
            kept = len(model.tokens) if call == model.prefill else len(self.texts[number])
            self.texts[number] = self.texts[number][:kept]
            assert list(model.tokens) == self.texts[number]

    def _fail(self, number: int) -> None:
        """Let a decode call of llama.cpp fail, before or after it changed the cache."""
        decode, is_after = library.llama_decode, self._rng.random() < 0.5

        def failing(context: Any, batch: Any) -> int:
            if is_after:
                decode(context, batch)
            return -3

        parts = self._parts() if self.runner.shared is not None else []
        call = self.runner.shared.evaluate_together if parts else self.runner.models[number].evaluate
        with mock.patch.object(library, "llama_decode", failing), pytest.raises(TargetError, match="returned -3"):
            call(parts or self._new(3))


def test_backend_random_walk_returns_logits_of_fresh_evaluation(runner: Runner) -> None:
    walk = Walk(runner)
    steps = min(45, settings.default.max_examples)
    walk.walk(steps if runner.shared is None else 2 * steps)
    assert walk.worst <= runner.tolerance
    assert runner.shared is None or walk.adopted


def test_backend_exact_rollback_keeps_logits_bit_identical(runner: Runner) -> None:
    model = runner.models[-1]
    text = [int(t) for t in np.random.default_rng(0).integers(3, 30, 40)]
    model.prefill(text)
    for size in (1, 2, 5) if model.can_rollback and model.exact_rollback else ():
        tail = text[:size]
        first = model.evaluate(tail).copy()
        model.rollback(len(text))
        model.evaluate(text[-6:])
        model.rollback(len(text))
        assert np.array_equal(first, model.evaluate(tail))
        model.rollback(len(text))


def test_backend_aligned_prefill_depends_only_on_tokens(runner: Runner) -> None:
    model = runner.models[-1]
    n = min(290, model.n_ctx - 10)
    text = [int(t) for t in np.random.default_rng(0).integers(3, 30, n)]
    fresh = model.prefill(text, aligned=True).copy()
    for keep, aligned in ((n - 10, True), (130, False), (n - 1, True)):
        model.clear()
        model.prefill(text[:keep], aligned=aligned)
        model.evaluate(text[keep : keep + 1])
        if model.can_rollback and runner.rolls_back_anywhere:
            model.rollback(len(model.tokens) - 1)
        assert np.array_equal(model.prefill(text, aligned=True), fresh), (keep, aligned)
    # A later aligned prefill does not reuse the result of an unaligned one.
    model.clear()
    for end, aligned in ((n // 2, True), (n - 10, False), (n - 5, True)):
        model.prefill(text[:end], aligned=aligned)
    assert np.array_equal(model.prefill(text, aligned=True), fresh)


def test_backend_with_full_context_accepts_only_padding(runner: Runner) -> None:
    model, size = runner.models[-1], runner.models[-1].max_batch
    if not runner.checks:
        return
    for other in runner.models:
        other.prefill([5] * other.n_ctx if other is model else [1, 2, 3])
        other.checkpoint()
    if isinstance(model, MockTarget):
        with pytest.raises(ValueError, match="full"):
            model.evaluate([5])
        return
    for _ in range(64 // size):
        model.evaluate([5] * size)
    with pytest.raises(ValueError, match="do not fit"):
        model.evaluate([5] * size)
    if runner.shared is not None:
        with pytest.raises(ValueError, match="do not fit"):
            runner.shared.evaluate_together([Part(runner.models[0], [5], 1), Part(model, [5] * size, 1)])
        assert runner.models[0].tokens == [1, 2, 3]
    model.rollback(10)
    assert np.isfinite(model.evaluate([5])).all()


# --------------------------------------------------------------------------- vocabulary and drafts


PROMPT = [5, 6, 7, 8, 9, 6, 7]
PENALISED = Sampling(1.0, seed=4, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.2)
SAMPLINGS = [Sampling(), Sampling(0.8, seed=3), PENALISED]


def test_backend_vocabulary_pieces_round_trip_text(opened: Runner) -> None:
    vocabulary: Vocabulary = opened.vocabulary
    tokens = vocabulary.tokenize("abba", add_bos=False)
    assert b"".join(map(vocabulary.piece, tokens)).strip() == b"abba"
    assert all(0 <= token < vocabulary.n_vocab and not vocabulary.is_eog(token) for token in tokens)


def test_backend_sampler_draws_from_its_distribution(runner: Runner) -> None:
    row = runner.models[0].prefill(PROMPT).copy()
    for sampling in SAMPLINGS:
        sampler, judge = runner.vocabulary.sampler(sampling), runner.vocabulary.sampler(sampling)
        sampler.begin(PROMPT)
        judge.begin(PROMPT)
        expected = judge.distribution(row)
        seen: list[Distribution] = []
        token = sampler.draw(row, len(PROMPT), seen)
        assert expected.probability(token) > 0
        assert expected.probs.sum() == pytest.approx(1)
        assert all((one.ids == expected.ids).all() and (one.probs == expected.probs).all() for one in seen)
        assert not sampling.greedy or expected.ids.tolist() == [int(row.argmax())]


def test_backend_drafts_keep_text_of_plain_decoding(runner: Runner, tmp_path: Path) -> None:
    model = runner.models[0]
    target: Any = SimpleNamespace(
        sequences=runner.models, vocabulary=runner.vocabulary, exactness=ExactnessMode(), feeds_head=False
    )
    options: dict[str, Any] = {"policy": "fixed", "draft_max": 4, "exact": "off"}
    plain = SpeculativeDecoder(target, drafter=None, calibration_folder=tmp_path, **options)
    drafted = SpeculativeDecoder(target, drafter="ngram", calibration_folder=tmp_path, **options)
    for sampling in SAMPLINGS:
        expected, _ = drive(plain, PROMPT, max_tokens=30, sampling=sampling)
        text, steps = drive(drafted, PROMPT, max_tokens=30, sampling=sampling)
        assert text == expected
        assert model.can_rollback or not any(step.drafted for step in steps)


def test_decoder_without_vocabulary_raises() -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        SpeculativeDecoder(ModelBase())
