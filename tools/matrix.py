"""Check of all architectures for changes of the text by drafts: `python tools/matrix.py [NAME...] [--quick]`.

The script prints a table with one row per model and one column per kind of session. `=` means that all texts equal
those of a decoder that never rolls back. `~` means that some texts differ by rounding, and `CORRUPT` that some differ
for another reason. The exit code is 1 if a text is corrupt, or if any text differs in exact mode (`UNEQUAL`).
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
        return max(self.results, key=lambda result: (("equal", "rounding", "CORRUPT").index(result.status), result.gap))

    @property
    def cell(self) -> str:
        """Text of the table cell."""
        status = self.worst.status
        return {"equal": "=", "rounding": "UNEQUAL" if self.exact else "~"}.get(status, status)


CELLS = ("=", "~", "UNEQUAL", "CORRUPT")
"""Texts of cells from good to bad."""


def run_sessions(path: Path, folder: Path, *, quick: bool) -> Iterator[Row]:
    """Yield the results of all sessions of a model, grouped by the settings of its target."""
    for exact, threads in ((False, 1),) if quick else product((False, True), (1, 2)):
        with closing(Bench(path, folder / f"{path.stem}-{exact}-{threads}", exact=exact, threads=threads)) as bench:
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
            texts = [row.cell for row in model_rows if row.setting.name == kind]
            worst_text = max(texts, key=CELLS.index, default="-")
            fraction = f" {texts.count(worst_text)}/{len(texts)}" if worst_text in CELLS[2:] else ""
            cells.append(worst_text + fraction)
        results = [result for row in model_rows for result in row.results]
        drafting = [
            result for row in model_rows if row.setting.name.startswith(("fixed", "sampled")) for result in row.results
        ]
        passes = sum(result.passes for result in drafting)
        tokens = sum(result.tokens for result in drafting)
        gap = max(result.gap for result in results)
        counts = str(len(results)), str(passes), f"{tokens / max(1, passes):.2f}", f"{gap:.2g}"
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
            file = architecture(name)
            rollbacks[name], rows[name] = describe_rollback(file), []
            for row in run_sessions(file, Path(folder), quick=options.quick):
                rows[name].append(row)
                if row.cell in CELLS[2:]:
                    where = f"{row.setting}, exact {row.exact}, {row.threads} threads"
                    print(f"{name}: {row.cell} in {where}: {row.worst}", file=sys.stderr)
            print(f"{name}: {len(rows[name])} sessions in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    Console(width=None if sys.stdout.isatty() else 250).print(make_table(rows, rollbacks))
    return int(any(row.cell in CELLS[2:] for model_rows in rows.values() for row in model_rows))


if __name__ == "__main__":
    sys.exit(main())
