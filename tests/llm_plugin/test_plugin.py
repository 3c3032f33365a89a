"""The plugin as simonw's `llm` uses it: in its own process, and by its library."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cli_runner import DEMO, Done, run
from support.tiny_models import write_model

llm = pytest.importorskip("llm")
pytest.importorskip("llama_cpp")

from ngramspec.chat_prompt import ChatPrompt  # noqa: E402
from ngramspec.decoding.step import Step  # noqa: E402
from ngramspec.llm_plugin.model import NGramSpec, PromptFailed  # noqa: E402
from ngramspec.llm_plugin.opened import loading  # noqa: E402
from ngramspec.llm_plugin.options import sampling_of  # noqa: E402
from ngramspec.policies.cost_aware import CostPolicy  # noqa: E402
from ngramspec.policies.simple import FixedPolicy  # noqa: E402
from ngramspec.sampling.settings import Sampling  # noqa: E402

REPETITIVE = "Repeat: one two three four five six. one two three four five six. one two three"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 32, "threads": 1}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "LLM_USER_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def model() -> Iterator[NGramSpec]:
    """The demo model, loaded by the first test that asks it something."""
    made = NGramSpec(str(DEMO))
    yield made
    if made._opened is not None:
        made._opened.close()


# --------------------------------------------------------------------------- in a process of its own

QUICK = ("-o", "temperature", "0", "-o", "max_tokens", "8", "-o", "threads", "1", "-o", "exact", "off")


def in_terminal(env: dict[str, str], folder: Path, *arguments: str, stdin: bytes = b"") -> Done:
    command = [sys.executable, "-m", "llm"]
    return run(env | {"LLM_USER_PATH": str(folder)}, *arguments, stdin=stdin, command=command)


def test_a_conversation_goes_on_and_its_tokens_are_counted(env: dict[str, str], tmp_path: Path) -> None:
    begun = in_terminal(env, tmp_path, "-m", "ngramspec", *QUICK, "-s", "Be kind.", "-u", "Hello")
    assert begun.code == 0, begun.err
    went_on = in_terminal(env, tmp_path, "-c", *QUICK, "-u", "--no-stream", "And now?")
    assert went_on.code == 0, went_on.err
    first, second = (int(done.err.split("Token usage: ")[1].split(" input")[0]) for done in (begun, went_on))
    assert second > first
    logged = json.loads(in_terminal(env, tmp_path, "logs", "-n", "0", "--json").out)
    assert [entry["response"] for entry in logged] == [begun.out.removesuffix("\n"), went_on.out.removesuffix("\n")]
    assert {entry["model"] for entry in logged} == {"ngramspec/default"}


def test_its_models_are_those_on_the_disk(env: dict[str, str], tmp_path: Path) -> None:
    kept = tmp_path / "hub" / "models--someone--Model-GGUF"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    (kept / "snapshots" / "abc").mkdir(parents=True)
    (kept / "snapshots" / "abc" / "model-Q4_0.gguf").write_bytes(b"GGUF")
    listed = in_terminal(env | {"HF_HUB_CACHE": str(tmp_path / "hub")}, tmp_path, "models", "list").out
    assert "ngramspec: ngramspec/default (aliases: ngramspec)" in listed
    assert "ngramspec: ngramspec/hf:someone/Model-GGUF:model-Q4_0.gguf" in listed


def test_in_a_chat_what_goes_wrong_is_a_line(env: dict[str, str], tmp_path: Path) -> None:
    chat = ("chat", "-m", "ngramspec", "-o", "ctx_size", "64", *QUICK)
    done = in_terminal(env, tmp_path, *chat, stdin=b"Hi\n" + b"word " * 99 + b"\nexit\n")
    assert done.code == 1
    assert "Traceback" not in done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("Error: ")]
    assert "but the context holds 64" in line
    assert "-o ctx_size" in line


def test_every_start_of_llm_is_spared_llama_cpp(env: dict[str, str]) -> None:
    script = (
        "import sys; import llm; before = set(sys.modules); import ngramspec.llm_plugin as plugin;"
        "plugin.register_models(lambda *a, **k: None);"
        "print([m for m in ('llama_cpp', 'jinja2', 'rich', 'psutil') if m in set(sys.modules) - before])"
    )
    assert run(env, command=[sys.executable, "-c", script]).out == "[]\n"


# --------------------------------------------------------------------------- by its library


def test_drafts_change_nothing_and_the_model_stays_loaded(home: Path, model: NGramSpec) -> None:
    drafted = model.prompt(REPETITIVE, **GREEDY)
    text = drafted.text()
    opened = model._opened
    usage = drafted.usage().details or {}
    assert (drafted.json()["estimated_gain"] is not None) == (usage.get("drafted", 0) > 0)
    sampled = [model.prompt(REPETITIVE, **GREEDY | {"temperature": 0.9, "seed": 5}).text() for _ in range(2)]
    assert sampled[0] == sampled[1]
    assert model._opened is opened
    plain = model.prompt(REPETITIVE, no_draft=True, **GREEDY)
    assert plain.text() == text
    assert model._opened is not opened
    assert opened is not None
    assert opened.target.closed
    used = drafted.usage()
    assert used.input == plain.usage().input > 0
    assert used.output == plain.usage().output > 0
    assert plain.usage().details is None


def test_a_draft_model_changes_nothing(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = NGramSpec(str(DEMO))
    plain = made.prompt(REPETITIVE, no_draft=True, **GREEDY).text()
    # The demo model is right about itself, though it is never cheap enough.
    monkeypatch.setattr(CostPolicy, "plan", FixedPolicy(4).plan)
    monkeypatch.setattr(CostPolicy, "price", lambda *_: None)
    drafted = made.prompt(REPETITIVE, draft_model=str(DEMO), **GREEDY)
    assert drafted.text() == plain
    usage = drafted.usage().details or {}
    assert usage["accepted"] > 0.6 * usage["drafted"] > 0
    opened = made._opened
    other = write_model(tmp_path / "other.gguf", "llama")
    with pytest.raises(llm.ModelError, match="their vocabularies differ, at token"):
        made.prompt("Hi", draft_model=str(other), **GREEDY).text()
    assert opened is not None
    assert opened._small is not None
    assert opened.target.closed
    assert opened._small.closed


def test_an_answer_of_a_schema_is_json_of_it(home: Path, model: NGramSpec) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    answer = json.loads(model.prompt("Is it?", schema=schema, **GREEDY).text())
    assert isinstance(answer["ok"], bool)
    with pytest.raises(PromptFailed, match="the option grammar and a schema exclude each other"):
        model.prompt("Is it?", schema=schema, grammar='root ::= "x"', **GREEDY).text()


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"temperature": "hot"}, "valid number"),
        ({"temperature": -1}, "must be finite and at least 0"),
        ({"top_p": 2}, "must be above 0 and at most 1"),
        ({"max_tokens": 0}, "greater than or equal to 1"),
        ({"exact": "yes"}, "'auto', 'on' or 'off'"),
        ({"stop": ""}, "at least 1 character"),
        ({"heat": 1}, "Extra inputs"),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_anything_is_loaded(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        NGramSpec("no such file").Options(**given)


def test_every_setting_of_one_value_is_an_option() -> None:
    schema = NGramSpec(None).Options.model_json_schema()["properties"]
    assert {"temperature", "top_k", "top_p", "min_p", "seed", "repeat_penalty", "mirostat", "samplers"} <= set(schema)
    assert all(one["description"] for one in schema.values())


def test_a_seed_is_random_unless_it_is_named() -> None:
    options = NGramSpec(None).Options
    seeds = {sampling_of(options(**given), None).seed for given in ({}, {"seed": -1}, {"seed": -1})}
    assert len(seeds) == 3
    assert sampling_of(options(seed=5), None).seed == 5
    assert sampling_of(options(samplers="top_k;temperature"), None).samplers == ("top_k", "temperature")
    with pytest.raises(ValueError, match="2\\^64"):
        options(seed=-2)


@pytest.mark.parametrize(
    ("name", "given", "complaint"),
    [
        ("no such file.gguf", {}, "no such file"),
        (str(DEMO), {"mirostat": 2, "temperature": 0}, "mirostat"),
        (str(DEMO), {"samplers": "bogus"}, "unknown sampler 'bogus'"),
        (str(DEMO), {"draft_model": "gone.gguf"}, "gone.gguf"),
        (str(DEMO), {"draft_model": str(DEMO), "no_draft": True}, "leave out no_draft"),
        (str(DEMO), {"rpc": "host"}, "'host' is not HOST:PORT"),
        (str(DEMO), {"rpc": "127.0.0.1:1", "gpu_layers": 0}, "leaves no layer to the option rpc"),
        (str(DEMO), {"rpc": "127.0.0.1:1"}, "DGGML_RPC=on|cannot be reached"),
    ],
)
def test_what_cannot_be_answered_is_one_line(home: Path, name: str, given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(llm.ModelError, match=complaint) as raised:
        NGramSpec(name).prompt("Hi", **{"threads": 1, "max_tokens": 1, **given}).text()
    assert "\n" not in str(raised.value)


# --------------------------------------------------------------------------- tools and thoughts

TEMPLATE = "{# <think> <tool_call> tools #}"


class Told:
    """A decoder and its model: they answer with the texts that they are told, and note what they are asked."""

    n_ctx = 512
    chat_template = TEMPLATE
    notes: tuple[str, ...] = ()

    def __init__(self, *answers: str) -> None:
        self.answers = iter(answers)
        self.asked: list[list[dict[str, Any]]] = []
        self.grammars: list[str | None] = []
        self.footing = SimpleNamespace(same=True)

    def chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any]) -> ChatPrompt:
        self.asked.append(list(messages))
        return ChatPrompt([1, 2, 3], "", "")

    def sampler(self, sampling: Sampling) -> None:
        self.grammars.append(sampling.grammar)

    def is_eog(self, token: int) -> bool:
        return False

    def generate(self, prompt: Sequence[int], **_: Any) -> Generator[Step]:
        text = next(self.answers)
        for place in range(0, len(text), 5):
            yield Step((7,), pieces=(text[place : place + 5],), batch=1)


def answering(*answers: str) -> tuple[NGramSpec, Told]:
    model, told = NGramSpec("told"), Told(*answers)
    opened = SimpleNamespace(
        loading=loading(model.Options()), target=told, decoder=told, memory=None, tuned={}, close=lambda: None
    )
    model._opened = opened  # type: ignore[assignment]
    return model, told


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


CALL = '<think>tools</think>Let me see.<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'


def test_tools_are_called_and_their_results_come_back() -> None:
    model, told = answering(CALL, "It is 42.")
    chain = model.conversation(tools=[multiply]).chain("What is 6 times 7?")
    assert chain.text() == "Let me see. It is 42."
    user, call, result = told.asked[1]
    assert user == {"role": "user", "content": "What is 6 times 7?"}
    assert (call["content"], call["reasoning_content"]) == ("Let me see.", "tools")
    (made,) = call["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"a": 6, "b": 7}
    assert result == {"role": "tool", "name": "multiply", "content": "42", "tool_call_id": made["id"]}


def test_a_call_that_was_cut_off_is_not_run() -> None:
    model, _ = answering(CALL.partition(', "b"')[0])
    response = model.prompt("What is 6 times 7?", tools=[multiply])
    assert response.tool_calls() == []
    assert '{"a": 6' in response.text()


def test_without_tools_what_looks_like_a_call_is_text() -> None:
    model, _ = answering("<tool_call>{}</tool_call>")
    assert model.prompt("Hi").text() == "<tool_call>{}</tool_call>"


def test_a_schema_leaves_room_for_calls_where_there_are_tools() -> None:
    model, told = answering('{"x": 1}', '{"x": 1}')
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    model.prompt("Hi", schema=schema).text()
    model.prompt("Hi", schema=schema, tools=[multiply]).text()
    without, with_tools = told.grammars
    assert "multiply" not in str(without)
    assert "multiply" in str(with_tools)
    assert "instead" in str(with_tools)
