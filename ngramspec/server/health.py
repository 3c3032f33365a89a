"""What the server says of itself: `/health`, `/props`, `/slots` and `/v1/models`."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from ngramspec.server.errors import ApiError
from ngramspec.server.fields import Fields
from ngramspec.server.generation_settings import generation_settings
from ngramspec.server.json_text import JsonAnswer
from ngramspec.server.report import FINGERPRINT
from ngramspec.server.served import Server


async def health(server: Server, _given: Fields) -> Response:
    """Whether there is a model to ask."""
    server.ready()
    return JsonAnswer({"status": "ok"})


async def models(server: Server, _given: Fields) -> Response:
    """The one model, as OpenAI lists them ("data") and as ollama does ("models")."""
    model = server.ready()
    meta = {**model.meta, "n_vocab": model.vocabulary.n_vocab, "n_ctx": model.n_ctx}
    listed = {"id": model.name, "object": "model", "created": server.began, "owned_by": "llamacpp", "meta": meta}
    named = {"name": model.name, "model": model.name, "type": "model", "capabilities": ["completion"]}
    return JsonAnswer({"object": "list", "data": [listed], "models": [named]})


async def props(server: Server, _given: Fields) -> Response:
    """Settings and properties of the model."""
    model = server.ready()
    bos, eos = model.vocabulary.ends
    return JsonAnswer(
        {
            "default_generation_settings": {
                "id": 0,
                "n_ctx": model.n_ctx,
                "speculative": model.speculative,
                "params": generation_settings(server.defaults.sampling, -1, ()),
            },
            "total_slots": len(model.service.report().slots),
            "model_alias": model.name,
            "model_path": model.path,
            "modalities": {"vision": False, "audio": False},
            "chat_template": model.vocabulary.chat_template or "",
            "bos_token": bos,
            "eos_token": eos,
            "build_info": FINGERPRINT,
            "exact": model.exact,
        }
    )


async def slots(server: Server, given: Fields) -> Response:
    """What each slot does. With `fail_on_no_slot` the answer is 503 while none is free."""
    model = server.ready()
    found = model.service.report().slots
    if given.data.get("fail_on_no_slot") == "1" and all(slot.busy for slot in found):
        raise ApiError(503, "no slot available")
    told: list[dict[str, Any]] = [
        {
            "id": slot.number,
            "n_ctx": model.n_ctx,
            "speculative": model.speculative,
            "is_processing": slot.busy,
            "n_prompt_tokens": slot.prompt,
            "n_prompt_tokens_processed": slot.prefilled,
            "n_tokens_held": slot.held,
            "next_token": [{"n_decoded": slot.generated}],
        }
        for slot in found
    ]
    return JsonAnswer(told)
