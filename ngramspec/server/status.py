"""What the server says of itself: `/health`, `/props`, `/slots`, `/v1/models`, and `/metrics` for Prometheus.

What a slot holds goes to a file and comes back, as in llama-server: `POST /slots/N?action=save|restore|erase`.
"""

from __future__ import annotations

import asyncio
import re
import struct
import time
import zlib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from starlette.responses import Response

from ngramspec.batching.request import Slot
from ngramspec.errors import TargetError
from ngramspec.server.call import LIST, ApiError, Call, bad_field, json_answer, shown
from ngramspec.server.common_fields import read_scales
from ngramspec.server.native_answer import generation_settings
from ngramspec.server.reply import FINGERPRINT
from ngramspec.shared_model import SequenceModel
from ngramspec.storage import replacing


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
    if name not in (call.model.name, *call.model.aliases):
        raise ApiError(
            404, f"unknown model {shown(name)}; this server has only {call.model.name!r}", code="model_not_found"
        )
    return json_answer(_listed(call))


def _listed(call: Call) -> dict[str, Any]:
    model = call.model
    meta = {**model.meta, "n_vocab": model.vocabulary.n_vocab, "n_ctx": model.n_ctx}
    return {
        "id": model.name,
        "aliases": list(model.aliases),
        "tags": list(model.tags),
        "object": "model",
        "created": call.server.began,
        "owned_by": "llamacpp",
        "meta": meta,
    }


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
            "endpoint_slots": call.server.has_slots,
            "endpoint_props": False,
            "endpoint_metrics": True,
            "webui": call.server.has_page,
            "is_sleeping": False,
            "chat_template": model.vocabulary.chat_template or "",
            "chat_template_caps": model.vocabulary.template_capabilities,
            "bos_token": bos,
            "eos_token": eos,
            "build_info": FINGERPRINT,
            "exact": model.exact,
            "threads": None if model.threads is None else model.threads()._asdict(),
        }
    )


async def lora_adapters(call: Call) -> Response:
    """Return the LoRA adapters, with the scales of requests that do not set their own."""
    files = zip(call.model.adapters, call.model.service.scales, strict=True)
    return json_answer([{"id": number, "path": path, "scale": scale} for number, (path, scale) in enumerate(files)])


async def scale_lora_adapters(call: Call) -> Response:
    """Set the scales of the LoRA adapters for later requests, from a list as in the field `lora`."""
    scales = read_scales(call, LIST)
    call.model.service.set_scales(scales or (0.0,) * len(call.model.adapters))
    return json_answer({"success": True})


async def slots(call: Call) -> Response:
    """Return the state of each slot. With `fail_on_no_slot` the status is 503 while none is free."""
    if not call.server.has_slots:
        raise ApiError(501, "/slots is disabled; start the server without --no-slots")
    model = call.model
    found = model.service.report().slots
    if call.given.data.get("fail_on_no_slot") == "1" and all(slot.request for slot in found):
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
        "is_processing": request is not None,
        "n_prompt_tokens": len(request.prompt) if request is not None else 0,
        "n_prompt_tokens_processed": slot.prefilled,
        "n_prompt_tokens_cache": slot.cached,
        "n_tokens_held": slot.held,
        "next_token": [
            {
                "has_next_token": request is not None,
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


# --------------------------------------------------------------------------- what slots hold, in files


_HEAD = struct.Struct("<8s32sIQ")
"""Magic, fingerprint of the model and its settings, checksum of the rest, and number of tokens. The token ids follow,
with four bytes each, and the result of `SequenceModel.saved`."""

_MAGIC = b"ngslot3\0"

_NUMBER = re.compile("[0-9]{1,4}")  # of a slot


async def slot_action(call: Call) -> Response:
    """Save what a slot holds to a file of the server's folder, hold what a file has, or hold nothing.

    The slot is empty afterwards where the content of a file cannot be used.
    """
    if call.server.slot_folder is None:
        raise ApiError(501, "saving slots is disabled; start the server with --slot-save-path FOLDER")
    slots = len(call.model.service.report().slots)
    path = str(call.query.data["id_slot"])
    if not _NUMBER.fullmatch(path):
        raise ApiError(404, "File Not Found")
    number = int(path)
    if number >= slots:
        raise bad_field("id_slot", f"id_slot must be 0 to {slots - 1}, got {number}")
    began = time.perf_counter()
    action = call.query.needed_choice("action", tuple(_ACTIONS))
    told = await _ACTIONS[action](call, number)
    if action != "erase":
        told["timings"] = {f"{action}_ms": (time.perf_counter() - began) * 1000}
    return json_answer({"id_slot": number} | told)


async def _save(call: Call, number: int) -> dict[str, Any]:
    path = _path(call)

    def pack(sequence: SequenceModel) -> tuple[int, bytes]:
        state = sequence.saved()
        tokens = list(sequence.tokens)
        body = np.array(tokens, "<i4").tobytes() + state
        checksum = _checksum(len(tokens), body)
        return len(tokens), _HEAD.pack(_MAGIC, _key(call, sequence), checksum, len(tokens)) + body

    def write() -> None:
        with replacing(path) as file:
            file.write(content)

    count, content = await _on_slot(call, number, pack)
    try:
        await asyncio.to_thread(write)
    except IsADirectoryError as error:
        raise bad_field("filename", f"{path.name} is a folder; choose another name") from error
    except OSError as error:
        raise ApiError(500, f"{path.name} cannot be written: {error.strerror}") from error
    return {"filename": path.name, "n_saved": count, "n_written": len(content)}


async def _restore(call: Call, number: int) -> dict[str, Any]:
    path = _path(call)
    try:
        content = await asyncio.to_thread(path.read_bytes)
    except OSError as error:
        raise bad_field("filename", f"{path.name} cannot be read: {error.strerror}") from error

    def unpack(sequence: SequenceModel) -> int:
        sequence.clear()
        if len(content) < _HEAD.size or not content.startswith(_MAGIC):
            raise bad_field("filename", f"{path.name} is not a saved slot")
        _, key, checksum, count = _HEAD.unpack_from(content)
        if key != _key(call, sequence):
            raise bad_field("filename", f"{path.name} was saved with another model, machine, version or settings")
        at = _HEAD.size + 4 * count
        if at > len(content) or _checksum(count, memoryview(content)[_HEAD.size :]) != checksum:
            raise bad_field("filename", f"{path.name} is damaged")
        try:
            sequence.restore(np.frombuffer(content, "<i4", count, _HEAD.size).tolist(), content[at:])
        except TargetError as error:
            raise bad_field("filename", f"{path.name} does not fit into a slot: {error}") from error
        return int(count)

    count = await _on_slot(call, number, unpack)
    return {"filename": path.name, "n_restored": count, "n_read": len(content)}


async def _erase(call: Call, number: int) -> dict[str, Any]:
    def clear(sequence: SequenceModel) -> int:
        count = len(sequence.tokens)
        sequence.clear()
        return count

    return {"n_erased": await _on_slot(call, number, clear)}


_ACTIONS = {"save": _save, "restore": _restore, "erase": _erase}


async def _on_slot(call: Call, number: int, work: Callable[[SequenceModel], Any]) -> Any:
    return await asyncio.wrap_future(call.model.service.on_slot(number, work))


def _checksum(count: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(struct.pack("<Q", count)))


def _key(call: Call, sequence: SequenceModel) -> bytes:
    """Return the fingerprint of the model, its settings and the scales of its adapters."""
    return sha256(f"{sequence.fingerprint} {call.model.service.scales}".encode()).digest()


def _path(call: Call) -> Path:
    """The file that is named, which is one in the folder itself."""
    name = call.given.needed_name("filename")
    if name in (".", "..") or len(name.encode()) > 255 or any(c in "/\\" or not c.isprintable() for c in name):
        raise call.given.refused("filename", "must be a file name without folders")
    assert call.server.slot_folder is not None
    return call.server.slot_folder / name
