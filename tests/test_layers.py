"""Tests of the layers and shelves of the package: a room only imports from lower layers.

A room is a folder or a file directly in `ngramspec/`; `cli/` is one room. Every import counts, also inside functions
and for type checking. A shelf is a group of rooms that only imports from earlier shelves. Only `llama/` imports
`llama_cpp` and calls llama.cpp. The tests recognize llama.cpp's functions and types by their names, so a module cannot
call them through an argument either.
"""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

from support.imports import ROOT, find_modules, find_names, resolve

LAYERS = (
    ("data", "storage", "tokens", "cpu", "leaves"),
    ("worker",),
    ("grammars",),
    ("sampling", "models", "chat"),
    ("backend",),
    ("cost", "fill_in"),
    ("drafting",),
    ("acceptance", "memory"),
    ("request", "steps", "model_settings"),
    ("policies", "llama"),
    ("decoding", "user_class"),
    ("loading",),
    ("batching", "beams", "dropin", "instruments"),
    ("__init__", "llm_plugin", "quants", "server"),
    ("cli",),
)
"""Layers from the lowest to the highest. `__init__` contains the public names of `import ngramspec`."""

SHELVES = {
    "core": (
        "decoding",
        "drafting",
        "acceptance",
        "policies",
        "cost",
        "sampling",
        "memory",
        "backend",
    ),
    "models": ("llama", "models", "loading", "chat"),
    "instruments": ("instruments", "quants"),
    "surfaces": ("cli", "server", "batching", "dropin", "llm_plugin"),
}
"""Rooms by purpose; rooms that are missing here are used by several shelves. A shelf only imports from earlier shelves,
and the core from none."""

LEAVES = "ngramspec.leaves"
"""The table of names that the core loads when they are used. It imports them only for mypy; see `test_leaves.py`."""

LLAMA = "llama"
"""The only room that may import `llama_cpp`, and call llama.cpp."""


def room(module: str) -> str:
    package, name, *_ = module.split(".")
    return "cli" if package == "ngramspec_cli" else name


def complaints(sources: Mapping[str, str]) -> list[str]:
    """Return messages about wrong imports in modules, from their sources."""
    height = {name: number for number, names in enumerate(LAYERS) for name in names}
    shelf = {name: number for number, names in enumerate(SHELVES.values()) for name in names}
    rooms = {room(module) for module in sources}
    found = [f"{name} is in no layer" for name in sorted(rooms - set(height))]
    found += [f"{name} is in a layer, and not there" for name in sorted(set(height) - rooms)]
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        names, foreign = find_names(module, source)
        if room(module) != LLAMA:
            if any(name.split(".")[0] == "llama_cpp" for name in names):
                found.append(f"{module} imports llama_cpp")
            found += [f"{module} uses {name}" for name in sorted(foreign - {"llama_cpp"})]
        graph[module] = {target for name in names if (target := resolve(name, sources))} - {module}
        if module == LEAVES:
            graph[module] = set()
        for target in sorted(graph[module]):
            here, there = height.get(room(module)), height.get(room(target))
            if room(module) != room(target) and here is not None and there is not None and here <= there:
                found.append(f"{module} imports {target}, which is not below it")
            if shelf.get(room(target), 0) > shelf.get(room(module), len(SHELVES)):
                found.append(f"{module} imports {target}, which is of a later shelf")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"a cycle: {' <- '.join(error.args[1])}")
    return found


SOURCES = {module: path.read_text("utf-8") for module, path in find_modules(ROOT).items()}


def test_layers_import_only_from_lower_layers() -> None:
    assert complaints(SOURCES) == []


E, WORKER = "ngramspec.cost.e", "ngramspec.worker.e"
WRONG = {
    (
        E,
        "from ngramspec.acceptance.rules import Rows",
    ): f"{E} imports ngramspec.acceptance.rules, which is not below",
    (E, "def f():\n    from ..drafting import draft"): f"{E} imports ngramspec.drafting.draft, which is not below it",
    (E, "from ngramspec.fill_in import x"): f"{E} imports ngramspec.fill_in, which is not below it",
    (E, "from ngramspec import thing"): f"{E} imports ngramspec.__init__, which is not below it",
    (E, "from ngramspec.models import gguf"): f"{E} imports ngramspec.models.gguf, which is of a later shelf",
    (WORKER, "import ngramspec_cli.app"): f"{WORKER} imports ngramspec_cli.app, which is not below it",
    (E, "if TYPE_CHECKING:\n    from llama_cpp import llama"): f"{E} imports llama_cpp",
    (E, "@api.ggml_backend_sched_eval_callback\ndef f(): ..."): f"{E} uses ggml_backend_sched_eval_callback",
    (E, "f = llama_free"): f"{E} uses llama_free",
    (E, "from ngramspec.data import llama_free"): f"{E} uses llama_free",
    ("ngramspec.drafting.draft", "import ngramspec.drafting.predictor"): "a cycle: ngramspec.",
    ("ngramspec.newer.__init__", ""): "newer is in no layer",
}


def test_layer_check_reports_wrong_imports() -> None:
    for (module, source), complaint in WRONG.items():
        (found,) = complaints({**SOURCES, module: source})
        assert found.startswith(complaint)
    without = {module: source for module, source in SOURCES.items() if room(module) != "quants"}
    assert "quants is in a layer, and not there" in complaints(without)
    sound = "import math\nprint('llama_decode failed', math.llama)"
    assert complaints({**SOURCES, E: sound}) == []
