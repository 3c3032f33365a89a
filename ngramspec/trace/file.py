"""Files of traces: `TraceWriter` writes each pass when it is done, `read_trace` reads what there is of them.

with TraceWriter(path) as trace:
    trace.begin(prompt, target.piece, TraceHeader.of(decoder, "my model", sampling))
    for step in decoder.generate(prompt, max_tokens=200, sampling=sampling, detail=True):
        trace.add(step)
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, NoReturn

from ngramspec.decoding.step import Step
from ngramspec.errors import NGramSpecError
from ngramspec.json_data import decode, encode
from ngramspec.trace.passes import VERSION, Piece, TracedPass, TraceHeader

CONTEXT = 12
"""Tokens of context that are written with a pass."""

_MARK = "ngramspec_trace"


class TraceError(NGramSpecError):
    """A trace cannot be written, or a file is not a trace."""


class TraceWriter:
    """Writes a trace, a line a pass, each to the operating system before `add` returns.

    Args:
        path: the file, which is emptied.

    Raises:
        TraceError: the file cannot be opened; from the methods: it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._context: deque[int] = deque(maxlen=CONTEXT)
        self._piece: Piece | None = None
        self._header: TraceHeader | None = None
        try:
            self._file = open(path, "w", encoding="ascii")  # noqa: SIM115 - closed by close()
        except (OSError, ValueError) as error:  # ValueError: a name with a null character
            self._fail(error)

    def begin(self, prompt: Sequence[int], piece: Piece, header: TraceHeader) -> None:
        """Begin a generation: `prompt` is its context; `header` is written unless the last generation had the same."""
        self._piece = piece
        self._context.clear()
        self._context.extend(prompt[-CONTEXT:])
        if header != self._header:
            self._header = header
            dated = replace(header, date=datetime.now(UTC).isoformat(timespec="seconds"))
            self._write({_MARK: VERSION, **encode(dated)})

    def add(self, step: Step) -> None:
        """Write a step of the generation that began.

        Raises:
            ValueError: it was generated without `detail=True`.
            RuntimeError: none began.
            TraceError: the file cannot be written.
        """
        if self._piece is None:
            raise RuntimeError("a trace needs begin() before add()")
        self._write(TracedPass.of(step, self._context, self._piece).to_json())
        self._context.extend(step.tokens)

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:
            self._fail(error)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # what went wrong first is what counts
            with suppress(OSError):
                self._file.close()

    def _write(self, data: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError | ValueError) -> NoReturn:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"cannot write the trace {self._path}: {reason}") from error


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """A line of a trace that is no pass.

    Attributes:
        number: counted from 1.
        reason: what is wrong with it.
        cut: it is the last one and lacks its end, as after a crash.
    """

    number: int
    reason: str
    cut: bool


def read_trace(lines: Iterable[bytes]) -> Iterator[TraceHeader | TracedPass | BrokenLine]:
    """What the lines of a trace hold, each as soon as it is there.

    Raises:
        TraceError: they are no trace, or one of another version.
    """
    begun = False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = _parse(line)
        except (ValueError, RecursionError) as error:
            if not begun:
                raise TraceError(f"this is not a trace: line {number} is not the header of one") from error
            yield BrokenLine(number, str(error), cut=not line.endswith(b"\n"))
            continue
        if not begun and isinstance(item, TracedPass):
            raise TraceError("the header is missing: a trace begins with a line that says its format and settings")
        begun = True
        yield item
    if not begun:
        raise TraceError("this is not a trace: it is empty")


def _parse(line: bytes) -> TraceHeader | TracedPass:
    try:
        data = json.loads(line)
    except ValueError as error:  # bytes that are not UTF-8 included
        raise ValueError("it is not JSON") from error
    version = data.get(_MARK) if isinstance(data, dict) else None
    if version is None:
        return TracedPass.from_json(data)
    if version != VERSION:
        raise TraceError(f"the trace has format {version}, and this ngramspec reads format {VERSION}")
    return decode(TraceHeader, data)
