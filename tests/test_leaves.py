"""Tests of the leaves: features that hang on the core, so that each can be understood or deleted alone.

The core is what a token needs, and imports no leaf. A leaf imports the core and the leaves that it needs. Otherwise
only registrations import it: modules that list features. So a leaf is deleted with its modules, its
tests, that line, and the leaves that need it.
"""

from __future__ import annotations

import re
from functools import cache

from support.imports import ROOT, find_imports, find_modules, find_names

from ngramspec.leaves import MODULES

CORE = (
    *("request", "steps", "backend", "tokens", "data", "storage", "leaves", "model_settings"),
    *("decoding", "acceptance", "sampling", "policies", "cost", "cpu", "drafting", "llama", "loading"),
)
"""Rooms of the core, without the leaves in them."""

MAX_CORE_LINES = 13_000

LEAVES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "beams": (("ngramspec.beams",), ("branches",)),
    "branches": (("ngramspec.decoding.branches", "ngramspec.llama.branches"), ()),
    "baselines": (("ngramspec.drafting.baselines", "ngramspec.policies.baselines"), ()),
    "user's classes": (("ngramspec.user_class",), ()),
    "draft models": (("ngramspec.drafting.draft_model",), ()),
    "NextN head": (("ngramspec.llama.head",), ()),
    "RPC": (("ngramspec.llama.rpc", "ngramspec_cli.rpc_worker"), ()),
    "embedder": (("ngramspec.llama.embedder",), ()),
    "memory": (("ngramspec.memory", "ngramspec_cli.memory"), ()),
    "grammars": (("ngramspec.grammars", "ngramspec.llama.grammar", "ngramspec.drafting.grammar"), ()),
    "reasoning budgets": (("ngramspec.sampling.reasoning",), ()),
    "templates": (
        ("ngramspec.chat", "ngramspec.llama.chat_format", "ngramspec_cli.reasoning_options"),
        ("grammars",),
    ),
    "chat": (
        (
            *(f"ngramspec_cli.chat{part}" for part in ("", "_commands", "_input", "_session", "_view")),
            "ngramspec_cli.markdown",
        ),
        ("templates", "grammars", "memory", "reasoning budgets", "trace"),
    ),
    "complete": (("ngramspec_cli.complete",), ("beams", "trace")),
    "edit": (("ngramspec_cli.edit", "ngramspec_cli.edited_file"), ("chat", "templates")),
    "server": (
        ("ngramspec_cli.serve", "ngramspec.server", "ngramspec.batching"),
        ("templates", "grammars", "embedder", "reasoning budgets"),
    ),
    "Anthropic": (("ngramspec.server.anthropic",), ("server",)),
    "Responses": (("ngramspec.server.responses",), ("server",)),
    "Ollama": (("ngramspec.server.ollama",), ("server", "templates")),
    "completions": (("ngramspec.server.openai_completions",), ("server",)),
    "embeddings": (("ngramspec.server.embeddings",), ("server", "embedder")),
    "web page": (("ngramspec.server.page",), ("server", "grammars")),
    "drop-in": (("ngramspec.dropin", "ngramspec.llama.llama_class"), ("grammars", "draft models")),
    "llm plugin": (("ngramspec.llm_plugin",), ("templates", "grammars")),
    "trace": (("ngramspec.instruments.trace", "ngramspec.policies.traced", "ngramspec_cli.trace"), ()),
    "bench": (
        ("ngramspec.instruments.benchmark", "ngramspec_cli.bench"),
        ("memory", "draft models"),
    ),
    "replay": (("ngramspec.instruments.replay", "ngramspec_cli.replay"), ("branches",)),
    "verify": (("ngramspec.instruments.selfcheck", "ngramspec_cli.verify"), ()),
    "tune": (("ngramspec.instruments.tuning", "ngramspec_cli.tune"), ("quants",)),
    "quants": (("ngramspec.quants",), ("replay",)),
    "info": (("ngramspec_cli.info",), ("quants",)),
}
"""The modules and packages of each leaf, and the leaves that it needs. A module belongs to its longest name."""

REGISTRATIONS = (
    *("ngramspec.__init__", "ngramspec.leaves", "ngramspec.drafting.__init__", "ngramspec.policies.__init__"),
    *("ngramspec_cli.app", "ngramspec.server.app"),
)
"""The public names, lazy imports of the core, every drafter, every command, and every dialect of the server."""

KNOWN = find_modules(ROOT)


def find_leaf(module: str) -> str | None:
    """Return the leaf of a module; `None` for the core and for what leaves share."""
    matches = [
        (len(name), leaf)
        for leaf, (names, _) in LEAVES.items()
        for name in names
        if module == name or module.startswith(f"{name}.")
    ]
    return max(matches)[1] if matches else None


@cache
def find_edges() -> list[tuple[str, str]]:
    """Return each module with each module of the project that it imports."""
    return [(module, target) for module, path in KNOWN.items() for target in find_imports(module, path, KNOWN)]


def test_leaves_are_imported_only_by_their_registration_and_leaves_that_need_them() -> None:
    importers: dict[str, set[str]] = {leaf: set() for leaf in LEAVES}
    for module, target in find_edges():
        own, leaf = find_leaf(module), find_leaf(target)
        if leaf not in {own, None, *(LEAVES[own][1] if own else ())} and module not in REGISTRATIONS:
            importers[str(leaf)].add(module)
    assert {leaf: sorted(modules) for leaf, modules in importers.items() if modules} == {}


def test_leaves_import_every_leaf_that_they_need() -> None:
    imported: dict[str | None, set[str | None]] = {leaf: set() for leaf in (*LEAVES, None)}
    for module, target in find_edges():
        imported[find_leaf(module)].add(find_leaf(target))
    unused = {leaf: {*needs} - imported[leaf] for leaf, (_, needs) in LEAVES.items()}
    assert {leaf: needs for leaf, needs in unused.items() if needs} == {}


def test_leaves_consist_of_modules_that_exist() -> None:
    names = [name for names, _ in LEAVES.values() for name in names]
    assert not [name for name in names if not any(f"{module}.".startswith(f"{name}.") for module in KNOWN)]
    assert {need for _, needs in LEAVES.values() for need in needs} <= set(LEAVES)


def test_table_of_lazy_imports_names_leaves() -> None:
    names = {name for path in KNOWN.values() for name in re.findall(r"\bleaves\.(\w+)", path.read_text("utf-8"))}
    assert names == {"MODULES", *MODULES}
    assert all(find_leaf(f"ngramspec.{module}") for module in MODULES.values())
    typed = find_names("ngramspec.leaves", KNOWN["ngramspec.leaves"].read_text("utf-8"))[0]
    own = {name.removeprefix("ngramspec.") for name in typed if name.startswith("ngramspec.")}
    assert own == {f"{module}.{name}" for name, module in MODULES.items()}


def test_core_is_small_enough_to_be_read() -> None:
    core = [path for module, path in KNOWN.items() if module.split(".")[1] in CORE and find_leaf(module) is None]
    assert sum(len(path.read_text("utf-8").splitlines()) for path in core) <= MAX_CORE_LINES
