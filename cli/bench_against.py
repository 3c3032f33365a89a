"""`ngramspec bench --against URL`: our tokens per second beside those of a running server, prompt by prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ngramspec.benchmark.against import SENT, Pair, Rival, compare
from ngramspec.benchmark.report import OVERALL, Spread
from ngramspec.benchmark.runs import Benchmark
from ngramspec.llama.target import Target
from ngramspec.sampling.settings import Sampling

from .about import provenance
from .console import Outcome, guarded_stdout, leave, outcome, usage_error
from .json_output import JsonOutput
from .view import counting_bar, figures_table, print_report


def check_against(sampling: Sampling, ours_alone: Mapping[str, object]) -> None:
    """End the program where a server cannot be asked for the same, or an option is for our own runs only."""
    if given := [f"--{name}" for name, value in ours_alone.items() if value]:
        usage_error(f"--against asks each prompt once, and compares one thing: leave out {', '.join(given)}")
    if sampling != Sampling(**{name: getattr(sampling, name) for name in SENT}):
        usage_error("--against: a server is sent --temp, --top-k, --top-p, --min-p and -s; leave out other settings")


def compare_with(
    rival: Rival, target: Target, benchmark: Benchmark, heading: Sequence[str] | None, output: JsonOutput
) -> None:
    """Ask both sides for every prompt of a benchmark, and show what came of it, also of a part.

    Args:
        rival: the server.
        target: our model.
        benchmark: whose prompts, settings and first decoder; none of its runs are made.
        heading: lines above the table; None: no table.
        output: where the same goes as data, if that is wanted.
    """
    pairs: list[Pair] = []
    ended = _measure(rival, benchmark, pairs)
    if pairs and heading is not None:
        _show(rival, pairs, heading, len(benchmark.cases))
    if pairs:
        output.write(provenance(target) | _document(rival, pairs))
    leave(ended)


def _measure(rival: Rival, benchmark: Benchmark, pairs: list[Pair]) -> Outcome:
    sampling = benchmark.sampling or Sampling()
    with outcome() as ended, counting_bar(len(benchmark.cases), "warming up", still=True) as done:
        rival.ask(benchmark.cases[0].tokens[:2], 2, sampling)  # before a minute of measuring: is it there?
        benchmark.warm_up()
        benchmark.forget()
        asked = benchmark.cases, benchmark.max_tokens, sampling, benchmark.acceptance
        for pair in compare(benchmark.drafted, rival, *asked):
            pairs.append(pair)
            done(f"{pair.case.category}/{pair.case.id}")
    return ended


def _show(rival: Rival, pairs: Sequence[Pair], heading: Sequence[str], total: int) -> None:
    categories = dict.fromkeys(pair.case.category for pair in pairs)
    groups = {category: [pair for pair in pairs if pair.case.category == category] for category in categories}
    rows = [_row(name, group) for name, group in [*groups.items(), (OVERALL, pairs)]]
    headings = ["category", "prompts", "theirs", "ours", "ratio", "from-to", "same text"]
    parts = [*heading, f"against {rival.url}, in turns, each prompt asked once"]
    if len(pairs) < total:
        parts.append(f"INCOMPLETE: stopped after {len(pairs)} of {total} prompts")
    with guarded_stdout():
        table = figures_table(headings, rows, totals=1)
        print_report([*parts, "", "Tokens per second of decoding, medians over prompts:", table])


def _row(name: str, pairs: Sequence[Pair]) -> list[str]:
    theirs = Spread.of([speed for pair in pairs if (speed := pair.theirs.tokens_per_second) is not None])
    ours = Spread.of([speed for pair in pairs if (speed := pair.ours.tokens_per_second) is not None])
    ratio = Spread.of([pair.ratio for pair in pairs if pair.ratio is not None])
    same = sum(pair.ours.text == pair.theirs.text for pair in pairs)
    return [
        name,
        str(len(pairs)),
        *("-" if speed is None else f"{speed.median:.2f}" for speed in (theirs, ours)),
        *(["-", "-"] if ratio is None else [f"{ratio.median:.2f}x", f"{ratio.low:.2f}-{ratio.high:.2f}"]),
        f"{same} of {len(pairs)}",
    ]


def _document(rival: Rival, pairs: Sequence[Pair]) -> dict[str, Any]:
    return {
        "against": rival.url,
        "pairs": [
            {
                "category": pair.case.category,
                "prompt": pair.case.id,
                "ratio": pair.ratio,
                "same_text": pair.ours.text == pair.theirs.text,
                **{
                    side: {"tokens": one.tokens, "seconds": one.seconds, "tokens_per_second": one.tokens_per_second}
                    for side, one in (("ours", pair.ours), ("theirs", pair.theirs))
                },
            }
            for pair in pairs
        ],
    }
