"""State of the server: `/health`, `/props`, `/v1/models`, `/lora-adapters`, `/metrics`, `/slots` and files of slots."""

from __future__ import annotations

import asyncio
import re
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from starlette.responses import PlainTextResponse, Response

from ngramspec.backend import SequenceModel
from ngramspec.batching.request import Slot
from ngramspec.data import TargetError
from ngramspec.server.body import Body, FieldError, Items, describe_value
from ngramspec.server.generation import Scale, read_scales
from ngramspec.server.json_text import ApiError, JsonResponse
from ngramspec.server.reply import FINGERPRINT, generation_settings
from ngramspec.server.state import Call, ServedModel
from ngramspec.storage import atomic_write


async def health(call: Call[Body]) -> Response:
    call.server.require_model()
    return JsonResponse({"status": "ok"})


async def models(call: Call[Body]) -> Response:
    """Return the list with the only model, in OpenAI's format ("data") and in Ollama's ("models")."""
    name = call.model.name
    details = {"format": "gguf", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}
    ollama_entry = {"name": name, "model": name, "type": "model", "capabilities": ["completion"], "details": details}
    return JsonResponse({"object": "list", "data": [_model_entry(call)], "models": [ollama_entry]})


async def model(call: Call[Body]) -> Response:
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
            "chat_template_caps": model.vocabulary.chats.capabilities,
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
    list_field = "adapters"
    adapters: Items[Scale]


async def scale_lora_adapters(call: Call[AdaptersBody]) -> Response:
    """Set the scales of the LoRA adapters for later requests, from a list as in the field `lora`."""
    scales = read_scales(call.model, call.body.adapters, "adapters")
    call.model.service.scales = scales or (0.0,) * len(call.model.adapters)
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


Metric = tuple[str, str, float | tuple[int, ...]]
"""Name, description and value; a tuple has one value for each position of a draft. Names of counters end in _total."""


async def metrics(call: Call[Body]) -> Response:
    """Return the engine's counters under llama-server's and vLLM's names, in Prometheus' text format."""
    if not call.server.has_metrics:
        raise ApiError(501, "/metrics is disabled; start the server with --metrics")
    model = call.model
    escaped_name = model.name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines: list[str] = []
    for name, description, value in _metrics(model):
        # One of llama-server's counters has another name.
        kind = "counter" if name.endswith("_total") or name == "llamacpp:n_tokens_max" else "gauge"
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
    report, embedder = model.service.report(), model.embedder
    stats, passes = report.stats, report.passes
    prompt_tokens = report.prompt_tokens + (embedder.n_tokens if embedder is not None else 0)
    running = sum(slot.request is not None for slot in report.slots)
    drafts = "spec_decode_num"
    for prefix, running_name, waiting_name, generated_name in (
        ("llamacpp", "requests_processing", "requests_deferred", "tokens_predicted_total"),
        ("vllm", "num_requests_running", "num_requests_waiting", "generation_tokens_total"),
    ):
        yield f"{prefix}:prompt_tokens_total", "Prompt tokens evaluated.", prompt_tokens
        yield f"{prefix}:{generated_name}", "Tokens generated.", stats.generated
        yield f"{prefix}:{running_name}", "Running requests.", running
        yield f"{prefix}:{waiting_name}", "Waiting requests.", report.waiting
        n_drafts = stats.passes - stats.passes_without_draft
        yield f"{prefix}:{drafts}_drafts_total", "Decode calls with a draft.", n_drafts
        yield f"{prefix}:{drafts}_draft_tokens_total", "Draft tokens verified.", stats.drafted
        yield f"{prefix}:{drafts}_accepted_tokens_total", "Draft tokens accepted.", stats.accepted
        by_position = "Draft tokens accepted, by position in the draft."
        yield f"{prefix}:{drafts}_accepted_tokens_per_pos_total", by_position, tuple(stats.accepted_at)
    prompt_rate = report.prompt_tokens / stats.prefill_seconds if stats.prefill_seconds else 0.0
    batches = passes + (embedder.n_passes if embedder is not None else 0)
    yield "llamacpp:prompt_tokens_cached_total", "Prompt tokens found in the cache.", report.cached_tokens
    yield "llamacpp:prompt_seconds_total", "Time for prompt processing, in seconds.", stats.prefill_seconds
    yield "llamacpp:tokens_predicted_seconds_total", "Time from first to last tokens, in seconds.", stats.decode_seconds
    yield "llamacpp:prompt_tokens_seconds", "Average prompt tokens per second.", prompt_rate
    rate = stats.tokens_per_second or 0.0
    yield "llamacpp:predicted_tokens_seconds", "Average generated tokens per second.", rate
    yield "llamacpp:n_decode_total", "Batches evaluated.", batches
    yield "llamacpp:n_tokens_max", "Maximum number of tokens in a slot.", report.max_held
    slots_each = report.busy / passes if passes else 0.0
    yield "llamacpp:n_busy_slots_per_decode", "Average number of busy slots per decode call.", slots_each
    queried = report.prompt_tokens + report.cached_tokens
    yield "vllm:prefix_cache_queries_total", "Prompt tokens looked up in the cache.", queried
    yield "vllm:prefix_cache_hits_total", "Prompt tokens found in the cache.", report.cached_tokens
    used = sum(slot.n_tokens for slot in report.slots) / (model.n_ctx * len(report.slots))
    yield "vllm:kv_cache_usage_perc", "Share of the cache in use, 0 to 1.", used
    yield "ngramspec:close_calls_total", "Tokens that rounding could have decided.", stats.close_calls
    times = model.service.times.evidence
    for size, ratio in times["ratios"].items():
        yield f"ngramspec:pass_cost_{size}", f"Cost of a decode call of {size} tokens, in calls of one token.", ratio
    yield "ngramspec:pass_pairs_total", "Pairs of decode calls that costs rest on.", times["pairs"]
    if model.threads is not None:
        state = model.threads()
        yield "ngramspec:threads", "CPU threads of a decode call of one token.", state.threads
        yield "ngramspec:threads_batch", "CPU threads of a decode call of a draft.", state.threads_batch
        yield "ngramspec:threads_prompt", "CPU threads of a decode call of a prompt.", state.threads_prompt
        if state.other_cores is not None:
            yield "ngramspec:other_cores", "CPU cores that other programs use.", state.other_cores


_HEAD = struct.Struct("<8s32sIQ")
"""Magic, fingerprint of the model and its settings, checksum of the rest, and number of tokens. The token ids follow,
with four bytes each, and the result of `SequenceModel.save_state`."""

_MAGIC = b"ngslot3\0"


class SlotBody(Body):
    filename: str = ""  # not required to erase a slot


async def slot_action(call: Call[SlotBody]) -> Response:
    """Save a slot to a file in the server's folder, restore it from one, or erase it.

    If the content of a file cannot be used, the slot is empty afterwards.
    """
    if call.server.slot_folder is None:
        raise ApiError(501, "saving slots is disabled; start the server with --slot-save-path FOLDER")
    slots = len(call.model.service.report().slots)
    path = call.query["id_slot"]
    if not re.fullmatch("[0-9]{1,4}", path):
        raise ApiError(404, "File Not Found")
    number = int(path)
    if number >= slots:
        raise FieldError(f"must be 0 to {slots - 1}, got {number}", "id_slot")
    started_at = time.perf_counter()
    if (action := call.query.get("action", "")) not in _ACTIONS:
        raise FieldError(f"must be one of {', '.join(_ACTIONS)}, got {describe_value(action)}", "action")
    fields = await _ACTIONS[action](call, number)
    if action != "erase":
        fields["timings"] = {f"{action}_ms": (time.perf_counter() - started_at) * 1000}
    return JsonResponse({"id_slot": number} | fields)


async def _save(call: Call[SlotBody], number: int) -> dict[str, Any]:
    path = _read_path(call)

    def pack(sequence: SequenceModel) -> tuple[int, bytes]:
        state = sequence.save_state()
        tokens = list(sequence.tokens)
        body = np.array(tokens, "<i4").tobytes() + state
        checksum = _checksum(len(tokens), body)
        return len(tokens), _HEAD.pack(_MAGIC, _make_fingerprint(call, sequence), checksum, len(tokens)) + body

    def write() -> None:
        with atomic_write(path) as file:
            file.write(content)

    count, content = await asyncio.wrap_future(call.model.service.on_slot(number, pack))
    try:
        await asyncio.to_thread(write)
    except IsADirectoryError as error:
        raise ApiError(400, f"{path.name} is a folder; choose another name", param="filename") from error
    except OSError as error:
        raise ApiError(500, f"{path.name} cannot be written: {error.strerror}") from error
    return {"filename": path.name, "n_saved": count, "n_written": len(content)}


async def _restore(call: Call[SlotBody], number: int) -> dict[str, Any]:
    path = _read_path(call)
    try:
        content = await asyncio.to_thread(path.read_bytes)
    except OSError as error:
        raise ApiError(400, f"{path.name} cannot be read: {error.strerror}", param="filename") from error

    def unpack(sequence: SequenceModel) -> int:
        sequence.clear()
        if len(content) < _HEAD.size or not content.startswith(_MAGIC):
            raise ApiError(400, f"{path.name} is not a saved slot", param="filename")
        _, key, checksum, count = _HEAD.unpack_from(content)
        if key != _make_fingerprint(call, sequence):
            problem = "was saved with another model, machine, version or settings"
            raise ApiError(400, f"{path.name} {problem}", param="filename")
        at = _HEAD.size + 4 * count
        if at > len(content) or _checksum(count, memoryview(content)[_HEAD.size :]) != checksum:
            raise ApiError(400, f"{path.name} is damaged", param="filename")
        try:
            sequence.restore(np.frombuffer(content, "<i4", count, _HEAD.size).tolist(), content[at:])
        except TargetError as error:
            raise ApiError(400, f"{path.name} does not fit into a slot: {error}", param="filename") from error
        return int(count)

    count = await asyncio.wrap_future(call.model.service.on_slot(number, unpack))
    return {"filename": path.name, "n_restored": count, "n_read": len(content)}


async def _erase(call: Call[SlotBody], number: int) -> dict[str, Any]:
    def clear(sequence: SequenceModel) -> int:
        count = len(sequence.tokens)
        sequence.clear()
        return count

    return {"n_erased": await asyncio.wrap_future(call.model.service.on_slot(number, clear))}


_ACTIONS = {"save": _save, "restore": _restore, "erase": _erase}


def _checksum(count: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(struct.pack("<Q", count)))


def _make_fingerprint(call: Call[SlotBody], sequence: SequenceModel) -> bytes:
    """Return the fingerprint of the model, its settings and the scales of its adapters."""
    return sha256(f"{sequence.fingerprint} {call.model.service.scales}".encode()).digest()


def _read_path(call: Call[SlotBody]) -> Path:
    """Return the path of the requested file, which must be directly in the folder."""
    name = call.body.filename
    if name in ("", ".", "..") or len(name.encode()) > 255 or any(c in "/\\" or not c.isprintable() for c in name):
        raise FieldError("must be a file name without folders", "filename")
    assert call.server.slot_folder is not None
    return call.server.slot_folder / name
