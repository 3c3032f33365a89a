"""Tests that servers with the same model and settings can save and restore slots, and other servers cannot."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.cli_runner import DEMO
from support.ear import WAIT, Ear, run_engine
from support.http import make_server, send
from support.mock_shared import MockShared
from support.model_files import write_adapter

from ngramspec.batching.request import Done, Event, Started
from ngramspec.data import ShutdownError
from ngramspec.llama.target import Target
from ngramspec.request import Request
from ngramspec.server.state import ServedModel, Server

PROMPT = "Once upon a time there was a small dog that lived in a very large house. " * 2


@contextmanager
def serving(folder: Path | None, **settings: Any) -> Iterator[Server]:
    """Run a server of the demo model with two slots."""
    with (
        Target(DEMO, texts=2, ctx_size=256, threads=1, exact="off", **settings) as target,
        run_engine(target) as engine,
    ):
        yield Server(model=ServedModel(engine, target.vocabulary, "demo"), slot_folder=folder)


def act(server: Server, slot: int, action: str, filename: str | None = "a.bin") -> dict[str, Any]:
    body = {} if filename is None else {"filename": filename}
    response = send(server, f"/slots/{slot}?action={action}", body)
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()
    return told


def refusal(server: Server, path: str, body: Any, status: int = 400) -> str:
    response = send(server, path, body)
    assert response.status_code == status, response.text
    return str(response.json()["error"]["message"])


def answer(server: Server, slot: int) -> tuple[str, int]:
    """Return a text and the number of its prompt tokens that were cached."""
    body = {"prompt": PROMPT, "n_predict": 8, "temperature": 0, "id_slot": slot}
    told = send(server, "/completion", body).json()
    return told["content"], told["timings"]["cache_n"]


def held(server: Server) -> list[int]:
    return [slot["n_tokens_held"] for slot in send(server, "/slots", method="GET").json()]


def test_slot_restore_on_other_server_continues_saved_text(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        text, cached = answer(server, 0)
        (count, _), name = held(server), "a.bin"
        saved = act(server, 0, "save")
        assert saved.pop("timings")["save_ms"] > 0
        size = (tmp_path / name).stat().st_size
        assert saved == {"id_slot": 0, "filename": name, "n_saved": count, "n_written": size}
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert act(server, 0, "erase", None) == {"id_slot": 0, "n_erased": count}
        assert (cached, held(server)) == (0, [0, 0])
    with serving(tmp_path) as server:
        restored = act(server, 1, "restore")
        assert restored.pop("timings")["restore_ms"] > 0
        assert restored == {"id_slot": 1, "filename": name, "n_restored": count, "n_read": size}
        assert held(server) == [0, count]
        again, cached = answer(server, 1)
        assert again == text
        assert cached > count - 12
        assert act(server, 0, "save", "empty")["n_saved"] == 0
        assert act(server, 1, "restore", "empty")["n_restored"] == 0
        assert held(server) == [0, 0]


def test_slot_restore_rejects_unusable_file_and_empties_slot(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        answer(server, 0)
        act(server, 0, "save")
    good = (tmp_path / "a.bin").read_bytes()
    files = {
        "damaged": (good[:-1] + bytes([good[-1] ^ 1]), "is damaged"),
        "short": (good[:-1], "is damaged"),
        "many": (good[:44] + b"\xff" * 8 + good[52:], "is damaged"),
        "other": (b"GGUF" + good, "is not a saved slot"),
        "nothing": (b"", "is not a saved slot"),
    }
    for name, (content, _) in files.items():
        (tmp_path / name).write_bytes(content)
    with serving(tmp_path) as server:
        for name, (_, why) in files.items():
            act(server, 1, "restore")
            assert refusal(server, "/slots/1?action=restore", {"filename": name}) == f"{name} {why}"
            assert held(server) == [0, 0]
        (tmp_path / "folder").mkdir()
        told = refusal(server, "/slots/0?action=save", {"filename": "folder"})
        assert told == "folder is a folder; choose another name"
        assert "cannot be read: No such file" in refusal(server, "/slots/1?action=restore", {"filename": "none"})
    lora = [(write_adapter(tmp_path / "lora.gguf", DEMO, ["attn_q.weight"]), 1.0)]
    others: tuple[dict[str, Any], ...] = ({"cache_type_k": "q8_0", "flash_attn": "on"}, {"lora": lora})
    for settings in others:
        with serving(tmp_path, **settings) as server:
            answer(server, 0)
            told = refusal(server, "/slots/0?action=restore", {"filename": "a.bin"})
            assert "was saved with another model, machine, version or settings" in told
            assert held(server) == [0, 0]


@pytest.mark.parametrize("action", ["save", "restore"])
def test_slot_actions_reject_file_names_outside_the_folder(tmp_path: Path, action: str) -> None:
    server, _ = make_server()
    server.slot_folder = tmp_path / "folder"
    for name in ("../x", "/etc/passwd", "a/b", "..", ".", "a\\b", "a\0", "a\n", "x" * 256, "", 5, None):
        assert "filename" in refusal(server, f"/slots/0?action={action}", {"filename": name})
    assert list(tmp_path.iterdir()) == []


def test_slot_actions_reject_unknown_slots_and_actions(tmp_path: Path) -> None:
    server, _ = make_server()
    assert "--slot-save-path" in refusal(server, "/slots/0?action=save", {"filename": "x"}, 501)
    server.slot_folder = tmp_path
    assert "id_slot must be 0 to 3, got 4" in refusal(server, "/slots/4?action=save", {"filename": "x"})
    for path in ("/slots/0", "/slots/0?action=eat"):
        assert "action" in refusal(server, path, {"filename": "x"})
    for number in ("x", "9" * 5000):
        assert send(server, f"/slots/{number}?action=save", {}).status_code == 404


def test_slot_restore_detects_flipped_bits_and_survives_forged_files(tmp_path: Path) -> None:
    """A file with a valid checksum is either rejected, or the slot responds to the second request at the latest."""
    with serving(tmp_path) as server:
        answer(server, 0)
        act(server, 0, "save")
        good, random = (tmp_path / "a.bin").read_bytes(), Random(5)
        for at in (*range(52), *(random.randrange(len(good)) for _ in range(20))):
            (tmp_path / "b.bin").write_bytes(good[:at] + bytes([good[at] ^ 1 << random.randrange(8)]) + good[at + 1 :])
            refusal(server, "/slots/0?action=restore", {"filename": "b.bin"})
            assert held(server) == [0, 0]
        count = struct.unpack_from("<Q", good, 44)[0]
        body = good[52:]
        forged = [(n, body) for n in (0, 1, count - 1, count + 1)]
        forged += [(count, struct.pack("<i", token) + body[4:]) for token in (-1, 2**31 - 1)]
        for _ in range(12):
            at = random.randrange(4 * count, 4 * count + 64)
            forged.append((count, body[:at] + bytes([random.randrange(256)]) + body[at + 1 :]))
        for number, content in forged:
            checksum = zlib.crc32(content, zlib.crc32(struct.pack("<Q", number)))
            (tmp_path / "b.bin").write_bytes(good[:40] + struct.pack("<IQ", checksum, number) + content)
            response = send(server, "/slots/0?action=restore", {"filename": "b.bin"})
            assert response.status_code in (200, 400), response.text
            body_ = {"prompt": PROMPT, "n_predict": 8, "temperature": 0, "id_slot": 0}
            send(server, "/completion", body_)
            again = send(server, "/completion", body_)
            assert again.status_code == 200, again.text


def test_on_slot_waits_for_running_request_of_the_slot() -> None:
    ear, found = Ear(), list[Future[Any]]()

    def listener(event: Event) -> None:
        if isinstance(event, Started):
            found.append(engine.on_slot(0, lambda sequence: (ear.end.is_set(), len(sequence.tokens))))
            found.append(engine.on_slot(1, lambda _: ear.end.is_set()))
            found.append(engine.on_slot(0, lambda _: 1 // 0))
            left = engine.on_slot(0, lambda sequence: sequence.clear())
            assert left.cancel()
        ear(event)

    with run_engine(MockShared(2)) as engine:
        engine.submit(Request([1, 2, 3], 20, slot=0), listener)
        assert isinstance(ear.wait(), Done)
        ended, length = found[0].result(WAIT)
        assert (ended, found[1].result(WAIT)) == (True, False)
        assert length >= 22
        with pytest.raises(ZeroDivisionError):
            found[2].result(WAIT)
    with pytest.raises(ShutdownError):
        engine.on_slot(0, len).result(WAIT)  # type: ignore[arg-type]
