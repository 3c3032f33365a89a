"""Tests that run the recipes of ngramspec/README.md exactly as written."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from drafting import test_drafters
from support.cli_runner import DEMO, RunResult, run_process
from support.mock_target import MockTarget

import ngramspec.drafting
import ngramspec.policies
from ngramspec import SpeculativeDecoder, Step
from ngramspec.drafting import DRAFTERS

ROOT = Path(__file__).parents[1]
PROMPT = [1, 2, 3, 1, 2]
TEXT = (ROOT / "ngramspec" / "README.md").read_text("utf-8")


def blocks(recipe: str) -> list[str]:
    """Return the Python blocks below a heading."""
    (section,) = (part for part in re.split("^## ", TEXT, flags=re.MULTILINE) if part.startswith(f"{recipe}\n"))
    return re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def follow(recipe: str) -> dict[str, Any]:
    """Run the block of a recipe with a target and a prompt, and return the resulting names."""
    names: dict[str, Any] = {"target": MockTarget(peak=8.0), "prompt": PROMPT}
    (block,) = blocks(recipe)
    exec(block, names)
    return names


def tokens(steps: Iterable[Step]) -> list[int]:
    return [token for step in steps for token in step.tokens]


@pytest.fixture(autouse=True)
def _undone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Undo the registrations and measurements of the recipes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ngramspec.drafting, "DRAFTERS", dict(ngramspec.drafting.DRAFTERS))
    monkeypatch.setattr(ngramspec.policies, "POLICIES", dict(ngramspec.policies.POLICIES))


@pytest.mark.parametrize("recipe", ["Add a drafter", "Add a policy"])
def test_recipe_for_drafter_or_policy_drafts_and_keeps_text(recipe: str) -> None:
    names = follow(recipe)
    plain = SpeculativeDecoder(MockTarget(peak=8.0), drafter=None, exact="off").generate(PROMPT, max_tokens=60)
    assert tokens(names["steps"]) == tokens(plain)
    assert sum(step.accepted for step in names["steps"]) > 10
    assert "copy" in {step.source for step in names["steps"]} or names["decoder"].policy.name == "doubling"


CONTRACT = [
    test
    for test in vars(test_drafters).values()
    for mark in getattr(test, "pytestmark", ())
    if mark.name == "parametrize" and mark.args[0] == "name" and set(DRAFTERS) <= set(mark.args[1])
]
"""The tests of `test_drafters.py` that run for every drafter."""


@pytest.mark.parametrize("test", CONTRACT, ids=lambda test: test.__name__)
def test_recipe_drafter_keeps_the_contract(test: Callable[..., None]) -> None:
    follow("Add a drafter")
    test(name="copy")


def test_contract_has_the_tests_for_all_drafters() -> None:
    assert len(CONTRACT) == 6


def test_guide_page_contains_drafters_of_the_examples() -> None:
    """`tests/cli/test_guide.py` runs the page's commands with it, `tests/test_user_class.py` checks its drafts."""
    page = (ROOT / "cli" / "guide" / "own-drafter.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for name, block in zip(("copy_drafter.py", "line_drafter.py"), blocks, strict=True):
        assert (ROOT / "examples" / "custom" / name).read_text("utf-8").endswith(f"\n\n{block}")


def test_recipe_for_backend_drafts_on_the_new_runner() -> None:
    names = follow("Add a backend")
    assert "".join(step.text for step in names["steps"]) == "abcdefghijklmnopqrstuvwxyz" * 2 + "abcdefgh"
    assert sum(step.accepted for step in names["steps"]) > 10
    assert names["runner"].tokens[-1] == ord("g")


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """Return a copy of both packages with the changes of the recipe for a sampling option."""
    folder = tmp_path / "changed"
    shutil.copytree(ROOT / "cli", folder / "ngramspec_cli")
    shutil.copytree(ROOT / "ngramspec", folder / "ngramspec", ignore=shutil.ignore_patterns("*.gguf", "__pycache__"))
    (folder / "ngramspec" / "demo" / DEMO.name).symlink_to(DEMO)
    field, constructors = blocks("Add a sampling option")
    settings = folder / "ngramspec" / "sampling" / "settings.py"
    source = settings.read_text("utf-8")
    settings.write_text(source.replace("\n    def __post_init__", f"{field}\n    def __post_init__", 1), "utf-8")
    samplers = folder / "ngramspec" / "llama" / "samplers.py"
    source = samplers.read_text("utf-8")
    for line in constructors.splitlines(keepends=True):
        name = line.split(":")[0]
        source, count = re.subn(rf"^{name}: .*\n", line.replace("\\", r"\\"), source, flags=re.MULTILINE)
        assert count == 1
    samplers.write_text(source, "utf-8")
    return folder


@pytest.fixture
def ngramspec_with(env: dict[str, str], changed: Path) -> Callable[..., RunResult]:
    """Run the command line of the copy."""
    script = "import sys; from ngramspec_cli.app import run; sys.exit(run(sys.argv[1:]))"

    def call(*arguments: str) -> RunResult:
        environ = {**env, "PYTHONPATH": os.pathsep.join([str(changed), env["PYTHONPATH"]])}
        command = [sys.executable, "-P", "-c", script]
        return run_process(environ, *arguments, command=command, stdin=b"It was a dark and")

    return call


@pytest.mark.exhaustive
def test_recipe_for_sampling_option_adds_working_option(ngramspec_with: Callable[..., RunResult]) -> None:
    """The option is in the help, is validated, and reaches llama.cpp."""
    for command in ("complete", "chat", "bench"):
        shown = " ".join(ngramspec_with(command, "--help").out.split())
        assert re.search(r"--min-keep \S+ Minimum number of tokens that top-p and min-p keep. \[default: 0\]", shown)
    done = ngramspec_with("complete", str(DEMO), "--min-keep", "-3")
    assert done.code == 2
    assert "min_keep must be a whole number of at least 0, got -3" in done.error_message
    arguments = ["-n", "12", "-t", "1", "-s", "5", "--json", "--temp", "3", "--top-p", "0.001", "--exact", "on"]
    texts = []
    for keep in ("0", "1", "40"):
        done = ngramspec_with("complete", str(DEMO), *arguments, "--min-keep", keep)
        assert done.code == 0, done.err
        texts.append(json.loads(done.out)["text"])
    assert texts[0] == texts[1] != texts[2]
