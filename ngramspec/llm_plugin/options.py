"""The options of a prompt, `-o NAME VALUE`: those of `Sampling` under their own names, and a few more.

`Sampling` says of each setting what it is and which values it may have; nothing of that is told again here.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Annotated, Any, Literal, cast, get_type_hints

import llm
from pydantic import AfterValidator, Field, create_model

from ngramspec.sampling.option import Option, options
from ngramspec.sampling.settings import Sampling
from ngramspec.tuning.settings import MOST_THREADS

TEMPERATURE = 0.8
"""llama.cpp's for chats, as in `ngramspec chat`."""

_SETTINGS = {name: known for name, known in options(Sampling).items() if not known.repeatable}

_SEED = _SETTINGS["seed"]  # -1 asks for a random one

_MORE: dict[str, Any] = {
    "max_tokens": (int, Field(None, ge=1, description="Most tokens of the answer.")),
    "stop": (str, Field(None, min_length=1, description="End before this text.")),
    "no_draft": (bool, Field(None, description="Plain decoding: one token per pass.")),
    "no_memory": (bool, Field(None, description="Draft from the conversation alone, and keep nothing that is learnt.")),
    "exact": (Literal["auto", "on", "off"], Field(None, description="The same text bit for bit, drafted or not.")),
    "ctx_size": (int, Field(None, ge=16, le=2**24, description="Context in tokens; default: the model's, if it fits.")),
    "gpu_layers": (int, Field(None, ge=-1, le=9999, description="Layers on the GPU; default: all.")),
    "threads": (int, Field(None, ge=1, le=MOST_THREADS, description="CPU threads; default: the physical cores.")),
    "draft_model": (str, Field(None, min_length=1, description="Draft with this model of the same vocabulary too.")),
    "rpc": (str, Field(None, description="Machines to spread the layers over, HOST:PORT,...; trusted networks only.")),
}


@cache
def prompt_options() -> type[llm.Options]:
    """The class of the options; a value that cannot be is refused by it, with what it may be."""
    hints = get_type_hints(Sampling)
    fields = {name: _field(known, hints[name]) for name, known in _SETTINGS.items()}
    fields |= {name: (kind | None, field) for name, (kind, field) in _MORE.items()}
    return create_model("Options", __base__=llm.Options, **cast(dict[str, Any], fields))


def _field(known: Option, kind: Any) -> tuple[Any, Any]:
    def check(value: Any) -> Any:
        if value is not None:
            if known.parse is not None:
                known.parse(value)
            if known.allowed is not None and not known.allowed.holds(value) and (known is not _SEED or value != -1):
                raise ValueError(f"must be {known.allowed.words}")
        return value

    given = kind if known.parse is None else str
    return Annotated[given | None, AfterValidator(check)], Field(None, description=known.help)


def sampling_of(given: llm.Options, grammar: str | None) -> Sampling:
    """The sampling that options ask for, with a random seed where they name none.

    Args:
        given: an instance of what `prompt_options` gives.
        grammar: that the answer must keep to, whatever the options say; None: as they say.

    Raises:
        ValueError: two settings contradict each other.
    """
    asked: dict[str, Any] = {"temperature": TEMPERATURE, "seed": random.SystemRandom().randrange(2**32)}
    for name, known in _SETTINGS.items():
        value = getattr(given, name)
        if value is not None and (known is not _SEED or value != -1):
            asked[name] = value if known.parse is None else known.parse(value)
    if grammar is not None:
        if "grammar" in asked:
            raise ValueError("the option grammar and a schema exclude each other; leave one out")
        asked["grammar"] = grammar
    return Sampling(**asked)
