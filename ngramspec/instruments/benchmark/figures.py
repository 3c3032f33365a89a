"""Figures of a benchmark's runs, by policy and category, and the report on them.

A *round* contains the runs of one prompt in one repeat, drafted with one policy. Unfinished rounds are omitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ngramspec.cost.paired import CHANCE, NO_DIFFERENCE, Paired, compare_pairs, pairs_needed
from ngramspec.instruments.benchmark.runs import Benchmark, Kind, Run
from ngramspec.instruments.prompts import SkippedPrompt, format_skipped
from ngramspec.instruments.reports import report as reports
from ngramspec.instruments.reports.report import OVERALL, Bar, Bars, Report, Section, Table, figure, limit_lines
from ngramspec.steps import Stats

Round = dict[Kind, Run]

UNCLEAR = "not clear"
"""Text in place of a gain that noise may explain."""


def median_of(figures: Iterable[float | None]) -> float | None:
    """Return the median of the known figures; `None` if no figure is known."""
    values = [figure for figure in figures if figure is not None]
    return median(values) if values else None


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one policy in one category, or in all."""

    policy: str
    category: str  # name of the category, or `OVERALL`
    prompts: int  # number of prompts with at least one finished round
    rounds: int  # number of finished rounds
    # Median tokens per second of plain, drafted and default runs over rounds, without the prefill. `None` if there were
    # no such runs, or they emitted nothing after the first token.
    plain: float | None
    drafted: float | None
    default: float | None
    ratio: float | None  # drafted / plain tokens per second, median over rounds; noise if nothing was drafted
    # Comparison of these ratios; `None` if nothing was drafted, or no speed is known. Those of categories share the
    # chance of a false alarm.
    gain: Paired | None
    exact_price: float | None  # plain speed with / without exact mode, median; `None` if not measured
    stats: Stats  # counters of the drafted runs
    identical: int  # number of prompts with equal drafted and plain output in every finished round
    tokens_per_pass: float
    acceptance_rate: float | None
    # Accepted / tested at each position of a draft; a position is tested if all before it were accepted.
    acceptance_by_position: list[float | None]
    share_of_passes_without_draft: float | None

    @property
    def is_clear(self) -> bool:
        """True if the pairs show more than noise."""
        return self.gain is not None and (self.gain.is_faster or self.gain.is_slower)


def summarise(runs: Sequence[Run], policies: Sequence[str] = ("cost",)) -> list[Summary]:
    """Return the summaries of each policy with a finished round by category, the overall one last."""
    # Noise is an overall gain of any policy with a probability of at most `CHANCE`, and a gain of any category too.
    summaries = []
    for policy in policies:
        rounds: dict[tuple[str, str, int], Round] = {}
        for run in runs:
            if run.policy in (policy, None):
                rounds.setdefault((run.category, run.prompt, run.repeat), {})[run.kind] = run
        finished = [round_ for round_ in rounds.values() if {"plain", "drafted"} <= round_.keys()]
        groups: dict[str, list[Round]] = {}
        for round_ in finished:
            groups.setdefault(round_["plain"].category, []).append(round_)
        chance = CHANCE / len(policies)
        summaries += [_summary(policy, *group, chance / len(groups)) for group in groups.items()]
        if finished:
            summaries.append(_summary(policy, OVERALL, finished, chance))
    return summaries


def _summary(policy: str, category: str, rounds: Sequence[Round], chance: float) -> Summary:
    identical: dict[tuple[str, str], bool] = {}
    stats = Stats()
    for round_ in rounds:
        plain_run, drafted_run = round_["plain"], round_["drafted"]
        key = plain_run.category, plain_run.prompt
        identical[key] = identical.get(key, True) and plain_run.output == drafted_run.output
        stats.merge(drafted_run.stats)
    ratios = [ratio for round_ in rounds if (ratio := _ratio(round_, "drafted", "plain")) is not None]
    positions = zip(stats.accepted_at, stats.tested_at, strict=True)
    return Summary(
        policy,
        category,
        prompts=len(identical),
        rounds=len(rounds),
        plain=median_of(_speed(round_, "plain") for round_ in rounds),
        drafted=median_of(_speed(round_, "drafted") for round_ in rounds),
        default=median_of(_speed(round_, "default") for round_ in rounds),
        ratio=median_of(ratios),
        gain=compare_pairs(ratios, chance) if stats.drafted else None,
        exact_price=median_of(_ratio(round_, "plain", "default") for round_ in rounds),
        stats=stats,
        identical=sum(identical.values()),
        tokens_per_pass=stats.tokens_per_pass,
        acceptance_rate=stats.acceptance_rate,
        acceptance_by_position=[n_accepted / n_tested if n_tested else None for n_accepted, n_tested in positions],
        share_of_passes_without_draft=stats.passes_without_draft / stats.passes if stats.passes else None,
    )


def _speed(round_: Round, kind: Kind) -> float | None:
    return round_[kind].tokens_per_second if kind in round_ else None


def _ratio(round_: Round, above: Kind, below: Kind) -> float | None:
    a, b = _speed(round_, above), _speed(round_, below)
    return None if a is None or b is None else a / b


def describe_gain(overall: Summary | None, n_policies: int = 1) -> str:
    """Return what the runs of one of several policies show about its gain."""
    if overall is None or overall.ratio is None:
        return "no speed measured"
    if overall.gain is None:
        return "nothing was drafted"
    if overall.gain.interval is None:
        return f"{NO_DIFFERENCE}: {overall.gain.pairs} of at least {pairs_needed(chance=CHANCE / n_policies)} pairs"
    return f"{overall.gain} with drafts as without" if overall.is_clear else str(overall.gain)


def benchmark_report(
    title: str,
    origin: str,
    command: str,
    setup: Sequence[str],
    benchmark: Benchmark,
    summaries: Sequence[Summary],
    skipped_prompts: Sequence[SkippedPrompt] = (),
) -> Report:
    """Return the report on a benchmark; the last of its `details` state the gain with each policy."""
    policies, caveat = benchmark.policies, benchmark.caveat
    # The overall rows come last.
    ordered = sorted(summaries, key=lambda s: s.category == OVERALL)
    rows = {f"{s.category}, {s.policy}" if len(policies) > 1 else s.category: s for s in ordered}
    table = _speeds(rows, benchmark)
    bars = Bars("Tokens per second, drafted / plain: median of pairs", [*_bars(rows)])
    notes = []
    if not benchmark.complete:
        notes.append(f"INCOMPLETE: stopped after {len(benchmark.runs)} of {benchmark.total} runs")
    if caveat is not None:
        notes.append(f"the texts are not expected to be the same: {caveat}")
    if benchmark.drafted.drafter is None:
        notes.append("drafting is off: plain decoding was compared with itself, so the ratios show the noise")
    gains, verdicts, totals = [], [], {s.policy: s for s in summaries if s.category == OVERALL}
    for policy in policies:
        overall = totals.get(policy)
        gain = describe_gain(overall, len(policies))
        gains.append(f"{policy}: {gain}" if len(policies) > 1 else gain)
        same = f"output identical on {overall.identical} of {overall.prompts} prompts" if overall else ""
        verdicts.append("; ".join(filter(None, (gains[-1], caveat or same))))
    details = []
    if (prefills := benchmark.prefills) and rows:
        rate = median(prefill["tokens"] / prefill["seconds"] for prefill in prefills)
        length = median(prefill["tokens"] for prefill in prefills)
        details.append(f"prefill, not counted above: median {length:.0f} tokens at {rate:.0f} tokens/s")
    details += [*format_skipped(skipped_prompts), *([] if caveat else _differences(benchmark)), *verdicts]
    sections = [*_sections(rows, benchmark, [bars, table])] if rows else []
    return Report(title, command, origin, table, bars, sections, notes, "; ".join(gains), setup, details)


def _speeds(rows: Mapping[str, Summary], benchmark: Benchmark) -> Table:
    cells = [
        [
            name,
            str(s.prompts),
            speed(s.plain),
            speed(s.drafted),
            # If nothing was drafted, the ratio is noise, and is shown only to show how much there is.
            figure(s.ratio if s.gain or benchmark.drafted.drafter is None else None, ".2f", "x"),
            "-" if s.gain is None else "{:.2f}-{:.2f}x".format(*s.gain.interval or ()) if s.is_clear else UNCLEAR,
            f"{s.identical} of {s.prompts}" if benchmark.caveat is None else "-",
        ]
        for name, s in rows.items()
    ]
    headings = ["category", "prompts", "plain t/s", "drafted t/s", "ratio", "gain", "same text"]
    return Table(headings, cells, totals=sum(s.category == OVERALL for s in rows.values()))


def _bars(rows: Mapping[str, Summary]) -> Iterator[Bar]:
    for name, s in rows.items():
        if s.ratio is not None and s.gain is not None:
            low, high = s.gain.interval or (None, None)
            label = f"{s.ratio:.2f}x" + ("" if s.is_clear else f", {UNCLEAR}")
            yield Bar(name, s.ratio, low, high, label, other=not s.is_clear)


def _sections(rows: Mapping[str, Summary], benchmark: Benchmark, speeds: list[reports.Figure]) -> Iterator[Section]:
    totals, drafted = sum(s.category == OVERALL for s in rows.values()), benchmark.drafted
    if drafted.drafter is not None:
        headings = ["category", "tokens per pass", "accepted", "no draft"]
        passes = []
        for name, s in rows.items():
            rates = s.acceptance_rate, s.share_of_passes_without_draft
            passes.append([name, f"{s.tokens_per_pass:.2f}", *(figure(rate, ".0%") for rate in rates)])
        speeds.append(Table(headings, passes, totals=totals))
    about = (
        "Medians over prompts and repeats. ratio: drafted / plain speed of two consecutive runs, if anything was"
        f" drafted. gain: interval for the ratio from a sign test over these pairs; {UNCLEAR!r} if it may be noise."
    )
    yield Section("Speed-up", about, speeds)
    if any(s.exact_price for s in rows.values()):
        prices = [
            [name, speed(s.default), speed(s.plain), figure(s.exact_price, ".2f", "x")] for name, s in rows.items()
        ]
        table = Table(["category", "without", "exact", "ratio"], prices, totals=totals)
        yield Section("Cost of exact mode", "Plain tokens per second.", [table])
    if any(s.stats.drafted for s in rows.values()):
        about = "Acceptance rate among the drafts whose earlier tokens were all accepted."
        yield reports.acceptance({name: s.acceptance_by_position for name, s in rows.items()}, about, totals=totals)
    curves = {}
    for policy, decoder in benchmark.policies.items():
        ratios = decoder.times.to_json()["ratios"]
        curves[policy if len(benchmark.policies) > 1 else "measured"] = {int(n): x for n, x in ratios.items()}
    yield reports.costs(curves)
    if drafted.drafter is not None and benchmark.texts:
        about = "The answer to the first prompt of each category."
        yield reports.draft_section(about, benchmark.texts, drafted.vocabulary.piece)


def _differences(benchmark: Benchmark) -> Iterator[str]:
    """Yield lines on the positions at which texts differ, which the measured effect of the batch size may explain."""
    several = len(benchmark.policies) > 1
    differences, probe = benchmark.differences, benchmark.drafted.kernels.probe
    lines = []
    for d in differences:
        line = f"{d['policy']}: " if several else ""
        line += f"{d['category']}/{d['prompt']} differs after {d['position']} equal tokens"
        if d["margin"] is not None:
            line += f", where the logits of both tokens are {d['margin']:.3g} apart"
        lines.append(line)
    yield from limit_lines(lines, f"{'outputs' if several else 'prompts'} differ in total")
    if differences and benchmark.drafted.exactness.bit_identical:
        yield "exact mode should rule this out; please report it as a bug"
    elif differences and probe:
        largest = probe.max_difference
        yield (
            f"(the batch size alone changes a logit by up to {largest:.3g} here, so two by up to {2 * largest:.3g};"
            " --exact on rules this out)"
        )
    counters = [run.stats for run in benchmark.runs if run.kind == "drafted"]
    if calls := sum(stats.close_calls for stats in counters):
        tokens = sum(stats.generated for stats in counters)
        yield f"{calls} of {tokens} tokens with drafts were near-ties that rounding could have decided differently"


def speed(value: float | None) -> str:
    return figure(value, ".1f" if value is not None and value < 100 else ".0f")
