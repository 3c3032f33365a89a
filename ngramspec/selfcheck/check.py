"""`SelfCheck`: whether drafting changes nothing on this model, build and machine.

    check = SelfCheck(target, cases, exact=True)
    for doing in check.run():
        ...                                     # its name; what was found so far is in `check`
    verdicts = ngramspec.selfcheck.report.report(check)

Eight things are checked, as far as the time goes: greedy texts, sampled texts of the same seed, their logprobs, the
law of the first tokens, and four things that must leave no trace in the memory: a rollback, reading a prompt whose
beginning the cache already holds, the probe, and measuring what passes cost. If the code under test raises an
exception, that is a finding too.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from ngramspec.backend import Logits, Runner
from ngramspec.cost.calibration import Calibration
from ngramspec.cost.curve import CostCurve
from ngramspec.cost.kernels import LONG, POSITIONS, SHORT, SIZES, ProbeReport, probe
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting import DEFAULT
from ngramspec.drafting.draft import Drafter
from ngramspec.errors import GrammarError
from ngramspec.prompts import Case
from ngramspec.selfcheck.law import PROMPTS, LawTest, law_tests
from ngramspec.selfcheck.rollback import ROOM, RollbackTest, rollback_tests
from ngramspec.selfcheck.states import Kind, StateTest, state_tests
from ngramspec.selfcheck.texts import LogitsKeeper, Setting, TextComparison, TextPair, read, settings

Name = Literal["greedy", "same seed", "logprobs", "rollback", "reuse", "probe", "calibration", "law"]

LEAST_PROMPT = 8
"""Where time or context is short, prompts are cut from the front, but never below this many tokens."""

# When each check ends, as a share of the time.
_SHARES = {"rollback": 0.1, "reuse": 0.18, "probe": 0.28, "calibration": 0.32, "texts": 0.84}
_PROBE_SHARE = 0.25  # the most of the time that the probe may take
_GREEDY_SHARE = 0.7  # of a prompt's time; if the greedy texts take more, the sampled ones wait for another prompt
_READING_SHARE = 0.4  # the most of a prompt's time that reading it may take
_PACE = 32  # tokens read to see how fast that goes


class SelfCheck:
    """The checks, made while `run` is consumed; stopping early leaves what was found.

    Args:
        target: the loaded model.
        cases: prompts; at least one. Long ones are cut to their ends.
        drafter: what drafts, or its name.
        max_tokens: most tokens of a text, at least 2; slow models emit fewer.
        seconds: the time for all checks, above 0. The least that each check must do may take longer, and so may the
            first comparison of batch sizes for exact mode.
        seed: the seed of all sampling.
        exact: the target runs under its exact settings, and everything must be equal bit for bit.
        calibration_folder: as in `SpeculativeDecoder`.
        clock: tells seconds.

    Attributes:
        drafter: the name of what drafts.
        settings: the ways of choosing tokens under which texts are compared.
        pairs, rollbacks, states, laws: all that was found.
        broken: what a check raised, by its name.
        spent: seconds by check.
        ungrammatical: why no text could be held to a grammar; None if there is no such reason.
        complete: whether `run` came to its end.

    Raises:
        ValueError: no cases, a number out of its range or too large for the context, or an unknown drafter.
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
            raise ValueError("a self-check needs a case, 2 tokens per text, and some time")
        if target.n_ctx - max_tokens < LEAST_PROMPT:
            raise ValueError(f"{max_tokens} tokens leave no room for a prompt in a context of {target.n_ctx}")
        self.target = target
        self.cases = cases
        self.exact = exact
        self.max_tokens = max_tokens
        self.seconds = seconds
        self.seed = seed
        self.drafter = drafter if isinstance(drafter, str) else drafter.name
        self.pairs: list[TextPair] = []
        self.rollbacks: list[RollbackTest] = []
        self.states: list[StateTest] = []
        self.laws: list[LawTest] = []
        self.complete = False
        self._clock = clock
        self._calibration = Calibration.load(target, calibration_folder)
        # Only the batch sizes of exact mode depend on what passes cost.
        curve = None if exact else CostCurve({1: 1.0})
        recorder = LogitsKeeper(target)
        self.plain, self.drafted = (
            SpeculativeDecoder(
                recorder,
                vocabulary=target,
                drafter=name,
                policy="fixed",
                exact="on" if exact else "off",
                calibration_folder=calibration_folder,
                curve=curve,
                calibration=self._calibration if exact else None,
            )
            for name in (None, drafter)
        )
        self._texts = TextComparison(recorder, self.plain, self.drafted, max_tokens, self.bound, clock)
        self.settings = settings(seed)
        self._next_sampled = 0
        self.ungrammatical: str | None = None
        self.broken: dict[Name, str] = {}
        self.spent: defaultdict[Name, float] = defaultdict(float)
        self._read = self._pass = 0.0  # seconds per token of a prompt, and of a pass
        self._began = 0.0

    def run(self) -> Iterator[str]:
        """Do the checks; yields the name of each piece of work before it is done."""
        yield "a first look"
        self._began = self._clock()
        self._take_pace()
        if self.target.can_rollback:
            yield "rollback"
            with self._blaming("rollback"):
                self._check_rollback()
        for kind in get_args(Kind) if self.target.can_rollback else ("reuse",):
            yield kind
            with self._blaming(kind):
                self._check_states(kind)
        if self.target.can_rollback:
            yield "batch sizes"
            with self._blaming("greedy"):
                self._compare_sizes()
            if not self._texts_broken:
                yield from self._check_texts()
        yield from self._check_law()
        self.complete = True

    @property
    def probed(self) -> ProbeReport | None:
        """What the batch-size probe said; None before it was needed."""
        return self._calibration.probe

    @property
    def exact_sizes(self) -> tuple[int, ...] | None:
        """Batch sizes of exact mode; None before they were settled."""
        return self._calibration.exact_sizes

    def bound(self) -> float:
        """How far batch sizes move a logit, by the probe, which runs now if it has not yet; 0 in exact mode."""
        if self.exact:
            return 0.0
        known = self._calibration.probe
        if known is None:
            known = self._calibration.probe = probe(self.target, self._affordable_depths() or (SHORT,))
        return known.max_difference

    @property
    def _texts_broken(self) -> bool:
        return not self.broken.keys().isdisjoint(("greedy", "same seed"))

    def _left(self, share: float = 1.0) -> float:
        """Seconds until this share of the time is over."""
        return self._began + share * self.seconds - self._clock()

    @contextmanager
    def _blaming(self, name: Name) -> Iterator[None]:
        """Add the block's time to a check; an exception in the block is recorded as the check's failure."""
        began = self._clock()
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:
            self.broken[name] = f"{type(error).__name__}: {error}"
        finally:
            self.spent[name] += self._clock() - began

    def _take_pace(self) -> None:
        """See how long reading and a pass take, after a pass that brings the weights into memory."""
        text = self.cases[0].tokens[: min(_PACE, self.target.n_ctx)]
        self.target.clear()
        self.target.prefill(text[:1])
        began = self._clock()
        self.target.evaluate(text[:1])
        self._pass = self._clock() - began
        self.target.clear()
        began = self._clock()
        self.target.prefill(text)
        self._read = (self._clock() - began) / len(text)

    def _text(self) -> list[int]:
        """Tokens for tests of the memory."""
        text = [token for case in self.cases for token in case.tokens]
        return (text * -(-ROOM // len(text)))[:ROOM]

    def _check_states(self, kind: Kind) -> None:
        def affordable(tokens: int, passes: int) -> bool:
            return tokens * self._read + passes * self._pass < self._left(_SHARES[kind])

        self.states.extend(state_tests(self.target, self._text(), kind, affordable, exact=self.exact))

    def _check_rollback(self) -> None:
        for test in rollback_tests(self.target, self._text()):
            self.rollbacks.append(test)
            if test.left_over or self._left(_SHARES["rollback"]) < 0:
                break
        self.target.clear()

    def _compare_sizes(self) -> None:
        """Settle the batch sizes of exact mode, outside the time; without exact mode probe, if time allows."""
        if self.exact:
            began = self._clock()
            self._calibration.ensure_exact(self.target)
            self._began += self._clock() - began
        elif self._affordable_depths():
            self.bound()

    def _affordable_depths(self) -> tuple[int, ...]:
        """The depths that there is time to probe at: a short and a long one, a short one, or none."""
        passes = sum(-(-POSITIONS // size) for size in SIZES)
        for depths in ((SHORT, LONG), (SHORT,)):
            # A batch of these sizes costs about two passes.
            if 2 * len(depths) * passes * self._pass + max(depths) * self._read < _PROBE_SHARE * self.seconds:
                return depths
        return ()

    def _check_texts(self) -> Iterator[str]:
        """Prompts in rounds, one of each category in each, until the time is over."""
        done, spent = 0, 0.0
        for cases in self._rounds():
            for number, case in enumerate(cases):
                left = self._left(_SHARES["texts"])
                # The first round leaves no category out while there is time; later ones begin what they can finish.
                usual = 0.0 if done < len(cases) else spent / done
                if done and left <= usual:
                    return
                yield f"{case.category}/{case.id}"
                began = self._clock()
                self._check_prompt(case, max(usual, left / (len(cases) - number)))
                if self._texts_broken:
                    return
                done, spent = done + 1, spent + self._clock() - began
            self._next_sampled += 1  # or a category would always get the same one

    def _rounds(self) -> Iterator[list[Case]]:
        """The shortest prompt of every category, then the longest, since kernels change with the depth; then others."""
        by_category: defaultdict[str, list[Case]] = defaultdict(list)
        for case in sorted(self.cases, key=lambda case: len(case.tokens)):
            by_category[case.category].append(case)
        for turn in range(max(map(len, by_category.values()))):
            yield [of.pop(-1 if turn == 1 else 0) for of in by_category.values() if of]

    def _check_prompt(self, case: Case, seconds: float) -> None:
        """Compare the greedy texts of a prompt, then those of the sampling settings whose turn it is."""
        began = self._clock()
        with self._blaming("greedy"):
            # In exact mode each text reads it again.
            readings = 5 if self.exact else 1
            case = self._cut(case, seconds / readings)
            reading = read(self.target, case.tokens, exact=self.exact)
            self._read = (self._clock() - began) / len(case.tokens)
            left = began + seconds - self._clock()
            self.pairs.append(self._texts.compare(case, self.settings[0], reading, left / 2))
        sampled = self.settings[1:]
        for _ in range(-(-len(sampled) // len(self.cases))):  # one, unless there are fewer prompts than settings
            late = self._clock() - began > _GREEDY_SHARE * seconds
            if self._texts_broken or (late and len(self.pairs) > 1):
                return
            setting = sampled[self._next_sampled % len(sampled)]
            self._next_sampled += 1
            if setting.sampling.grammar is None or not self.ungrammatical:
                self._check_sampled(case, setting, reading, began + seconds - self._clock())

    def _check_sampled(self, case: Case, setting: Setting, reading: Logits, seconds: float) -> None:
        with self._blaming("same seed"):
            try:
                self.pairs.append(self._texts.compare(case, setting, reading, seconds))
            except GrammarError as error:
                self.ungrammatical = str(error)

    def _cut(self, case: Case, seconds: float) -> Case:
        """Keep the end of a prompt: what fits in the context and can be read in its share of the time."""
        most = max(LEAST_PROMPT, int(_READING_SHARE * seconds / self._read))
        return replace(case, tokens=case.tokens[-min(most, self.target.n_ctx - self.max_tokens) :])

    def _check_law(self) -> Iterator[str]:
        for case in sorted(self.cases, key=lambda case: len(case.tokens))[:PROMPTS]:
            if self.laws and self._left() < 0:
                return
            yield f"law of the tokens after {case.category}/{case.id}"
            with self._blaming("law"):
                tests = law_tests(
                    self.target,
                    self._cut(case, self._left()),
                    seed=self.seed,
                    exact=self.exact,
                    in_time=lambda: self._left() > 0,
                )
                self.laws.extend(tests)
