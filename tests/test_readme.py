"""Tests of the READMEs and the tour: all names in them exist, and the test command is the one that CI runs."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
import typer.main
from ngramspec_cli import chat_commands
from ngramspec_cli.app import app, import_command
from ngramspec_cli.options import REASONS
from test_layers import LAYERS

from ngramspec.drafting import DRAFTERS
from ngramspec.policies import POLICIES

ROOT = Path(__file__).parent.parent
ROOM = ROOT / "ngramspec"
README = (ROOT / "README.md").read_text("utf-8")
TOUR = (ROOM / "TOUR.md").read_text("utf-8")
REFERENCE = (ROOT / "cli" / "README.md").read_text("utf-8")
GUIDE = [page for page in (ROOT / "cli" / "guide").glob("*.md") if page.name != "README.md"]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOM / "TOUR.md",
        *GUIDE,
        *(p for room in ("cli", "ngramspec") for p in (ROOT / room).rglob("README.md")),
    ]
)
TOP = {name: import_command(name) for name in typer.main.get_command(app).commands}
# `memory` is a group, of which only the commands count.
COMMANDS = {n: c for name, top in TOP.items() for n, c in getattr(top, "commands", {name: top}).items()}


def flags(command: str) -> set[str]:
    return {flag for parameter in COMMANDS[command].params for flag in parameter.opts if flag.startswith("-")}


def test_command_reference_equals_generated_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    made = importlib.import_module("reference").make_page()
    assert made == REFERENCE, "run: python tools/reference.py > cli/README.md"
    for command in COMMANDS:
        assert not [flag for flag in flags(command) - {"--help"} if f"`{flag}`" not in REFERENCE]
    assert not [name for name in chat_commands.COMMANDS if f"`/{name}" not in REFERENCE]


def test_gains_picture_equals_picture_drawn_from_readme_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    made = importlib.import_module("picture").draw_chart(README)
    drawing = ROOT / "cli" / "guide" / "gains.svg"
    assert made == drawing.read_text("utf-8"), f"run: python tools/picture.py > {drawing}"
    assert f"]({drawing.relative_to(ROOT).as_posix()})" in README


def test_readme_command_edits_a_file_of_the_project() -> None:
    edited = re.findall(r"bin/ngramspec edit (\S+) \"", README)
    assert edited
    assert all((ROOT / name).is_file() for name in edited)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_documentation_pages_name_only_existing_options_and_links(page: Path) -> None:
    text = page.read_text("utf-8")
    known = set.union({"--version", *REASONS}, *(flags(command) for command in COMMANDS))
    assert not set(re.findall(r"`(--?[a-z][a-z-]*)", text)) - known
    for link in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        headings = re.findall("^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}, link


def test_readme_is_short_and_room_pages_list_every_drafter_and_policy() -> None:
    assert len(README.splitlines()) <= 130
    for room, names in (("drafting", DRAFTERS), ("policies", POLICIES)):
        text = (ROOT / "ngramspec" / room / "README.md").read_text("utf-8")
        assert sorted(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == sorted(names)


def test_package_readme_table_equals_layers() -> None:
    text = (ROOT / "ngramspec" / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| \[?`([\w./]+)`.* \| \S.* \|$", text, re.MULTILINE)
    shown = [(int(layer), name.removesuffix("/").removesuffix(".py")) for layer, name in rows]
    assert [layer for layer, _ in shown] == sorted((layer for layer, _ in shown), reverse=True)
    assert sorted(shown) == sorted((layer, name) for layer, names in enumerate(LAYERS) for name in names)


def test_ci_runs_test_command_of_readme() -> None:
    command = next(line.strip() for line in README.splitlines() if line.endswith(".venv/bin/pytest"))
    for runner in (".ci/run", ".github/workflows/tests.yml"):
        ci = (ROOT / runner).read_text("utf-8")
        assert all(part.strip() in ci for part in command.split("&&"))


def find_links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)#]+)\)", text)


def test_tour_names_only_classes_and_functions_of_linked_files() -> None:
    defined = {"tokenize", "piece"}  # of `Vocabulary`, which inherits them from `ngramspec.tokens`
    for path in {ROOM / path for path in find_links(TOUR) if path.endswith(".py")}:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                defined.add(node.name)
            if isinstance(node, ast.ClassDef):
                defined |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    named = re.findall(r"`([A-Z]\w+(?:\.\w+\(\))?|\w+\(\))`", TOUR)
    assert len(named) > 25
    assert {name.removesuffix("()") for name in named} - defined == set()


def test_tour_is_short_and_starts_with_six_files_of_package_readme() -> None:
    assert len(TOUR.splitlines()) <= 150
    six = find_links((ROOM / "README.md").read_text("utf-8"))[:6]
    assert set(six) == set(find_links(TOUR)[:6])
    assert sum(len((ROOM / path).read_text("utf-8").splitlines()) for path in six) <= 1700
