"""Results of a `SelfCheck`: one `Check` for each requirement, and the verdict."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from ngramspec.instruments.selfcheck.check import Name, RollbackTest, SelfCheck
from ngramspec.instruments.selfcheck.texts import GREEDY, TextPair

Status = Literal["passed", "explained", "failed", "skipped"]

NO_ROLLBACK = "this model's state cannot be rolled back (recurrent or hybrid), so drafting is off"


@dataclass(slots=True)
class Check:
    """The result of one requirement."""

    name: Name  # name of the check; see `SelfCheck`
    claim: str  # requirement in this mode
    seconds: float  # time of the check
    status: Status = "passed"  # "explained" means that texts differ only as far as the batch size can explain
    covered: str = ""  # tests that were made
    reason: str = ""  # reason of a failure, a skipped check, or an explained difference
    missing: str = ""  # parts that were not checked


def list_checks(selfcheck: SelfCheck) -> list[Check]:
    """Return all checks, including those that were not reached."""
    equal = "plain and drafted texts are equal"
    if not selfcheck.exact:
        equal += " or differ only as the batch size explains"
    claims: dict[Name, str] = {
        "rollback": "logits after a rollback are bit-identical to those before it",
        "greedy": f"at temperature 0, {equal}",
        "same seed": f"at temperature 0.8 with a fixed seed, {equal}",
    }
    checks = [Check(name, claim, selfcheck.seconds_by_check[name]) for name, claim in claims.items()]
    for check in checks:
        pairs = [pair for pair in selfcheck.pairs if (pair.setting == GREEDY) == (check.name == "greedy")]
        if check.name == "rollback" and selfcheck.rollbacks:
            _judge_rollback(check, selfcheck.rollbacks)
        elif check.name != "rollback" and pairs:
            _judge_texts(check, selfcheck, pairs)
        else:
            check.status, check.reason = "skipped", "not reached" if selfcheck.sequence.can_rollback else NO_ROLLBACK
        if check.name in selfcheck.errors:
            check.status, check.reason = "failed", selfcheck.errors[check.name]
        if check.status == "failed":
            check.missing = ""
    return checks


def verdict(checks: Sequence[Check], *, complete: bool) -> str:
    """Return a one-line summary of the checks; `complete` is false if the user stopped them."""
    failures, explanations, omissions = (
        ", ".join(check.name for check in checks if check.status == status)
        for status in ("failed", "explained", "skipped")
    )
    partial_checks = ", ".join(check.name for check in checks if check.missing)
    if failures:
        return f"FAILED: {failures}"
    if not complete:
        return "INCOMPLETE: no check failed so far"
    line = "all checks passed"
    if explanations:
        line += "; some texts differ because of the batch size, which exact mode rules out"
    line += f"; checked in part: {partial_checks}" if partial_checks else ""
    return f"{line}; not checked: {omissions}" if omissions else line


def _judge_rollback(check: Check, tests: Sequence[RollbackTest]) -> None:
    sizes, depths = _join_numbers({test.size for test in tests}), _join_numbers({test.depth for test in tests})
    check.covered = f"{len(tests)} batches of {sizes} tokens after {depths}"
    failures = [test for test in tests if test.left_over or not test.identical]
    if not failures:
        return
    check.status, first = "failed", failures[0]
    if first.left_over:
        check.reason = f"{first.left_over} extra tokens in the cache after a batch of {first.size} at {first.depth}"
    else:
        largest = max(test.difference for test in failures)
        check.reason = f"{len(failures)} differ, by up to {largest:.3g}; first a batch of {first.size} at {first.depth}"


def _judge_texts(check: Check, selfcheck: SelfCheck, pairs: Sequence[TextPair]) -> None:
    coverage = f"{len(pairs)} texts of {len({pair.category for pair in pairs})} categories"
    coverage += f", {sum(p.tokens for p in pairs)} tokens"
    if check.name == "same seed":
        coverage += f" ({', '.join(dict.fromkeys(p.setting for p in pairs))})"
    coverage += f"; {sum(p.accepted for p in pairs)} of {sum(p.drafted for p in pairs)} drafted tokens accepted"
    whole = {(case.category, case.id): len(case.tokens) for case in selfcheck.cases}
    if cut := {(p.category, p.prompt) for p in pairs if p.prompt_tokens < whole[p.category, p.prompt]}:
        coverage += f"; {len(cut)} prompts cut to their ends"
    check.covered, check.missing = coverage, _missing(selfcheck, check.name, pairs)
    differences = [pair.difference for pair in pairs if pair.difference is not None]
    n_unexplained = sum(difference.needed is None for difference in differences)
    if n_unexplained:
        check.status, check.reason = "failed", f"texts with an unexplained difference: {n_unexplained}"
    elif differences:
        check.status, check.reason = "explained", f"texts that differ because of the batch size: {len(differences)}"


def _missing(selfcheck: SelfCheck, name: Name, pairs: Sequence[TextPair]) -> str:
    """Return the parts that a check skipped, for lack of time or of support."""
    if name == "greedy":
        all_parts, checked_parts = [case.category for case in selfcheck.cases], {pair.category for pair in pairs}
    else:
        all_parts, checked_parts = (
            [name for name, _, _ in selfcheck.settings if name != GREEDY],
            {pair.setting for pair in pairs},
        )
        if selfcheck.grammar_unsupported_reason:
            all_parts.remove("grammar")
    missing_parts = [part for part in dict.fromkeys(all_parts) if part not in checked_parts]
    parts = [f"no time for {', '.join(missing_parts)}"] if missing_parts else []
    if not any(pair.drafted for pair in pairs):
        parts.append("nothing was drafted")
    if selfcheck.grammar_unsupported_reason and name == "same seed":
        parts.append(f"the grammar does not work with this vocabulary: {selfcheck.grammar_unsupported_reason}")
    return "; ".join(parts)


def _join_numbers(numbers: Collection[int]) -> str:
    return " and ".join(", ".join(str(n) for n in sorted(numbers)).rsplit(", ", 1))
