"""`/v1/responses`: a chat in the words of OpenAI's newer API, as Codex has it. Nothing is stored."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from ngramspec.server.chat import run_chat
from ngramspec.server.endpoint import Endpoint
from ngramspec.server.errors import ApiError
from ngramspec.server.fields import Fields
from ngramspec.server.json_text import JsonAnswer
from ngramspec.server.report import logprobs_content
from ngramspec.server.responses_answer import Answer
from ngramspec.server.responses_request import read_request
from ngramspec.server.sampling_fields import grammar_of, read_sampling
from ngramspec.server.served import Server
from ngramspec.server.silence import with_silences
from ngramspec.server.sse import event, event_stream


async def responses(server: Server, given: Fields) -> Response:
    """Answer a chat."""
    model = server.ready()
    asked = read_request(given, read_sampling(given, server.defaults, model.vocabulary))
    if asked.task.schema is not None:
        grammar_of(asked.task.schema, "text.format.schema")  # an error names the field as this dialect does
    answer = Answer(
        asked,
        f"resp_{secrets.token_hex(12)}",
        given.text("model") or model.name,
        lambda one: logprobs_content(model, [one])[0],
    )
    streamed = given.flag("stream")
    deltas = run_chat(model, asked.task, streamed=streamed)
    if not streamed:
        return JsonAnswer(await answer.whole(deltas))

    def failed(error: ApiError) -> str:
        return "".join(_chunk(one) for one in answer.failed(error))

    chunks = _chunks(answer.events(with_silences(deltas, server.ping_seconds)))
    return await event_stream(chunks, server.ping_seconds, failed)


async def _chunks(told: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[str, None]:
    async with aclosing(told):
        async for one in told:
            yield _chunk(one)


def _chunk(one: dict[str, Any]) -> str:
    return event(one, one["type"])


ENDPOINTS = (Endpoint(("/v1/responses", "/responses"), responses),)
