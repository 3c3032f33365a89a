"""Tests of batch sizes whose logits agree: the probe for "on", the comparisons for "auto", and their files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.mock_target import MockTarget

from ngramspec.backend import ExactnessMode
from ngramspec.cost import bits
from ngramspec.cost.bits import COMPARED, SIZES, ExactnessSelector, KernelClasses, prefill_is_chunk_invariant, probe
from ngramspec.data import TargetError
from ngramspec.decoding.decoder import SpeculativeDecoder

pytestmark = pytest.mark.usefixtures("_comparing")


def planted(kernels: Callable[[int, int], int], **options: Any) -> MockTarget:
    return MockTarget(30, **{"kernels": kernels, "n_ctx": 2048, **options})


@pytest.mark.parametrize(
    ("kernels", "classes", "chosen"),
    [
        (lambda n, depth: 0, {SIZES}, SIZES),
        (lambda n, depth: n, {(n,) for n in SIZES}, (1,)),
        (lambda n, depth: int(n > 2), {(1, 2), SIZES[2:]}, (1, 2)),
        (lambda n, depth: n % 2, {(1, 3, 5, 9), (2, 4, 6, 8, 12, 16)}, (2, 4, 6, 8, 12, 16)),
        (lambda n, depth: int(n > 1 and depth >= 512), {(1,), SIZES[1:]}, SIZES[1:]),
        (lambda n, depth: n if depth < 256 else 0, {(n,) for n in SIZES}, (1,)),
        (lambda n, depth: int(n > 3) + 2 * (depth > 256 and n > 5), {(1, 2, 3), (4, 5), (6, 8, 9, 12, 16)}, (1, 2, 3)),
    ],
)
def test_probe_finds_kernel_classes_and_exact_mode_takes_largest_that_begins_small(
    kernels: Callable[[int, int], int], classes: set[tuple[int, ...]], chosen: tuple[int, ...]
) -> None:
    target = planted(kernels)
    report = probe(target)
    assert set(report.classes) == classes
    assert report.sizes == SIZES
    assert (report.max_difference > 0) == (len(classes) > 1)
    assert all(report.class_of(n) == c for c in classes for n in c)
    assert target.tokens == []
    assert sum(target.batches) <= 2 * len(SIZES) * 24
    assert sum(target.prefill_sizes) <= 96 + 1200
    target.prefill([1, 2, 3])
    assert probe(target) == report, "the content of the cache does not matter"
    assert KernelClasses(report).ensure_exact(target) == chosen


def test_probe_with_given_depths_uses_them() -> None:
    target = planted(lambda n, depth: int(n > 4 and depth >= 700))
    assert len(probe(target, [100]).classes) == 1
    report = probe(target, [800, 100, 800])
    assert (report.depths, len(report.classes)) == ((100, 800), 2)


@pytest.mark.parametrize("n_ctx", [20, 64, 200, 512])
def test_probe_of_small_context_keeps_depths_within_it(n_ctx: int) -> None:
    # The last tokens may be beyond n_ctx, in the space for padding; a full cache raises.
    report = probe(planted(lambda n, depth: int(n > 2), n_ctx=n_ctx, n_batch=64))
    assert set(report.classes) == {(1, 2), SIZES[2:]}
    assert max(report.depths) < n_ctx


def test_probe_reports_maximum_logit_difference() -> None:
    large, small = (probe(planted(lambda n, _: int(n == 5), noise=noise)).max_difference for noise in (0.5, 0.05))
    assert 0.5 < large < 8.0  # the maximum of several hundred differences of normal numbers
    assert large > 5 * small


def test_prefill_is_chunk_invariant_compares_prefill_with_decoding() -> None:
    assert prefill_is_chunk_invariant(MockTarget(), (1, 2, 3))
    # The mock's prefill has separate kernels.
    assert not prefill_is_chunk_invariant(MockTarget(kernels=lambda n, depth: 0), (1, 2, 3))
    target = MockTarget(n_ctx=64)
    assert prefill_is_chunk_invariant(target, (4,))
    assert not target.tokens


def test_exact_sizes_are_shared_by_processes_until_they_are_forgotten(tmp_path: Path) -> None:
    target, other = (planted(lambda n, depth: 0 if n == 1 else 1 if n <= 8 else 2) for _ in range(2))
    late = KernelClasses.load(other, tmp_path)
    assert KernelClasses.load(target, tmp_path).ensure_exact(target) == (2, 3, 4, 5, 6, 8)
    again = KernelClasses.load(other, tmp_path)
    assert late.ensure_exact(other) == again.ensure_exact(other) == (2, 3, 4, 5, 6, 8)
    assert target.batches
    assert not other.batches
    assert late.ensure_chunk_invariance(other) is False
    assert KernelClasses.load(target, tmp_path).is_chunk_invariant is False
    again.forget()
    assert (again.exact_sizes, [*tmp_path.iterdir()]) == (None, [])


@pytest.mark.parametrize("text", ["", "{}", '{"probe": 3, "exact_sizes": [1], "reads_alike": 0}', "[" * 9])
def test_damaged_files_of_classes_are_ignored(tmp_path: Path, text: str) -> None:
    target = planted(lambda n, depth: 0)
    KernelClasses.load(target, tmp_path).ensure_exact(target)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    assert KernelClasses.load(target, tmp_path).exact_sizes is None


# --------------------------------------------------------------------------- auto


class Model:
    """Model whose trials find that sizes agree up to a given one at each depth; it is its own trial."""

    identity = "mock"

    def __init__(
        self, settings: Sequence[str] = ("fast", "exact"), fails_after: int = 99, **largest: tuple[int, int]
    ) -> None:
        self.settings, self.fails_after = settings, fails_after
        self.largest = {"fast": (1, 16), "exact": (16, 16)} | largest
        self.compared: list[tuple[str, int] | str] = []

    @contextmanager
    def trial(self, setting: str) -> Iterator[Model]:
        self.setting = setting
        yield self

    def note(self, comparison: tuple[str, int] | str) -> None:
        if len(self.compared) >= self.fails_after:
            raise TargetError("not enough memory")
        self.compared.append(comparison)

    def largest_agreeing(self, depth: int) -> int:
        self.note((self.setting, depth))
        return self.largest[self.setting][bits.DEPTHS.index(depth)]

    def threads_agree(self, _: int) -> bool:
        self.note(f"{self.setting} threads")
        return self.setting == "exact"

    def follow_load(self) -> None:
        assert self.setting == "exact"

    def rounding(self, text: Sequence[int]) -> float:
        assert [*text] == [1, 2]
        self.note("rounding")
        return 0.5


def choose(model: Model, folder: Path) -> tuple[str, ExactnessMode]:
    """Return the choice of a process that loads the model."""
    selector = ExactnessSelector(model, (1, 2), folder)
    selector.compare()
    return selector.setting, selector.exactness(selector.setting)


ALL_SIZES, TO_7, SINGLE = (ExactnessMode(COMPARED[:n], bit_identical=True) for n in (9, 7, 1))
FAST, EXACT = [("fast", 1024), ("fast", 0)], ["exact threads", ("exact", 1024), ("exact", 0)]
ROUNDED, FEW = (ExactnessMode(max_logit_shift=0.5, agreeing=agreeing) for agreeing in ((1,), (1, 2, 3)))
CHOICES = {  # sizes that agree at each depth, the choice, and the comparisons that it needs
    "fast differ": ({}, "exact", ALL_SIZES, FAST[:1] + EXACT),
    "fast differ later": ({"fast": (16, 6)}, "exact", ALL_SIZES, FAST + EXACT),
    "fast agree": ({"fast": (16, 16)}, "fast", ALL_SIZES, FAST),
    "fast agree for drafts": ({"fast": (7, 16)}, "fast", TO_7, FAST),
    "exact agree for drafts": ({"exact": (16, 7)}, "exact", TO_7, FAST[:1] + EXACT),
    "exact differ": ({"exact": (16, 6)}, "fast", ROUNDED, [*FAST[:1], *EXACT, "rounding"]),
    "exact differ first": ({"exact": (1, 16)}, "fast", ROUNDED, [*FAST[:1], *EXACT[:2], "rounding"]),
    "only fast": ({"settings": ("fast",)}, "fast", ROUNDED, [*FAST[:1], "rounding"]),
    "only fast, few sizes": ({"settings": ("fast",), "fast": (3, 16)}, "fast", FEW, [*FAST, "rounding"]),
}


@pytest.mark.parametrize(("model", "setting", "exactness", "compared"), CHOICES.values(), ids=CHOICES)
def test_exact_auto_chooses_by_agreeing_sizes_alone(
    model: dict[str, Any], setting: str, exactness: ExactnessMode, compared: list[Any], tmp_path: Path
) -> None:
    first, later = Model(**model), Model(**model)
    assert choose(first, tmp_path) == choose(later, tmp_path) == (setting, exactness)
    assert (first.compared, later.compared) == (compared, []), "the first process stored what it found"
    ExactnessSelector(later, folder=tmp_path).forget()
    assert choose(later, tmp_path) == (setting, exactness)
    assert later.compared == compared


@pytest.mark.parametrize("fails_after", range(4))
def test_exact_auto_after_failed_comparison_decodes_single_tokens_exactly(fails_after: int, tmp_path: Path) -> None:
    model = Model(fails_after=fails_after)
    assert choose(model, tmp_path) == ("exact", SINGLE)
    model.fails_after = 99
    assert choose(model, tmp_path) == ("exact", ALL_SIZES)
    assert model.compared == FAST[:1] + EXACT


def test_exact_auto_without_memory_or_exact_settings_guarantees_nothing(tmp_path: Path) -> None:
    model = Model(("fast",), fails_after=0)
    assert choose(model, tmp_path) == ("fast", ExactnessMode(max_logit_shift=bits.DEFAULT_LOGIT_SHIFT))
    assert not ExactnessSelector(Model(fails_after=0), folder=tmp_path).threads_agree("exact")


def test_threads_agree_compares_each_setting_once(tmp_path: Path) -> None:
    model = Model()
    for _ in range(2):
        selector = ExactnessSelector(model, folder=tmp_path)
        assert [selector.threads_agree(setting) for setting in ("fast", "exact")] == [False, True]
    assert model.compared == ["fast threads", "exact threads"]


def test_bits_module_imports_no_clock_and_no_load() -> None:
    source = Path(bits.__file__).read_text("utf-8")
    assert not re.search(r"^\s*(import|from) (time|datetime|psutil|ngramspec\.cpu)", source, re.MULTILINE)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "\0", '{"sizes": {"fast": [9, 1]}}', '{"sizes": {"fast": [1, 1, 1]}}', '{"threads": {"fast": 3}}'],
)
@pytest.mark.parametrize("identity", ["mock", ""])
def test_exact_auto_with_damaged_file_or_without_identity_compares_again(
    content: str, identity: str, tmp_path: Path
) -> None:
    (tmp_path / f"{identity}-bits.json").write_text(content)
    model = Model()
    model.identity = identity
    assert choose(model, tmp_path)[0] == "exact"
    assert model.compared == FAST[:1] + EXACT
    assert ((tmp_path / f"{identity}-bits.json").read_text() == content) is (identity == "")


@pytest.mark.parametrize("exact", ["auto", "on", "off"])
def test_decoder_follows_exactness_of_target_unless_off(exact: Any, tmp_path: Path) -> None:
    target: Any = MockTarget(8, seed=1, max_batch=16)
    target.exactness = ExactnessMode((2, 4, 32), bit_identical=True)
    decoder = SpeculativeDecoder(target, policy="fixed", exact=exact, calibration_folder=tmp_path)
    steps = list(decoder.generate([1, 2, 3, 4, 5, 6] * 10, max_tokens=20))
    assert decoder.exactness.bit_identical is (exact != "off")
    if exact == "auto":
        assert {step.batch for step in steps[1:]} <= {2, 4}, "no draft is longer than the maximum rollback"
