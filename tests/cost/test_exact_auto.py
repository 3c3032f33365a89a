"""Tests of `exact="auto"` on a mock model: the choice, the comparisons that it needs, and their storage."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.mock_target import MockTarget

from ngramspec.backend import ExactnessMode
from ngramspec.cost import bits
from ngramspec.cost.bits import COMPARED, DEFAULT_LOGIT_SHIFT, ExactnessSelector
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.errors import TargetError

pytestmark = pytest.mark.usefixtures("_comparing")

TO_7 = COMPARED[:7]
Both = tuple[int, int]


class Model:
    """Model whose trials find that sizes agree up to a given one at each depth; it is its own trial."""

    identity = "mock"

    def __init__(self, settings: Sequence[str] = ("fast", "exact"), **largest: Both) -> None:
        self.settings = settings
        self.largest = {"fast": (1, 16), "exact": (16, 16)} | largest
        self.compared: list[tuple[str, int] | str] = []
        self.fails_after = 99

    def trial(self, setting: str) -> Any:
        self.setting = setting
        return self

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        pass

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


def choose(model: Model, folder: Path, text: Sequence[int] = (1, 2)) -> tuple[str, ExactnessMode]:
    """Return the choice of a process that loads the model."""
    selector = ExactnessSelector(model, text, folder)
    selector.compare()
    return selector.setting, selector.exactness(selector.setting)


def same_bits(*sizes: int) -> ExactnessMode:
    return ExactnessMode(sizes, bit_identical=True)


FAST, EXACT = [("fast", 1024), ("fast", 0)], ["exact threads", ("exact", 1024), ("exact", 0)]
ROUNDED = ExactnessMode(max_logit_shift=0.5)
CHOICES = {  # sizes that agree at each depth, the choice, and the comparisons that it needs
    "fast differ": ({}, "exact", same_bits(*COMPARED), FAST[:1] + EXACT),
    "fast differ later": ({"fast": (16, 6)}, "exact", same_bits(*COMPARED), FAST + EXACT),
    "fast agree": ({"fast": (16, 16)}, "fast", same_bits(*COMPARED), FAST),
    "fast agree for drafts": ({"fast": (7, 16)}, "fast", same_bits(*TO_7), FAST),
    "exact agree for drafts": ({"exact": (16, 7)}, "exact", same_bits(*TO_7), FAST[:1] + EXACT),
    "exact differ": ({"exact": (16, 6)}, "fast", ROUNDED, [*FAST[:1], *EXACT, "rounding"]),
    "exact differ first": ({"exact": (1, 16)}, "fast", ROUNDED, [*FAST[:1], *EXACT[:2], "rounding"]),
    "only fast": ({"settings": ("fast",)}, "fast", ROUNDED, [*FAST[:1], "rounding"]),
    "only fast, few sizes": (
        {"settings": ("fast",), "fast": (3, 16)},
        "fast",
        ExactnessMode(max_logit_shift=0.5, agreeing=(1, 2, 3)),
        [*FAST, "rounding"],
    ),
}


@pytest.mark.parametrize(("model", "setting", "exactness", "compared"), CHOICES.values(), ids=CHOICES)
def test_exact_auto_chooses_by_agreeing_sizes_alone(
    model: dict[str, Any], setting: str, exactness: ExactnessMode, compared: list[Any], tmp_path: Path
) -> None:
    first, later = Model(**model), Model(**model)
    assert choose(first, tmp_path) == (setting, exactness)
    assert first.compared == compared
    assert choose(later, tmp_path) == (setting, exactness)
    assert later.compared == [], "the first process stored what it found"
    ExactnessSelector(later, folder=tmp_path).forget()
    assert choose(later, tmp_path) == (setting, exactness)
    assert later.compared == compared


@pytest.mark.parametrize("fails_after", range(4))
def test_exact_auto_after_failed_comparison_decodes_single_tokens_exactly(fails_after: int, tmp_path: Path) -> None:
    model = Model()
    model.fails_after = fails_after
    assert choose(model, tmp_path) == ("exact", same_bits(1))
    model.fails_after = 99
    assert choose(model, tmp_path) == ("exact", same_bits(*COMPARED))
    assert model.compared == FAST[:1] + EXACT


def test_exact_auto_without_memory_or_exact_settings_guarantees_nothing(tmp_path: Path) -> None:
    model = Model(("fast",))
    model.fails_after = 0
    assert choose(model, tmp_path) == ("fast", ExactnessMode(max_logit_shift=DEFAULT_LOGIT_SHIFT))


def test_threads_agree_compares_each_setting_once(tmp_path: Path) -> None:
    model = Model()
    for _ in range(2):
        selector = ExactnessSelector(model, folder=tmp_path)
        assert [selector.threads_agree(setting) for setting in ("fast", "exact")] == [False, True]
    assert model.compared == ["fast threads", "exact threads"]
    model.fails_after = 0
    assert not ExactnessSelector(model, folder=tmp_path / "other").threads_agree("exact")


def test_bits_module_imports_no_clock_and_no_load() -> None:
    modules = set()
    for node in ast.walk(ast.parse(Path(bits.__file__).read_text("utf-8"))):
        modules |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
        modules |= {node.module} if isinstance(node, ast.ImportFrom) else set()
    assert not [name for name in modules if name and name.startswith(("time", "datetime", "psutil", "ngramspec.cpu"))]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "\0", '{"sizes": {"fast": [9, 1]}}', '{"sizes": {"fast": [1, 1, 1]}}', '{"threads": {"fast": 3}}'],
)
def test_exact_auto_with_damaged_file_compares_again(content: str, tmp_path: Path) -> None:
    (tmp_path / "mock-bits.json").write_text(content)
    model = Model()
    assert choose(model, tmp_path)[0] == "exact"
    assert model.compared == FAST[:1] + EXACT


def test_exact_auto_without_model_identity_stores_nothing(tmp_path: Path) -> None:
    model = Model()
    model.identity = ""
    assert choose(model, tmp_path)[0] == "exact"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("exact", ["auto", "on", "off"])
def test_decoder_follows_exactness_of_target_unless_off(exact: Any, tmp_path: Path) -> None:
    target: Any = MockTarget(8, seed=1, max_batch=16)
    target.exactness = ExactnessMode((2, 4, 32), bit_identical=True)
    decoder = SpeculativeDecoder(target, policy="fixed", exact=exact, calibration_folder=tmp_path)
    steps = list(decoder.generate([1, 2, 3, 4, 5, 6] * 10, max_tokens=20))
    assert decoder.exactness.bit_identical is (exact != "off")
    if exact == "auto":
        assert {step.batch for step in steps[1:]} <= {2, 4}, "no draft is longer than the maximum rollback"
