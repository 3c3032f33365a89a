"""Figures of a benchmark's runs, by category and overall, and the gain that theory predicts.

A *round* contains the runs of one prompt in one repeat, drafted with one policy. Unfinished rounds are omitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from ngramspec.cost.paired import Paired, compare_pairs
from ngramspec.cost.times import PassTimes
from ngramspec.instruments.benchmark.runs import Kind, Run
from ngramspec.instruments.reports.report import OVERALL
from ngramspec.steps import Stats

Round = dict[Kind, Run]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum of some figures."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, figures: Iterable[float | None]) -> Spread | None:
        """Return the spread of the known figures; `None` if no figure is known."""
        values = [figure for figure in figures if figure is not None]
        return cls(median(values), min(values), max(values)) if values else None


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one category, or of all."""

    category: str  # name of the category, or `OVERALL`
    prompts: int  # number of prompts with at least one finished round
    rounds: int  # number of finished rounds
    # Tokens per second of plain, drafted and default runs over rounds, without the prefill. `None` if there were no
    # such runs, or they emitted nothing after the first token.
    plain: Spread | None
    drafted: Spread | None
    default: Spread | None
    ratio: Spread | None  # drafted / plain tokens per second of each round; noise if nothing was drafted
    gain: Paired | None  # comparison of these ratios; `None` if nothing was drafted, or no speed is known
    exact_price: Spread | None  # plain speed with / without exact mode in each round; `None` if not measured
    stats: Stats  # counters of the drafted runs
    alpha: float | None  # acceptance rate; see `alpha`
    predicted: float | None  # predicted gain; see `predict_gain`
    identical: int  # number of prompts with equal drafted and plain output in every finished round

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


def summarise(runs: Iterable[Run], times: PassTimes) -> list[Summary]:
    """Return one summary per category, in order of appearance, and the overall one; [] if no round is finished.

    Args:
        runs: Runs of one policy, and those that it is compared with (see `Benchmark.runs_of`).
        times: Costs of passes.
    """
    rounds_by_key: dict[tuple[str, str, int], Round] = {}
    for run in runs:
        rounds_by_key.setdefault((run.category, run.prompt, run.repeat), {})[run.kind] = run
    rounds = [runs_by_kind for runs_by_kind in rounds_by_key.values() if {"plain", "drafted"} <= runs_by_kind.keys()]
    groups: dict[str, list[Round]] = {}
    for runs_by_kind in rounds:
        groups.setdefault(runs_by_kind["plain"].category, []).append(runs_by_kind)
    return [_summary(*group, times) for group in (*groups.items(), (OVERALL, rounds))] if rounds else []


def _summary(category: str, rounds: Sequence[Round], times: PassTimes) -> Summary:
    identical: dict[tuple[str, str], bool] = {}
    stats = Stats()
    batches: Counter[int] = Counter()
    plain_batches: Counter[int] = Counter()
    for round_ in rounds:
        plain_run, drafted_run = round_["plain"], round_["drafted"]
        key = plain_run.category, plain_run.prompt
        identical[key] = identical.get(key, True) and plain_run.output == drafted_run.output
        stats.merge(drafted_run.stats)
        batches += drafted_run.batches
        plain_batches += plain_run.batches
    ratios = [ratio for round_ in rounds if (ratio := _ratio(round_, "drafted", "plain")) is not None]
    return Summary(
        category,
        prompts=len(identical),
        rounds=len(rounds),
        plain=Spread.of(_speed(round_, "plain") for round_ in rounds),
        drafted=Spread.of(_speed(round_, "drafted") for round_ in rounds),
        default=Spread.of(_speed(round_, "default") for round_ in rounds),
        ratio=Spread.of(ratios),
        gain=compare_pairs(ratios) if stats.drafted else None,
        exact_price=Spread.of(_ratio(round_, "plain", "default") for round_ in rounds),
        stats=stats,
        alpha=alpha(stats),
        predicted=predict_gain(stats, batches, plain_batches, times),
        identical=sum(identical.values()),
    )


def _speed(round_: Round, kind: Kind) -> float | None:
    return round_[kind].tokens_per_second if kind in round_ else None


def _ratio(round_: Round, above: Kind, below: Kind) -> float | None:
    a, b = _speed(round_, above), _speed(round_, below)
    return None if a is None or b is None else a / b


def alpha(stats: Stats) -> float | None:
    """Return accepted / tested positions of drafts, Leviathan's alpha; `None` if nothing was drafted."""
    n_tested = sum(stats.tested_at)
    return sum(stats.accepted_at) / n_tested if n_tested else None


def count_expected_tokens(alpha: float, gamma: int) -> float:
    """Return the expected number of tokens of a pass with gamma draft tokens.

    Each draft token is accepted with probability alpha if all before it were. Equation (1) of Leviathan et al. 2023 is
    (1 - alpha^(gamma + 1)) / (1 - alpha). The code sums the series 1 + alpha + ... + alpha^gamma instead, which is also
    valid at alpha = 1 and loses no digits close to it.
    """
    total = 1.0
    for _ in range(gamma):
        total = 1.0 + alpha * total
    return total


def predict_gain(
    stats: Stats, batches: Mapping[int, int], plain_batches: Mapping[int, int], times: PassTimes
) -> float | None:
    """Return the speed-up that theory predicts from alpha, the draft lengths and the costs of passes.

    This is theorem 3.8 of Leviathan et al. 2023 (arXiv 2211.17192) with c = 0. Pass i has the draft length gamma_i
    (0 without a draft) and takes the time T of its batch size b_i, including padding. Plain decoding takes T(p) per
    token:

        gain = sum_i E[tokens | alpha, gamma_i] * T(p) / sum_i T(b_i),    E as in their equation (1)

    The formula ignores the time of drafting and of Python, and assumes equal acceptance at all positions.

    Returns:
        Predicted gain; 1 if nothing was drafted, `None` without passes.
    """
    if not stats.passes or not plain_batches:
        return None
    if not stats.drafted:
        return 1.0
    rate = alpha(stats) or 0.0
    # Drafts of exactly k tokens: those that had a position k - 1, less those that had a position k.
    lengths = [a - b for a, b in pairwise([*stats.drafted_at, 0])]
    tokens = stats.passes_without_draft + sum(n * count_expected_tokens(rate, k) for k, n in enumerate(lengths, 1))
    plain = sum(n * times.ratio(size) for size, n in plain_batches.items()) / sum(plain_batches.values())
    return tokens * plain / sum(n * times.ratio(size) for size, n in batches.items())


def describe_gain(summaries: Sequence[Summary]) -> str:
    """Return what the runs of a policy show about the gain, from the overall summary, which comes last."""
    if not summaries or summaries[-1].ratio is None:
        return "no speed measured"
    gain = summaries[-1].gain
    if gain is None:
        return "nothing was drafted"
    return f"{gain} with drafts as without" if gain.is_faster or gain.is_slower else str(gain)


def verdicts(summaries: Mapping[str, Sequence[Summary]], caveat: str | None = None) -> list[str]:
    """Return the gain with each policy and the equality of outputs, with the policy's name if there are several.

    `caveat` is the reason why outputs may differ; `None` means that they must be equal.
    """
    lines = []
    for policy, rows in summaries.items():
        same = f"output identical on {rows[-1].identical} of {rows[-1].prompts} prompts" if rows else ""
        name = f"{policy}: " if len(summaries) > 1 else ""
        lines.append(name + "; ".join(filter(None, (describe_gain(rows), caveat or same))))
    return lines
