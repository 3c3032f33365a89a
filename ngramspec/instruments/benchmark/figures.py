"""Figures of a benchmark's runs, by category and overall.

A *round* contains the runs of one prompt in one repeat, drafted with one policy. Unfinished rounds are omitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ngramspec.cost.paired import CHANCE, NO_DIFFERENCE, Paired, compare_pairs, pairs_needed
from ngramspec.instruments.benchmark.runs import Kind, Run
from ngramspec.instruments.reports.report import OVERALL
from ngramspec.steps import Stats

Round = dict[Kind, Run]


def median_of(figures: Iterable[float | None]) -> float | None:
    """Return the median of the known figures; `None` if no figure is known."""
    values = [figure for figure in figures if figure is not None]
    return median(values) if values else None


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one category, or of all."""

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

    @property
    def is_clear(self) -> bool:
        """True if the pairs show more than noise."""
        return self.gain is not None and (self.gain.is_faster or self.gain.is_slower)

    @property
    def share_without_draft(self) -> float | None:
        """Share of target passes without a draft."""
        return self.stats.passes_without_draft / self.stats.passes if self.stats.passes else None

    @property
    def acceptance_by_position(self) -> list[float | None]:
        """Accepted / tested at each position of a draft; a position is tested if all before it were accepted."""
        pairs = zip(self.stats.accepted_at, self.stats.tested_at, strict=True)
        return [n_accepted / n_tested if n_tested else None for n_accepted, n_tested in pairs]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "tokens_per_pass": self.stats.tokens_per_pass,
            "acceptance_rate": self.stats.acceptance_rate,
            "acceptance_by_position": self.acceptance_by_position,
            "share_of_passes_without_draft": self.share_without_draft,
        }


def summarise(runs: Iterable[Run], chance: float = CHANCE) -> list[Summary]:
    """Return one summary per category, in order of appearance, and the overall one; [] if no round is finished.

    Args:
        runs: Runs of one policy, and those that it is compared with (see `Benchmark.runs_of`).
        chance: Maximum probability that noise is reported as an overall gain, or as a gain of any category.
    """
    rounds_by_key: dict[tuple[str, str, int], Round] = {}
    for run in runs:
        rounds_by_key.setdefault((run.category, run.prompt, run.repeat), {})[run.kind] = run
    rounds = [runs_by_kind for runs_by_kind in rounds_by_key.values() if {"plain", "drafted"} <= runs_by_kind.keys()]
    groups: dict[str, list[Round]] = {}
    for runs_by_kind in rounds:
        groups.setdefault(runs_by_kind["plain"].category, []).append(runs_by_kind)
    rows = [_summary(*group, chance / len(groups)) for group in groups.items()]
    return [*rows, _summary(OVERALL, rounds, chance)] if rounds else []


def _summary(category: str, rounds: Sequence[Round], chance: float) -> Summary:
    identical: dict[tuple[str, str], bool] = {}
    stats = Stats()
    for round_ in rounds:
        plain_run, drafted_run = round_["plain"], round_["drafted"]
        key = plain_run.category, plain_run.prompt
        identical[key] = identical.get(key, True) and plain_run.output == drafted_run.output
        stats.merge(drafted_run.stats)
    ratios = [ratio for round_ in rounds if (ratio := _ratio(round_, "drafted", "plain")) is not None]
    return Summary(
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
    )


def _speed(round_: Round, kind: Kind) -> float | None:
    return round_[kind].tokens_per_second if kind in round_ else None


def _ratio(round_: Round, above: Kind, below: Kind) -> float | None:
    a, b = _speed(round_, above), _speed(round_, below)
    return None if a is None or b is None else a / b


def describe_gain(summaries: Sequence[Summary], chance: float = CHANCE) -> str:
    """Return what the runs of a policy show about the gain, from the overall summary, which comes last.

    `chance` is that of `summarise`.
    """
    if not summaries or summaries[-1].ratio is None:
        return "no speed measured"
    overall = summaries[-1]
    if overall.gain is None:
        return "nothing was drafted"
    if overall.gain.interval is None:
        return f"{NO_DIFFERENCE}: {overall.gain.pairs} of at least {pairs_needed(chance=chance)} pairs"
    return f"{overall.gain} with drafts as without" if overall.is_clear else str(overall.gain)


def verdicts(summaries: Mapping[str, Sequence[Summary]], caveat: str | None = None) -> list[str]:
    """Return the gain with each policy and the equality of outputs, with the policy's name if there are several.

    `caveat` is the reason why outputs may differ; `None` means that they must be equal.
    """
    lines = []
    for policy, rows in summaries.items():
        same = f"output identical on {rows[-1].identical} of {rows[-1].prompts} prompts" if rows else ""
        name = f"{policy}: " if len(summaries) > 1 else ""
        lines.append(name + "; ".join(filter(None, (describe_gain(rows, CHANCE / len(summaries)), caveat or same))))
    return lines
