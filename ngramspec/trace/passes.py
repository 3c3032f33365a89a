"""A trace: what the decoding loop did, each pass a line of JSON. `ngramspec.trace.file` writes and reads the files.

The lines are JSON objects in ASCII. The first is a header, {"ngramspec_trace": 1, ...}: the format's version, and the
attributes of `TraceHeader`, which hold for all passes up to the next header. All others are passes, the attributes of
`Step` and `TracedPass`. How attributes become JSON: see `ngramspec.json_data`; those with a default are left out where
they have it. The version rises with a change that would make existing programs misread a trace; new keys leave it.

    {"position": 9, "batch": 3, "seconds": 0.012, ..., "source": "mixture", "context": [{"id": 5, "text": " a"}, ...],
     "draft": [{"id": 7, "text": " cat", "accepted": true, "p": 0.8, "why": {"margin": 0.0}, "acceptance": 0.7},
               {"id": 4, "text": " sat", "accepted": false, "p": 0.1, "why": {"margin": 1.6}}], "sent": 2,
     "own": {"id": 3, "text": " ran", "p": 0.5}, "tokens": [7, 3], "pieces": [" cat", " ran"]}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from heapq import nsmallest
from itertools import takewhile
from typing import Any

from ngramspec.acceptance.rules import TokenDecision
from ngramspec.acceptance.verifier import Acceptance
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.decoding.step import Step
from ngramspec.drafting.draft import NO_DRAFT, Draft
from ngramspec.json_data import decode, encode
from ngramspec.sampling.logprobs import Logprobs
from ngramspec.sampling.settings import Sampling
from ngramspec.version import __version__

VERSION = 1
TOP = 5
"""How many entries of a q are written: the likeliest ones."""

Piece = Callable[[int], bytes]
"""The bytes that a token stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """What holds for the passes that follow it.

    Attributes:
        model: its name.
        sampling: all settings by name, as JSON has them.
        verify: see `RuleVerifier.name`.
        lossy: what changes the output, None if nothing does.
        drafter, policy: their names; the drafter's is "" in plain decoding.
        exact: whether `SpeculativeDecoder`'s `exact` was "on".
        date: when it was written, in ISO 8601; `TraceWriter` fills it in.
        program: what wrote it.
    """

    model: str
    sampling: Mapping[str, Any]
    verify: str
    lossy: str | None = None
    drafter: str
    policy: str
    exact: bool = False
    date: str = ""
    program: str

    @classmethod
    def of(
        cls,
        decoder: SpeculativeDecoder,
        model: str,
        sampling: Sampling | None = None,
        verify: Acceptance | str | None = None,
    ) -> TraceHeader:
        """The header of a generation; `sampling`, `verify` and errors as in `SpeculativeDecoder.generate`."""
        sampling = sampling or Sampling()
        how = verify if isinstance(verify, Acceptance) else Acceptance(verify)
        rule = how.resolve(sampling)
        return cls(
            model=model,
            sampling=encode(asdict(sampling)),
            verify=rule.name,
            lossy=rule.lossy,
            drafter=decoder.drafter.name if decoder.drafter is not None else "",
            policy=decoder.policy.name,
            exact=decoder.exact == "on",
            program=f"ngramspec {__version__}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token and its text.

    Attributes:
        id: in the vocabulary.
        text: what it stands for; "" for a control token.
        hex: its bytes, where they are not whole characters of UTF-8 and `text` has U+FFFD in their place.
    """

    id: int
    text: str
    hex: str = ""

    def __post_init__(self) -> None:
        bytes.fromhex(self.hex)  # a ValueError belongs here, not where it is shown

    @property
    def raw(self) -> bytes:
        """The bytes it stands for."""
        return bytes.fromhex(self.hex) if self.hex else self.text.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Token):
    """A token that a draft could have had, and its probability."""

    q: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess(Token):
    """A drafted token and what came of it.

    Attributes:
        accepted: whether the target accepted it; None if it was not reached.
        p, why: see `TokenDecision`; None if it was not reached (and `why` where no numbers decided).
        q: probability with which it was drawn; None where the drafter did not draw.
        q_size: how many tokens it was drawn from.
        q_top: the `TOP` likeliest of them, best first.
        acceptance, match, support: see `Draft`; None where the drafter does not say.
    """

    accepted: bool | None = None
    p: float | None = None
    why: Mapping[str, float] | None = None
    q: float | None = None
    q_size: int = 0
    q_top: tuple[Candidate, ...] = ()
    acceptance: float | None = None
    match: int | None = None
    support: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Own(Token):
    """A token that the target chose itself, and its probability (see `TokenDecision`)."""

    p: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Likely(Token):
    """A token and the logarithm of its probability; see `Logprobs`."""

    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted(Likely):
    """An emitted token with its logarithm, and the likeliest at its place; see `Logprobs`."""

    top: tuple[Likely, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPass:
    """A step that was generated with `detail=True`, with the text of the tokens.

    Attributes:
        step: all of the step but its logprobs and its detail, which are spelled out here.
        context: the last tokens before the pass.
        draft: the draft that was judged; see `Step.judged`.
        sent: how many of it were in the batch.
        own: the target's own token; None where the judged tokens end without one.
        logprobs: see `Step`.

    Where the text ended inside the draft, `draft` and `own` go on behind it.
    """

    step: Step
    context: tuple[Token, ...] = ()
    draft: tuple[Guess, ...] = ()
    sent: int = 0
    own: Own | None = None
    logprobs: tuple[Emitted, ...] = ()

    @classmethod
    def of(cls, step: Step, context: Iterable[int], piece: Piece) -> TracedPass:
        """A step that was generated with `detail=True`, after the tokens `context`.

        Raises:
            ValueError: the step has no detail.
        """
        if not step.detail:
            raise ValueError("only steps that were generated with detail=True can be traced")
        drafted = [judgement for judgement in step.detail if judgement.accepted is not None]
        own = next((judgement for judgement in step.detail if judgement.accepted is None), None)
        unreached = [None] * (len(step.judged) - len(drafted))
        return cls(
            step=replace(step, logprobs=(), detail=(), judged=NO_DRAFT),
            context=tuple(Token(**_spelled(token, piece)) for token in context),
            draft=tuple(_guess(step.judged, i, came, piece) for i, came in enumerate([*drafted, *unreached])),
            sent=len(step.drafted),
            own=None if own is None else Own(**_spelled(own.token, piece), p=own.p),
            logprobs=tuple(_emitted(entry, piece) for entry in step.logprobs),
        )

    def to_json(self) -> dict[str, Any]:
        """The object of its line: the step's fields, what the policy told, and the fields beside `step`, all in one."""
        line = encode(self)
        step = line.pop("step")
        explained = step.pop("explained")
        line = {name: getattr(self.step, name) for name in _ALWAYS} | step | explained | line
        return {name: value for name, value in line.items() if name not in _DERIVED}

    @classmethod
    def from_json(cls, data: Any) -> TracedPass:
        """The pass of a line.

        Raises:
            ValueError: a field is missing, or is not what its annotation says.
        """
        if not isinstance(data, dict):
            raise ValueError("it is not a JSON object")
        missing = [name for name in _ALWAYS if name not in data]
        if missing:
            raise ValueError(f"it has no {missing[0]!r}")
        explained = {name: x for name, x in data.items() if name not in _FIELDS and type(x) in (int, float)}
        told = {name: x for name, x in data.items() if name in _STEP and name != "logprobs"}
        done = decode(cls, {**data, "step": {**told, "explained": explained}})
        drafted = tuple(guess.id for guess in done.draft[: done.sent])
        kept = len(list(takewhile(lambda guess: guess.accepted, done.draft)))
        step = replace(done.step, drafted=drafted, accepted=min(kept, len(done.step.tokens)))
        return replace(done, step=step)


_STEP = frozenset(field.name for field in fields(Step))
_FIELDS = _STEP | {field.name for field in fields(TracedPass)}
_ALWAYS = ("position", "batch", "seconds", "tokens", "pieces")
"""Fields of a step that every line has."""
_DERIVED = ("drafted", "accepted")
"""Fields that no line has: `draft` and `sent` say them."""


def _spelled(token: int, piece: Piece) -> dict[str, Any]:
    raw = piece(token)
    text = raw.decode(errors="replace")
    return {"id": token, "text": text, "hex": "" if text.encode() == raw else raw.hex()}


def _guess(draft: Draft, i: int, judgement: TokenDecision | None, piece: Piece) -> Guess:
    token = draft.tokens[i]
    q = draft.q[i] if draft.q else {}
    top = nsmallest(TOP, q, key=lambda other: (-q[other], other))
    return Guess(
        **_spelled(token, piece),
        accepted=None if judgement is None else judgement.accepted,
        p=None if judgement is None else judgement.p,
        why=None if judgement is None else dict(judgement.why) or None,
        q=q.get(token),
        q_size=len(q),
        q_top=tuple(Candidate(**_spelled(other, piece), q=q[other]) for other in top),
        acceptance=draft.chances[i] if draft.chances else None,
        match=draft.match[i] if draft.match else None,
        support=draft.support[i] if draft.support else None,
    )


def _emitted(entry: Logprobs, piece: Piece) -> Emitted:
    top = tuple(Likely(**_spelled(token, piece), logprob=logprob) for token, logprob in entry.top)
    return Emitted(**_spelled(entry.token, piece), logprob=entry.logprob, top=top)
