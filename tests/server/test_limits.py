"""Tests of limits on the size of fields: the server rejects an oversized request before it makes other clients wait."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import pytest
from support.http import demo_vocabulary, get_error, make_server, send

from ngramspec.sampling.settings import Sampling
from ngramspec.server import app
from ngramspec.server.limits import (
    LARGE_JSON,
    MAX_ALTERNATIVES,
    MAX_DIGITS,
    MAX_LOGPROBS,
    MAX_MESSAGE,
    MAX_TOKENS,
    MAX_VALUES,
)

NATIVE = "/completion"
PROMPT = {"prompt": "x"}
BIASES = {"logit_bias": [[1, 1.0]] * (MAX_TOKENS // 2)}


def test_completion_accepts_more_alternatives_for_few_tokens() -> None:
    for body in ({"n_probs": MAX_ALTERNATIVES}, {"n_probs": MAX_LOGPROBS // 4, "n_predict": 4}, BIASES):
        assert send(make_server()[0], NATIVE, PROMPT | body).status_code == 200
    assert send(make_server()[0], NATIVE, {"prompt": ["x"] * 2, "n_predict": 1} | BIASES).status_code == 200


@pytest.mark.parametrize("tokens", [[1] * 600, ["x", 1] * 300, ["x " * 500] * 2])
def test_completion_rejects_mixed_prompt_beyond_the_context(tokens: list[Any]) -> None:
    assert get_error(NATIVE, {"prompt": [*tokens, 1]}, n_ctx=512)["code"] == "context_length_exceeded"


@pytest.mark.parametrize("value", [[0] * MAX_VALUES, [[]] * (MAX_VALUES // 2), [{}] * (MAX_VALUES // 2)])
def test_serve_rejects_json_with_too_many_values(value: list[Any]) -> None:
    assert get_error(NATIVE, {"prompt": "x", "unknown": value}, 413)["code"] == 413


def test_serve_parses_large_json_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, parse = list[int](), app._parse

    def note_thread(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return parse(*arguments)

    monkeypatch.setattr(app, "_parse", note_thread)
    for size in (10, LARGE_JSON):
        assert send(make_server()[0], "/tokenize", {"content": "", "unknown": "x" * size}).status_code == 200
    assert [thread == threading.get_ident() for thread in threads] == [True, False]


@pytest.mark.parametrize("text", ["[{," * MAX_VALUES, '",\\' * MAX_VALUES])
def test_serve_json_value_limit_ignores_commas_in_strings(text: str) -> None:
    assert send(make_server()[0], "/v1/messages/count_tokens", {"messages": [], "unknown": text}).status_code == 200


@pytest.mark.parametrize(("digits", "status"), [(MAX_DIGITS, 200), (MAX_DIGITS + 1, 400)])
def test_serve_rejects_numbers_with_too_many_digits(digits: int, status: int) -> None:
    response = send(make_server()[0], NATIVE, content=b'{"prompt": "x", "unknown": %s}' % (b"1" * digits))
    assert response.status_code == status
    if status == 400:
        message = "the request is not valid JSON: a number has more than 1,000 digits"
        assert response.json()["error"]["message"] == message


def test_serve_truncates_long_error_messages() -> None:
    message = get_error(NATIVE, PROMPT | {"samplers": ["x" * 900]})["message"]
    assert message.startswith("samplers: unknown sampler 'xxx")
    schema = {"type": "object", "required": ["x" * 100_000], "properties": {"y" * 100_000: {"$ref": "z" * 100_000}}}
    assert len(get_error(NATIVE, PROMPT | {"json_schema": schema})["message"]) <= MAX_MESSAGE + 4


def test_completion_with_dry_prepares_sampler_before_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each breaker, llama.cpp compares all tokens, and the other requests would have to wait."""
    asked = {"dry_multiplier": 1.0, "dry_sequence_breakers": ["x", "y"], "dry_penalty_last_n": 8}
    server, _ = make_server()
    assert send(server, NATIVE, PROMPT | asked).status_code == 200
    monkeypatch.setattr("ngramspec.llama.bindings.dry", None)
    sampling = Sampling(0.8, dry_multiplier=1.0, dry_sequence_breakers=("x", "y"), dry_penalty_last_n=8)
    demo_vocabulary().sampler(sampling)


def test_detokenize_converts_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists may have 400,000 tokens, and the conversion holds Python's lock while other requests wait."""
    server, service = make_server()
    shown = Mock(wraps=service.vocabulary.display_piece)
    monkeypatch.setattr(service.vocabulary, "display_piece", shown)
    assert send(server, "/detokenize", {"tokens": [5, 6, 5] * 100}).status_code == 200
    assert shown.call_count == 2
