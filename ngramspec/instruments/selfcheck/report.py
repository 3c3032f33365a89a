"""What a `SelfCheck` found, as one `Check` for each thing that must hold, and the verdict."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ngramspec.instruments.selfcheck.check import Name, SelfCheck
from ngramspec.instruments.selfcheck.texts import GREEDY, TextPair

Status = Literal["passed", "explained", "failed", "skipped"]

NO_ROLLBACK = "this model's state cannot be taken back (recurrent or hybrid), so drafting is off"


@dataclass(frozen=True, slots=True)
class Check:
    """One of the things that must hold."""

    name: Name  # see `SelfCheck`
    claim: str  # what must hold, in this mode
    seconds: float  # the time it took
    status: Status = "passed"  # `explained`: texts differ where the batch size alone can make them
    covered: str = ""  # what was looked at
    reason: str = ""  # why it failed, was skipped, or is explained
    missing: str = ""  # what it does not cover


def report(found: SelfCheck) -> list[Check]:
    """All checks, including those that were not reached."""
    equal = "plain and drafted texts are equal"
    if not found.exact:
        equal += ", or differ where the batch size explains it"
    same_bits, spent = "logits after a rollback are the same bits as before it", found.spent
    checks = [
        _rollback(found, Check("rollback", same_bits, spent["rollback"])),
        _texts(found, Check("greedy", f"at temperature 0 {equal}", spent["greedy"])),
        _texts(found, Check("same seed", f"at temperature 0.8 and one seed {equal}", spent["same seed"])),
    ]
    broken = found.broken
    return [
        replace(check, status="failed", reason=broken[check.name], missing="") if check.name in broken else check
        for check in checks
    ]


def verdict(checks: Sequence[Check], *, complete: bool) -> str:
    """One line: whether everything holds that must."""
    failed, explained, skipped = (
        ", ".join(check.name for check in checks if check.status == status)
        for status in ("failed", "explained", "skipped")
    )
    partly = ", ".join(check.name for check in checks if check.missing)
    if failed:
        return f"FAILED: {failed}"
    if not complete:
        return "INCOMPLETE: what was checked holds"
    line = "all that must hold does"
    if explained:
        line += "; some texts differ by the batch size alone, which exact mode rules out"
    line += f"; checked in part: {partly}" if partly else ""
    return f"{line}; not checked: {skipped}" if skipped else line


def _skipped(found: SelfCheck, check: Check) -> Check:
    return replace(check, status="skipped", reason="not reached" if found.target.can_rollback else NO_ROLLBACK)


def _rollback(found: SelfCheck, check: Check) -> Check:
    tests = found.rollbacks
    if not tests:
        return _skipped(found, check)
    covered = f"{len(tests)} batches of {_listed({test.size for test in tests})} tokens"
    covered += f" after {_listed({test.depth for test in tests})}"
    wrong = [test for test in tests if not test.held]
    if not wrong:
        return replace(check, covered=covered)
    first = wrong[0]
    if first.left_over:
        reason = f"{first.left_over} tokens too many in the cache after a batch of {first.size} at {first.depth}"
    else:
        largest = max(test.difference for test in wrong)
        reason = f"{len(wrong)} are not, by up to {largest:.3g}; first a batch of {first.size} at {first.depth}"
    return replace(check, status="failed", covered=covered, reason=reason)


def _texts(found: SelfCheck, check: Check) -> Check:
    pairs = [pair for pair in found.pairs if (pair.setting == GREEDY) == (check.name == "greedy")]
    if not pairs:
        return _skipped(found, check)
    covered = f"{len(pairs)} texts of {len({pair.category for pair in pairs})} categories"
    covered += f", {sum(p.tokens for p in pairs)} tokens"
    if check.name == "same seed":
        covered += f" ({', '.join(dict.fromkeys(p.setting for p in pairs))})"
    covered += f"; {sum(p.accepted for p in pairs)} of {sum(p.drafted for p in pairs)} drafted tokens accepted"
    whole = {(case.category, case.id): len(case.tokens) for case in found.cases}
    cut = {(p.category, p.prompt) for p in pairs if p.prompt_tokens < whole[p.category, p.prompt]}
    if cut:
        covered += f"; {len(cut)} prompts cut to their ends"
    check = replace(check, covered=covered, missing=_missing(found, check.name, pairs))
    differences = [pair.difference for pair in pairs if pair.difference is not None]
    if unexplained := sum(not difference.explained for difference in differences):
        return replace(check, status="failed", reason=f"texts that differ unexplained: {unexplained}", missing="")
    if differences:
        alone = f"texts that differ by the batch size alone: {len(differences)}"
        return replace(check, status="explained", reason=alone)
    return check


def _missing(found: SelfCheck, name: Name, pairs: Sequence[TextPair]) -> str:
    """What a check leaves out: categories and ways of sampling for lack of time, and what cannot be done."""
    if name == "greedy":
        wanted, seen = [case.category for case in found.cases], {pair.category for pair in pairs}
    else:
        wanted, seen = [name for name, _, _ in found.settings if name != GREEDY], {pair.setting for pair in pairs}
        if found.ungrammatical:
            wanted.remove("grammar")
    missing = [what for what in dict.fromkeys(wanted) if what not in seen]
    parts = [f"no time for {', '.join(missing)}"] if missing else []
    if not any(pair.drafted for pair in pairs):
        parts.append("nothing was drafted")
    if found.ungrammatical and name == "same seed":
        parts.append(f"this vocabulary cannot be held to the grammar: {found.ungrammatical}")
    return "; ".join(parts)


def _listed(numbers: Collection[int]) -> str:
    return " and ".join(", ".join(str(n) for n in sorted(numbers)).rsplit(", ", 1))
