"""What drafts learn, kept from one run to the next: who writes it, who reads it, and how it is switched off."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.cli_runner import DEMO, environment, run

from ngramspec.drafting.mixture.drafter import MixtureDrafter
from ngramspec.drafting.mixture.learnt import read
from ngramspec.llama.vocabulary import Vocabulary

TEXT = b"def f(x):\n    return x + 1\n\n\ndef g(x):\n    return x + 1\n\n\ndef h(x):\n"
COMPLETE = ("complete", DEMO, "-n", "60", "--temp", "0", "--policy", "fixed")


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return environment(tmp_path / "home")


def judges(home: dict[str, str]) -> list[Path]:
    return sorted(Path(home["XDG_CACHE_HOME"], "ngramspec", "judge").glob("*"))


def test_complete_and_chat_write_one_file_and_go_on_from_it(home: dict[str, str]) -> None:
    first = run(home, *COMPLETE, stdin=TEXT)
    assert first.code == 0, first.err
    (path,) = judges(home)
    early = path.read_bytes()
    assert (read(path)["slope"] != 1).sum() > 10
    again = run(home, *COMPLETE, stdin=TEXT)
    assert again.out == first.out
    middle = path.read_bytes()
    assert middle != early
    assert run(home, "chat", DEMO, "-n", "30", "--temp", "0", "--policy", "fixed", stdin=b"and " * 9).code == 0
    assert judges(home) == [path]
    assert path.read_bytes() != middle
    stats = run(home, "memory", "stats").out
    assert "learnt by drafts: 1 vocabulary, " in stats
    assert str(path.parent) in stats
    assert "what drafts have learnt is forgotten" in run(home, "memory", "clear").err
    assert judges(home) == []
    assert "learnt by drafts: nothing" in run(home, "memory", "stats").out


@pytest.mark.parametrize(
    "arguments",
    [
        (*COMPLETE, "--no-memory"),
        (*COMPLETE, "--no-draft"),
        (*COMPLETE, "--drafter", "ngram"),
        ("chat", DEMO, "-n", "10", "--temp", "0", "--no-memory"),
        ("bench", DEMO, "-n", "8", "--limit", "1", "--repeat", "1", "--category", "code"),
        ("verify", DEMO, "--seconds", "1", "-n", "8"),
    ],
    ids=lambda arguments: " ".join(str(a) for a in (arguments[0], arguments[-2], arguments[-1])),
)
def test_whoever_shall_not_neither_reads_nor_writes(
    home: dict[str, str], demo_vocabulary: Vocabulary, arguments: tuple[str | Path, ...]
) -> None:
    path = Path(home["XDG_CACHE_HOME"], "ngramspec", "judge", f"{demo_vocabulary.vocabulary_hash.hex()}.npz")
    path.parent.mkdir(parents=True)
    os.mkfifo(path)  # who reads it waits for ever, who writes puts a file in its place
    assert "Traceback" not in run(home, *arguments, stdin=TEXT).err
    assert judges(home) == [path]
    assert path.is_fifo()


def test_a_damaged_file_is_no_complaint_and_is_replaced(home: dict[str, str]) -> None:
    first = run(home, *COMPLETE, stdin=TEXT)
    (path,) = judges(home)
    path.write_bytes(path.read_bytes()[:-100])
    again = run(home, *COMPLETE, stdin=TEXT)
    assert again.code == 0
    assert again.out == first.out
    assert len(again.err.splitlines()) == len(first.err.splitlines())
    assert read(path).keys() == MixtureDrafter()._guesser.about_tokens().keys()
