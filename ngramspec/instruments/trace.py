"""Traces: the steps of the decoding loop as JSON Lines. `TraceWriter` writes a file, `read_trace` reads one.

with TraceWriter(path) as trace:
    trace.begin(prompt, target.vocabulary.piece, TraceHeader.of(decoder, "my model", sampling, Acceptance()))
    for step in decoder.generate(prompt, max_tokens=200, sampling=sampling, return_decisions=True):
        trace.add(step)

The lines are JSON objects in ASCII. The first is a header, {"ngramspec_trace": 3, ...}. It contains the version of the
format and the attributes of `TraceHeader`, which apply to all passes up to the next header. All other lines are passes.
They contain the attributes of `Step`, the last tokens before the pass ("context"), and the texts of all tokens in the
line ("texts"). In these texts, a byte that is not part of a whole UTF-8 character is the half surrogate U+DC00 + byte.
`ngramspec.data` converts the attributes to JSON. Attributes that have their default are omitted, except the first
five. The version increases with every change that would make existing programs misread a trace, but not for new keys.

    {"position": 9, "batch": 3, "seconds": 0.012, "tokens": [7, 3], "pieces": [" cat", " ran"], "drafted": [7, 4],
     "accepted": 1, "decisions": [{"token": 7, "accepted": true, "p": 0.8, "why": {"margin": 0.0}}, ...],
     "verified_draft": {"tokens": [7, 4], "acceptance_probs": [0.7, 0.6], "source": "mixture"},
     "context": [5], "texts": {"3": " ran", "4": " sat", "5": " a", "7": " cat"}}
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from heapq import nsmallest
from typing import Any, NamedTuple

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.data import NGramSpecError, __version__, decode, encode, get_reason
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting.draft import Draft
from ngramspec.instruments.reports.report import Piece
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Step
from ngramspec.storage import utf8

VERSION = 3

CONTEXT = 12  # number of context tokens that are written with a pass

_MARK = "ngramspec_trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """Header of a trace: settings that apply to the following passes."""

    model: str
    sampling: Mapping[str, Any]  # all settings by name, as JSON values
    acceptance: str  # rule of acceptance; see `Acceptance.rule`
    lossy: str | None = None  # setting that changes the output; `None` if nothing does
    drafter: str  # name of the drafter; "" in plain decoding
    policy: str  # name of the policy
    exact: bool = False  # whether `SpeculativeDecoder`'s `exact` was "on"
    date: str = ""  # time of writing in ISO 8601, set by `TraceWriter`
    program: str

    @classmethod
    def of(cls, decoder: SpeculativeDecoder, model: str, sampling: Sampling, acceptance: Acceptance) -> TraceHeader:
        """Return the header of a generation; it raises the same errors as `SpeculativeDecoder.generate`."""
        return cls(
            model=model,
            sampling=encode(asdict(sampling)),
            acceptance=acceptance.rule(sampling),
            lossy=acceptance.lossy,
            drafter=decoder.drafter.name if decoder.drafter is not None else "",
            policy=decoder.policy.name,
            exact=decoder.exact == "on",
            program=f"ngramspec {__version__}",
        )


class TracedPass(NamedTuple):
    """A step, the last tokens before it, and the bytes of all tokens in it."""

    step: Step
    context: tuple[int, ...]
    texts: Mapping[int, bytes]


BrokenLine = tuple[int, str, bool]
"""A line that cannot be read: its number from 1, the error, and whether it lacks a line break, as after a crash."""


class TraceWriter(AbstractContextManager["TraceWriter"]):
    """Writer of a trace, which truncates the file first. Each pass is flushed to the operating system by `add`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._context: deque[int] = deque(maxlen=CONTEXT)
        self._piece: Piece | None = None
        self._header: TraceHeader | None = None
        with self._reporting():
            # A trace contains texts, so only the user may read it.
            self._file = open(  # noqa: SIM115 - closed by close()
                path, "w", encoding="ascii", opener=lambda name, flags: os.open(name, flags, 0o600)
            )

    def begin(self, prompt: Sequence[int], piece: Piece, header: TraceHeader) -> None:
        """Begin a generation; its header is written unless the previous generation had an equal one."""
        self._piece = piece
        self._context = deque(prompt[-CONTEXT:], maxlen=CONTEXT)
        if header != self._header:
            self._header = header
            dated_header = replace(header, date=datetime.now(UTC).isoformat(timespec="seconds"))
            self._write({_MARK: VERSION, **encode(dated_header)})

    def add(self, step: Step) -> None:
        """Write a step of the generation that began; it must have been generated with `return_decisions=True`."""
        if self._piece is None or not step.decisions:
            raise ValueError(
                "a trace needs begin() before add(), and steps that were generated with return_decisions=True"
            )
        step = _brief(step)
        draft = step.verified_draft
        numbers = {*self._context, *step.tokens, *step.drafted, *draft.tokens, *(one.token for one in step.decisions)}
        numbers |= {entry.token for entry in step.logprobs}
        tokens = sorted(numbers.union(*draft.q, *(dict(entry.top) for entry in step.logprobs)))
        texts = {str(token): self._piece(token).decode("utf-8", "surrogateescape") for token in tokens}
        always = {name: encode(getattr(step, name)) for name in ("position", "batch", "seconds", "tokens", "pieces")}
        self._write({**always, **encode(step), "context": list(self._context), "texts": texts})
        self._context.extend(step.tokens)

    def close(self) -> None:
        with self._reporting():
            self._file.close()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # If the block raised an error, that one is reported, not one of `close`.
        with nullcontext() if error is None else suppress(NGramSpecError):
            self.close()

    def _write(self, data: dict[str, Any]) -> None:
        line = json.dumps(data, separators=(",", ":"), allow_nan=False)
        with self._reporting():
            self._file.write(f"{line}\n")
            self._file.flush()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: a name with a null character
            raise NGramSpecError(f"cannot write the trace {self._path}: {get_reason(error)}") from error


def _brief(step: Step) -> Step:
    """Return the step with only the most likely tokens of each q, because whole distributions would fill the file."""
    draft, distributions = step.verified_draft, []
    for token, q in zip(draft.tokens, draft.q, strict=False):
        top = nsmallest(5, q, key=lambda candidate, q=q: (-q[candidate], candidate))  # type: ignore[misc]
        distributions.append(
            {likely_token: q[likely_token] for likely_token in dict.fromkeys((*top, token)) if likely_token in q}
        )
    details = draft.match_lengths, draft.context_counts, draft.acceptance_probs, draft.source
    return replace(step, verified_draft=Draft(draft.tokens, tuple(distributions), *details))


def read_trace(lines: Iterable[bytes]) -> Iterator[TraceHeader | TracedPass | BrokenLine]:
    """Yield the content of each line of a trace as soon as it has arrived; raise an NGramSpecError if it is not one."""
    has_header = False
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = _parse(line)
        except (ValueError, RecursionError) as error:
            if not has_header:
                reason = error if isinstance(error, UnicodeError) else "not a header"
                raise NGramSpecError(f"this is not a trace: line {number} is {reason}") from error
            yield number, str(error), not line.endswith(b"\n")
            continue
        if not has_header and isinstance(item, TracedPass):
            raise NGramSpecError(
                "the header is missing: the first line of a trace must contain its format and settings"
            )
        has_header = True
        yield item
    if not has_header:
        raise NGramSpecError("this is not a trace: it is empty")


def _parse(line: bytes) -> TraceHeader | TracedPass:
    text = utf8(line)
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError("it is not valid JSON") from error
    version = data.get(_MARK) if isinstance(data, dict) else None
    if version is None:
        step = decode(Step, data)
        context, texts = data.get("context", []), data.get("texts", {})
        if not isinstance(context, list) or not all(type(token) is int for token in context):
            raise ValueError("'context' is not a list of tokens")
        if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
            raise ValueError("'texts' is not a mapping of tokens to their text")
        raw = {int(token): text.encode("utf-8", "surrogateescape") for token, text in texts.items()}
        return TracedPass(step, tuple(context), raw)
    if version != VERSION:
        raise NGramSpecError(f"the trace has format {version}, but this version of ngramspec reads format {VERSION}")
    return decode(TraceHeader, data)
