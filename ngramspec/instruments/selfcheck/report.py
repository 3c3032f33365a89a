"""Results of a `SelfCheck`: one `Check` for each requirement, and the report on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ngramspec.instruments.prompts import SkippedPrompt, format_skipped
from ngramspec.instruments.reports.report import Report, Section, Table, limit_lines
from ngramspec.instruments.selfcheck.check import Name, RollbackTest, SelfCheck
from ngramspec.instruments.selfcheck.texts import GREEDY, TextDifference, TextPair

Status = Literal["passed", "explained", "failed", "skipped"]


@dataclass(slots=True)
class Check:
    """The result of one requirement."""

    name: Name
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
            check.status, check.reason = "skipped", "not reached"
            if not selfcheck.sequence.can_rollback:
                check.reason = "this model's state cannot be rolled back (recurrent or hybrid), so drafting is off"
        if check.name in selfcheck.errors:
            check.status, check.reason = "failed", selfcheck.errors[check.name]
        if check.status == "failed":
            check.missing = ""
    return checks


def verdict(checks: Sequence[Check], *, complete: bool) -> str:
    """Return a one-line summary of the checks; `complete` is false if the user stopped them."""
    names = {status: ", ".join(c.name for c in checks if c.status == status) for status in ("failed", "skipped")}
    if names["failed"]:
        return f"FAILED: {names['failed']}"
    if not complete:
        return "INCOMPLETE: no check failed so far"
    line = "all checks passed"
    if any(check.status == "explained" for check in checks):
        line += "; some texts differ because of the batch size, which exact mode rules out"
    if partial_checks := ", ".join(check.name for check in checks if check.missing):
        line += f"; checked in part: {partial_checks}"
    return f"{line}; not checked: {names['skipped']}" if names["skipped"] else line


def _judge_rollback(check: Check, tests: Sequence[RollbackTest]) -> None:
    numbers = {test.size for test in tests}, {test.depth for test in tests}
    sizes, depths = (" and ".join(", ".join(map(str, sorted(each))).rsplit(", ", 1)) for each in numbers)
    check.covered = f"{len(tests)} batches of {sizes} tokens after {depths}"
    failures = [test for test in tests if test.left_over or not test.identical]
    if not failures:
        return
    check.status, first = "failed", failures[0]
    place = f"a batch of {first.size} at {first.depth}"
    largest = max(test.difference for test in failures)
    check.reason = f"{len(failures)} differ, by up to {largest:.3g}; first {place}"
    if first.left_over:
        check.reason = f"{first.left_over} extra tokens in the cache after {place}"


def _judge_texts(check: Check, selfcheck: SelfCheck, pairs: Sequence[TextPair]) -> None:
    is_greedy, unsupported = check.name == "greedy", selfcheck.grammar_unsupported_reason
    tested_settings = dict.fromkeys(pair.setting for pair in pairs)
    coverage = f"{len(pairs)} texts of {len({pair.category for pair in pairs})} categories"
    coverage += f", {sum(p.tokens for p in pairs)} tokens" + ("" if is_greedy else f" ({', '.join(tested_settings)})")
    coverage += f"; {sum(p.accepted for p in pairs)} of {sum(p.drafted for p in pairs)} drafted tokens accepted"
    whole = {(case.category, case.id): len(case.tokens) for case in selfcheck.cases}
    if cut := {(p.category, p.prompt) for p in pairs if p.prompt_tokens < whole[p.category, p.prompt]}:
        coverage += f"; {len(cut)} prompts cut to their ends"
    parts = dict.fromkeys(case.category for case in selfcheck.cases)
    tested = {pair.category for pair in pairs}
    if not is_greedy:
        parts = dict.fromkeys(setting for setting, _, _ in selfcheck.settings if setting != GREEDY)
        tested = {*tested_settings, "grammar"} if unsupported else {*tested_settings}
    late = [part for part in parts if part not in tested]
    gaps = [f"no time for {', '.join(late)}"] if late else []
    gaps += [] if any(pair.drafted for pair in pairs) else ["nothing was drafted"]
    if unsupported and not is_greedy:
        gaps.append(f"the grammar does not work with this vocabulary: {unsupported}")
    check.covered, check.missing = coverage, "; ".join(gaps)
    differences = [pair.difference for pair in pairs if pair.difference is not None]
    n_unexplained = sum(difference.needed is None for difference in differences)
    if n_unexplained:
        check.status, check.reason = "failed", f"texts with an unexplained difference: {n_unexplained}"
    elif differences:
        check.status, check.reason = "explained", f"texts that differ because of the batch size: {len(differences)}"


def verify_report(
    command: str,
    setup: Sequence[str],
    selfcheck: SelfCheck,
    checks: Sequence[Check],
    skipped_prompts: Sequence[SkippedPrompt],
) -> Report:
    """Return the report on all checks, with the verdict as its headline."""
    rows = []
    for check in checks:
        lines = "\n".join(filter(None, (check.claim, check.covered, check.reason, check.missing)))
        rows.append([check.name, check.status, lines, f"{check.seconds:.1f}" if check.seconds else "-"])
    table = Table(["check", "result", "requirement and coverage", "seconds"], rows, text=3)
    differences = [_describe(pair, pair.difference) for pair in selfcheck.pairs if pair.difference is not None]
    headline = verdict(checks, complete=selfcheck.complete)
    details = [*limit_lines(differences, "texts differ in total"), *format_skipped(skipped_prompts), headline]
    sections = [Section("Checks", "drafts change no text here", [table])]
    return Report("Checks", command, sections=sections, headline=headline, setup=setup, details=details)


def _describe(pair: TextPair, difference: TextDifference) -> str:
    tokens = []
    for token, text, logit in (
        (difference.plain, difference.plain_text, difference.plain_logit),
        (difference.drafted, difference.drafted_text, difference.drafted_logit),
    ):
        tokens.append("no more tokens" if token is None else f"{token} {text!r} (logit {logit:.4f})")
    bound = f"the batch size changes {{}} by up to {difference.bound:.2g}"
    if difference.needed is not None:
        need = "nothing" if difference.needed == 0 else f"{difference.needed:.2g}"
        why = f"a change of {need} in the logits explains it; {bound.format('them')}"
    elif difference.bound == 0:
        why = "no batch size explains it"
    else:
        why = f"{bound.format('logits')}, which does not explain it"
    return (
        f"{pair.category}/{pair.prompt}, {pair.setting}: after {difference.position} equal tokens, plain decoding has"
        f" {tokens[0]}, drafted {tokens[1]}; {why}"
    )
