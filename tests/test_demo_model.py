"""Tests of the embedded demo model: the shipped file, its card, and the chat turns of its training."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
from gguf import GGUFReader
from jinja2 import Template
from support.cli_runner import DEMO

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def reader() -> GGUFReader:
    return GGUFReader(str(DEMO))


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "demo_model"))
    return importlib.import_module("chat")


def value(reader: GGUFReader, key: str) -> object:
    return reader.fields[key].contents()


def test_demo_model_metadata_matches_its_card(reader: GGUFReader) -> None:
    assert 1_000_000 < DEMO.stat().st_size <= 12_000_000
    assert value(reader, "general.architecture") == "llama"
    assert value(reader, "general.name") == "ngramspec demo"
    assert value(reader, "general.license") == "MIT"
    assert value(reader, "general.description")
    assert value(reader, "llama.context_length") == 2048
    assert value(reader, "llama.vocab_size") == 4096
    blocks = int(str(value(reader, "llama.block_count")))
    stored = {int(match[1]) for tensor in reader.tensors if (match := re.match(r"blk\.(\d+)\.", tensor.name))}
    assert stored == set(range(blocks))
    card = DEMO.with_name("MODEL_CARD.md").read_text("utf-8")
    assert all(fact in card for fact in ("Licence: MIT", f"{DEMO.stat().st_size:,} bytes", f"{blocks} blocks"))


def test_demo_model_chat_template_matches_training_format(reader: GGUFReader, chat: ModuleType) -> None:
    template = Template(str(value(reader, "tokenizer.chat_template")))
    prompt = template.render(messages=[{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    tokens = value(reader, "tokenizer.ggml.tokens")
    assert isinstance(tokens, list)
    assert tokens[int(str(value(reader, "tokenizer.ggml.eot_token_id")))] == "<|im_end|>"
    turns = (("system", "Answer briefly."), ("user", "Hello"), ("assistant", "Hi."))
    messages = [{"role": role, "content": content} for role, content in turns]
    trained = chat.render([("Hello", "Hi.")], "Answer briefly.")
    assert template.render(messages=messages, add_generation_prompt=False) == trained
