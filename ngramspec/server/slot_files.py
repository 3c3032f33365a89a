"""`POST /slots/N?action=save|restore|erase`: what a slot holds goes to a file and comes back, as in llama-server."""

from __future__ import annotations

import asyncio
import struct
import time
import zlib
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from starlette.responses import Response

from ngramspec.errors import TargetError
from ngramspec.server.call import ApiError, Call, bad_field, json_answer
from ngramspec.shared_model import SequenceModel
from ngramspec.storage import replacing

_HEAD = struct.Struct("<8s32sIQ")
"""Magic, what the model and its settings are known by, the checksum of all that follows, the number of tokens. Token
ids follow, four bytes each, and what `SequenceModel.saved` gave."""

_MAGIC = b"ngslot2\0"


async def slot_action(call: Call) -> Response:
    """Save what a slot holds to a file of the server's folder, hold what a file has, or hold nothing.

    The slot is empty afterwards where the content of a file cannot be used.
    """
    if call.server.slot_folder is None:
        raise ApiError(501, "what slots hold is not saved to files; --slot-save-path FOLDER starts a server that does")
    slots = len(call.model.service.report().slots)
    number = call.query.data["id_slot"]
    if number >= slots:
        raise bad_field("id_slot", f"there is no slot {number} here, only 0 to {slots - 1}")
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
        return len(tokens), _HEAD.pack(_MAGIC, _key(sequence), zlib.crc32(body), len(tokens)) + body

    def write() -> None:
        with replacing(path) as file:
            file.write(content)

    count, content = await _on_slot(call, number, pack)
    try:
        await asyncio.to_thread(write)
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
            raise bad_field("filename", f"{path.name} is not what a slot of this server was saved to")
        _, key, checksum, count = _HEAD.unpack_from(content)
        if key != _key(sequence):
            raise bad_field("filename", f"{path.name} was saved with another model, machine, version or settings")
        at = _HEAD.size + 4 * count
        if at > len(content) or zlib.crc32(memoryview(content)[_HEAD.size :]) != checksum:
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


def _key(sequence: SequenceModel) -> bytes:
    """What the model and its settings are known by."""
    return sha256(sequence.fingerprint.encode()).digest()


def _path(call: Call) -> Path:
    """The file that is named, which is one in the folder itself."""
    name = call.given.needed_name("filename")
    if name in (".", "..") or len(name.encode()) > 255 or any(c in "/\\" or not c.isprintable() for c in name):
        raise call.given.refused("filename", "must be the name of a file, without folders")
    assert call.server.slot_folder is not None
    return call.server.slot_folder / name
