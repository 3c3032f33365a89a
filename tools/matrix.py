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
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from architectures.comparison import Bench, Result, worst
from architectures.files import architecture, families, names
from architectures.settings import QUICK, Setting, matrix
from rich.console import Console
from rich.table import Table

from ngramspec.llama.target import Target


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one session of a model.

    Attributes:
        kind: Name of the column.
        label: Variant of the session within the column.
        exact: True if all texts must be equal.
        threads: Number of threads of the target.
        results: Results of the requests.
    """

    kind: str
    label: str
    exact: bool
    threads: int
    results: Sequence[Result]

    @property
    def cell(self) -> str:
        """Text of the table cell."""
        status = worst(self.results).status
        return {"equal": "=", "rounding": "UNEQUAL" if self.exact else "~"}.get(status, status)


CELLS = ("=", "~", "UNEQUAL", "CORRUPT")
"""Texts of cells from good to bad."""


def run_sessions(path: Path, folder: Path, settings: Sequence[Setting]) -> Iterator[Row]:
    """Run all sessions of a model, grouped by its load settings, and yield their results."""
    for exact, threads in dict.fromkeys((setting.exact, setting.threads) for setting in settings):
        with closing(Bench(path, folder / f"{path.stem}-{exact}-{threads}", exact=exact, threads=threads)) as bench:
            for setting in settings:
                if (setting.exact, setting.threads) == (exact, threads):
                    yield Row(setting.name, setting.label, exact, threads, bench.run(setting))


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
    kinds = list(dict.fromkeys(row.kind for model_rows in rows.values() for row in model_rows))
    output = Table(box=None, padding=(0, 1, 0, 0))
    for title in ("model", "goes back by", *kinds, "requests", "passes", "per pass", "gap"):
        output.add_column(title)
    for name, model_rows in rows.items():
        cells = []
        for kind in kinds:
            texts = [row.cell for row in model_rows if row.kind == kind]
            worst_text = max(texts, key=CELLS.index, default="-")
            fraction = f" {texts.count(worst_text)}/{len(texts)}" if worst_text in CELLS[2:] else ""
            cells.append(worst_text + fraction)
        results = [result for row in model_rows for result in row.results]
        drafting = [result for row in model_rows if row.kind.startswith(("fixed", "sampled")) for result in row.results]
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
            settings = QUICK if options.quick else tuple(matrix())
            for row in run_sessions(file, Path(folder), settings):
                rows[name].append(row)
                if row.cell in CELLS[2:]:
                    first = worst(row.results)
                    print(f"{name}: {row.cell} in {row.kind}, {row.label}: {first}", file=sys.stderr)
            print(f"{name}: {len(rows[name])} sessions in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    Console(width=None if sys.stdout.isatty() else 250).print(make_table(rows, rollbacks))
    return int(any(row.cell in CELLS[2:] for model_rows in rows.values() for row in model_rows))


if __name__ == "__main__":
    sys.exit(main())
