"""Tests of `Acceptance` and `RuleVerifier`: the rule for each combination of settings, contradictions and errors."""

from __future__ import annotations

import sys
from collections import Counter
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any

import numpy as np
import pytest
from support.llama_chain import make_chain
from support.small_loop import make_certain_draft

from ngramspec.acceptance.rules import TokenDecision, Verdict
from ngramspec.acceptance.verifier import METHODS, Acceptance, RuleVerifier
from ngramspec.drafting.draft import NO_DRAFT
from ngramspec.sampling import rows as compiled_rows
from ngramspec.sampling.distribution import BadLogits
from ngramspec.sampling.settings import Sampling

HOT = Sampling(0.5)
MIROSTAT = Sampling(0.5, mirostat=2)


def verifier(sampling: Sampling, how: Acceptance | str | None = None) -> RuleVerifier:
    return RuleVerifier(make_chain(sampling, 6), how)


@pytest.mark.parametrize(
    ("sampling", "how", "name"),
    [
        (Sampling(), None, "greedy"),
        (Sampling(), "greedy", "greedy"),
        (Sampling(), "rejection", "greedy"),
        (Sampling(), "coupled", "greedy"),
        (Sampling(), "match", "greedy"),
        (Sampling(), Acceptance(lenience=0.5), "greedy"),
        (Sampling(repeat_penalty=1.2), None, "greedy"),
        (HOT, None, "coupled"),
        (HOT, "coupled", "coupled"),
        (HOT, "match", "match"),
        (HOT, "rejection", "rejection"),
        (HOT, Acceptance(lenience=0.5), "rejection"),
        (HOT, Acceptance("rejection", lenience=0.5), "rejection"),
        (HOT, Acceptance(typical=True), "typical"),
        (Sampling(0.0, dynatemp_range=0.5), None, "coupled"),
        (MIROSTAT, None, "match"),
        (MIROSTAT, "coupled", "match"),
        (MIROSTAT, "match", "match"),
    ],
)
def test_verifier_selects_rule_by_method_and_sampling(sampling: Sampling, how: Any, name: str) -> None:
    made = verifier(sampling, how)
    assert made.rule == name
    assert made.fixed_length == (name == "rejection")
    assert (made.choose(3) is None) == (name not in ("coupled", "rejection"))


@pytest.mark.parametrize(
    ("sampling", "how", "reason"),
    [
        (HOT, "greedy", "'greedy' requires temperature 0, got 0.5"),
        (HOT, Acceptance("greedy", lenience=0.5), "'greedy' requires temperature 0, got 0.5"),
        (HOT, "typical", "must be one of greedy, coupled, match, rejection"),
        (MIROSTAT, "greedy", "'greedy' requires temperature 0, got 0.5"),
        (MIROSTAT, "rejection", "mirostat cannot be combined with rejection sampling"),
        (MIROSTAT, Acceptance(lenience=0.5), "mirostat cannot be combined with lenience 0.5"),
        (MIROSTAT, Acceptance(typical=True), "mirostat cannot be combined with typical acceptance"),
        (Sampling(), Acceptance(typical=True), "typical acceptance requires a temperature above 0"),
        (Sampling(repeat_penalty=2.0), Acceptance(lenience=0.5), "lenience at temperature 0 cannot be combined"),
        (Sampling(logit_bias=((1, 2.0),)), Acceptance(lenience=0.5), "lenience at temperature 0 cannot be combined"),
        (HOT, {"method": "bold"}, "acceptance must be one of greedy, coupled, match, rejection, got 'bold'"),
        (HOT, {"lenience": 0.0}, "lenience must be above 0 and at most 1"),
        *((HOT, {"lenience": wrong}, f"lenience must be .*, got {wrong}") for wrong in (1.1, -1.0, float("nan"))),
        (HOT, {"lenience": 0.5, "method": "coupled"}, "lenience has no effect with acceptance 'coupled'"),
        (HOT, {"lenience": 0.5, "method": "match"}, "lenience has no effect with acceptance 'match'"),
        (HOT, {"typical": True, "lenience": 0.5}, "typical acceptance cannot be combined"),
        (HOT, {"typical": True, "method": "rejection"}, "typical acceptance cannot be combined"),
    ],
)
def test_acceptance_rejects_contradictory_settings(sampling: Sampling, how: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        verifier(sampling, Acceptance(**how) if isinstance(how, dict) else how)
    assert "\n" not in str(error.value)


def test_acceptance_lossy_names_settings_that_change_output() -> None:
    assert all(Acceptance(method).lossy is None for method in (None, *METHODS))
    assert Acceptance("rejection", lenience=1.0).lossy is None
    assert Acceptance(lenience=0.25).lossy == "lenience 0.25"
    assert Acceptance("rejection", lenience=0.5).lossy == "lenience 0.5"
    assert Acceptance(typical=True).lossy == "typical acceptance"


@pytest.mark.parametrize(
    ("sampling", "how"),
    [
        (Sampling(), None),
        (Sampling(), Acceptance(lenience=0.5)),
        (HOT, "coupled"),
        (HOT, "match"),
        (HOT, "rejection"),
        (HOT, Acceptance(typical=True)),
        (MIROSTAT, None),
    ],
)
def test_verify_with_bad_logits_keeps_earlier_accepted_tokens(sampling: Sampling, how: Any) -> None:
    """One row is broken; all rows before it accept the draft."""
    good = np.array([0, 0, 90, 0, 0, 0], np.float32)
    for wrong in range(5):
        rows = [good] * 5
        rows[wrong] = np.full(6, np.nan, np.float32)
        told: list[TokenDecision] = []
        made = RuleVerifier(make_chain(sampling, 6), how, told.append)
        if wrong == 0:
            with pytest.raises(BadLogits, match=r"^at position 30 of the text: the logit of token 0 is nan"):
                made.verify(rows, make_certain_draft([2] * 4), 30)
            assert told == []
            continue
        verdict = made.verify(rows, make_certain_draft([2] * 4), 30)
        assert (verdict.tokens, verdict.accepted) == ((2,) * wrong, wrong)
        assert isinstance(verdict.error, BadLogits)
        assert str(verdict.error).startswith(f"at position {30 + wrong} of the text: the logit of token 0 is nan")
        assert [(judgement.token, judgement.accepted) for judgement in told] == [(2, True)] * wrong
        again = made.verify([good], NO_DRAFT, 30 + wrong)
        assert (again.tokens, again.error) == ((2,), None)


def test_verify_greedy_with_llama_sampler_reads_no_rows_after_mismatch() -> None:
    """The same applies without an observer, when one compiled call verifies all rows."""
    rows = np.zeros((5, 4), np.float32)
    rows[:3, 1] = 9
    rows[3:] = np.nan
    made = RuleVerifier(make_chain(Sampling(), 4))
    for draft, verdict in (
        ([1, 1, 2, 1], Verdict((1, 1, 1), 2)),
        ([1, 1], Verdict((1, 1, 1), 2)),
        ([], Verdict((1,), 0)),
    ):
        assert made.verify(rows, make_certain_draft(draft), 7) == verdict
        assert made.verify(list(rows), make_certain_draft(draft), 7) == verdict
    assert made.verify(rows[:2], make_certain_draft([1, 1]), 7) == Verdict((1, 1), 2)
    verdict = made.verify(rows, make_certain_draft([1, 1, 1]), 7)
    assert verdict[:2] == ((1, 1, 1), 3)
    assert str(verdict.error).startswith("at position 10 of the text: the logit of token 0 is nan")
    with pytest.raises(BadLogits, match=r"^at position 7 of the text: the logit of token 0 is nan"):
        made.verify(rows[3:], NO_DRAFT, 7)
    for draft in ([1, 1, 1], []):
        with pytest.raises(ValueError, match=f"a draft of {len(draft)} tokens came with {min(2, len(draft))} rows"):
            made.verify(rows[: min(2, len(draft))], make_certain_draft(draft), 7)


@pytest.mark.skipif(not str(compiled_rows.__file__).endswith(tuple(EXTENSION_SUFFIXES)), reason="rows are not compiled")
@pytest.mark.parametrize(("sampling", "calls"), [(Sampling(), (3, 3)), (Sampling(0.8), (7, 23))])
def test_verify_with_compiled_rows_makes_few_python_calls(sampling: Sampling, calls: tuple[int, int]) -> None:
    """The test covers one row without a draft, and five rows whose draft is accepted."""
    rows = np.zeros((5, 100), np.float32)
    rows[:, 1] = 90
    counts = Counter[str]()
    for draft, most in zip((NO_DRAFT, make_certain_draft([1] * 4)), calls, strict=True):
        made = RuleVerifier(make_chain(sampling, 100))
        counts.clear()
        sys.setprofile(lambda _frame, event, _argument: counts.update([event]))
        try:
            verdict = made.verify(rows, draft, 7)
        finally:
            sys.setprofile(None)
        assert verdict.accepted == len(draft)
        assert counts["call"] <= most
