"""Where the core of drafting runs as plain Python, that is said. A wheel that is so: test_packaging.py."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path

import pytest
from support.cli_runner import run

from ngramspec import drafting
from ngramspec.drafting.core import uncompiled

PLAIN = """
from ngramspec.drafting import core
core.uncompiled = lambda: ("ngramspec.drafting.price",)
from ngramspec_cli.app import main
main()
"""
"""Start of the command line where nothing was compiled, as far as it knows."""


def test_what_lies_beside_its_source_is_compiled() -> None:
    folder = Path(str(drafting.__file__)).parent
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    plain = {
        "ngramspec.drafting." + path.relative_to(folder).with_suffix("").as_posix().replace("/", ".")
        for path in folder.rglob("*.pxd")
        if not any(path.with_suffix(suffix).exists() for suffix in suffixes)
    }
    assert set(uncompiled()) == plain


@pytest.mark.parametrize("draft", [[], ["--no-draft"]])
def test_speeds_say_so(env: dict[str, str], draft: list[str]) -> None:
    asked = ["-t", "1", "-c", "512", "-n", "4", *draft]
    told = run(env, "complete", *asked, stdin=b"def f(", command=[sys.executable, "-c", PLAIN])
    chat = run(env, "chat", *asked, stdin=b"hello", command=[sys.executable, "-c", PLAIN])
    for done in (told, chat):
        assert done.code == 0, done.err
        assert ("; drafts are slow: their core was not compiled" in done.err.splitlines()[-1]) == (not draft)


def test_info_says_what_to_do(env: dict[str, str]) -> None:
    told = run(env, "info", "-t", "1", "-c", "512", command=[sys.executable, "-c", PLAIN])
    (line,) = (line for line in told.out.splitlines() if line.startswith("drafting "))
    assert "core in plain Python" in line
    assert "install a C compiler" in line
