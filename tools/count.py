"""Size of a source tree for a new reader: lines, modules and classes, and the files to read for some tasks.

python tools/count.py [TREE]    # a checkout of this repository, also an older one; default: this one
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

TREE = Path(sys.argv[1] if len(sys.argv) > 1 else __file__).resolve()
TREE = TREE if TREE.is_dir() else TREE.parents[1]

FILES = {
    ".".join([package, *path.relative_to(TREE / folder).with_suffix("").parts]).removesuffix(".__init__"): path
    for package, folder in (("ngramspec", "ngramspec"), ("ngramspec_cli", "cli"))
    for path in sorted((TREE / folder).rglob("*.py"))
}
PARSED = {name: ast.parse(path.read_text("utf-8")) for name, path in FILES.items()}

ROUTES = ("server.openai_chat", "server.chat_completions")
"""Names of the module with the route for chat completions in newer and older trees."""

PATH = ("server", "batching", "decoding", "tool_calls", "chat_template", "conversation", "sampling", "acceptance")
"""Folders that a request passes through from HTTP to text, without the model runner and the drafters."""

SETTING = r"\bflash_attn\b"
"""Name of one load setting; the modules that contain it must change with it."""

SETTINGS = r"\b(LoadSettings|LoadOptions|DraftOptions|DraftModelOptions|SecondModelOptions)\b"
"""Names of the classes for all load settings in newer and older trees."""


def lines(paths: Iterator[Path] | list[Path]) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def imported(name: str) -> set[str]:
    """Return the modules of the tree that a module imports at any place, except for type checking."""
    found = set[str]()
    checks = [n for n in ast.walk(PARSED[name]) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    left_out = {id(inner) for check in checks for inner in ast.walk(check)}
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(PARSED[name]):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found & FILES.keys()


def reached(start: str, follow: Callable[[str], bool]) -> set[str]:
    """Return a module and its direct and indirect imports that `follow` accepts."""
    found, waiting = {start}, [start]
    while waiting:
        new = {one for one in imported(waiting.pop()) if follow(one)} - found
        found |= new
        waiting += new
    return found


def reading_path() -> list[Path]:
    """Return the files that the package map tells readers to read first, below "read these six files"."""
    _, _, text = (TREE / "ngramspec" / "README.md").read_text("utf-8").partition("read these six files")
    named = re.findall(r"\]\(([\w/]+\.py)\)", text.partition("\n#")[0])
    return [path for name in dict.fromkeys(named) if (path := TREE / "ngramspec" / name).exists()]


def opening() -> list[str]:
    """Return the calls that load a model with Target or its older names, except in the child that tests AMX."""
    found = []
    for name, tree in PARSED.items():
        if name == "ngramspec.llama.amx":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                # executor.submit(Target, ...) opens a model too.
                named = {one.id for one in (node.func, *node.args) if isinstance(one, ast.Name)}
                if named & {"Target", "SharedTarget"} and "isinstance" not in named:
                    found.append(f"{name}:{node.lineno}")
    return found


def room(name: str) -> str:
    package, _, rest = name.partition(".")
    return "cli" if package == "ngramspec_cli" else rest.partition(".")[0] or "__init__"


def counts() -> Iterator[tuple[str, object]]:
    """Yield the name and the value of each figure."""
    classes = [node for tree in PARSED.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    yield "lines of ngramspec/ + cli/", lines(list(FILES.values()))
    yield "modules", len(FILES)
    yield "classes", len(classes)
    yield "lines of backend.py", lines([FILES["ngramspec.backend"]])
    path = reading_path()
    yield "reading path, files", len(path)
    yield "reading path, lines", lines(path)
    route = next(name for one in ROUTES if (name := f"ngramspec.{one}") in FILES)
    request = reached(route, lambda name: room(name) in PATH)
    yield f"HTTP request to text, files (imports of {route}, within: {', '.join(PATH)})", len(request)
    yield "HTTP request to text, lines", lines([FILES[name] for name in request])
    for what, pattern in (("flash_attn", SETTING), ("the load settings", SETTINGS)):
        naming = Counter(room(name) for name, path in FILES.items() if re.search(pattern, path.read_text("utf-8")))
        rooms = ", ".join(f"{name} {count}" for name, count in sorted(naming.items()))
        yield f"modules that name {what}, by room", f"{naming.total()} in {len(naming)} ({rooms})"
    calls = opening()
    yield "calls that open a model or a draft model", f"{len(calls)} ({', '.join(calls)})"


if __name__ == "__main__":
    for what, count in counts():
        print(f"{what}: {count}")
