"""Check of all architectures for changes of the text by drafts: `python tools/matrix.py [NAME...] [--quick]`.

The script prints a table with one row per model and one column per kind of session. `=` means that all texts and logits
equal those of a decoder that never rolls back, and `WRONG` that some differ; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from architectures.comparison import Bench, Result
from architectures.files import architecture, families, names
from architectures.settings import AGAIN, ALL, ELSEWHERE, QUICK, Setting
from rich.console import Console
from rich.table import Table

from ngramspec.llama.target import Target
from ngramspec.steps import Stats

LENGTHS = (50, 900)
"""Lengths of the prompts in tokens."""

SETTINGS = (
    Setting("plain", drafter="plain"),
    *(Setting(f"fixed {n}", draft_max=n) for n in (1, 4, 8, 15, 40)),
    *(Setting(f"fixed {n}, measured", draft_max=n, measured=True) for n in (4, 15)),
    Setting("cost", (ALL, AGAIN, AGAIN, ELSEWHERE), policy="cost", measured=True),
    Setting("cost, mixture", (AGAIN, ELSEWHERE), "mixture", "cost", measured=True),
    Setting("fixed 8, mixture", drafter="mixture", draft_max=8),
    *(Setting(f"sampled, fixed {n}", draft_max=n, temperature=0.8) for n in (4, 15)),
    Setting("sampled, cost", (ALL, AGAIN), policy="cost", measured=True, temperature=0.8),
)
"""One session of each kind, with a short prompt."""

LONG = ("plain", "fixed 4", "fixed 15", "fixed 15, measured", "cost", "sampled, fixed 15")
"""Kinds of session that also run with long prompts; for the others, short prompts suffice and take less time."""

THREADED = ("fixed 8", "cost", "sampled, fixed 15")
"""Kinds of session that also run with two threads."""


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one session of a model.

    Attributes:
        setting: The session; its name is that of the column.
        exact: True if all texts must be equal.
        threads: Number of threads of the target.
        results: Results of the requests.
    """

    setting: Setting
    exact: bool
    threads: int
    results: Sequence[Result]

    @property
    def worst(self) -> Result:
        """The worst result."""
        return max(self.results, key=lambda result: (not result.is_right, result.gap))

    @property
    def is_right(self) -> bool:
        return all(result.is_right for result in self.results)


def run_sessions(name: str, folder: Path, *, quick: bool) -> Iterator[Row]:
    """Yield the results of all sessions of a model, grouped by the settings of its target."""
    for exact, threads in ((False, 1),) if quick else product((False, True), (1, 2)):
        with closing(Bench(name, folder / f"{name}-{exact}-{threads}", exact=exact, threads=threads)) as bench:
            for setting in QUICK if quick else [replace(s, length=n) for n in LENGTHS for s in SETTINGS]:
                is_left_out = setting.length == max(LENGTHS) and setting.name not in LONG
                if quick or not (is_left_out or (threads > 1 and setting.name not in THREADED)):
                    yield Row(setting, exact, threads, list(bench.requests(setting)))


def describe_rollback(path: Path) -> str:
    """Return a phrase on the rollback of a model's memory."""
    with Target(path, ctx_size=256, threads=1) as target:
        if not target.sequences[0].can_rollback:
            return "nothing"
        if target.sequences[0].replays:
            return "checkpoints"
        return "cut" if target.can_branch else f"{target.sequences[0].max_batch - 1} snapshots"


def make_table(rows: dict[str, list[Row]], rollbacks: dict[str, str]) -> Table:
    """Return a table with one row per model."""
    kinds = list(dict.fromkeys(row.setting.name for model_rows in rows.values() for row in model_rows))
    output = Table(box=None, padding=(0, 1, 0, 0))
    for title in ("model", "goes back by", *kinds, "requests", "passes", "per pass", "gap"):
        output.add_column(title)
    for name, model_rows in rows.items():
        cells = []
        for kind in kinds:
            right = [row.is_right for row in model_rows if row.setting.name == kind]
            wrong = f"WRONG {right.count(False)}/{len(right)}"
            cells.append("-" if not right else "=" if all(right) else wrong)
        results = [result for row in model_rows for result in row.results]
        stats = Stats()
        for row in model_rows:
            for result in row.results if row.setting.name.startswith(("fixed", "sampled")) else ():
                stats.merge(result.stats)
        gap = max(result.gap for result in results)
        counts = str(len(results)), str(stats.passes), f"{stats.tokens_per_pass:.2f}", f"{gap:.2g}"
        output.add_row(name, rollbacks[name], *cells, *counts)
    return output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help=f"a model or a family ({', '.join(families())}); default: all")
    parser.add_argument("--quick", action="store_true", help="what the tests run of every model")
    options = parser.parse_args()
    model_names = [name for argument in options.name or families() for name in families().get(argument, [argument])]
    if unknown := sorted(set(model_names) - set(names())):
        parser.error(f"no such model: {', '.join(unknown)}; there are: {', '.join(names())}")
    rows: dict[str, list[Row]] = {}
    rollbacks: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in model_names:
            start = time.perf_counter()
            rollbacks[name], rows[name] = describe_rollback(architecture(name)), []
            for row in run_sessions(name, Path(folder), quick=options.quick):
                rows[name].append(row)
                if not row.is_right:
                    where = f"{row.setting}, exact {row.exact}, {row.threads} threads"
                    print(f"{name}: wrong in {where}: {row.worst}", file=sys.stderr)
            print(f"{name}: {len(rows[name])} sessions in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    Console(width=None if sys.stdout.isatty() else 250).print(make_table(rows, rollbacks))
    return int(not all(row.is_right for model_rows in rows.values() for row in model_rows))


if __name__ == "__main__":
    sys.exit(main())
