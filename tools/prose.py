"""Check prose for phrases that hardly occur in English technical writing.

    python tools/prose.py               compare every file with its limit in tools/prose_baseline.json
    python tools/prose.py FILE...       list every hit in these files
    python tools/prose.py --update      lower the limits to the present number of hits

The check covers Markdown, the chat page, and docstrings, comments and string literals in Python. It skips code blocks,
`inline code` and lines that contain "prose: ok". A file that is not in the baseline must have no hits, and `--update`
never raises a limit: each file may only improve. After renaming a file, move its entry in the baseline by hand.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BASELINE = Path(__file__).with_name("prose_baseline.json")

RULES = [
    (name, re.compile(regex, re.MULTILINE), advice)
    for name, regex, advice in (
        line.split("\t") for line in Path(__file__).with_name("prose_rules.tsv").read_text("utf-8").splitlines() if line
    )
]
"""Each rule has a name, a regular expression and the advice shown with a hit."""


class Hit(NamedTuple):
    """One phrase to rewrite."""

    line: int
    rule: str
    phrase: str
    advice: str


def find_passages(name: str, source: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and text of everything in a file that people read.

    Args:
        name: Name of the file; its suffix selects the format.
        source: Contents of the file.
    """
    if name.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                yield token.start[0], token.string
    elif name.endswith(".md"):
        source = re.sub(r"(?ms)^```.*?^```$|^ {4}[^\n]*$", lambda block: "\n" * block[0].count("\n"), source)
        yield 1, re.sub(r"`[^`\n]*`", "`x`", source)
    else:
        yield 1, source


def find_hits(name: str, source: str) -> Iterator[Hit]:
    """Yield the hits in a file; the arguments are those of `find_passages`."""
    lines = source.splitlines()
    for start, text in find_passages(name, source):
        for rule, regex, advice in RULES:
            for match in regex.finditer(text):
                line = start + text.count("\n", 0, match.start())
                if "prose: ok" not in lines[line - 1]:
                    yield Hit(line, rule, match[0].strip(), advice)


def list_files() -> list[Path]:
    """Return the files to check: all of these types that git knows or does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.md", "*.js", "*.html"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for name in sorted(set(names)) if (path := ROOT / name).exists()]


def count_hits(paths: list[Path]) -> Counter[str]:
    """Return the number of hits by path relative to the project, for files that have any."""
    counts = Counter[str]()
    for path in paths:
        counts[path.relative_to(ROOT).as_posix()] = sum(1 for _ in find_hits(path.name, path.read_text("utf-8")))
    return +counts


def find_excess(counts: Mapping[str, int], limits: Mapping[str, int]) -> list[str]:
    """Return a message for each file with more hits than its limit."""
    return [
        f"{name}: {number} hits, but at most {limits.get(name, 0)} are allowed; python tools/prose.py {name} lists them"
        for name, number in sorted(counts.items())
        if number > limits.get(name, 0)
    ]


def lower_limits(counts: Mapping[str, int], limits: Mapping[str, int]) -> dict[str, int]:
    """Return the limits, lowered where a file has improved, without files that have no hits left."""
    return {name: min(counts[name], limit) for name, limit in sorted(limits.items()) if counts.get(name, 0)}


def main(arguments: list[str]) -> int:
    """Run the check and return the exit code: 1 if a file has more hits than its limit."""
    if arguments and arguments != ["--update"]:
        for name in arguments:
            for hit in find_hits(name, Path(name).read_text("utf-8")):
                print(f"{name}:{hit.line}: {hit.rule} {hit.phrase!r}: {hit.advice}")
        return 0
    limits = json.loads(BASELINE.read_text("utf-8"))
    counts = count_hits(list_files())
    if arguments:
        BASELINE.write_text(json.dumps(lower_limits(counts, limits), indent=1) + "\n", "utf-8")
    messages = find_excess(counts, limits)
    print("\n".join([*messages, f"{counts.total()} hits in {len(counts)} files"]))
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
