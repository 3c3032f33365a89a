"""`/v1/messages` and `/v1/messages/count_tokens`: a chat in Anthropic's words, as Claude Code has it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from ngramspec.server.anthropic_answer import events, message, worded
from ngramspec.server.anthropic_request import hides_thoughts, read_request
from ngramspec.server.chat import chat_prompt, run_chat
from ngramspec.server.endpoint import Endpoint
from ngramspec.server.fields import Fields
from ngramspec.server.json_text import JsonAnswer
from ngramspec.server.sampling_fields import grammar_of, read_sampling
from ngramspec.server.served import Server
from ngramspec.server.silence import with_silences
from ngramspec.server.sse import event, event_stream


async def messages(server: Server, given: Fields) -> Response:
    """Answer a chat."""
    model = server.ready()
    task = read_request(given, read_sampling(given, server.defaults, model.vocabulary))
    if task.schema is not None:
        grammar_of(task.schema, "output_config.format.schema")  # an error names the field as this dialect does
    hide = hides_thoughts(given)
    named = f"msg_{secrets.token_hex(12)}", given.text("model") or model.name
    if not given.flag("stream"):
        return JsonAnswer(await message(run_chat(model, task, streamed=False), *named, hide))
    deltas = run_chat(model, replace(task, progress=True), streamed=True)  # the first event tells the prompt's length
    chunks = _chunks(events(with_silences(deltas, server.ping_seconds), *named, hide))
    return await event_stream(chunks, server.ping_seconds, lambda error: event(worded(error), "error"))


async def _chunks(told: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[str, None]:
    async with aclosing(told):
        async for one in told:
            yield event(one, one["type"])


async def count_tokens(server: Server, given: Fields) -> Response:
    """How many tokens the prompt of a chat has."""
    model = server.ready()
    task = read_request(given, server.defaults.sampling, counting=True)
    prompt = await asyncio.to_thread(chat_prompt, model, task)
    return JsonAnswer({"input_tokens": len(prompt.tokens)})


ENDPOINTS = (
    Endpoint(("/v1/messages",), messages, wording=worded),
    Endpoint(("/v1/messages/count_tokens",), count_tokens, wording=worded),
)
