"""The embedded demo model: the shipped file, its card, and the chat turns it is trained on."""

import importlib
import random
import re
from pathlib import Path
from types import ModuleType

import pytest
from gguf import GGUFReader
from jinja2 import Template

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "ngramspec" / "demo"
MODEL = DEMO / "demo.gguf"

MODULE = '''
def total(numbers, start):
    """Return the sum of the numbers plus a start value.

    A second paragraph that nobody could guess.
    """
    result = start
    for number in numbers:
        result += number
    return result


def undocumented(number):
    return number + 1
'''


@pytest.fixture(scope="module")
def reader() -> GGUFReader:
    return GGUFReader(str(MODEL))


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "demo_model"))
    return importlib.import_module("chat")


def value(reader: GGUFReader, key: str) -> object:
    return reader.fields[key].contents()


def test_file_is_small_enough_to_ship() -> None:
    assert 1_000_000 < MODEL.stat().st_size <= 12_000_000


def test_metadata_names_what_the_file_is(reader: GGUFReader) -> None:
    assert value(reader, "general.architecture") == "llama"
    assert value(reader, "general.name") == "ngramspec demo"
    assert value(reader, "general.license") == "MIT"
    assert value(reader, "general.description")
    assert value(reader, "llama.context_length") == 2048
    assert value(reader, "llama.vocab_size") == 4096


def test_every_block_is_stored(reader: GGUFReader) -> None:
    blocks = value(reader, "llama.block_count")
    named = {re.match(r"blk\.(\d+)\.", tensor.name) for tensor in reader.tensors} - {None}
    assert {int(match[1]) for match in named if match} == set(range(int(str(blocks))))


def test_chat_template_ends_turns_with_the_end_of_turn_token(reader: GGUFReader) -> None:
    template = Template(str(value(reader, "tokenizer.chat_template")))
    prompt = template.render(messages=[{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    tokens = value(reader, "tokenizer.ggml.tokens")
    assert isinstance(tokens, list)
    assert tokens[int(str(value(reader, "tokenizer.ggml.eot_token_id")))] == "<|im_end|>"


def test_chat_template_is_the_form_of_the_training_turns(reader: GGUFReader, chat: ModuleType) -> None:
    template = Template(str(value(reader, "tokenizer.chat_template")))
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
    ]
    trained = chat.rendered([("Hello", "Hi.")], "Answer briefly.")
    assert template.render(messages=messages, add_generation_prompt=False) == trained


def test_model_card_agrees_with_the_file(reader: GGUFReader) -> None:
    card = (DEMO / "MODEL_CARD.md").read_text("utf-8")
    assert "Licence: MIT" in card
    assert f"{MODEL.stat().st_size:,} bytes" in card
    assert f"{value(reader, 'llama.block_count')} blocks" in card


def test_only_documented_functions_become_chat(chat: ModuleType) -> None:
    (function,) = chat.functions_in(MODULE)
    assert function.name == "total"
    assert function.parameters == ("numbers", "start")
    assert '"""Return the sum of the numbers plus a start value."""' in function.source
    assert '"""' not in function.bare
    assert "second paragraph" not in function.source


def test_renaming_changes_names_only(chat: ModuleType) -> None:
    source = 'def f(n):\n    print("n", n, n.n)\n    return nn + n\n'
    assert chat.renamed(source, "n", "value") == (
        'def f(value):\n    print("n", value, value.value)\n    return nn + value\n'
    )


def test_chat_documents_are_closed_turns(chat: ModuleType) -> None:
    documents = chat.chat_documents([MODULE] * 3, random.Random(0), rounds=8, talk=True)
    assert len(documents) > 8  # the module's one function, and hand-written talk
    for document in documents:
        assert document.count("<|im_start|>") == document.count("<|im_end|>")
        assert document.endswith("<|im_end|>\n")
