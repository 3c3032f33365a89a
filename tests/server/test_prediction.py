"""Tests of predicted outputs: they reach the engine, which drafts their tokens first and counts them."""

from __future__ import annotations


import pytest
from support.fake_service import Script
from support.http import BODIES, ask, demo_vocabulary, get_error

from ngramspec.drafting.mixture.drafter import MixtureDrafter

PATHS = ("/v1/chat/completions", "/v1/responses")
PREDICTION = "Hello, world of many words"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_prediction_reaches_the_engine_and_is_counted_in_usage(path: str, stream: bool) -> None:
    tokens = demo_vocabulary().tokenize(PREDICTION, add_bos=False)
    came = len(demo_vocabulary().tokenize("Hello, world", add_bos=False))
    for content in (PREDICTION, [{"type": "text", "text": "Hello, world"}, {"type": "text", "text": " of many words"}]):
        more = {"prediction": {"type": "content", "content": content}, "stream_options": {"include_usage": True}}
        told, service = ask(path, BODIES[path] | more | {"stream": stream}, Script("Hello, world", step=2))
        assert list(service.requests[0].prediction) == tokens
        last = told[-1] if stream else told
        usage = last.get("response", last)["usage"]
        details = usage.get("completion_tokens_details") or usage["output_tokens_details"]
        assert details["accepted_prediction_tokens"] == came
        assert details["rejected_prediction_tokens"] == len(tokens) - came
    told, service = ask(path, BODIES[path])
    assert (list(service.requests[0].prediction), "accepted_prediction" in str(told)) == ([], False)


@pytest.mark.parametrize("path", PATHS)
def test_prediction_with_invalid_value_is_rejected_by_field_name(path: str) -> None:
    for wrong, param in (({"type": "x", "content": ""}, "type"), ({"type": "content"}, "content"), (5, "")):
        error = get_error(path, BODIES[path] | {"prediction": wrong})
        assert error["param"] == f"prediction.{param}".removesuffix(".")


def test_mixture_with_prediction_drafts_it_from_first_token() -> None:
    prompt, predicted = list(range(100, 160)), list(range(500, 540))
    drafter = MixtureDrafter()
    drafter.prediction = predicted
    drafter.begin(prompt)
    assert drafter.propose(16).tokens == tuple(predicted[:16])
    drafter.accept(predicted[:3])
    assert drafter.propose(8).tokens == tuple(predicted[3:11])
    drafter.prediction = ()
    drafter.begin(prompt)
    assert not set(drafter.propose(16).tokens) & set(predicted)
