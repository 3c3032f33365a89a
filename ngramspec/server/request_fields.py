"""The fields of a request to the engine that are the same in every API, except sampling and constraints.

`read_shared_fields` makes a `Request` of them; each API adds the prompt. To add a field to all APIs, see README.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ngramspec.request import Request
from ngramspec.sampling.settings import Sampling, TextRules, options
from ngramspec.server.call import Call
from ngramspec.server.errors import bad_field
from ngramspec.server.fields import Fields, describe_value
from ngramspec.server.sampling_fields import MAX_TOKENS, check_token, read_bad_words

SHARED_FIELDS = {*options(Sampling), *options(TextRules), "stop_token_ids", "bad_words", "stop", "lora", "id_slot"}
"""Names of the fields of `read_sampling`, `read_stop` and `read_shared_fields`, which are the same in every API."""

MAX_ANSWERS = 128  # maximum number of answers of a request, which is OpenAI's limit

MAX_ALTERNATIVES = 20  # maximum number of alternatives in the logprobs of a token, which is OpenAI's limit


def read_shared_fields(call: Call, sampling: Sampling, max_tokens: int | None, stop: tuple[str, ...]) -> Request:
    """Return a request without a prompt, with the fields in `SHARED_FIELDS`."""
    return Request(
        prompt=(),
        max_tokens=(call.model.predict or call.model.n_ctx) if max_tokens is None else max_tokens,
        sampling=sampling,
        stop=stop,
        scales=read_scales(call),
        slot=_read_slot(call),
        rules=_read_rules(call),
    )


def repeat_with_seeds(request: Request, count: int, n_prompts: int = 1) -> list[Request]:
    """Repeat a request `count` times, each time with the next seed.

    It raises an ApiError if too many biases apply to all answers to `n_prompts` prompts.
    """
    sampling, n_answers = request.sampling, count * n_prompts
    n_biases = len(sampling.logit_bias) * n_answers
    if n_answers > 1 and n_biases > MAX_TOKENS:
        limit = f"at most {MAX_TOKENS:,} tokens for all answers together"
        raise bad_field("logit_bias", f"logit_bias must have {limit}, got {n_biases:,}")
    return [replace(request, sampling=replace(sampling, seed=(sampling.seed + i) % 2**64)) for i in range(count)]


def _read_rules(call: Call) -> TextRules:
    """Return the rules in vLLM's fields: `stop_token_ids`, `bad_words` and the options of `TextRules`."""
    fields, vocabulary = call.fields, call.model.vocabulary
    numbers: dict[str, Any] = {n: number for n in options(TextRules) if (number := fields.integer(n)) is not None}
    token_ids = fields.list("stop_token_ids")
    fields.check_count("stop_token_ids", len(token_ids), MAX_TOKENS, "tokens")
    stop_token_ids = frozenset(check_token(vocabulary, token, "stop_token_ids") for token in token_ids)
    # `read_sampling` forbids words of one token.
    bad_words = tuple(tokens for tokens in read_bad_words(fields, vocabulary) if len(tokens) > 1)
    return TextRules(stop_token_ids=stop_token_ids, bad_words=bad_words, **numbers)


def read_max_tokens(fields: Fields) -> int | None:
    """Return the maximum number of tokens, under any of its names; `None` and -1 mean until the context is full."""
    max_tokens = fields.integer(fields.name("max_completion_tokens", "max_tokens", "n_predict"), -1, minimum=-1)
    return None if max_tokens == -1 else max_tokens


def read_stop(fields: Fields) -> tuple[str, ...]:
    """Return the stop strings."""
    stop = fields.string_list("stop")
    if not all(stop):
        raise bad_field("stop", "stop must not contain an empty string")
    return tuple(stop)


def read_prediction(fields: Fields) -> str:
    """Return OpenAI's predicted output, which is `{"type": "content", "content": ...}`."""
    prediction = fields.object("prediction")
    if prediction is None:
        return ""
    prediction.require_choice("type", ("content",))
    prediction.require("content")
    return "".join(prediction.parts("content", lambda part: part.require_string("text")))


def _read_slot(call: Call) -> int | None:
    """Return the preferred slot; numbers beyond the last slot wrap around."""
    slot = call.fields.integer("id_slot", -1, minimum=-1)
    return None if slot is None or slot == -1 else slot % len(call.model.service.report().slots)


def read_scales(call: Call, name: str = "lora") -> tuple[float, ...] | None:
    """Return the scales of all LoRA adapters in a request; `None` if it sets no scale.

    The field is a list such as `[{"id": 0, "scale": 0.5}]`. Adapters that it omits have scale 0, as in llama-server.
    """
    scales: dict[int, float] = {}
    for item in call.fields.objects(name):
        count = len(call.model.adapters)
        number = item.integer("id")
        if number is None or number >= count:
            raise bad_field(name, f"{name}: unknown adapter {describe_value(number)}; there are {count} adapters")
        scales[number] = 1.0 if (scale := item.number("scale")) is None else scale
    if not scales:
        return None
    return tuple(scales.get(number, 0.0) for number in range(len(call.model.adapters)))


def read_n_answers(fields: Fields, prompts: int = 1) -> int:
    """Return the requested number of answers to each prompt."""
    count = fields.integer(fields.name("n", "n_cmpl"), minimum=1, maximum=MAX_ANSWERS) or 1
    if prompts * count > MAX_ANSWERS:
        raise bad_field("n", f"n must be at most {MAX_ANSWERS} for all prompts together, got {prompts * count}")
    return count


def has_usage_chunk(call: Call) -> bool:
    """Return True if the response is a stream that ends with a chunk of usage."""
    options = call.fields.object("stream_options") if call.streamed else None
    return options is not None and options.boolean("include_usage")
