"""What the server says of itself: `/health`, `/props`, `/slots`, `/v1/models`, and `/metrics` for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.responses import PlainTextResponse, Response

from ngramspec.batching.request import Report, Slot
from ngramspec.server.call import ApiError, Call, json_answer, shown
from ngramspec.server.llama_server import generation_settings
from ngramspec.server.reply import FINGERPRINT


async def health(call: Call) -> Response:
    """Whether there is a model to ask."""
    call.server.ready()
    return json_answer({"status": "ok"})


async def models(call: Call) -> Response:
    """The one model, as OpenAI lists them ("data") and as ollama does ("models")."""
    name = call.model.name
    details = {"format": "gguf", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}
    named = {"name": name, "model": name, "type": "model", "capabilities": ["completion"], "details": details}
    return json_answer({"object": "list", "data": [_listed(call)], "models": [named]})


async def model(call: Call) -> Response:
    """The one model, by its name."""
    name = call.given.text("id")
    if name != call.model.name:
        raise ApiError(404, f"there is no model {shown(name)} here, only {call.model.name!r}", code="model_not_found")
    return json_answer(_listed(call))


def _listed(call: Call) -> dict[str, Any]:
    model = call.model
    meta = {**model.meta, "n_vocab": model.vocabulary.n_vocab, "n_ctx": model.n_ctx}
    return {"id": model.name, "object": "model", "created": call.server.began, "owned_by": "llamacpp", "meta": meta}


async def props(call: Call) -> Response:
    """Settings and properties of the model."""
    model = call.model
    bos, eos = model.vocabulary.ends
    settings = generation_settings(call.server.sampling, -1, ())
    defaults = {"id": 0, "n_ctx": model.n_ctx, "speculative": model.speculative, "params": settings}
    return json_answer(
        {
            "default_generation_settings": defaults,
            "total_slots": len(model.service.report().slots),
            "model_alias": model.name,
            "model_path": model.path,
            "model_ftype": model.meta.get("ftype"),
            "modalities": {"vision": False, "audio": False},
            "endpoint_slots": True,
            "endpoint_props": False,
            "endpoint_metrics": True,
            "webui": True,
            "is_sleeping": False,
            "chat_template": model.vocabulary.chat_template or "",
            "chat_template_caps": model.vocabulary.template_capabilities,
            "bos_token": bos,
            "eos_token": eos,
            "build_info": FINGERPRINT,
            "exact": model.exact,
        }
    )


async def lora_adapters(call: Call) -> Response:
    """The LoRA adapters that every text is generated with."""
    found = enumerate(call.model.adapters)
    return json_answer([{"id": number, "path": path, "scale": scale} for number, (path, scale) in found])


async def slots(call: Call) -> Response:
    """What each slot does. With `fail_on_no_slot` the answer is 503 while none is free."""
    model = call.model
    found = model.service.report().slots
    if call.given.data.get("fail_on_no_slot") == "1" and all(slot.busy for slot in found):
        raise ApiError(503, "no slot available")
    return json_answer([_slot(call, slot) for slot in found])


def _slot(call: Call, slot: Slot) -> dict[str, Any]:
    """A slot in llama-server's words; what it works for is told, but no text of it."""
    model, request = call.model, slot.request
    most = -1 if request is None or request.max_tokens >= model.n_ctx else request.max_tokens
    told: dict[str, Any] = {
        "id": slot.number,
        "id_task": slot.number_of_request,
        "n_ctx": model.n_ctx,
        "speculative": model.speculative,
        "is_processing": slot.busy,
        "n_prompt_tokens": slot.prompt,
        "n_prompt_tokens_processed": slot.prefilled,
        "n_prompt_tokens_cache": slot.cached,
        "n_tokens_held": slot.held,
        "next_token": [
            {
                "has_next_token": slot.busy,
                "has_new_line": slot.new_line,
                "n_remain": -1 if most == -1 else most - slot.generated,
                "n_decoded": slot.generated,
            }
        ],
    }
    if request is not None:
        settings = generation_settings(request.sampling, most, ())
        told["params"] = {name: value for name, value in settings.items() if name not in _TEXTS}
    return told


_TEXTS = ("stop", "grammar", "logit_bias", "dry_sequence_breakers")
"""Settings that hold what a client wrote, or show it."""


# --------------------------------------------------------------------------- /metrics


async def metrics(call: Call) -> Response:
    """The engine's counters, under llama-server's names and vLLM's."""
    model = call.model
    name = model.name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines: list[str] = []
    for metric, kind, text, value in _figures(model.service.report(), model.n_ctx):
        lines += [f"# HELP {metric} {text}", f"# TYPE {metric} {kind}"]
        label = f'model_name="{name}"'
        if isinstance(value, tuple):  # one for each position of a draft
            lines += [f'{metric}{{{label},position="{position}"}} {one}' for position, one in enumerate(value)]
        else:
            lines.append(f"{metric}{{{label}}} {value:.12g}")
    return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


def _figures(report: Report, n_ctx: int) -> Iterator[tuple[str, str, str, float | tuple[int, ...]]]:
    """Names, kinds, meanings and values."""
    stats, busy = report.stats, sum(slot.busy for slot in report.slots)
    drafts = stats.passes - stats.passes_without_draft
    held, room = sum(slot.held for slot in report.slots), n_ctx * len(report.slots)
    prompt_rate = report.prompt_tokens / stats.prefill_seconds if stats.prefill_seconds else 0.0
    slots_each = report.busy / report.passes if report.passes else 0.0
    asked = report.prompt_tokens + report.cached_tokens
    for prefix, running, waiting, generated in (
        ("llamacpp", "requests_processing", "requests_deferred", "tokens_predicted_total"),
        ("vllm", "num_requests_running", "num_requests_waiting", "generation_tokens_total"),
    ):
        yield f"{prefix}:prompt_tokens_total", "counter", "Prompt tokens evaluated.", report.prompt_tokens
        yield f"{prefix}:{generated}", "counter", "Tokens generated.", stats.generated
        yield f"{prefix}:{running}", "gauge", "Requests at work.", busy
        yield f"{prefix}:{waiting}", "gauge", "Requests in the queue.", report.waiting
        name = f"{prefix}:spec_decode_num"
        yield f"{name}_drafts_total", "counter", "Passes that held a draft.", drafts
        yield f"{name}_draft_tokens_total", "counter", "Draft tokens sent.", stats.drafted
        yield f"{name}_accepted_tokens_total", "counter", "Draft tokens accepted.", stats.accepted
        help_ = "Draft tokens accepted, by position in the draft."
        yield f"{name}_accepted_tokens_per_pos_total", "counter", help_, tuple(stats.accepted_at)
    yield "llamacpp:prompt_seconds_total", "counter", "Time of evaluating prompts.", stats.prefill_seconds
    help_ = "Time from first tokens to last."
    yield "llamacpp:tokens_predicted_seconds_total", "counter", help_, stats.decode_seconds
    yield "llamacpp:prompt_tokens_seconds", "gauge", "Prompt tokens per second, over all.", prompt_rate
    help_ = "Tokens per second, over all."
    yield "llamacpp:predicted_tokens_seconds", "gauge", help_, stats.tokens_per_second or 0.0
    yield "llamacpp:n_decode_total", "counter", "Batches evaluated.", report.passes
    yield "llamacpp:n_busy_slots_per_decode", "gauge", "Slots at work in a batch, on average.", slots_each
    yield "vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked for in the cache.", asked
    yield "vllm:prefix_cache_hits_total", "counter", "Prompt tokens found there.", report.cached_tokens
    yield "vllm:kv_cache_usage_perc", "gauge", "Share of the cache that is held, 0 to 1.", held / room
    yield "ngramspec:close_calls_total", "counter", "Tokens that rounding could decide.", stats.close_calls
