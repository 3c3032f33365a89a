"""Tests of the benchmark prompts: every file has the documented format, and every prompt fits the demo model."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ngramspec.instruments.prompts import Prompt, load_prompts, prepare

if TYPE_CHECKING:
    from ngramspec.llama.vocabulary import Vocabulary

FILES = sorted((Path(__file__).parents[2] / "prompts").glob("*.toml"))
PROMPTS = [prompt for path in FILES for prompt in load_prompts(path)]
RAW = {"code-continuation", "prose"}
MAX_CHARACTERS = 6_000
MAX_TOKENS = 1_900  # The rest of the demo model's context of 2,048 is for the answer.


def texts(prompt: Prompt) -> list[str]:
    return [message["content"] for message in prompt.messages] if prompt.messages else [prompt.text or ""]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_packaged_prompt_file_names_category_source_and_licence(path: Path) -> None:
    name, data = path.stem, tomllib.loads(path.read_text("utf-8"))
    assert data.keys() == {"category", "source", "licence", "prompts"}
    assert data["category"] == name
    ids = [prompt["id"] for prompt in data["prompts"]]
    assert len(ids) >= 8
    assert ids == [f"{name}-{number:02}" for number in range(1, len(ids) + 1)]
    sources, licences = (set(re.findall(rf"{name}-\d+", data[field])) for field in ("source", "licence"))
    assert sources | licences <= set(ids)
    assert sources <= licences


def test_packaged_prompts_include_enough_files_and_long_chats() -> None:
    assert len(FILES) >= 6
    roles = [[message["role"] for message in prompt.messages or ()] for prompt in PROMPTS]
    assert sum("assistant" in turns for turns in roles) >= 3


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.id)
def test_packaged_prompt_follows_documented_format(prompt: Prompt) -> None:
    assert (prompt.text is not None) == (prompt.category in RAW)
    # Turns alternate, and the first and the last turn are the user's.
    roles = [message["role"] for message in prompt.messages or () if message["role"] != "system"]
    assert roles == ["assistant" if number % 2 else "user" for number in range(len(roles))]
    assert not roles or roles[-1] == "user"
    # White space at the end of a raw prompt would change how its last word is tokenised.
    assert all(text == text.strip() for text in texts(prompt))
    assert sum(map(len, texts(prompt))) <= MAX_CHARACTERS


def test_packaged_prompts_share_no_texts_or_long_passages() -> None:
    """No prompt contains another's text, which a drafter with a memory of earlier prompts would find."""
    counts = Counter(" ".join(text.split()) for prompt in PROMPTS for text in texts(prompt))
    assert [text for text, count in counts.items() if count > 1] == []
    first_seen: dict[tuple[str, ...], str] = {}
    for prompt in PROMPTS:
        words = " ".join(texts(prompt)).split()
        for start in range(len(words) - 19):
            passage = tuple(words[start : start + 20])
            assert first_seen.setdefault(passage, prompt.id) == prompt.id, passage


def test_packaged_prompts_fit_demo_model_context(demo_vocabulary: Vocabulary) -> None:
    cases, skipped = prepare(demo_vocabulary, PROMPTS, 0, MAX_TOKENS)
    assert (len(cases), skipped) == (len(PROMPTS), [])
