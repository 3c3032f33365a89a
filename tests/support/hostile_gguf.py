"""Damaged headers: copies of a GGUF file with one value changed each. A second opinion on the format."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

_CODES = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_FLOATS = (0.0, -1.0, 1e-30, 1e30, 3.0e38, float("inf"), float("-inf"), float("nan"))
_BOOLS = (False, True)


@dataclass(frozen=True)
class Entry:
    """One metadata entry: key, type, value; a value of an array is (item type, items)."""

    key: str
    kind: int
    value: object


@dataclass(frozen=True)
class Tensor:
    """One tensor's place in the header."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class Header:
    """A whole header, and the tensor data behind it."""

    entries: tuple[Entry, ...]
    tensors: tuple[Tensor, ...]
    data: bytes

    def bytes(self) -> bytes:
        out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.entries)))
        for entry in self.entries:
            out += _string(entry.key) + struct.pack("<I", entry.kind) + _pack(entry.kind, entry.value)
        for tensor in self.tensors:
            out += _string(tensor.name) + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
            out += struct.pack("<IQ", tensor.kind, tensor.offset)
        return bytes(out + bytes(-len(out) % 32)) + self.data


def read(path: Path) -> Header:
    """The header of a good file of version 3 with the usual alignment."""
    raw = path.read_bytes()
    at = 4

    def take(layout: str) -> tuple[int, ...]:
        nonlocal at
        values = struct.unpack_from("<" + layout, raw, at)
        at += struct.calcsize("<" + layout)
        return values

    def string() -> str:
        nonlocal at
        (size,) = take("Q")
        at += size
        return raw[at - size : at].decode()

    def value(kind: int) -> object:
        if kind == _STRING:
            return string()
        if kind == _ARRAY:
            item, count = take("IQ")
            return item, [value(item) for _ in range(count)]
        return take(_CODES[kind])[0]

    _, tensor_count, entry_count = take("IQQ")
    entries = []
    for _ in range(entry_count):
        key, (kind,) = string(), take("I")
        entries.append(Entry(key, kind, value(kind)))
    tensors = []
    for _ in range(tensor_count):
        name, (dimensions,) = string(), take("I")
        shape = take(f"{dimensions}Q")
        tensors.append(Tensor(name, shape, *take("IQ")))
    return Header(tuple(entries), tuple(tensors), raw[at + -at % 32 :])


def mutations(header: Header) -> Iterator[tuple[str, Header]]:
    """(what was changed, the header with it): every metadata entry, and some tensors, in many ways each."""
    for i, entry in enumerate(header.entries):

        def put(name: str, *new: Entry, at: int = i) -> tuple[str, Header]:
            entries = header.entries[:at] + new + header.entries[at + 1 :]
            return f"{header.entries[at].key} {name}", replace(header, entries=entries)

        yield put("missing")
        yield put("twice", entry, entry)
        other = Entry(entry.key, _STRING, "7") if entry.kind != _STRING else Entry(entry.key, 4, 7)
        yield put("of another type", other)
        for value in _others(entry):
            yield put(_short(value), replace(entry, value=value))
    for i in (0, 1, 3, 10, len(header.tensors) - 1):
        tensor = header.tensors[i]
        width = tensor.shape[0]
        changed = [
            replace(tensor, name="nothing"),
            replace(tensor, name=""),
            replace(tensor, name=header.tensors[i - 1].name),
            replace(tensor, shape=tensor.shape[1:]),
            replace(tensor, shape=(*tensor.shape, 2)),
            replace(tensor, shape=(0, *tensor.shape[1:])),
            replace(tensor, shape=(width - 32, *tensor.shape[1:])),
            replace(tensor, shape=(width + 1, *tensor.shape[1:])),
            replace(tensor, shape=(2**62, *tensor.shape[1:])),
            replace(tensor, shape=tuple(reversed(tensor.shape))),
            *(replace(tensor, kind=kind) for kind in (1, 2, 4, 14, 31, 99) if kind != tensor.kind),
            *(replace(tensor, offset=offset) for offset in (0, 1, tensor.offset + 32, 2**40, 2**64 - 32)),
        ]
        for new in changed:
            tensors = (*header.tensors[:i], new, *header.tensors[i + 1 :])
            yield f"{tensor.name} -> {new.name!r} {new.shape} {new.kind} {new.offset}", replace(header, tensors=tensors)


def _others(entry: Entry) -> Iterator[object]:
    if entry.kind == _STRING:
        yield from ("", "\0", "nonsense", "x" * 100_000, "\n{%")
    elif entry.kind == _ARRAY:
        assert isinstance(entry.value, tuple)
        item, items = entry.value
        yield item, []
        yield item, items[:1]
        yield item, items[:-1]
        yield item, items + items[:1]
        yield item, [items[0]] * len(items)
        yield item, items[::-1]
        yield item, items[:5] + items[4:-1]
        if item == _STRING:
            for odd in ("", " ", "\0", "a", "\udcff", "x" * 100_000):
                yield item, [*items[:5], odd, *items[6:]]
        else:
            for odd in (0, -1, 99, 2**31 - 1):
                yield item, [*items[:5], odd, *items[6:]]
                yield item, [odd] * len(items)
    elif entry.kind == 6:
        yield from _FLOATS
    elif entry.kind == 7:
        yield from _BOOLS
    else:
        assert isinstance(entry.value, int)
        near = {0, 1, 2, 3, entry.value - 1, entry.value + 1, entry.value // 2, entry.value * 2, 1000}
        yield from sorted(near | {65535, 2**20, 2**31 - 1, 2**31, 2**32 - 1} - {entry.value})


def _pack(kind: int, value: object) -> bytes:
    if kind == _STRING:
        return _string(str(value))
    if kind == _ARRAY:
        assert isinstance(value, tuple)
        item, items = value
        return struct.pack("<IQ", item, len(items)) + b"".join(_pack(item, one) for one in items)
    return struct.pack("<" + _CODES[kind], value)


def _string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, tuple) else f"{len(value[1])} of {value[1][:7]!r}"
    return text if len(text) < 120 else text[:120] + "..."
