"""Tests of the layers and shelves of the package: a room only imports from lower layers.

A room is a folder or a file directly in `ngramspec/`; `cli/` is one room. Every import counts, also inside functions
and for type checking. A shelf is a group of rooms that only imports from earlier shelves. Only `llama/` imports
`llama_cpp` and calls llama.cpp. The tests recognize llama.cpp's functions and types by their names, so a module cannot
call them through an argument either.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from support.imports import ROOT, find_modules, find_names, resolve

LAYERS = (
    ("data", "storage", "tokens", "cpu", "leaves"),
    ("worker",),
    ("grammars", "machine", "user_class"),
    ("sampling", "models", "chat"),
    ("backend",),
    ("cost", "fill_in"),
    ("drafting",),
    ("acceptance", "memory"),
    ("request", "steps", "model_settings"),
    ("policies", "llama"),
    ("decoding",),
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


def complaints(root: Path, layers: Sequence[Sequence[str]], shelves: Mapping[str, Collection[str]]) -> list[str]:
    """Return messages about wrong imports below `root`."""
    height = {name: number for number, names in enumerate(layers) for name in names}
    shelf = {name: number for number, names in enumerate(shelves.values()) for name in names}
    known = find_modules(root)
    rooms = {room(module) for module in known}
    found = [f"{name} is in no layer" for name in sorted(rooms - set(height))]
    found += [f"{name} is in a layer, and not there" for name in sorted(set(height) - rooms)]
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        names, foreign = find_names(module, path.read_text("utf-8"))
        if room(module) != LLAMA:
            if any(name.split(".")[0] == "llama_cpp" for name in names):
                found.append(f"{module} imports llama_cpp")
            found += [f"{module} uses {name}" for name in sorted(foreign - {"llama_cpp"})]
        graph[module] = {target for name in names if (target := resolve(name, known))} - {module}
        if module == LEAVES:
            graph[module] = set()
        for target in sorted(graph[module]):
            here, there = height.get(room(module)), height.get(room(target))
            if room(module) != room(target) and here is not None and there is not None and here <= there:
                found.append(f"{module} imports {target}, which is not below it")
            if shelf.get(room(target), 0) > shelf.get(room(module), len(shelves)):
                found.append(f"{module} imports {target}, which is of a later shelf")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append(f"a cycle: {' <- '.join(error.args[1])}")
    return found


def test_layers_import_only_from_lower_layers() -> None:
    assert complaints(ROOT, LAYERS, SHELVES) == []


SOUND = {
    "ngramspec/__init__.py": "from ngramspec.high.b import thing",
    "ngramspec/data.py": "",
    "ngramspec/meter.py": "",
    "ngramspec/low/__init__.py": "from ngramspec.low.a import thing",
    "ngramspec/low/a.py": "from ngramspec.data import Oops\nfrom ngramspec.low import d",
    "ngramspec/low/d.py": "import math\nprint('llama_decode failed', math.llama)",
    "ngramspec/side.py": "",
    "ngramspec/llama/t.py": "import llama_cpp.llama_cpp as llama\nllama.llama_decode()\nllama.ggml_time_us()",
    "ngramspec/high/__init__.py": "",
    "ngramspec/high/b.py": "import ngramspec.low.a\nfrom ngramspec import side",
    "cli/app.py": "import ngramspec\nfrom . import view",
    "cli/view.py": "from ngramspec.high.b import thing\nfrom ngramspec import meter",
}
SMALL = (("data", "meter"), ("low", "side"), ("high", "llama"), ("__init__",), ("cli",))
SMALL_SHELVES = {"core": ("low", "side"), "instruments": ("meter",)}


def check(tmp_path: Path, files: Mapping[str, str]) -> list[str]:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return complaints(tmp_path, SMALL, SMALL_SHELVES)


WRONG = {
    ("low/e.py", "from ngramspec.high.b import thing"): "ngramspec.low.e imports ngramspec.high.b, which is not below",
    ("low/e.py", "def f():\n    from ..high import b"): "ngramspec.low.e imports ngramspec.high.b",
    ("low/e.py", "from ngramspec.side import x"): "ngramspec.low.e imports ngramspec.side, which is not below it",
    ("low/e.py", "from ngramspec import thing"): "ngramspec.low.e imports ngramspec.__init__, which is not",
    ("low/e.py", "from ngramspec import meter"): "ngramspec.low.e imports ngramspec.meter, which is of a later shelf",
    ("low/e.py", "import ngramspec_cli.app"): "ngramspec.low.e imports ngramspec_cli.app, which is not",
    ("low/e.py", "if TYPE_CHECKING:\n    from llama_cpp import llama"): "ngramspec.low.e imports llama_cpp",
    ("low/e.py", "@api.ggml_backend_sched_eval_callback\ndef f(): ..."): "ngramspec.low.e uses ggml_backend_sched",
    ("low/e.py", "f = llama_free"): "ngramspec.low.e uses llama_free",
    ("low/e.py", "from ngramspec.data import llama_free"): "ngramspec.low.e uses llama_free",
    ("low/d.py", "from ngramspec.low.a import x"): "a cycle: ngramspec.low.",
    ("newer/__init__.py", ""): "newer is in no layer",
}


def test_layer_check_reports_wrong_imports(tmp_path: Path) -> None:
    assert check(tmp_path / "sound", SOUND) == []
    for number, ((file, text), complaint) in enumerate(WRONG.items()):
        (found,) = check(tmp_path / str(number), {**SOUND, f"ngramspec/{file}": text})
        assert found.startswith(complaint)
    # A removed room must also be removed from the table.
    files = {**SOUND, "ngramspec/high/b.py": "import ngramspec.low.a"}
    del files["ngramspec/side.py"]
    assert check(tmp_path / "gone", files) == ["side is in a layer, and not there"]
