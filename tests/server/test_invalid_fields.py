"""Tests that every endpoint rejects an invalid field before the engine receives the request, and names the field."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.fake_embedder import CountingEmbedder
from support.http import BODIES, get_error

from ngramspec.grammars.lark import MAX_SIZE
from ngramspec.sampling.settings import MAX_BREAKERS
from ngramspec.server.limits import MAX_CHARACTERS, MAX_ITEMS, MAX_STRINGS, MAX_TEXT, MAX_TOKENS, MAX_VALUES

Fields = dict[str, Any]

CHATS, TEXTS, NATIVE, INFILL = "/v1/chat/completions", "/v1/completions", "/completion", "/infill"
MESSAGES, RESPONSES, EMBEDDINGS = "/v1/messages", "/v1/responses", "/v1/embeddings"
USER = {"role": "user", "content": "hi"}
BASES: dict[str, Fields] = BODIES | {INFILL: {"input_prefix": "a", "input_suffix": "b"}, EMBEDDINGS: {"input": "a"}}
BOGUS = {"type": "bogus"}
STRICT = {
    "schema": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]},
    "strict": True,
}
LOOK = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": LOOK}
STRICT_TOOL = {"type": "function", "function": {"name": "f", "parameters": STRICT["schema"], "strict": True}}
ITEM = {"type": "function", "strict": False} | LOOK
BLOCK = {"name": "look", "input_schema": LOOK["parameters"]}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
BEGUN = {"role": "assistant", "content": "The answer is "}
CALLED = BEGUN | {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
ALLOWED = {"mode": "required", "tools": [{"name": "x", "parameters": {}}]}
JSON_TEXT = f"[{'[],' * (MAX_VALUES // 2)}[]]"
FORM = {"type": "json_schema", "schema": LOOK["parameters"]}
COMBINED = "guided_json cannot be combined with"
TOO_MUCH_JSON = f"must have at most {MAX_VALUES:,} JSON values"
BIASES = {"logit_bias": [[1, 1.0]] * (MAX_TOKENS // 2)}
TOO_MANY_BIASES = f"logit_bias must have at most {MAX_TOKENS:,} tokens for all answers together"
ALTERNATIVES = ("top_logprobs must be a whole number from 0 to 20", {"logprobs": True, "top_logprobs": 21})
TOO_MANY_LOGPROBS = "must be at most 20, or 10,000 divided by the number of tokens to generate"


def say(content: Any, role: str = "user") -> Fields:
    """Return a conversation whose first message has a content."""
    return {"messages": [{"role": role, "content": content}, USER]}


def go_on(*messages: Fields, **fields: Any) -> Fields:
    return {"messages": [*messages], "continue_final_message": True} | fields


GENERATION: list[tuple[str, Fields]] = [
    ("guided_regex", {"guided_regex": "(?=a)a+"}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "("}}),
    ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": "{}"}}),
    ("guided_json", {"guided_json": "{"}),
    ("guided_json", {"guided_json": BOGUS}),
    ("guided_json", {"guided_json": 5}),
    ("guided_choice", {"guided_choice": []}),
    ("guided_choice", {"guided_choice": ["a"], "grammar": 'root ::= "b"'}),
    ("structured_outputs.choice", {"structured_outputs": {"choice": ["a"]}, "guided_choice": ["a"]}),
    ("min_tokens", {"min_tokens": -1}),
    ("stop_token_ids", {"stop_token_ids": [10**6]}),
    ("bad_words", {"bad_words": ["x", " "]}),
    ("allowed_token_ids", {"allowed_token_ids": [1]}),
    ("use_beam_search", {"use_beam_search": True}),
    *(("prompt_logprobs", {"prompt_logprobs": value}) for value in (0, 1)),
    ("grammar_lazy", {"grammar_lazy": True}),
    ("lora", {"lora": [{"id": 0, "scale": 0.5}]}),
    ("min_keep", {"min_keep": 2}),
    ("adaptive_target", {"adaptive_target": 0.5}),
    ("thinking_budget_tokens", {"thinking_budget_tokens": -2}),
    ("reasoning_budget_tokens", {"reasoning_budget_tokens": -2}),
    ("reasoning_format", {"reasoning_format": "none"}),
]
"""Fields of all APIs but Ollama's."""

PREDICTIONS: list[tuple[str, Fields]] = [
    ("prediction.type", {"prediction": {"type": "x", "content": ""}}),
    ("prediction.content", {"prediction": {"type": "content"}}),
    ("prediction", {"prediction": 5}),
]

OLLAMA: list[tuple[str, Fields]] = [
    ("options.temperature must be", {"options": {"temperature": -1}}),
    ("options.num_predict must be", {"options": {"num_predict": "x"}}),
    *(("options.min_tokens must be a whole", {"options": {"min_tokens": value}}) for value in (-1, 1.5, "3", True)),
    ("stop_token_ids must contain", {"options": {"stop_token_ids": [-1]}}),
    ("lora: unknown adapter", {"options": {"lora": [{"id": 0}]}}),
    ("options must be an object", {"options": 5}),
    ("grammar cannot be combined with format", {"format": "json", "options": {"grammar": 'root ::= "a"'}}),
    ('format must be "json" or a JSON schema', {"format": "yaml"}),
    ("think must be one of true, false, low", {"think": "some"}),
    ("think: 'demo' does not support thinking", {"think": True}),  # clients recognize this, and retry without the field
    ("keep_alive must be a number of seconds", {"keep_alive": "5 minutes"}),
    ("keep_alive must be a number of seconds", {"keep_alive": True}),
    ("stream must be true or false", {"stream": "no"}),
    ("top_logprobs requires logprobs", {"top_logprobs": 2}),
    ALTERNATIVES,
]

INVALID: dict[str, list[tuple[str, Fields]]] = {
    CHATS: [
        ("messages", {"messages": ...}),
        ("messages[0].role", {"messages": [{"content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[0].role", {"messages": [{"role": "wizard", "content": "x"}]}),
        *(("messages", {"messages": value}) for value in ("hi", [3])),
        *(("temperature", {"temperature": value}) for value in (-1, "hot", 10**400)),
        ("stream", {"stream": "yes"}),
        ("n", {"n": 0}),
        ("max_tokens", {"max_tokens": True}),
        *(("stop", {"stop": value}) for value in ([""], 5)),
        ("top_logprobs", {"top_logprobs": 3}),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": BOGUS}}}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": STRICT}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        (f"{COMBINED} response_format", {"response_format": FORM, "guided_json": {}}),
        # Tools
        ("tool_choice", {"tool_choice": "required"}),
        (
            "tool_choice.function.name: there is no tool named 'other'",
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
        ),
        ("tool_choice.name", {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}}),
        ("tool_choice.name", {"tools": [TOOL], "tool_choice": {"name": "x"}}),
        (
            "tools: the parameters of the tool 'f': the JSON schema cannot be used: unsupported keywords: uniqueItems",
            {"tools": [STRICT_TOOL], "tool_choice": "required"},
        ),
        # Parts of answers
        ("messages[0].content[0].refusal", say([{"type": "refusal"}], "assistant")),
        ("messages[0].content[0].thinking", say([{"type": "thinking"}], "assistant")),
        ("messages[0].content[0].text", say([{"type": "reasoning"}], "assistant")),
        ("messages[0].content[0].type", say([{"type": "mystery"}], "assistant")),
        *(("messages[0].content[0].type", say([{"type": kind}])) for kind in ("refusal", "thinking", "reasoning")),
        # Continued messages
        ("continue_final_message", go_on(USER)),
        ("continue_final_message", go_on(USER, CALLED)),
        ("messages", {"messages": [USER, BEGUN, BEGUN]}),
        ("add_generation_prompt", go_on(USER, BEGUN, add_generation_prompt=True)),
        # Reasoning
        ("reasoning", {"reasoning": "none"}),
        ("reasoning.effort", {"reasoning": {"effort": 5}}),
        ("reasoning.enabled", {"reasoning": {"enabled": "no"}}),
        ("reasoning.max_tokens", {"reasoning": {"max_tokens": -1}}),
        ("thinking", {"thinking": False}),
        ("thinking.type", {"thinking": {"type": "perhaps"}}),
        ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": -1}}),
        ("think", {"think": 5}),
        ("enable_thinking", {"enable_thinking": "no"}),
        ("reasoning_budget_tokens", {"reasoning_budget_tokens": "many"}),
        ("thinking_budget_tokens", {"thinking_budget_tokens": 1.5}),
        ("reasoning_budget_message", {"reasoning_budget_message": 5, "reasoning_budget_tokens": 5}),
        *PREDICTIONS,
        # Sizes
        ALTERNATIVES,
        (TOO_MANY_BIASES, BIASES | {"n": 3}),
        ("messages", {"messages": [USER] * (MAX_ITEMS + 1)}),
        ("tools", {"tools": [TOOL] * (MAX_ITEMS + 1)}),
        (f"structured_outputs.json {TOO_MUCH_JSON}", {"structured_outputs": {"json": JSON_TEXT}}),
        (
            f"messages[0].tool_calls[0].function.arguments {TOO_MUCH_JSON}",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": JSON_TEXT}}]}]},
        ),
    ],
    TEXTS: [
        ("prompt", {"prompt": ...}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [10**9]}),
        ("best_of", {"best_of": 3}),
        ("post_sampling_probs", {"post_sampling_probs": True}),
        ("echo", {"suffix": "y", "echo": True, "logprobs": 1}),
        *(
            ("suffix requires a single string as prompt", {"suffix": "b", "prompt": prompt})
            for prompt in (["a", "b"], [1, 2], ...)
        ),
        ("n", {"prompt": ["x"] * 100, "n": 100}),
        ("reasoning_budget_tokens", {"reasoning_budget_tokens": 9}),
        ALTERNATIVES,
        ("logprobs must be a whole number from 0 to 20", {"logprobs": 21}),
        ("logprobs must have at most 4,194,304", {"prompt": [5] * 2000, "n": 128, "echo": True, "logprobs": 20}),
        (TOO_MANY_BIASES, BIASES | {"prompt": ["x"] * 2, "n": 2}),
    ],
    NATIVE: [
        ("logit_bias", {"logit_bias": [[1, 2, 3]]}),
        ("logit_bias", {"logit_bias": {"9999999": 1}}),
        ("samplers", {"samplers": ["magic"]}),
        ("json_schema", {"grammar": "root ::= x", "json_schema": {}}),
        ("n_predict", {"n_predict": -2}),
        ("xtc_probability", {"temperature": 0, "xtc_probability": 0.5}),
        ("thinking_budget_tokens", {"thinking_budget_tokens": 9}),
        ("dry_sequence_breakers", {"dry_sequence_breakers": [f"{i}" for i in range(MAX_BREAKERS + 1)]}),
        ("dry_sequence_breakers", {"dry_sequence_breakers": ["x" * 41]}),
        *((name, {name: ["x"] * (MAX_STRINGS + 1)}) for name in ("stop", "bad_words")),
        *((name, {name: "x" * (MAX_CHARACTERS + 1)}) for name in ("stop", "bad_words")),
        ("stop_token_ids", {"stop_token_ids": [1] * (MAX_TOKENS + 1)}),
        ("logit_bias", {"logit_bias": [[1, 1.0]] * (MAX_TOKENS + 1)}),
        ("logit_bias", {"logit_bias": {f"{i}": 1.0 for i in range(MAX_TOKENS + 1)}}),
        ("logit_bias", {"logit_bias": [["x" * (MAX_CHARACTERS + 1), 1.0]]}),
        ("samplers", {"samplers": ["top_k"] * 1001}),
        ("samplers", {"samplers": "k" * 1001}),
        ("response_fields", {"response_fields": ["content"] * 257}),
        ("prompt", {"prompt": ["x"] * 129}),
        (f"guided_json {TOO_MUCH_JSON}", {"guided_json": JSON_TEXT}),
        (f"n_probs {TOO_MANY_LOGPROBS}", {"n_probs": 21}),
        (f"n_probs {TOO_MANY_LOGPROBS}", {"n_probs": 1251, "n_predict": 2, "n": 4}),
        (TOO_MANY_BIASES, BIASES | {"prompt": ["x"] * 3}),
        ("grammar must have at most 2,000,000", {"n": 128, "grammar": f'root ::= "{"x" * (MAX_SIZE // 128)}"'}),
    ],
    INFILL: [
        ("input_prefix is missing", {"input_prefix": ...}),
        ("input_suffix is missing", {"input_suffix": ...}),
        ("input_suffix must be a string, got 5", {"input_suffix": 5}),
        ("prompt must be a string", {"prompt": ["a"]}),
        ("input_extra[0] must be an object", {"input_extra": ["a"]}),
        ("input_extra[0].text is missing", {"input_extra": [{"filename": "a"}]}),
        ("input_extra[0].filename must be a string", {"input_extra": [{"text": "", "filename": 3}]}),
        ("t_max_predict_ms must be a whole number", {"t_max_predict_ms": "x"}),
        ("samplers: infill requires top_k before it", {"samplers": ["infill"]}),
        ("top_k must be 1 to 256", {"samplers": ["top_k", "infill"], "top_k": 0}),
        (f"logprobs {TOO_MANY_LOGPROBS}", {"logprobs": 21}),
    ],
    MESSAGES: [
        *(("max_tokens", {"max_tokens": value}) for value in (None, "9")),
        *(("messages", {"messages": value}) for value in (None, "x")),
        ("system", {"system": [3]}),
        *(("stop_sequences", {"stop_sequences": value}) for value in ([""], ["x"] * (MAX_STRINGS + 1))),
        ("messages[0].content", say(3)),
        ("messages[0].content[0].type", say([{"text": "x"}])),
        ("messages[0].content[0].source", say([{"type": "document"}])),
        ("messages[0].content[0].text", say([{"type": "text"}])),
        ("messages[0].role", say("x", "tool")),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[0].content[0].input", say([{"type": "tool_use"}], "assistant")),
        ("tools[0].input_schema", {"tools": [{"name": "x"}]}),
        ("tools[0].name", {"tools": [{"input_schema": {}}]}),
        ("tools[1].name", {"tools": [BLOCK, BLOCK]}),
        ("tool_choice.type", {"tool_choice": {"type": "some"}}),
        ("tool_choice.type", {"tool_choice": {}}),
        ("tool_choice.name", {"tools": [BLOCK], "tool_choice": {"type": "tool", "name": "other"}}),
        # The server ignores Anthropic's own tools, so that none can be chosen.
        ("tool_choice.name", {"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}),
        ("tool_choice", {"tools": [SEARCH], "tool_choice": {"type": "any"}}),
        ("thinking.type", {"thinking": {"type": "perhaps"}}),
        ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": -1}}),
        ("output_config.effort", {"output_config": {"effort": "all"}}),
        ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema"}}}),
        (f"{COMBINED} output_config.format.schema", {"output_config": {"format": FORM}, "guided_json": {}}),
    ],
    RESPONSES: [
        *(("input", {"input": value}) for value in (None, 3, ["x"])),
        ("previous_response_id", {"previous_response_id": "resp_0"}),
        ("conversation", {"conversation": "conv_0"}),
        ("prompt", {"prompt": {"id": "pmpt_0"}}),
        ("background", {"background": True}),
        ("truncation", {"truncation": "auto"}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("instructions", {"instructions": ["x"]}),
        *(("tool_choice", {"tool_choice": value}) for value in ("required", "some")),
        ("top_logprobs must be a whole number from 0 to 20", {"top_logprobs": 21}),
        ("input[0].role", {"input": [{"content": "x"}]}),
        ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
        ("input[0].content", {"input": [{"role": "user"}]}),
        ("input[0].call_id", {"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}),
        ("input[0].output", {"input": [{"type": "function_call_output", "call_id": "c"}]}),
        ("input[0].id", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        ("input[0].type", {"input": [{"type": "mystery"}]}),
        ("tools[0].type", {"tools": [{"name": "x"}]}),
        ("tools[0].name", {"tools": [{"type": "function", "function": {"name": "x"}}]}),
        ("tools[1].name", {"tools": [ITEM, ITEM]}),
        ("tool_choice.name", {"tools": [ITEM], "tool_choice": {"type": "function", "name": "other"}}),
        ("tool_choice.type", {"tool_choice": {"type": "web_search"}}),
        ("text.format.type", {"text": {"format": {}}}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "n"}}}),
        (f"{COMBINED} text.format.schema", {"text": {"format": FORM}, "guided_json": {}}),
        ("reasoning.effort", {"reasoning": {"effort": "all"}}),
        (
            f"input[0].arguments {TOO_MUCH_JSON}",
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": JSON_TEXT}]},
        ),
        *PREDICTIONS,
    ],
    "/api/chat": [
        ("messages must be a list", {"messages": "hi"}),
        ("messages[0].role is missing", {"messages": [{"content": "x"}]}),
        ("messages[0].images: images are not supported", {"messages": [USER | {"images": ["aGk="]}]}),
        ("messages[0].tool_calls[0].function", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}),
        ("tools[0].function is missing", {"tools": [{"type": "function"}]}),
        ("tools[0].type must be", {"tools": [{"type": "web"}]}),
        *OLLAMA,
    ],
    "/api/generate": [
        ("images: images are not supported", {"images": ["aGk="]}),
        ("template: Go templates are not supported", {"template": "{{ .Prompt }}"}),
        ("system cannot be combined with raw", {"raw": True, "system": "s"}),
        ("context cannot be combined with raw", {"raw": True, "context": [1]}),
        ("suffix cannot be combined with raw", {"raw": True, "suffix": "s"}),
        ("context must contain", {"context": [10**9]}),
        ("prompt must be a string", {"prompt": 5}),
        *OLLAMA,
    ],
    EMBEDDINGS: [
        *(("input", {"input": value}) for value in (..., None, [], [[5], []], 0, [5, 10**6], [True])),
        ("input.content", {"input": {"content": "hello"}}),
        ("input.content[0].type", {"input": {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}}),
        ("input.multimodal_data", {"input": {"prompt_string": "x", "multimodal_data": ["x"]}}),
        ("dimensions", {"dimensions": 2}),
        ("encoding_format", {"encoding_format": "int8"}),
        ("embd_normalize", {"embd_normalize": -2}),
    ],
    "/tokenize": [
        ("content", {"content": 5}),
        ("content", {"content": "x" * (MAX_TEXT + 1)}),
        ("content", {"content": ["x"] * (MAX_ITEMS + 1)}),
    ],
    "/detokenize": [("tokens", {"tokens": [-1]})],
    "/api/embed": [("input must not", {"input": [[]]}), ("dimensions must be", {"input": "x", "dimensions": 4})],
    "/markdown": [
        *(("text", fields) for fields in ({}, {"text": 5})),
        *(("drafted", {"text": "a", "drafted": [value]}) for value in ([1], [1, "2"])),
    ],
}


def find_cases(path: str) -> Iterator[tuple[str, Fields]]:
    yield from INVALID[path]
    if path in BODIES and not path.startswith("/api/"):
        yield from GENERATION


@pytest.mark.parametrize("path", INVALID)
def test_serve_rejects_invalid_fields_by_name(path: str) -> None:
    for message, fields in find_cases(path):
        body = {name: value for name, value in (BASES.get(path, {}) | fields).items() if value is not ...}
        error = get_error(path, body, embedder=CountingEmbedder(), n_ctx=4000)
        if path.startswith("/api/"):
            assert error.startswith(message), (message, error)
            continue
        assert error["message"].startswith(message), (message, error)
        assert error["type"] == "invalid_request_error"
        if path != MESSAGES:  # Anthropic's errors have no such fields
            name = re.match(r"\w+(?:\[\d+\]|\.\w+)*", message)
            assert name is not None
            assert (error["code"], error["param"]) == (400, re.sub(r"\[\d+\]$", "", name[0])), message
