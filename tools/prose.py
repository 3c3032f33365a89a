"""Check prose for phrases that hardly occur in English technical writing.

    python tools/prose.py [FILE...]     list every hit in these files, or in the whole tree; exit code 1 if there is one

The check covers Markdown, the chat page, and docstrings, comments and string literals in Python. It skips code blocks,
`inline code` and lines that contain "prose: ok".
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

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
    """Yield the line number and text of everything that people read in a file; its suffix selects the format."""
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


def main(names: list[str]) -> int:
    """Print the hits in these files, or in the whole tree, and return the exit code."""
    n_hits = 0
    for path in map(Path, names) if names else list_files():
        for hit in find_hits(path.name, path.read_text("utf-8")):
            n_hits += 1
            print(
                f"{path.relative_to(ROOT) if not names else path}:{hit.line}: {hit.rule} {hit.phrase!r}: {hit.advice}"
            )
    print(f"{n_hits} hits")
    return 1 if n_hits else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
