"""Check that drafting changes no text with this model, build and machine (`SelfCheck`), and the report on it.

There are three checks, within a time limit: a rollback does not change later logits, and drafts do not change texts,
neither in greedy decoding nor with a seed. An exception in the tested code fails the check too.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ngramspec.backend import Logits, Model, Runner
from ngramspec.cost.bits import LONG, POSITIONS, SHORT, SIZES, KernelClasses, probe
from ngramspec.cost.times import PassTimes
from ngramspec.data import GrammarError
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting import DEFAULT
from ngramspec.drafting.draft import Drafter
from ngramspec.instruments.prompts import Case, SkippedPrompt, format_skipped
from ngramspec.instruments.reports.report import Report, Section, Table, limit_lines
from ngramspec.instruments.selfcheck.texts import (
    GREEDY,
    LogitsRecorder,
    Setting,
    TextComparison,
    TextDifference,
    TextPair,
    read,
    settings,
)

Name = Literal["rollback", "greedy", "same seed"]
Status = Literal["passed", "explained", "failed", "skipped"]

MIN_PROMPT = 8  # minimum length of a prompt that is cut at the start because time or context is short


class SelfCheck:
    """The checks, which run while `run` is consumed. If the caller stops early, the results so far remain.

    The minimum work of each check may take longer than `seconds`, which do not include the comparison of batch sizes.
    `exact` means that the target runs with its exact settings, so that everything must be equal bit for bit.
    """

    def __init__(
        self,
        target: Runner,
        cases: Sequence[Case],
        *,
        drafter: str | Drafter = DEFAULT,
        max_tokens: int = 64,
        seconds: float = 50.0,
        seed: int = 0,
        exact: bool = False,
        calibration_folder: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not cases or max_tokens < 2 or not seconds > 0:
            raise ValueError("a self-check requires a case, at least 2 tokens per text, and a time limit above 0")
        self.sequence = target.sequences[0]
        if self.sequence.n_ctx - max_tokens < MIN_PROMPT:
            raise ValueError(f"{max_tokens} tokens leave no room for a prompt in a context of {self.sequence.n_ctx}")
        self.cases, self.exact = cases, exact
        self.max_tokens, self.seconds, self.seed = max_tokens, seconds, seed
        self.drafter = drafter if isinstance(drafter, str) else drafter.name
        self.rollbacks: list[RollbackTest] = []
        self.pairs: list[TextPair] = []
        self.settings = settings(seed)
        self.grammar_unsupported_reason: str | None = None  # reason why the check of grammars was skipped
        self.errors: dict[Name, str] = {}  # error that a check raised, by the name of the check
        self.seconds_by_check: defaultdict[Name, float] = defaultdict(float)
        self.complete = False
        self._clock = clock
        self.kernels = KernelClasses.load(self.sequence, calibration_folder)  # with the result of the probe, if needed
        keeper = LogitsRecorder(self.sequence)
        options: dict[str, Any] = {"policy": "fixed", "exact": "off", "times": PassTimes()}
        if exact:
            options |= {"exact": "on", "kernels": self.kernels}
        self.plain, self.drafted = (
            SpeculativeDecoder(
                keeper, vocabulary=target.vocabulary, drafter=name, calibration_folder=calibration_folder, **options
            )
            for name in (None, drafter)
        )
        self._texts = TextComparison(keeper, self.plain, self.drafted, self.bound)
        self._sampled = cycle(self.settings[1:])
        self._read = self._pass = 0.0  # seconds per token of a prompt, and of a text
        self._start = 0.0

    def run(self) -> Iterator[str]:
        """Run the checks, and yield the name of each step before it starts."""
        yield "a first look"
        self._start = self._clock()
        self._measure_pace()
        if self.sequence.can_rollback:
            yield "rollback"
            with self._blame("rollback"):
                self._check_rollback()
            if self.exact:
                yield "batch sizes"
                with self._blame("greedy"):
                    start = self._clock()
                    self.kernels.ensure_exact(self.sequence)
                    self._start += self._clock() - start  # not included in the time limit
            if not self._texts_broken:
                yield from self._check_texts()
        self.complete = True

    def bound(self) -> float:
        """Return how far batch sizes move a logit, measured by a probe at the first call; 0 in exact mode."""
        if self.exact:
            return 0.0
        if self.kernels.probe is None:
            # A batch of these sizes costs about two passes.
            passes = 2 * 2 * sum(-(-POSITIONS // size) for size in SIZES)
            fits_both = passes * self._pass + LONG * self._read < 0.25 * self.seconds
            self.kernels.probe = probe(self.sequence, (SHORT, LONG) if fits_both else (SHORT,))
        return self.kernels.probe.max_difference

    @property
    def _texts_broken(self) -> bool:
        return not self.errors.keys().isdisjoint(("greedy", "same seed"))

    @contextmanager
    def _blame(self, name: Name) -> Iterator[None]:
        """Add the block's time to a check; an exception in the block is recorded as the check's failure."""
        start = self._clock()
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:
            self.errors[name] = f"{type(error).__name__}: {error}"
        finally:
            self.seconds_by_check[name] += self._clock() - start

    def _measure_pace(self) -> None:
        """Measure the time of prefill and of a pass, after a pass that loads the weights into memory."""
        text = self.cases[0].tokens[: min(32, self.sequence.n_ctx)]
        self.sequence.clear()
        self.sequence.prefill(text[:1])
        start = self._clock()
        self.sequence.evaluate(text[:1])
        self._pass = self._clock() - start
        self.sequence.clear()
        start = self._clock()
        self.sequence.prefill(text)
        self._read = (self._clock() - start) / len(text)

    def _check_rollback(self) -> None:
        text = [token for case in self.cases for token in case.tokens]
        for test in rollback_tests(self.sequence, (text * -(-ROOM // len(text)))[:ROOM]):
            self.rollbacks.append(test)
            if test.left_over or self._clock() - self._start > 0.15 * self.seconds:
                break
        self.sequence.clear()

    def _check_texts(self) -> Iterator[str]:
        """Check texts in rounds with one prompt of each category, which share the remaining time equally."""
        done, elapsed = 0, 0.0
        for cases in self._rounds():
            for number, case in enumerate(cases):
                start = self._clock()
                remaining = self._start + self.seconds - start
                # The first round checks all categories while there is time. Later rounds start only prompts that they
                # can finish.
                usual_seconds = 0.0 if done < len(cases) else elapsed / done
                if done and remaining <= usual_seconds:
                    return
                yield f"{case.category}/{case.id}"
                self._check_prompt(case, max(usual_seconds, remaining / (len(cases) - number)))
                if self._texts_broken:
                    return
                done, elapsed = done + 1, elapsed + self._clock() - start
            next(self._sampled)  # otherwise a category would always have the same settings

    def _rounds(self) -> Iterator[list[Case]]:
        """Yield the shortest prompt of every category, the longest (kernels change with the depth), then the others."""
        by_category: defaultdict[str, list[Case]] = defaultdict(list)
        for case in sorted(self.cases, key=lambda case: len(case.tokens)):
            by_category[case.category].append(case)
        for turn in range(max(map(len, by_category.values()))):
            yield [of.pop(-1 if turn == 1 else 0) for of in by_category.values() if of]

    def _check_prompt(self, case: Case, seconds: float) -> None:
        """Compare the greedy texts of a prompt, then those of the sampling settings whose turn it is."""
        start = self._clock()
        with self._blame("greedy"):
            # Reading takes at most 40 % of the time. In exact mode each text requires another prefill.
            max_length = int(0.4 * seconds / (5 if self.exact else 1) / self._read)
            max_length = min(max(MIN_PROMPT, max_length), self.sequence.n_ctx - self.max_tokens)
            case = case._replace(tokens=case.tokens[-max_length:])
            read(self.sequence, case.tokens, exact=self.exact)
            self._read = (self._clock() - start) / len(case.tokens)
            self._compare(case, self.settings[0], (start + seconds - self._clock()) / 2)
        turns = -(-(len(self.settings) - 1) // len(self.cases))  # 1, unless there are fewer prompts than settings
        for setting in islice(self._sampled, turns):
            if self._texts_broken or (setting[1].grammar is not None and self.grammar_unsupported_reason):
                continue
            with self._blame("same seed"):
                try:
                    self._compare(case, setting, start + seconds - self._clock())
                except GrammarError as error:
                    self.grammar_unsupported_reason = str(error)

    def _compare(self, case: Case, setting: Setting, seconds: float) -> None:
        """Compare two texts whose length is limited to what can be generated in about this many seconds."""
        start = self._clock()
        max_tokens = min(max(4, int(seconds / (2 * self._pass))), self.max_tokens)
        pair = self._texts.compare(case, setting, max_tokens, cut=max_tokens < self.max_tokens)
        self.pairs.append(pair)
        if pair.difference is None:  # the explanation of a difference takes time that would distort the measurement
            self._pass = (self._clock() - start) / (2 * pair.tokens)


# The size of a full draft comes first, because time may run out before the end of the list.
BATCHES = (5, 2, 1, 16)  # sizes of the batches that are evaluated, rolled back, and evaluated again
DEPTHS = (24, 300)  # numbers of context tokens before the batch
ROOM = max(DEPTHS) + 2 * max(BATCHES)  # number of tokens that all tests together require


@dataclass(frozen=True, slots=True)
class RollbackTest:
    """The result of evaluating a batch, rolling it back, and evaluating it again."""

    depth: int  # number of tokens in the cache before the batch
    size: int  # number of tokens in the batch
    # 0 if the whole batch was rolled back and evaluated again. Otherwise this many of its tokens were kept. The next
    # batch was then evaluated twice: after two batches of this size that differ in the tokens rolled back.
    kept: int
    left_over: int  # number of tokens in the cache after the rollback that should have been removed
    difference: float  # maximum difference of a logit between the two evaluations; inf if one is nan
    identical: bool  # whether the logits are equal bit for bit


def rollback_tests(target: Model, text: Sequence[int]) -> Iterator[RollbackTest]:
    """Test every size at every depth that the text and the context have room for."""
    # Tokens that are evaluated twice have the same place in a batch of the same size, so their logits must be equal.
    other_tokens = [(token + 1) % target.n_vocab for token in text]
    room = min(len(text), target.n_ctx)

    def evaluate(batch: Sequence[int], length: int) -> Logits:
        rows = target.evaluate(batch).copy()
        target.rollback(length)
        return rows

    def test(size: int, n_kept: int, first: Logits, second: Logits) -> RollbackTest:
        differs = first.view(np.uint32) != second.view(np.uint32)
        gaps = np.nan_to_num(np.abs(first[differs] - second[differs]), nan=np.inf)
        left_over = len(target.tokens) - depth
        return RollbackTest(depth, size, n_kept, left_over, float(gaps.max(initial=0.0)), not differs.any())

    for depth in sorted({max(1, min(depth, room - 2 * max(BATCHES))) for depth in DEPTHS}):
        target.clear()
        target.prefill(text[:depth])
        target.checkpoint()
        for size in BATCHES:
            end = depth + size
            if end + size > room or size > target.max_batch:
                continue
            batch, other_batch, after = text[depth:end], other_tokens[depth:end], text[end : end + size]
            once = evaluate(batch, depth)
            evaluate(other_batch, depth)
            yield test(size, 0, once, evaluate(batch, depth))
            if n_kept := size // 2:
                rows = []
                for undone_tokens in (batch[n_kept:], other_batch[n_kept:]):
                    evaluate([*batch[:n_kept], *undone_tokens], depth + n_kept)
                    rows.append(evaluate(after, depth))
                yield test(size, n_kept, *rows)


@dataclass(slots=True)
class Check:
    name: Name
    claim: str  # requirement in this mode
    seconds: float  # time of the check
    status: Status = "passed"  # "explained" means that texts differ only as far as the batch size can explain
    covered: str = ""  # tests that were made
    reason: str = ""  # reason of a failure, a skipped check, or an explained difference
    missing: str = ""  # parts that were not checked


def list_checks(selfcheck: SelfCheck) -> list[Check]:
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
