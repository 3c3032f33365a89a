"""Tests of the benchmark prompts: every file has the documented format, and every prompt fits the demo model."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import DEMO

FOLDER = Path(__file__).parents[2] / "prompts"
FILES = sorted(FOLDER.glob("*.toml"))
RAW = {"code-continuation", "prose"}
MAX_CHARACTERS = 6_000
MAX_TOKENS = 1_900  # The rest of the demo model's context of 2,048 is for the answer.

Prompt = dict[str, Any]
CONTENTS = {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in FILES}
PROMPTS: list[Prompt] = [prompt for data in CONTENTS.values() for prompt in data["prompts"]]


def conversation(prompt: Prompt) -> list[dict[str, str]]:
    """Return the messages for a chat template, starting with the system prompt, if any."""
    system = [{"role": "system", "content": prompt["system"]}] if "system" in prompt else []
    return [*system, *prompt["messages"]]


def texts(prompt: Prompt) -> list[str]:
    return [prompt["text"]] if "text" in prompt else [message["content"] for message in conversation(prompt)]


@pytest.mark.parametrize("name", CONTENTS)
def test_packaged_prompt_file_names_category_source_and_licence(name: str) -> None:
    data = CONTENTS[name]
    assert data.keys() == {"category", "source", "licence", "prompts"}
    assert data["category"] == name
    assert data["source"].strip()
    assert data["licence"].strip()
    ids = [prompt["id"] for prompt in data["prompts"]]
    assert len(ids) >= 8
    assert ids == [f"{name}-{number:02}" for number in range(1, len(ids) + 1)]
    sources, licences = (set(re.findall(rf"{name}-\d+", data[field])) for field in ("source", "licence"))
    assert sources | licences <= set(ids)
    assert sources <= licences


def test_packaged_prompts_include_enough_files_and_long_chats() -> None:
    assert len(FILES) >= 6
    assert sum(len(prompt["messages"]) >= 3 for prompt in CONTENTS["chat"]["prompts"]) >= 3


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt["id"])
def test_packaged_prompt_follows_documented_format(prompt: Prompt) -> None:
    raw = prompt["id"].rpartition("-")[0] in RAW
    assert ("text" in prompt, "messages" in prompt) == (raw, not raw)
    assert prompt.keys() <= ({"id", "text"} if raw else {"id", "system", "messages"})
    # Turns alternate, and the first and the last turn are the user's.
    messages = prompt.get("messages", [])
    assert raw or len(messages) % 2 == 1
    for number, message in enumerate(messages):
        assert message.keys() == {"role", "content"}
        assert message["role"] == ("assistant" if number % 2 else "user")
    # White space at the end of a raw prompt would change how its last word is tokenised.
    assert all(text and text == text.strip() for text in texts(prompt))
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
            assert first_seen.setdefault(passage, prompt["id"]) == prompt["id"], passage


def test_packaged_prompts_fit_demo_model_context() -> None:
    from ngramspec.llama.target import Target

    with Target(DEMO, n_ctx=64, n_gpu_layers=0) as target:
        for prompt in PROMPTS:
            tokens = (
                target.vocabulary.tokenize(prompt["text"])
                if "text" in prompt
                else target.vocabulary.chat_prompt(conversation(prompt))
            )
            assert len(tokens) <= MAX_TOKENS, prompt["id"]
