"""Tests of what all chat APIs have in common, in the format of each; only the engine is scripted."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.dialects import DIALECTS, USER, Dialect
from support.fake_service import Script
from support.http import (
    allows,
    ask,
    demo_vocabulary,
    format_tool_call,
    thinking_vocabulary,
    vocabulary_with,
)
from support.templates import CHAT_VALUES, ONE_CALL


def test_reasoning_token_count_does_not_depend_on_drafts() -> None:
    counts, vocabulary = set(), thinking_vocabulary()
    expected = len(vocabulary.tokenize("<think>\nLong thoughts of many words.", add_bos=False))
    for step in (1, 2, 3, 7, 100):
        for dialect in (DIALECTS["chat completions"], DIALECTS["messages"], DIALECTS["responses"]):
            for stream in (False, True):
                script = Script("<think>\nLong thoughts of many words.\n</think>\n\nI löok.", step=step)
                body = dialect.body(stream=stream)
                answer, _ = ask(dialect.path, body, script, vocabulary=vocabulary, n_ctx=2000)
                last = answer[-2:] if stream else answer
                counts |= set(re.findall(r'"(?:reasoning|thinking)_tokens": (\d+)', json.dumps(last)))
    assert counts == {f"{expected}"}


EACH = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
LOOKS = [format_tool_call("look", f'{{"at": {at}}}') for at in (1, 2)]


@EACH
def test_settings_reach_the_engine(dialect: Dialect) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.2, "seed": 7, "repeat_penalty": 1.2}
    stop = "stop_sequences" if dialect.path == "/v1/messages" else "stop"
    _, engine = dialect.ask(dialect.body(limit=9, settings={**sampling, stop: ["END"]}, unknown=[1]), n_ctx=2000)
    (request,) = engine.requests
    assert {name: getattr(request.sampling, name) for name in sampling} == sampling
    assert (request.max_tokens, request.sampling.grammar) == (9, None)
    assert request.stop == ("END",) or dialect.name == "responses"  # OpenAI's responses have no stop strings


FRAGMENTS = ("<think>\n", "hm ", "\n</think>\n\n", "I löok. ", "\n", '<tool_call>\n{"name": "loo', '{"at": [1]}', "</")


@st.composite
def answers(draw: st.DrawFn) -> tuple[Script, int]:
    """Draw reasoning, texts, calls and parts of them in any order; and the maximum number of tokens."""
    calls = map(format_tool_call, ("look", "patch", "made_up"))
    parts = draw(st.lists(st.sampled_from([*FRAGMENTS, *calls]), max_size=8))
    is_cut = draw(st.booleans())
    script = Script("".join(parts) or "x", step=draw(st.integers(1, 9)), ends=not is_cut, n_cached=5)
    return script, 60 if is_cut else 400


@EACH
@given(answer=answers(), has_tools=st.booleans())
def test_stream_equals_whole_answer(dialect: Dialect, answer: tuple[Script, int], has_tools: bool) -> None:
    script, limit = answer
    server = {"vocabulary": vocabulary_with(CHAT_VALUES), "n_ctx": 4000}
    tools = dialect.tools if has_tools else []
    whole, _ = dialect.ask(dialect.body(limit=limit, tools=tools), script, **server)
    streamed, _ = dialect.ask(dialect.body(limit=limit, tools=tools, stream=True), script, **server)
    streamed_calls = streamed.calls
    if dialect.path == "/v1/chat/completions" and whole.reason == "length":
        streamed_calls = streamed_calls[: len(whole.calls)]  # the whole answer omits a call that a limit cut off
    assert streamed[:2] == whole[:2]
    assert (streamed_calls, streamed[3:6]) == (whole.calls, whole[3:6])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["chat completions", "responses", "ollama"])
def test_logprobs_cover_exactly_the_text(name: str, stream: bool) -> None:
    asked = {"logprobs": True, "top_logprobs": 2, "include": ["message.output_text.logprobs"], "stream": stream}
    for text in ("a END b", "Hello, wörld", "1 <tool b"):
        turn, _ = DIALECTS[name].ask(DIALECTS[name].body(**asked), Script(text, step=2), n_ctx=2000)
        assert turn.text == text
        assert b"".join(bytes(token["bytes"]) for token in turn.logprobs).decode() == text
        assert {(token["logprob"], len(token["top_logprobs"])) for token in turn.logprobs} == {(-0.5, 2)}


ONE, TWO, FREE = LOOKS[0], "\n".join(LOOKS), format_tool_call("patch", '{"input": "x"}')
NAMED_CHOICE = {"type": "function", "name": "look"}
ALLOWED = {"mode": "required", "tools": [{"type": "function", "function": {"name": "look"}}]}
CHOICES: list[tuple[str, Any, list[str] | None]] = [
    *((name, choice, None) for name in ("chat completions", "responses") for choice in (None, "auto", "none")),
    ("chat completions", "required", [ONE, TWO, FREE]),
    ("chat completions", {"type": "function", "function": {"name": "look"}}, [ONE]),
    ("chat completions", {"type": "allowed_tools", "allowed_tools": ALLOWED}, [ONE, TWO]),
    ("responses", "required", [ONE, TWO, FREE]),
    ("responses", NAMED_CHOICE, [ONE]),
    ("responses", {"type": "allowed_tools", "mode": "required", "tools": [NAMED_CHOICE]}, [ONE, TWO]),
    ("messages", {"type": "auto"}, None),
    ("messages", {"type": "none"}, None),
    ("messages", {"type": "any"}, [ONE, TWO]),
    ("messages", {"type": "any", "disable_parallel_tool_use": True}, [ONE]),
    ("messages", {"type": "tool", "name": "look"}, [ONE]),
]


@pytest.mark.parametrize(("name", "choice", "allowed"), CHOICES)
def test_tool_choice_becomes_a_grammar(name: str, choice: Any, allowed: list[str] | None) -> None:
    _, engine = DIALECTS[name].ask(DIALECTS[name].body(tool_choice=choice), n_ctx=2000)
    if allowed is None:
        assert engine.requests[0].sampling.grammar is None
        return
    texts = [ONE, TWO, "no"] + ([FREE] if name != "messages" else [])
    assert [text for text in texts if allows(engine, text)] == [text for text in texts if text in allowed]


@EACH
def test_answer_continues_last_message_of_assistant(dialect: Dialect) -> None:
    vocabulary, begun = demo_vocabulary(), {"role": "assistant", "content": "The answer <|im_end|> is "}
    body = dialect.body(tools=[], **{dialect.messages: [USER, begun]})
    turn, engine = dialect.ask(body, Script("4."))
    expected = vocabulary.chats.tokens([USER]) + vocabulary.tokenize(begun["content"], add_bos=False)
    assert (turn.text, list(engine.requests[0].prompt)) == ("4.", expected)


SINGLE = {
    "chat completions": {"parallel_tool_calls": False},
    "responses": {"parallel_tool_calls": False},
    "messages": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    "ollama": None,  # without such a field
}


@EACH
@pytest.mark.parametrize("stream", [False, True])
def test_answer_with_single_call_ends_after_it(dialect: Dialect, stream: bool) -> None:
    endless, single = Script(TWO, ends=False, step=3), SINGLE[dialect.name]
    asked = dialect.body(stream=stream)
    # A template that accepts only one call in a turn has the same effect as the field.
    answers = [dialect.ask(asked, endless, vocabulary=vocabulary_with(ONE_CALL), n_ctx=2000)]
    if single is not None:
        answers.append(dialect.ask(asked | single, endless, n_ctx=2000))
    for turn, _ in answers:
        assert ([json.loads(arguments) for _, arguments in turn.calls], turn.reason) == ([{"at": 1}], turn.reason)
        assert turn.reason not in ("length", "incomplete", "max_tokens")
