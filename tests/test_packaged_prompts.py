"""The benchmark prompts: every file has the promised form, every prompt fits the demo model."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ngramspec.llama.target import Target

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "prompts").glob("*.toml"))
DEMO = ROOT / "ngramspec" / "demo" / "demo.gguf"
RAW = {"code-continuation", "prose"}
MAX_CHARACTERS = 6_000
MAX_TOKENS = 1_900  # of the demo model's context of 2,048: the rest is for the answer

Prompt = dict[str, Any]


def load(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def conversation(prompt: Prompt) -> list[dict[str, str]]:
    """The messages as a chat template gets them: the system prompt, if any, comes first."""
    system = [{"role": "system", "content": prompt["system"]}] if "system" in prompt else []
    return [*system, *prompt["messages"]]


def texts(prompt: Prompt) -> list[str]:
    if "text" in prompt:
        return [prompt["text"]]
    return [message["content"] for message in conversation(prompt)]


PROMPTS: list[Prompt] = [prompt for path in FILES for prompt in load(path)["prompts"]]
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
each_prompt = pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt["id"])


def test_there_are_enough_categories() -> None:
    assert len(FILES) >= 6


@each_file
def test_file_says_what_it_is_and_where_it_comes_from(path: Path) -> None:
    data = load(path)
    assert data.keys() == {"category", "source", "licence", "prompts"}
    assert data["category"] == path.stem
    assert data["source"].strip()
    assert data["licence"].strip()


@each_file
def test_prompts_are_numbered_in_order(path: Path) -> None:
    ids = [prompt["id"] for prompt in load(path)["prompts"]]
    assert len(ids) >= 8
    assert ids == [f"{path.stem}-{number:02}" for number in range(1, len(ids) + 1)]


@each_file
def test_source_and_licence_name_only_prompts_that_exist(path: Path) -> None:
    data = load(path)
    ids = {prompt["id"] for prompt in data["prompts"]}
    for field in ("source", "licence"):
        assert set(re.findall(rf"{path.stem}-\d+", data[field])) <= ids
    named = re.findall(rf"{path.stem}-\d+", data["source"])
    assert all(name in data["licence"] for name in named)


@each_prompt
def test_prompt_is_either_text_or_messages(prompt: Prompt) -> None:
    raw = prompt["id"].rpartition("-")[0] in RAW
    assert ("text" in prompt, "messages" in prompt) == (raw, not raw)
    assert prompt.keys() <= ({"id", "text"} if raw else {"id", "system", "messages"})


@each_prompt
def test_turns_alternate_and_the_user_has_the_last_word(prompt: Prompt) -> None:
    for number, message in enumerate(reversed(prompt.get("messages", []))):
        assert message.keys() == {"role", "content"}
        assert message["role"] == ("assistant" if number % 2 else "user")
    if "messages" in prompt:
        assert len(prompt["messages"]) % 2 == 1


@each_prompt
def test_no_text_is_empty_or_padded_or_too_long(prompt: Prompt) -> None:
    for text in texts(prompt):
        assert text
        # White space at the end of a raw prompt would change how its last word is tokenised.
        assert text == text.strip()
    assert sum(map(len, texts(prompt))) <= MAX_CHARACTERS


def test_some_chats_have_several_turns() -> None:
    chats = load(ROOT / "prompts" / "chat.toml")["prompts"]
    assert sum(len(prompt["messages"]) >= 3 for prompt in chats) >= 3


def test_no_text_occurs_twice() -> None:
    counts = Counter(" ".join(text.split()) for prompt in PROMPTS for text in texts(prompt))
    assert [text for text, count in counts.items() if count > 1] == []


def test_no_long_passage_is_shared_by_two_prompts() -> None:
    """A drafter that remembers earlier prompts must not find one prompt's text in another."""
    first_seen: dict[tuple[str, ...], str] = {}
    for prompt in PROMPTS:
        words = " ".join(texts(prompt)).split()
        for start in range(len(words) - 19):
            passage = tuple(words[start : start + 20])
            assert first_seen.setdefault(passage, prompt["id"]) == prompt["id"], passage


def test_every_prompt_fits_the_demo_models_context() -> None:
    with Target(DEMO, n_ctx=64, n_gpu_layers=0) as target:
        for prompt in PROMPTS:
            tokens = target.tokenize(prompt["text"]) if "text" in prompt else target.chat_prompt(conversation(prompt))
            assert len(tokens) <= MAX_TOKENS, prompt["id"]
