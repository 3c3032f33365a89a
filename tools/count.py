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
MODULES = {name: ast.parse(path.read_text("utf-8")) for name, path in FILES.items()}

ROUTES = ("server.openai_chat", "server.chat_completions")
"""Names of the module with the route for chat completions in newer and older trees."""

REQUEST_FOLDERS = (
    "server",
    "batching",
    "decoding",
    "tool_calls",
    "chat_template",
    "conversation",
    "sampling",
    "acceptance",
)
"""Folders that a request passes through from HTTP to text, without the model runner and the drafters."""

SETTING = r"\bflash_attn\b"
"""Name of one load setting; the modules that contain it must change with it."""

SETTINGS = r"\b(LoadSettings|LoadOptions|DraftOptions|DraftModelOptions|SecondModelOptions)\b"
"""Names of the classes for all load settings in newer and older trees."""


def count_lines(paths: Iterator[Path] | list[Path]) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def find_imports(name: str) -> set[str]:
    """Return the modules of the tree that a module imports at any place, except for type checking."""
    names = set[str]()
    checks = [n for n in ast.walk(MODULES[name]) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    ignored_ids = {id(inner) for check in checks for inner in ast.walk(check)}
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(MODULES[name]):
        if id(node) in ignored_ids:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return names & FILES.keys()


def find_reachable(start: str, follow: Callable[[str], bool]) -> set[str]:
    """Return a module and its direct and indirect imports that `follow` accepts."""
    reachable, queue = {start}, [start]
    while queue:
        new = {name for name in find_imports(queue.pop()) if follow(name)} - reachable
        reachable |= new
        queue += new
    return reachable


def read_reading_path() -> list[Path]:
    """Return the files that the package map tells readers to read first, below "read these six files"."""
    _, _, text = (TREE / "ngramspec" / "README.md").read_text("utf-8").partition("read these six files")
    paths = re.findall(r"\]\(([\w/]+\.py)\)", text.partition("\n#")[0])
    return [path for name in dict.fromkeys(paths) if (path := TREE / "ngramspec" / name).exists()]


def find_model_loads() -> list[str]:
    """Return the calls that load a model with Target or its older names, except in the child that tests AMX."""
    calls = []
    for name, tree in MODULES.items():
        if name == "ngramspec.llama.amx":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                # executor.submit(Target, ...) opens a model too.
                names = {argument.id for argument in (node.func, *node.args) if isinstance(argument, ast.Name)}
                if names & {"Target", "SharedTarget"} and "isinstance" not in names:
                    calls.append(f"{name}:{node.lineno}")
    return calls


def get_folder(name: str) -> str:
    package, _, rest = name.partition(".")
    return "cli" if package == "ngramspec_cli" else rest.partition(".")[0] or "__init__"


def measure() -> Iterator[tuple[str, object]]:
    """Yield the name and the value of each figure."""
    classes = [node for tree in MODULES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    yield "lines of ngramspec/ + cli/", count_lines(list(FILES.values()))
    yield "modules", len(FILES)
    yield "classes", len(classes)
    yield "lines of backend.py", count_lines([FILES["ngramspec.backend"]])
    path = read_reading_path()
    yield "reading path, files", len(path)
    yield "reading path, lines", count_lines(path)
    route = next(name for module in ROUTES if (name := f"ngramspec.{module}") in FILES)
    request = find_reachable(route, lambda name: get_folder(name) in REQUEST_FOLDERS)
    yield f"HTTP request to text, files (imports of {route}, within: {', '.join(REQUEST_FOLDERS)})", len(request)
    yield "HTTP request to text, lines", count_lines([FILES[name] for name in request])
    for subject, pattern in (("flash_attn", SETTING), ("the load settings", SETTINGS)):
        folders = Counter(
            get_folder(name) for name, path in FILES.items() if re.search(pattern, path.read_text("utf-8"))
        )
        figures = ", ".join(f"{name} {count}" for name, count in sorted(folders.items()))
        yield f"modules that name {subject}, by room", f"{folders.total()} in {len(folders)} ({figures})"
    calls = find_model_loads()
    yield "calls that open a model or a draft model", f"{len(calls)} ({', '.join(calls)})"


if __name__ == "__main__":
    for what, count in measure():
        print(f"{what}: {count}")
