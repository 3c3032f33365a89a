"""State of the server: `/health`, `/props`, `/slots`, `/v1/models`, `/lora-adapters`, and `/metrics` for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from starlette.responses import PlainTextResponse, Response

from ngramspec.batching.request import Report, Slot
from ngramspec.llama.embedder import Embedder
from ngramspec.server.body import Body, Items, describe_value
from ngramspec.server.call import Call
from ngramspec.server.errors import ApiError
from ngramspec.server.generation import Scale, read_scales
from ngramspec.server.json_text import JsonResponse
from ngramspec.server.reply import FINGERPRINT, generation_settings
from ngramspec.server.state import ServedModel


async def health(call: Call[Body]) -> Response:
    """Return the status "ok" if the model is loaded."""
    call.server.require_model()
    return JsonResponse({"status": "ok"})


async def models(call: Call[Body]) -> Response:
    """Return the list with the only model, in OpenAI's format ("data") and in Ollama's ("models")."""
    name = call.model.name
    details = {"format": "gguf", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}
    ollama_entry = {"name": name, "model": name, "type": "model", "capabilities": ["completion"], "details": details}
    return JsonResponse({"object": "list", "data": [_model_entry(call)], "models": [ollama_entry]})


async def model(call: Call[Body]) -> Response:
    """Return the only model, if the name is correct."""
    name = call.query["id"]
    if name not in (call.model.name, *call.model.aliases):
        raise ApiError(
            404,
            f"unknown model {describe_value(name)}; this server has only {call.model.name!r}",
            code="model_not_found",
        )
    return JsonResponse(_model_entry(call))


def _model_entry(call: Call[Body]) -> dict[str, Any]:
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


async def props(call: Call[Body]) -> Response:
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


async def lora_adapters(call: Call[Body]) -> Response:
    """Return the LoRA adapters, with the scales of requests that do not set their own."""
    files = zip(call.model.adapters, call.model.service.scales, strict=True)
    return JsonResponse([{"id": number, "path": path, "scale": scale} for number, (path, scale) in enumerate(files)])


class AdaptersBody(Body):
    """The body of `POST /lora-adapters`, which is only this list."""

    adapters: Items[Scale]


async def scale_lora_adapters(call: Call[AdaptersBody]) -> Response:
    """Set the scales of the LoRA adapters for later requests, from a list as in the field `lora`."""
    scales = read_scales(call.model, call.body.adapters, "adapters")
    call.model.service.set_scales(scales or (0.0,) * len(call.model.adapters))
    return JsonResponse({"success": True})


async def slots(call: Call[Body]) -> Response:
    """Return the state of each slot. With `fail_on_no_slot` the status is 503 if all slots are busy."""
    if not call.server.has_slots:
        raise ApiError(501, "/slots is disabled; start the server without --no-slots")
    model = call.model
    report = model.service.report()
    if call.query.get("fail_on_no_slot") == "1" and all(slot.request for slot in report.slots):
        raise ApiError(503, "no slot available")
    return JsonResponse([_slot_fields(call, slot) for slot in report.slots])


def _slot_fields(call: Call[Body], slot: Slot) -> dict[str, Any]:
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


class Metric(NamedTuple):
    """A metric and its value."""

    name: str
    kind: str  # "counter" or "gauge"
    description: str
    value: float | tuple[int, ...]  # a tuple has one value for each position of a draft


async def metrics(call: Call[Body]) -> Response:
    """Return the engine's counters under llama-server's and vLLM's names, in Prometheus' text format."""
    if not call.server.has_metrics:
        raise ApiError(501, "/metrics is disabled; start the server with --metrics")
    model = call.model
    escaped_name = model.name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines: list[str] = []
    for name, kind, description, value in _metrics(model):
        lines += [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]
        # As on the two servers, only vLLM's metrics name the model.
        labels = [f'model_name="{escaped_name}"'] if name.startswith("vllm:") else []
        if isinstance(value, tuple):
            lines += [_line(name, [*labels, f'position="{i}"'], count) for i, count in enumerate(value)]
        else:
            lines.append(_line(name, labels, value))
    headers = {"Process-Start-Time-Unix": str(call.server.started_at)}
    return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4", headers=headers)


def _line(name: str, labels: list[str], value: float) -> str:
    return f"{name}{{{','.join(labels)}}} {value:.12g}" if labels else f"{name} {value:.12g}"


def _metrics(model: ServedModel) -> Iterator[Metric]:
    report = model.service.report()
    yield from _common_metrics(report, model.embedder)
    yield from _llama_server_metrics(report, model.embedder)
    yield from _vllm_metrics(report, model.n_ctx)
    description = "Tokens that rounding could have decided."
    yield Metric("ngramspec:close_calls_total", "counter", description, report.stats.close_calls)
    times = model.service.times.evidence
    for size, ratio in times["ratios"].items():
        description = f"Cost of a decode call of {size} tokens, in calls of one token."
        yield Metric(f"ngramspec:pass_cost_{size}", "gauge", description, ratio)
    yield Metric("ngramspec:pass_pairs_total", "counter", "Pairs of decode calls that costs rest on.", times["pairs"])
    if model.threads is not None:
        state = model.threads()
        yield Metric("ngramspec:threads", "gauge", "CPU threads of a decode call of one token.", state.threads)
        yield Metric(
            "ngramspec:threads_batch", "gauge", "CPU threads of a decode call of a draft.", state.threads_batch
        )
        yield Metric(
            "ngramspec:threads_prompt", "gauge", "CPU threads of a decode call of a prompt.", state.threads_prompt
        )
        if state.other_cores is not None:
            yield Metric("ngramspec:other_cores", "gauge", "CPU cores that other programs use.", state.other_cores)


def _common_metrics(report: Report, embedder: Embedder | None) -> Iterator[Metric]:
    """Yield the metrics that both servers have, under both names."""
    stats, running = report.stats, sum(slot.request is not None for slot in report.slots)
    prompt_tokens = report.prompt_tokens + (embedder.n_tokens if embedder is not None else 0)
    for prefix, running_name, waiting_name, generated_name in (
        ("llamacpp", "requests_processing", "requests_deferred", "tokens_predicted_total"),
        ("vllm", "num_requests_running", "num_requests_waiting", "generation_tokens_total"),
    ):
        yield Metric(f"{prefix}:prompt_tokens_total", "counter", "Prompt tokens evaluated.", prompt_tokens)
        yield Metric(f"{prefix}:{generated_name}", "counter", "Tokens generated.", stats.generated)
        yield Metric(f"{prefix}:{running_name}", "gauge", "Running requests.", running)
        yield Metric(f"{prefix}:{waiting_name}", "gauge", "Waiting requests.", report.waiting)
        name, drafts = f"{prefix}:spec_decode_num", stats.passes - stats.passes_without_draft
        yield Metric(f"{name}_drafts_total", "counter", "Decode calls with a draft.", drafts)
        yield Metric(f"{name}_draft_tokens_total", "counter", "Draft tokens verified.", stats.drafted)
        yield Metric(f"{name}_accepted_tokens_total", "counter", "Draft tokens accepted.", stats.accepted)
        description = "Draft tokens accepted, by position in the draft."
        yield Metric(f"{name}_accepted_tokens_per_pos_total", "counter", description, tuple(stats.accepted_at))


def _llama_server_metrics(report: Report, embedder: Embedder | None) -> Iterator[Metric]:
    stats, passes = report.stats, report.passes
    prompt_rate = report.prompt_tokens / stats.prefill_seconds if stats.prefill_seconds else 0.0
    slots_each, decoding = report.busy / passes if passes else 0.0, stats.decode_seconds
    batches = passes + (embedder.n_passes if embedder is not None else 0)
    for name, kind, description, value in (
        ("prompt_tokens_cached_total", "counter", "Prompt tokens found in the cache.", report.cached_tokens),
        ("prompt_seconds_total", "counter", "Time for prompt processing, in seconds.", stats.prefill_seconds),
        ("tokens_predicted_seconds_total", "counter", "Time from first to last tokens, in seconds.", decoding),
        ("prompt_tokens_seconds", "gauge", "Average prompt tokens per second.", prompt_rate),
        ("predicted_tokens_seconds", "gauge", "Average generated tokens per second.", stats.tokens_per_second or 0.0),
        ("n_decode_total", "counter", "Batches evaluated.", batches),
        ("n_tokens_max", "counter", "Maximum number of tokens in a slot.", report.max_held),
        ("n_busy_slots_per_decode", "gauge", "Average number of busy slots per decode call.", slots_each),
    ):
        yield Metric(f"llamacpp:{name}", kind, description, value)


def _vllm_metrics(report: Report, n_ctx: int) -> Iterator[Metric]:
    tokens = report.prompt_tokens + report.cached_tokens
    used = sum(slot.n_tokens for slot in report.slots) / (n_ctx * len(report.slots))
    yield Metric("vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked up in the cache.", tokens)
    yield Metric("vllm:prefix_cache_hits_total", "counter", "Prompt tokens found in the cache.", report.cached_tokens)
    yield Metric("vllm:kv_cache_usage_perc", "gauge", "Share of the cache in use, 0 to 1.", used)
