"""Tests of the page on privacy: in an empty home, ngramspec only leaves the files that the page lists."""

from __future__ import annotations

import fnmatch
import os
import re
import stat
import sys
from contextlib import closing
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from platformdirs.macos import MacOS
from platformdirs.unix import Unix
from platformdirs.windows import Windows
from support.cli_runner import COMMAND, PYTHONPATH, run
from support.serving import serve
from support.tmux import Terminal

from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.memory.store import Store

pytestmark = pytest.mark.usefixtures("_trying", "_new_workers")

PAGE = (Path(__file__).parents[2] / "cli" / "guide" / "privacy.md").read_text("utf-8")
SECRET = "zanzibar quetzal marzipan"
"""Word in every text that ngramspec receives."""

FEW = ["-t", "1", "-c", "512", "-n", "128", "--exact", "off"]


def section(heading: str) -> str:
    return next(part for part in PAGE.split("\n## ") if part.startswith(f"{heading}\n"))


def patterns(heading: str) -> set[str]:
    """Return the files of a table, with the short names of folders, such as CACHE/tuned/*.json."""
    names = re.findall(r"^\| `([A-Z]+/[^`]+)` \|", section(heading), re.MULTILINE)
    assert names
    return {name.replace("NAME", "*") for name in names}


def folders(system: str) -> dict[str, str]:
    """Return the folders by their short names, as the page lists them for an operating system."""
    head, _, *rows = re.findall(r"^\|(.*)\|$", PAGE.split("\n## ")[0], re.MULTILINE)
    column = [cell.strip() for cell in head.split("|")].index(system)
    cells = [[cell.strip(" `") for cell in row.split("|")] for row in rows]
    return {row[0]: row[column] for row in cells}


@pytest.mark.parametrize(("system", "kind"), [("Linux", Unix), ("macOS", MacOS), ("Windows", Windows)])
def test_privacy_page_folders_match_each_system(
    system: str, kind: type[Unix], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WIN_PD_OVERRIDE_LOCAL_APPDATA", "C:\\Local")
    for name in [name for name in os.environ if name.startswith("XDG_")]:
        monkeypatch.delenv(name)
    there = kind("ngramspec", appauthor=False)
    found = {n.upper(): getattr(there, f"user_{n}_dir") for n in ("cache", "data", "config", "state")}
    places = {"~": str(tmp_path), "%LOCALAPPDATA%": "C:\\Local"}
    for name, path in folders(system).items():
        start, *rest = re.split(r"[\\/]", path)
        assert re.split(r"[\\/]", str(found[name])) == [*re.split(r"[\\/]", places[start]), *rest]


def chat_at_a_terminal(home: Path, model: Path) -> None:
    """Type a message and leave."""
    places = {"HOME": str(home), "XDG_CACHE_HOME": f"{home}/.cache", "XDG_STATE_HOME": f"{home}/.local/state"}
    command = [*COMMAND, "chat", str(model), *FEW]
    with closing(Terminal(places | {"PYTHONPATH": PYTHONPATH}, home, command)) as terminal:
        terminal.ask(SECRET, "tokens/s")
        terminal.type("/quit")
        terminal.wait("^exit code 0$")


def ask_the_server(env: dict[str, str]) -> None:
    """Send one request and stop the server."""
    body = {"prompt": SECRET, "n_predict": 8}
    done = serve(env, lambda http: http.post("/completion", json=body).raise_for_status(), model=())
    assert "POST /completion 200" in done.err
    assert SECRET not in done.err


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, id="some commands"), pytest.param(True, id="all", marks=pytest.mark.exhaustive)],
)
def every(request: pytest.FixtureRequest) -> bool:
    """Return True if slow commands run too: `serve`, `info`, `verify`, and a chat at a terminal."""
    return bool(request.param)


@pytest.fixture(scope="module")
def homes(every: bool, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a home after all commands except those that store texts, and one after these."""
    text = tmp_path_factory.mktemp("texts") / "text.txt"
    text.write_text(f"{SECRET}. " * 8)
    found = []
    for keeps in (False, True):
        home = tmp_path_factory.mktemp("home")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "NGRAMSPEC_", "HF_"))}
        env = {**kept, "HOME": str(home), "PYTHONPATH": PYTHONPATH, "NO_PROXY": "127.0.0.1", "TERM": "xterm"}
        env["NGRAMSPEC_MODEL"] = str(tiny)
        calls = [["complete", str(text), *FEW], ["chat", "-f", str(text), *FEW]]
        if keeps:
            calls = [["memory", "save-answers", "on"], ["memory", "add", str(text)], *calls, [*calls[-1], "--keep"]]
            if every:
                chat_at_a_terminal(home, tiny)
        else:
            short = ["--prompts", str(text), "-t", "1", "-c", "512", "-n", "64", "--exact", "off"]
            calls += [["bench", *short, "--repeat", "1"], ["models"]]
            if every:
                calls += [["verify", *short, "--time-limit", "1"], ["info", "-c", "512"]]
                ask_the_server(env)
        for call in calls:
            done = run(env, *call)
            assert done.code == 0, (call, done.err)
        found.append(home)
    return found[0], found[1]


@pytest.fixture
def unseen(every: bool) -> set[str]:
    """Return the files that no command left.

    On a processor without AMX, there is no result of its kernels' check, answers without repetition give no tip,
    `tune --apply` saves only settings that are clearly faster, and tests hide SmolLM2.
    """
    never = {"CACHE/amx/*", "STATE/memory-tip-shown", "CACHE/tuned/*.json", "CACHE/models/*/*.gguf"}
    return never if every else {*never, "STATE/chat_history"}


def files(home: Path) -> dict[str, Path]:
    """Return all files of a home, by the page's names for their folders."""
    if sys.platform != "linux":
        pytest.skip("the folders of this system are elsewhere")
    places = {home / path.removeprefix("~/"): name for name, path in folders("Linux").items()}
    found = {}
    for path in home.rglob("*"):
        if path.is_file():
            (place,) = [place for place in places if place in path.parents] or [home]
            found[f"{places.get(place, 'HOME')}/{path.relative_to(place).as_posix()}"] = path
    return found


def unnamed(names: set[str], named: set[str]) -> set[str]:
    return {name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in named)}


def test_privacy_page_lists_exactly_the_written_files(homes: tuple[Path, Path], unseen: set[str]) -> None:
    kept_no_text, kept_text = (set(files(home)) for home in homes)
    without = patterns("No texts") | patterns("Statistics about your texts")
    assert not unnamed(kept_no_text, without)
    assert not unnamed(kept_text, without | patterns("Your texts"))
    expected = (without | patterns("Your texts")) - unseen
    assert not [p for p in expected if not fnmatch.filter(kept_no_text | kept_text, p)]
    for path in [path for home in homes for path in files(home).values() if path.stat().st_size]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, "others can read what it holds"


def test_privacy_page_lists_exactly_the_files_with_texts(
    homes: tuple[Path, Path], tiny: Path, unseen: set[str]
) -> None:
    with Vocabulary(tiny) as vocabulary:
        tokens = np.array(vocabulary.tokenize(f" {SECRET}", add_bos=False)[2:-2], np.int32).tobytes()
    holding = set()
    for home in homes:
        for name, path in files(home).items():
            raw = path.read_bytes()
            if path.suffix == ".npz":
                with np.load(BytesIO(raw)) as arrays:
                    raw = b"".join(np.asarray(arrays[key]).tobytes() for key in arrays.files)
            if path.suffix == ".memory":  # compressed
                store = Store(path.parent, bytes.fromhex(path.stem))
                raw = b"".join(document.tokens.tobytes() for document in store.documents())
            if tokens in raw or any(word.encode() in raw for word in SECRET.split()):
                holding.add(name)
    assert not unnamed(holding, patterns("Your texts"))
    assert not [p for p in patterns("Your texts") - unseen if not fnmatch.filter(holding, p)]
