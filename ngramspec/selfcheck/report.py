"""What a `SelfCheck` found, as one `Check` for each thing that must hold, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ngramspec.selfcheck.check import Name, SelfCheck
from ngramspec.selfcheck.law import ALARM, FALSE_ALARM
from ngramspec.selfcheck.states import Kind
from ngramspec.selfcheck.texts import GREEDY, TOP, TextPair

Status = Literal["passed", "explained", "failed", "skipped"]

NO_ROLLBACK = "this model's state cannot be taken back (recurrent or hybrid), so drafting is off"
NOT_REACHED = "not reached"
NO_TIME = "no time for it"

CLAIMS: dict[Kind, str] = {
    "reuse": "a prompt of which the cache holds the beginning gives the logits that a cleared cache gives",
    "probe": "the probe of batch sizes finds what cleared caches show",
    "calibration": "measuring what passes cost leaves no trace in the logits",
}
"""What must hold when the memory goes back for another reason than a refused draft."""


@dataclass(frozen=True, slots=True)
class Check:
    """One of the things that must hold.

    Attributes:
        name: see `SelfCheck`.
        claim: what must hold, in this mode.
        status: `explained`: texts differ where the batch size alone can make them.
        covered: what was looked at.
        reason: why it failed, was skipped, or is explained.
        missing: what it does not cover.
        seconds: the time it took; 0 where it used the work of other checks.
    """

    name: Name
    claim: str
    status: Status
    covered: str
    reason: str
    missing: str
    seconds: float


def report(found: SelfCheck) -> list[Check]:
    """All checks, including those that were not reached."""
    equal = "plain and drafted texts are equal"
    if not found.exact:
        equal += ", or differ where the batch size explains it"
    greedy = [pair for pair in found.pairs if pair.setting == GREEDY]
    sampled = [pair for pair in found.pairs if pair.setting != GREEDY]
    checks = [
        _texts(found, "greedy", f"at temperature 0 {equal}", greedy),
        _texts(found, "same seed", f"at temperature 0.8 and one seed {equal}", sampled),
        _logprobs(found),
        _rollback(found),
        *(_states(found, kind, claim) for kind, claim in CLAIMS.items()),
        _law(found),
    ]
    return [_broken(found, check) for check in checks]


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


def _broken(found: SelfCheck, check: Check) -> Check:
    """The check as it stands, or failed by what it raised."""
    if check.name not in found.broken:
        return check
    return replace(check, status="failed", reason=found.broken[check.name], missing="")


def _check(
    found: SelfCheck, name: Name, claim: str, status: Status, covered: str = "", reason: str = "", missing: str = ""
) -> Check:
    return Check(name, claim, status, covered, reason, missing, found.spent[name])


def _skipped(found: SelfCheck, name: Name, claim: str) -> Check:
    return _check(found, name, claim, "skipped", reason=NOT_REACHED if found.target.can_rollback else NO_ROLLBACK)


def _texts(found: SelfCheck, name: Name, claim: str, pairs: Sequence[TextPair]) -> Check:
    if not pairs:
        return _skipped(found, name, claim)
    categories = {pair.category for pair in pairs}
    covered = f"{len(pairs)} texts of {len(categories)} categories, {sum(p.tokens for p in pairs)} tokens"
    if name == "same seed":
        covered += f" ({', '.join(dict.fromkeys(p.setting for p in pairs))})"
    covered += f"; {sum(p.accepted for p in pairs)} of {sum(p.drafted for p in pairs)} drafted tokens accepted"
    whole = {(case.category, case.id): len(case.tokens) for case in found.cases}
    cut = {(p.category, p.prompt) for p in pairs if p.prompt_tokens < whole[p.category, p.prompt]}
    if cut:
        covered += f"; {len(cut)} prompts cut to their ends"
    differences = [pair.difference for pair in pairs if pair.difference is not None]
    unexplained = sum(not difference.explained for difference in differences)
    if unexplained:
        return _check(found, name, claim, "failed", covered, f"texts that differ unexplained: {unexplained}")
    missing = _missing(found, name, pairs)
    if not differences:
        return _check(found, name, claim, "passed", covered, missing=missing)
    reason = f"texts that differ by the batch size alone: {len(differences)}"
    return _check(found, name, claim, "explained", covered, reason, missing)


def _missing(found: SelfCheck, name: Name, pairs: Sequence[TextPair]) -> str:
    """What a check leaves out: categories and ways of sampling for lack of time, and what cannot be done."""
    if name == "greedy":
        wanted, seen = [case.category for case in found.cases], {pair.category for pair in pairs}
    else:
        wanted, seen = [s.name for s in found.settings if s.name != GREEDY], {pair.setting for pair in pairs}
        if found.ungrammatical:
            wanted.remove("grammar")
    missing = [what for what in dict.fromkeys(wanted) if what not in seen]
    parts = [f"no time for {', '.join(missing)}"] if missing else []
    if not any(pair.drafted for pair in pairs):
        parts.append("nothing was drafted")
    if found.ungrammatical and name == "same seed":
        parts.append(f"this vocabulary cannot be held to the grammar: {found.ungrammatical}")
    return "; ".join(parts)


def _logprobs(found: SelfCheck) -> Check:
    name: Name = "logprobs"
    claim = "logprobs of plain and drafted texts are "
    claim += "the same bits" if found.exact else "no farther apart than batch sizes move them"
    pairs = found.pairs
    if not pairs:
        return _skipped(found, name, claim)
    largest = max(pair.logprob_difference for pair in pairs)
    covered = f"{sum(p.tokens for p in pairs)} tokens, and the {TOP} likeliest there; largest difference {largest:.3g}"
    if all(pair.logprobs_held(0.0) for pair in pairs):
        return _check(found, name, claim, "passed", covered)
    if not found.exact and found.probed is None:
        return _check(found, name, claim, "skipped", covered, "no time to see how far batch sizes move a logit")
    bound = 0.0 if found.probed is None or found.exact else found.probed.max_difference
    covered += f" of {2 * bound:.3g}"
    wrong = [pair for pair in pairs if not pair.logprobs_held(bound)]
    if not wrong:
        return _check(found, name, claim, "passed", covered)
    off = max(pair.first_logprob_difference for pair in wrong)
    reason = f"those of {len(wrong)} texts are not; the first is off its own logits by up to {off:.3g}"
    return _check(found, name, claim, "failed", covered, reason)


def _rollback(found: SelfCheck) -> Check:
    name: Name = "rollback"
    claim = "logits after a rollback are the same bits as before it"
    tests = found.rollbacks
    if not tests:
        return _skipped(found, name, claim)
    sizes, depths = ({getattr(test, which) for test in tests} for which in ("size", "depth"))
    covered = f"{len(tests)} batches of {_listed(sizes)} tokens after {_listed(depths)}"
    wrong = [test for test in tests if not test.held]
    if not wrong:
        return _check(found, name, claim, "passed", covered)
    first = wrong[0]
    if first.left_over:
        reason = f"{first.left_over} tokens too many in the cache after a batch of {first.size} at {first.depth}"
    else:
        largest = max(test.difference for test in wrong)
        reason = f"{len(wrong)} are not, by up to {largest:.3g}; first a batch of {first.size} at {first.depth}"
    return _check(found, name, claim, "failed", covered, reason)


def _states(found: SelfCheck, kind: Kind, claim: str) -> Check:
    tests = [test for test in found.states if test.kind == kind]
    if not tests:
        if found.spent[kind]:
            return _check(found, kind, claim, "skipped", reason=NO_TIME)
        return _skipped(found, kind, claim)
    covered = f"{len(tests)} test{'s' * (len(tests) > 1)} after {_listed({test.depth for test in tests})} tokens"
    rounded = [test for test in tests if test.held and not test.identical]
    if rounded:
        most = max(rounded, key=lambda test: test.difference)
        covered += f"; {len(rounded)} differ by rounding, up to {most.difference:.3g} of {most.bound:.3g}"
    wrong = [test for test in tests if not test.held]
    if not wrong:
        return _check(found, kind, claim, "passed", covered)
    worst = max(wrong, key=lambda test: test.difference)
    reason = f"{len(wrong)} differ, by up to {worst.difference:.3g}: {worst.what}, after {worst.depth} tokens"
    return _check(found, kind, claim, "failed", covered, reason)


def _law(found: SelfCheck) -> Check:
    name: Name = "law"
    claim = f"first tokens follow the target's law (false alarms: {FALSE_ALARM:g})"
    tests = found.laws
    if not tests:
        return _check(found, name, claim, "skipped", reason=NOT_REACHED)
    draws, accepted, refused = (sum(getattr(test, of) for test in tests) for of in ("draws", "accepted", "refused"))
    covered = f"{draws} tokens in {len(tests)} tests; {accepted} drafted ones accepted, {refused} refused"
    covered += f"; smallest bound of p {min(test.false_alarm for test in tests):.2g}, an alarm below {ALARM:.1g}"
    wrong = [test for test in tests if not test.held]
    if wrong:
        first = min(wrong, key=lambda test: test.false_alarm)
        reason = f"{len(wrong)} tests; worst after {first.category}/{first.prompt} with {first.method}"
        if first.outside:
            reason += f", {first.outside} of {first.draws} tokens are not in the law at all"
        return _check(found, name, claim, "failed", covered, reason)
    return _check(found, name, claim, "passed", covered, missing="" if found.target.can_rollback else NO_ROLLBACK)


def _listed(numbers: set[int]) -> str:
    return " and ".join(", ".join(str(n) for n in sorted(numbers)).rsplit(", ", 1))
