"""`POST /slots/N?action=save|restore|erase`: the tokens and the state of a slot in files, as in llama-server."""

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

from ngramspec.backend import SequenceModel
from ngramspec.data import TargetError
from ngramspec.server.body import Body, Text, describe_value
from ngramspec.server.errors import ApiError, bad_field
from ngramspec.server.json_text import JsonResponse
from ngramspec.server.state import Call
from ngramspec.storage import atomic_write

_HEAD = struct.Struct("<8s32sIQ")
"""Magic, fingerprint of the model and its settings, checksum of the rest, and number of tokens. The token ids follow,
with four bytes each, and the result of `SequenceModel.save_state`."""

_MAGIC = b"ngslot3\0"

_NUMBER = re.compile("[0-9]{1,4}")  # number of a slot in a path


class _SlotBody(Body):
    filename: Text = ""  # not required to erase a slot


async def slot_action(call: Call[_SlotBody]) -> Response:
    """Save a slot to a file in the server's folder, restore it from one, or erase it.

    If the content of a file cannot be used, the slot is empty afterwards.
    """
    if call.server.slot_folder is None:
        raise ApiError(501, "saving slots is disabled; start the server with --slot-save-path FOLDER")
    slots = len(call.model.service.report().slots)
    path = call.query["id_slot"]
    if not _NUMBER.fullmatch(path):
        raise ApiError(404, "File Not Found")
    number = int(path)
    if number >= slots:
        raise bad_field("id_slot", f"id_slot must be 0 to {slots - 1}, got {number}")
    started_at = time.perf_counter()
    if (action := call.query.get("action", "")) not in _ACTIONS:
        raise bad_field("action", f"action must be one of {', '.join(_ACTIONS)}, got {describe_value(action)}")
    fields = await _ACTIONS[action](call, number)
    if action != "erase":
        fields["timings"] = {f"{action}_ms": (time.perf_counter() - started_at) * 1000}
    return JsonResponse({"id_slot": number} | fields)


async def _save(call: Call[_SlotBody], number: int) -> dict[str, Any]:
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

    count, content = await _run_on_slot(call, number, pack)
    try:
        await asyncio.to_thread(write)
    except IsADirectoryError as error:
        raise bad_field("filename", f"{path.name} is a folder; choose another name") from error
    except OSError as error:
        raise ApiError(500, f"{path.name} cannot be written: {error.strerror}") from error
    return {"filename": path.name, "n_saved": count, "n_written": len(content)}


async def _restore(call: Call[_SlotBody], number: int) -> dict[str, Any]:
    path = _read_path(call)
    try:
        content = await asyncio.to_thread(path.read_bytes)
    except OSError as error:
        raise bad_field("filename", f"{path.name} cannot be read: {error.strerror}") from error

    def unpack(sequence: SequenceModel) -> int:
        sequence.clear()
        if len(content) < _HEAD.size or not content.startswith(_MAGIC):
            raise bad_field("filename", f"{path.name} is not a saved slot")
        _, key, checksum, count = _HEAD.unpack_from(content)
        if key != _make_fingerprint(call, sequence):
            raise bad_field("filename", f"{path.name} was saved with another model, machine, version or settings")
        at = _HEAD.size + 4 * count
        if at > len(content) or _checksum(count, memoryview(content)[_HEAD.size :]) != checksum:
            raise bad_field("filename", f"{path.name} is damaged")
        try:
            sequence.restore(np.frombuffer(content, "<i4", count, _HEAD.size).tolist(), content[at:])
        except TargetError as error:
            raise bad_field("filename", f"{path.name} does not fit into a slot: {error}") from error
        return int(count)

    count = await _run_on_slot(call, number, unpack)
    return {"filename": path.name, "n_restored": count, "n_read": len(content)}


async def _erase(call: Call[_SlotBody], number: int) -> dict[str, Any]:
    def clear(sequence: SequenceModel) -> int:
        count = len(sequence.tokens)
        sequence.clear()
        return count

    return {"n_erased": await _run_on_slot(call, number, clear)}


_ACTIONS = {"save": _save, "restore": _restore, "erase": _erase}


async def _run_on_slot(call: Call[_SlotBody], number: int, work: Callable[[SequenceModel], Any]) -> Any:
    return await asyncio.wrap_future(call.model.service.on_slot(number, work))


def _checksum(count: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(struct.pack("<Q", count)))


def _make_fingerprint(call: Call[_SlotBody], sequence: SequenceModel) -> bytes:
    """Return the fingerprint of the model, its settings and the scales of its adapters."""
    return sha256(f"{sequence.fingerprint} {call.model.service.scales}".encode()).digest()


def _read_path(call: Call[_SlotBody]) -> Path:
    """Return the path of the requested file, which must be directly in the folder."""
    name = call.body.filename
    if name in ("", ".", "..") or len(name.encode()) > 255 or any(c in "/\\" or not c.isprintable() for c in name):
        raise bad_field("filename", "filename must be a file name without folders")
    assert call.server.slot_folder is not None
    return call.server.slot_folder / name
