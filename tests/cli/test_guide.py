"""Tests that the commands in the guide's pages run unchanged on the demo model.

The tests run every block that begins with ```sh. A block that begins with ```sh by-hand needs a network, a second
terminal or another program; the tests only check the options of its commands. The blocks of a page run in order, in one
folder and one home. Both are empty at first, except for the `examples` of the project.
"""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli_runner import environment, run_process
from test_readme import COMMANDS, PAGES, ROOT, flags

from ngramspec.server.app import ENDPOINTS

TOP = {"--version", "--install-completion"}
RUN, BY_HAND = "", " by-hand"
SCRIPT = 'ngramspec() { "$PYTHON" -m ngramspec_cli.app "$@"; }; set -euo pipefail\n'


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, kind: str) -> list[str]:
    """Return the blocks of a page that the tests run, or those that they do not run."""
    return re.findall(rf"^```sh{kind}\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def with_blocks(kind: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, kind)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", with_blocks(RUN), ids=name_of)
def test_guide_page_commands_run_successfully(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    env = environment(tmp_path / "home") | {"PYTHON": sys.executable}
    for block in blocks(page, RUN):
        done = run_process(env, command=["bash", "-c", SCRIPT + block], cwd=folder)
        assert done.code == 0, f"{block}\n{done.err}"


def said(page: Path) -> Iterator[list[str]]:
    """Yield the calls of ngramspec in a page, without the program's name."""
    text = page.read_text("utf-8")
    for line in "".join(blocks(page, RUN) + blocks(page, BY_HAND)).splitlines():
        words = shlex.split(line, comments=True) if "ngramspec" in line else []
        if "ngramspec" in words:
            yield words[words.index("ngramspec") + 1 :]
    for span in re.findall(r"`ngramspec ([^`]+)`", text):
        yield span.replace("...", "").split()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_guide_page_commands_use_known_options(page: Path) -> None:
    for words in said(page):
        command = words[1] if words[0] == "memory" and len(words) > 1 else words[0]
        if command.startswith("-"):
            assert command in TOP
        elif command.islower() and command != "memory":
            assert command in COMMANDS, words
            assert {word for word in words if re.match("--?[a-z]", word)} <= flags(command) | {"--help"}, words


@pytest.mark.parametrize("page", with_blocks(BY_HAND), ids=name_of)
def test_guide_page_extras_and_endpoints_exist(page: Path) -> None:
    text = "".join(blocks(page, BY_HAND))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert {name for names in re.findall(r"\.\[([\w,]+)\]", text) for name in names.split(",")} <= extras.keys()
    assert set(re.findall(r"http://127\.0\.0\.1:8080(/\S*)", text)) <= {
        "/v1",
        *(path for one in ENDPOINTS for path in one.paths),
    }


def test_guide_notes_on_stderr_match_source() -> None:
    page = (ROOT / "cli" / "guide" / "not-faster.md").read_text("utf-8")
    rows = re.findall(r"^\| (`.*?`) \|", page.split("## Notes on stderr")[1], re.MULTILINE)
    source = "\n".join(f.read_text("utf-8") for room in ("cli", "ngramspec") for f in (ROOT / room).rglob("*.py"))
    lines = re.findall("`(.*?)`", " ".join(rows))
    assert len(lines) > 10
    assert not [line for line in lines if not all(part in source for part in line.split("…"))]
