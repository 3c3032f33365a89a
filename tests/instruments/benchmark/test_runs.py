"""Tests of the benchmark on a mock target with known durations of passes: pairs, times, statistics and theory."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray
from support.mock_target import Clock, MockTarget

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.cost import bits
from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.data import ModelError
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting import make_drafter
from ngramspec.drafting.draft import NO_DRAFT, Ask, Draft, Drafter
from ngramspec.instruments.benchmark.figures import Summary, benchmark_report, describe_gain, summarise
from ngramspec.instruments.benchmark.runs import Benchmark, Kind, Run
from ngramspec.instruments.prompts import Case, Prompt, prepare
from ngramspec.instruments.reports.report import Report
from ngramspec.policies import make_policy
from ngramspec.policies.policy import Policy
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats

PREDICTABLE = 8.0
"""Peak with which the mock's text soon repeats itself, so that drafts are accepted."""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
    return clock


def cases(count: int = 2, length: int = 20) -> list[Case]:
    rng = np.random.default_rng(5)
    return [
        Case("even" if i % 2 == 0 else "odd", f"p{i}", tuple(int(t) for t in rng.integers(0, 16, length)))
        for i in range(count)
    ]


def make_untrained(policy: str, drafter: str | Drafter = "ngram") -> tuple[Drafter, Policy]:
    return make_drafter(drafter) if isinstance(drafter, str) else drafter, make_policy(policy)


def bench(
    target: MockTarget, prompts: int = 2, *, policies: Sequence[str] = ("fixed",), tokens: int = 40, **options: Any
) -> Benchmark:
    """Return a benchmark after its warm-up; `options` are arguments of the decoders and of the benchmark."""
    defaults = {"drafter": "ngram", "exact": "off", "times": None}
    how = {name: options.pop(name, default) for name, default in defaults.items()}
    decoder = SpeculativeDecoder(target, policy=policies[0], **how)
    options = {
        "repeat": 2,
        "other_policies": policies[1:],
        "make_untrained": partial(make_untrained, drafter=how["drafter"]),
        **options,
    }
    benchmark = Benchmark(decoder, options.pop("cases", cases(prompts)), tokens, **options)
    benchmark.warm_up()
    return benchmark


def measured(target: MockTarget, prompts: int = 2, **options: Any) -> Benchmark:
    """Return a benchmark after its run."""
    benchmark = bench(target, prompts, **options)
    list(benchmark.measure())
    return benchmark


def summaries_of(benchmark: Benchmark) -> list[Summary]:
    return summarise(benchmark.runs, list(benchmark.policies))


def overall(benchmark: Benchmark) -> Summary:
    return summaries_of(benchmark)[-1]


def report_on(benchmark: Benchmark) -> Report:
    return benchmark_report("t", "o", "c", ["s"], benchmark, summaries_of(benchmark))


def test_prepare_tokenizes_prompts_and_skips_unusable_ones() -> None:
    class Chatty(MockTarget):
        @property
        def chats(self) -> SimpleNamespace:
            return SimpleNamespace(tokens=self._format)

        def _format(self, messages: Sequence[dict[str, str]]) -> list[int]:
            if messages[0]["role"] == "system":
                raise ModelError("no system message, please")
            return self.tokenize(messages[0]["content"])

    system, user = ({"role": role, "content": "ab"} for role in ("system", "user"))
    prompts = [
        *(Prompt(name, "c", text="x" * length) for name, length in (("fits", 22), ("long", 23))),
        *(Prompt(name, "c", messages=said) for name, said in (("chat", (user,)), ("refused", (system, user)))),
    ]
    run, skipped = prepare(Chatty(256), prompts, max_tokens=10, n_ctx=32)
    assert [(case.id, len(case.tokens)) for case in run] == [("fits", 22), ("chat", 2)]
    assert run[1].tokens == (0, 1)
    assert [s["id"] for s in skipped] == ["long", "refused"]
    assert "23 tokens" in skipped[0]["reason"]
    assert "no system message" in skipped[1]["reason"]


@pytest.mark.parametrize("policy", ["fixed", "cost"])
def test_benchmark_repeats_do_not_learn_from_earlier_repeats(clock: Clock, policy: str) -> None:
    """The default drafter learns facts about tokens from every text, and most of them from its own text."""
    times = make_fixed_curve({1: 1.0, 64: 2.26})
    target = MockTarget(64, peak=3.0, seconds=times.ratio, clock=clock)
    settings = {"drafter": "mixture", "policies": [policy], "repeat": 3, "tokens": 120, "times": times}
    runs = measured(target, cases=cases(3, 60), **settings).runs
    drafted = {(run.repeat, run.prompt): run.stats for run in runs if run.kind == "drafted"}
    assert sum(stats.accepted for stats in drafted.values()) > 50
    for (repeat, prompt), stats in drafted.items():
        first = drafted[0, prompt]
        assert (stats.passes, stats.drafted_at) == (first.passes, first.drafted_at)
        assert stats.accepted_at == first.accepted_at
        assert stats.tokens / stats.seconds == pytest.approx(first.tokens / first.seconds, rel=1e-9), repeat


def test_benchmark_runs_alternate_plain_and_drafted() -> None:
    runs = measured(MockTarget(), repeat=3).runs
    assert [(run.prompt, run.repeat) for run in runs[::2]] == [(p, r) for r in range(3) for p in ("p0", "p1")]
    assert [(run.prompt, run.repeat) for run in runs[::2]] == [(run.prompt, run.repeat) for run in runs[1::2]]
    first = [run.kind for run in runs[::2]]
    assert first == ["plain", "drafted", "drafted", "plain", "plain", "drafted"]
    assert all({a.kind, b.kind} == {"plain", "drafted"} for a, b in zip(runs[::2], runs[1::2], strict=True))


def test_benchmark_times_decoding_and_prefill_separately(clock: Clock) -> None:
    benchmark = measured(MockTarget(seconds=lambda n: 1.0 + 0.25 * n, reading=float, clock=clock))
    for run in benchmark.runs:
        assert len(run.output) == run.stats.generated == 40
        assert sum(run.batches.values()) == run.stats.passes
        passes = sum(n * (1.0 + 0.25 * size) for size, n in run.batches.items())
        assert run.seconds == pytest.approx(passes, abs=0.01)
        assert run.prefill_seconds == pytest.approx(1.0, abs=0.01)
        assert run.tokens_per_second == pytest.approx(39 / passes, rel=0.01)
        if run.kind == "plain":
            assert run.batches == {1: 39}
    assert [(p["prompt"], p["tokens"]) for p in benchmark.prefills] == [("p0", 20), ("p1", 20)] * 2
    assert [p["seconds"] for p in benchmark.prefills] == pytest.approx([20.0] * 4, abs=0.01)


def test_benchmark_run_time_includes_drafting(clock: Clock) -> None:
    class Slow(Always):
        def begin(self, prompt: Sequence[int]) -> None:
            clock.now += 7.0

        def propose(self, ask: Ask) -> Draft:
            clock.now += 3.0
            return super().propose(ask)

    target = MockTarget(seconds=lambda n: 1.0, clock=clock)
    drafted = [run for run in bench(target, drafter=Slow()).measure() if run.kind == "drafted"]
    assert drafted
    for run in drafted:
        # The drafter reads the prompt while the target does. The last token is never drafted, as that cannot gain.
        assert run.prefill_seconds >= 7.0
        assert run.seconds == pytest.approx(run.stats.passes * 4.0, abs=3.01)


class Always(Drafter):
    """Drafter that always proposes the same token, so that every pass has two tokens."""

    name = "always"

    def begin(self, prompt: Sequence[int]) -> None:
        pass

    def propose(self, ask: Ask) -> Draft:
        return Draft((0,), ({0: 1.0},), (0,), (1,), (0.5,), self.name)

    def accept(self, tokens: Sequence[int]) -> int:
        return 0


class Flipped(MockTarget):
    """Target that swaps the two best tokens at one position in passes of two tokens."""

    flip_at = 22

    def evaluate(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        start = len(self.tokens)
        rows = super().evaluate(tokens)
        for i, row in enumerate(rows):
            if len(tokens) > 1 and start + i + 1 == self.flip_at:
                second, best = np.argsort(row)[-2:]
                row[[second, best]] = row[[best, second]]
        return rows


def test_benchmark_compares_sampled_texts_except_with_rejection() -> None:
    sampling = Sampling(temperature=1.0, seed=3)
    coupled = measured(MockTarget(peak=PREDICTABLE), 3, sampling=sampling)
    assert coupled.differences == []
    assert [s.identical for s in summaries_of(coupled)] == [2, 1, 3]
    rejection = measured(MockTarget(), 1, sampling=sampling, acceptance=Acceptance("rejection"))
    outputs = {run.kind: run.output for run in rejection.runs}
    assert outputs["plain"] != outputs["drafted"]
    assert rejection.differences == []


def test_benchmark_with_rounding_differs_only_without_exact_mode() -> None:
    def inexact() -> MockTarget:
        return MockTarget(peak=PREDICTABLE, kernels=lambda size, _depth: size % 2, noise=4.0, n_batch=64)

    assert len(measured(inexact(), 3).differences) > 0
    exact = measured(inexact(), 3, exact="on", default=SpeculativeDecoder(inexact(), drafter=None))
    assert exact.differences == []
    sizes = {size for run in exact.runs if run.kind != "default" for size in run.batches}
    assert sizes <= set(exact.drafted.kernels.exact_sizes)
    assert [run.kind for run in exact.runs[:6]] == ["plain", "drafted", "default", "drafted", "default", "plain"]
    assert overall(exact).identical == 3


def test_benchmark_in_exact_mode_probes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Mock(side_effect=bits.probe)
    monkeypatch.setattr(bits, "probe", probe)
    unwritable = tmp_path / "file"
    unwritable.touch()
    decoder = SpeculativeDecoder(MockTarget(), exact="on", calibration_folder=unwritable)
    benchmark = Benchmark(decoder, cases(1), max_tokens=8, make_untrained=make_untrained)
    benchmark.warm_up()
    list(benchmark.measure())
    assert probe.call_count == 1


def test_benchmark_runs_of_policy_contain_only_its_runs() -> None:
    policies = ("fixed", "heuristic", "entropy")
    benchmark = measured(MockTarget(peak=PREDICTABLE), 3, policies=policies, tokens=60)
    assert tuple(benchmark.policies) == policies
    # Each side goes first before any goes first again, also across prompts.
    rounds = [benchmark.runs[i : i + 4] for i in range(0, benchmark.total, 4)]
    assert [done[0].policy for done in rounds[:4]] == [None, *policies]
    assert all({run.policy for run in done} == {None, *policies} for done in rounds)
    for found in (summary for summary in summaries_of(benchmark) if summary.category == "overall"):
        drafted = [run for run in benchmark.runs if run.policy == found.policy]
        assert len(drafted) == found.rounds == 6
        assert found.stats.passes == sum(run.stats.passes for run in drafted)
        assert found.identical == found.prompts == 3


def test_benchmark_separates_costs_by_policy_and_stores_those_of_first(clock: Clock, tmp_path: Path) -> None:
    target = MockTarget(peak=PREDICTABLE, seconds=lambda n: 1 + 0.2 * (n - 1), clock=clock)
    decoder, others = SpeculativeDecoder(target), ("fixed", "heuristic")
    benchmark = Benchmark(decoder, cases(1), 40, other_policies=others, make_untrained=make_untrained)
    first, second, third = (d.times for d in benchmark.policies.values())
    assert first.to_json() == second.to_json() == third.to_json()
    for size in (1, 5) * 3:
        second.observe(size, float(size))
    assert first.to_json() == third.to_json() != second.to_json()
    list(benchmark.measure())
    (stored,) = tmp_path.rglob("*.json")
    assert json.loads(stored.read_text()) == first.to_json()


def test_benchmark_difference_names_its_policy() -> None:
    class Never(Always):
        def propose(self, ask: Ask) -> Draft:
            return NO_DRAFT

    target = Flipped()
    decoder = SpeculativeDecoder(target, drafter=Never(), policy="fixed")
    drafters = {"fixed": Never(), "heuristic": Always()}
    made = {name: (drafter, make_policy(name)) for name, drafter in drafters.items()}
    benchmark = Benchmark(decoder, cases(1), 40, other_policies=["heuristic"], make_untrained=made.__getitem__)
    list(benchmark.measure())
    assert [(d["policy"], d["repeat"], d["position"]) for d in benchmark.differences] == [("heuristic", 0, 2)]
    assert {s.policy: s.identical for s in summaries_of(benchmark)} == {"fixed": 1, "heuristic": 0}


def test_benchmark_caveat_names_reason_for_different_outputs() -> None:
    decoder = SpeculativeDecoder(MockTarget())
    for acceptance, temperature, caveat in (
        (Acceptance(), 1.0, None),
        (Acceptance("coupled"), 1.0, None),
        (Acceptance("rejection"), 1.0, "keeps its distribution"),
        (Acceptance("rejection"), 0.0, None),
        (Acceptance(lenience=0.5), 0.0, "lenience 0.5 changes the output"),
        (Acceptance(typical=True), 1.0, "typical acceptance changes the output"),
    ):
        settings = 8, 1, Sampling(temperature), acceptance
        found = Benchmark(decoder, cases(), *settings, make_untrained=make_untrained).caveat
        assert found is None if caveat is None else caveat in found


def a_run(category: str, kind: Kind, tokens: int, seconds: float, *, prompt: str = "p", repeat: int = 0) -> Run:
    stats = Stats(tokens=tokens, passes=tokens, passes_without_draft=tokens, generated=tokens + 1)
    output = tuple(range(tokens + 1))
    return Run(category, prompt, kind, repeat, output, seconds, 0.5, stats, Counter({1: tokens}), "length")


def test_summarise_returns_medians_of_paired_ratios() -> None:
    runs = [a_run("a", "plain", 8, seconds, repeat=repeat) for repeat, seconds in enumerate((1.0, 2.0, 4.0))]
    runs += [a_run("a", "drafted", 8, seconds, repeat=repeat) for repeat, seconds in enumerate((0.5, 2.0, 1.0))]
    runs += [a_run("b", "plain", 8, 1.0), a_run("b", "drafted", 8, 2.0), a_run("b", "default", 8, 0.8)]
    runs.append(a_run("b", "plain", 8, 1.0, repeat=1))  # Its partner never ran.
    a, b, both = summarise(runs)
    assert (a.category, a.prompts, a.rounds) == ("a", 1, 3)
    assert (a.plain, a.drafted) == (4.0, 8.0)
    assert a.ratio == 2.0
    assert a.exact_price is None
    assert b.ratio == 0.5
    assert b.exact_price == 0.8
    assert (b.prompts, b.rounds) == (1, 1)
    assert both.ratio == 1.5
    assert (both.prompts, both.stats.tokens) == (2, 32)


@pytest.mark.parametrize(
    ("seconds", "drafts", "words"),
    [
        ([0.9] * 5, 1, "no difference that these runs can show: 5 of at least 6 pairs"),
        ([0.9, 0.8, 0.85, 0.8, 0.7, 0.8], 1, "1.11 to 1.43 times as fast with drafts as without"),
        ([0.9, 0.97, 1.04, 0.98, 0.9, 0.95], 1, "no difference that these runs can show"),
        ([0.97] * 6, 0, "nothing was drafted"),
    ],
)
def test_describe_gain_reports_only_what_the_pairs_show(seconds: list[float], drafts: int, words: str) -> None:
    runs = [a_run("a", "drafted", 8, one, repeat=repeat) for repeat, one in enumerate(seconds)]
    for run in runs:
        run.stats.drafted = drafts
    runs += [a_run("a", "plain", 8, 1.0, repeat=run.repeat) for run in runs]
    assert describe_gain(summarise(runs)[-1]) == words


def test_summarise_of_categories_shares_the_chance_of_a_false_alarm() -> None:
    """Six faster pairs show an overall gain, but not which of the categories gains."""
    runs = [
        a_run(category, kind, 8, seconds, repeat=repeat)
        for repeat in range(6)
        for category in ("a", "b")
        for kind, seconds in (("plain", 1.0), ("drafted", 0.8))
    ]
    for run in runs:
        run.stats.drafted = run.kind == "drafted"
    assert [summary.is_clear for summary in summarise(runs)] == [False, False, True]
    many = [str(number) for number in range(2000)]
    summaries = summarise(runs, many)[:3]
    assert [summary.is_clear for summary in summaries] == [False] * 3
    assert describe_gain(summaries[-1], len(many)).endswith(": 12 of at least 17 pairs")
    alone = [run for run in runs if run.category == "a"]
    assert [summary.is_clear for summary in summarise(alone)] == [True, True]


def test_summarise_requires_identical_rounds_and_omits_speed_of_empty_text() -> None:
    runs = [a_run("a", kind, 8, 1.0, repeat=repeat) for repeat in (0, 1) for kind in ("plain", "drafted")]
    runs[1] = replace(runs[1], output=(9,))
    summary = summarise(runs)[0]
    assert (summary.identical, summary.prompts, summary.rounds) == (0, 1, 2)
    summaries = summarise([a_run("a", "plain", 0, 0.0), a_run("a", "drafted", 0, 0.0)])
    assert (summaries[0].plain, summaries[0].ratio, summaries[0].identical) == (None, None, 1)
    assert summarise([]) == []


def interrupted(target: MockTarget) -> Benchmark:
    benchmark = bench(target, repeat=2)
    for _, _ in zip(range(3), benchmark.measure(), strict=False):
        pass
    return benchmark


REPORTS: dict[str, Callable[[Any], Benchmark]] = {
    "two policies": lambda make: measured(make(), 3, policies=("fixed", "heuristic"), repeat=3),
    "texts differ": lambda make: measured(make(Flipped, peak=3.0), 1, drafter=Always()),
    "exact": lambda make: measured(make(), 3, exact="on", default=SpeculativeDecoder(make(), drafter=None)),
    "lossy": lambda make: measured(make(peak=3.0), acceptance=Acceptance(lenience=0.5)),
    "interrupted": lambda make: interrupted(make()),
    "no runs": lambda make: bench(make()),
    "no drafts": lambda make: measured(make(fail_rollback=True)),
}


def shorten(value: Any) -> Any:
    """Return a JSON value with six digits of each number, because machines round differently, and rows as texts."""
    if isinstance(value, dict):
        return {name: shorten(part) for name, part in value.items()}
    if isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        return [shorten(part) for part in value]
    if isinstance(value, list):
        return " | ".join(str(shorten(part)) for part in value)
    return float(f"{value:.6g}") if isinstance(value, float) else value


@pytest.mark.parametrize("name", REPORTS)
def test_benchmark_report_is_as_recorded(name: str, clock: Clock) -> None:
    """`RECORD=1` records it again, so the changes of the file are what users can notice."""

    def make(kind: type[MockTarget] = MockTarget, **options: Any) -> MockTarget:
        return kind(**{"peak": PREDICTABLE, "seconds": lambda n: 1 + 0.1 * n, "clock": clock, "n_batch": 64, **options})

    file = Path(__file__).with_name("reports.json")
    recorded = json.loads(file.read_text("utf-8")) if file.exists() else {}
    report = shorten(json.loads(json.dumps(asdict(report_on(REPORTS[name](make))))))
    if "RECORD" in os.environ:
        file.write_text(json.dumps(recorded | {name: report}, indent=1, ensure_ascii=False) + "\n", "utf-8")
    else:
        assert report == recorded[name]
