"""Tests of stored draft statistics: writing, reading and disabling them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.cli_runner import DEMO, run

from ngramspec.drafting.mixture import weight_files
from ngramspec.drafting.mixture.weight_files import read
from ngramspec.llama.vocabulary import Vocabulary

TEXT = b"def f(x):\n    return x + 1\n\n\ndef g(x):\n    return x + 1\n\n\ndef h(x):\n"
SHORT = ("-t", "1", "-c", "512", "--exact", "off", "--temp", "0", "--policy", "fixed")
COMPLETE = ("complete", DEMO, "-n", "60", *SHORT)


@pytest.fixture
def home(env: dict[str, str]) -> dict[str, str]:
    """Return an environment without stored statistics."""
    shutil.rmtree(Path(env["XDG_CACHE_HOME"], "ngramspec", "judge"), ignore_errors=True)
    return env


def judges(home: dict[str, str]) -> list[Path]:
    return sorted(Path(home["XDG_CACHE_HOME"], "ngramspec", "judge").glob("*"))


def test_draft_statistics_of_complete_and_chat_share_one_file(home: dict[str, str]) -> None:
    first = run(home, *COMPLETE, stdin=TEXT).ok()
    (path,) = judges(home)
    early = path.read_bytes()
    assert (read(path)["slope"] != 1).sum() > 10
    again = run(home, *COMPLETE, stdin=TEXT)
    assert again.out == first.out
    middle = path.read_bytes()
    assert middle != early
    run(home, "chat", DEMO, "-n", "30", *SHORT, stdin=b"and " * 9).ok()
    assert judges(home) == [path]
    assert path.read_bytes() != middle
    assert "deleted the draft statistics" in run(home, "memory", "clear").err
    assert judges(home) == []


def test_draft_statistics_when_disabled_stay_unread_and_unchanged(
    home: dict[str, str], demo_vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes(TEXT)
    path = Path(home["XDG_CACHE_HOME"], "ngramspec", "judge", f"{demo_vocabulary.vocabulary_hash.hex()}.npz")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"mine")
    seen = list[Path]()
    monkeypatch.setattr(weight_files, "read", lambda file: seen.append(file) or read(file))
    for arguments in (
        ("complete", DEMO, "-n", "8", *SHORT, "--no-memory"),
        ("complete", DEMO, "-n", "8", *SHORT, "--no-draft"),
        ("complete", DEMO, "-n", "8", *SHORT, "--drafter", "ngram"),
        ("chat", DEMO, "-n", "8", *SHORT, "--no-memory"),
        ("bench", DEMO, "-n", "8", *SHORT, "--repeat", "1", "--prompts", prompt),
    ):
        run(home, *arguments, stdin=TEXT).ok()
        assert path not in seen
        assert judges(home) == [path]
        assert path.read_bytes() == b"mine"
    run(home, *COMPLETE, stdin=TEXT).ok()
    assert path in seen
    assert path.read_bytes() != b"mine"
