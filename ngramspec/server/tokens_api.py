"""`/tokenize`, `/detokenize` and `/apply-template`: text to tokens and back, and a chat as the text of its prompt."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from ngramspec.server.chat import chat_prompt
from ngramspec.server.fields import Fields
from ngramspec.server.json_text import JsonAnswer
from ngramspec.server.messages import read_conversation
from ngramspec.server.prompts_fields import check_token
from ngramspec.server.served import ServedModel, Server


async def tokenize(server: Server, given: Fields) -> Response:
    """Token ids of a text; `with_pieces`: with the text of each, in bytes where it is none."""
    model = server.ready()
    content = given.text("content") or ""
    special, bos = given.flag("parse_special", True), given.flag("add_special")
    tokens = await asyncio.to_thread(model.vocabulary.tokenize, content, special=special, add_bos=bos)
    if not given.flag("with_pieces"):
        return JsonAnswer({"tokens": tokens})
    return JsonAnswer({"tokens": [{"id": token, "piece": _piece(model, token)} for token in tokens]})


def _piece(model: ServedModel, token: int) -> str | list[int]:
    raw: bytes = model.vocabulary.shown(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


async def detokenize(server: Server, given: Fields) -> Response:
    """The text of token ids, control tokens by their names, so that tokenizing it gives the tokens again."""
    model = server.ready()
    tokens = [check_token(model, token, "tokens") for token in given.list("tokens")]
    return JsonAnswer({"content": b"".join(map(model.vocabulary.shown, tokens)).decode("utf-8", "replace")})


async def apply_template(server: Server, given: Fields) -> Response:
    """The prompt of a chat as text, with the control tokens that the template writes."""
    model = server.ready()
    task = read_conversation(given)
    prompt = await asyncio.to_thread(chat_prompt, model, task)
    return JsonAnswer({"prompt": prompt.text})
