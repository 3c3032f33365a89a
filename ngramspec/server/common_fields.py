"""Fields that all endpoints have which generate text."""

from __future__ import annotations

from ngramspec.server.errors import bad_field
from ngramspec.server.fields import Fields

MOST_ANSWERS = 128
"""Most texts that one request may ask for: OpenAI's limit."""

_TOKENS = ("max_completion_tokens", "max_tokens", "n_predict")


def read_max_tokens(given: Fields) -> int | None:
    """Most tokens to emit, under any of its names; None: as many as the context holds, which -1 means too."""
    most = given.whole(given.name(*_TOKENS), -1, least=-1)
    return None if most == -1 else most


def read_stop(given: Fields) -> tuple[str, ...]:
    """The strings that end a text."""
    stop = given.texts("stop")
    if not all(stop):
        raise bad_field("stop", "stop holds an empty text, but must hold none")
    return tuple(stop)


def read_slot(given: Fields, slots: int) -> int | None:
    """The slot to prefer; any number means one of them."""
    slot = given.whole("id_slot", -1, least=-1)
    return None if slot is None or slot == -1 else slot % slots


def read_answers(given: Fields) -> int:
    """How many answers are asked for."""
    count = given.whole(given.name("n", "n_cmpl"), 1, least=1, most=MOST_ANSWERS)
    assert count is not None
    return count
