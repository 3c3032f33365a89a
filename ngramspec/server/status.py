"""State of the server: `/health`, `/props`, `/slots`, `/v1/models` and `/lora-adapters`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.responses import Response

from ngramspec.batching.request import Slot
from ngramspec.server.call import Call
from ngramspec.server.errors import ApiError
from ngramspec.server.fields import LIST_FIELD, describe_value
from ngramspec.server.json_text import JsonResponse
from ngramspec.server.native_answer import generation_settings
from ngramspec.server.reply import FINGERPRINT
from ngramspec.server.request_fields import read_scales


async def health(call: Call) -> Response:
    """Return the status "ok" if the model is loaded."""
    call.server.require_model()
    return JsonResponse({"status": "ok"})


async def models(call: Call) -> Response:
    """Return the list with the only model, in OpenAI's format ("data") and in Ollama's ("models")."""
    name = call.model.name
    details = {"format": "gguf", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}
    ollama_entry = {"name": name, "model": name, "type": "model", "capabilities": ["completion"], "details": details}
    return JsonResponse({"object": "list", "data": [_model_entry(call)], "models": [ollama_entry]})


async def model(call: Call) -> Response:
    """Return the only model, if the name is correct."""
    name = call.fields.string("id")
    if name not in (call.model.name, *call.model.aliases):
        raise ApiError(
            404,
            f"unknown model {describe_value(name)}; this server has only {call.model.name!r}",
            code="model_not_found",
        )
    return JsonResponse(_model_entry(call))


def _model_entry(call: Call) -> dict[str, Any]:
    model = call.model
    meta = {**model.meta, "n_vocab": model.vocabulary.n_vocab, "n_ctx": model.n_ctx}
    return {
        "id": model.name,
        "aliases": list(model.aliases),
        "tags": list(model.tags),
        "object": "model",
        "created": call.server.started_at,
        "owned_by": "llamacpp",
        "meta": meta,
    }


async def props(call: Call) -> Response:
    """Return the settings and properties of the model."""
    model = call.model
    bos, eos = model.vocabulary.ends
    settings = generation_settings(call.server.sampling, -1, ())
    defaults = {"id": 0, "n_ctx": model.n_ctx, "speculative": model.speculative, "params": settings}
    return JsonResponse(
        {
            "default_generation_settings": defaults,
            "total_slots": len(model.service.report().slots),
            "model_alias": model.name,
            "model_path": model.path,
            "model_ftype": model.meta.get("ftype"),
            "modalities": {"vision": False, "audio": False},
            "endpoint_slots": call.server.has_slots,
            "endpoint_props": False,
            "endpoint_metrics": call.server.has_metrics,
            "webui": call.server.has_page,
            "is_sleeping": False,
            "chat_template": model.vocabulary.chat_template or "",
            "chat_template_caps": model.vocabulary.template_capabilities,
            "bos_token": bos,
            "eos_token": eos,
            "build_info": FINGERPRINT,
            "exact": model.exact,
            "placement": model.placement,
            "pass_costs": model.service.times.evidence,
            "threads": None if model.threads is None else model.threads()._asdict(),
        }
    )


async def lora_adapters(call: Call) -> Response:
    """Return the LoRA adapters, with the scales of requests that do not set their own."""
    files = zip(call.model.adapters, call.model.service.scales, strict=True)
    return JsonResponse([{"id": number, "path": path, "scale": scale} for number, (path, scale) in enumerate(files)])


async def scale_lora_adapters(call: Call) -> Response:
    """Set the scales of the LoRA adapters for later requests, from a list as in the field `lora`."""
    scales = read_scales(call, LIST_FIELD)
    call.model.service.set_scales(scales or (0.0,) * len(call.model.adapters))
    return JsonResponse({"success": True})


async def slots(call: Call) -> Response:
    """Return the state of each slot. With `fail_on_no_slot` the status is 503 if all slots are busy."""
    if not call.server.has_slots:
        raise ApiError(501, "/slots is disabled; start the server without --no-slots")
    model = call.model
    report = model.service.report()
    if call.fields.data.get("fail_on_no_slot") == "1" and all(slot.request for slot in report.slots):
        raise ApiError(503, "no slot available")
    return JsonResponse([_slot_fields(call, slot) for slot in report.slots])


def _slot_fields(call: Call, slot: Slot) -> dict[str, Any]:
    """Return a slot in llama-server's format, with properties of its request but without any text."""
    model, request = call.model, slot.request
    max_tokens = -1 if request is None or request.max_tokens >= model.n_ctx else request.max_tokens
    fields: dict[str, Any] = {
        "id": slot.number,
        "id_task": slot.number_of_request,
        "n_ctx": model.n_ctx,
        "speculative": model.speculative,
        "is_processing": request is not None,
        "n_prompt_tokens": len(request.prompt) if request is not None else 0,
        "n_prompt_tokens_processed": slot.n_prefilled,
        "n_prompt_tokens_cache": slot.n_cached,
        "n_tokens_held": slot.n_tokens,
        "next_token": [
            {
                "has_next_token": request is not None,
                "has_new_line": slot.new_line,
                "n_remain": -1 if max_tokens == -1 else max_tokens - slot.n_generated,
                "n_decoded": slot.n_generated,
            }
        ],
    }
    if request is not None:
        settings = generation_settings(replace(request.sampling, logit_bias=()), max_tokens, ())
        fields["params"] = {name: value for name, value in settings.items() if name not in _TEXTS}
    return fields


_TEXTS = ("stop", "grammar", "logit_bias", "dry_sequence_breakers")
"""Settings that contain or reveal texts of a client."""
