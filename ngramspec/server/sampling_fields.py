"""The fields with sampling settings: `read_sampling` returns the `Sampling` of a request in any API.

Every setting of `Sampling` is a field with the same name, as in llama-server, or with the name in other servers. So a
field that is added to `Sampling` is an HTTP field without further code. The fields of a request override the server's
defaults:

    server's defaults      temperature 0.8, top_k 40
    request                {"temperature": 0, "bad_words": ["foo"], "repetition_penalty": 1.1}
    Sampling               temperature 0.0, top_k 40, logit_bias ((id of "foo", -inf), ...), repeat_penalty 1.1

A setting is a number, or has a reader in `_READERS`. An invalid value raises an `ApiError` that names its field.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import fields as dataclass_fields
from typing import Any, get_type_hints

from ngramspec.sampling.settings import LARGEST_BIAS, NAMED_ONLY, SAMPLERS, Sampling, options, parse_samplers
from ngramspec.server.call import Call
from ngramspec.server.constraint_fields import read_grammar
from ngramspec.server.errors import ApiError, bad_field
from ngramspec.server.fields import MAX_CHARACTERS, Fields, describe_value
from ngramspec.tokens import Tokenizer, ending_tokens

_OPTIONS = options(Sampling)
_TYPES = get_type_hints(Sampling)
_OFF = {f.name: f.default for f in dataclass_fields(Sampling)}

_OTHER_NAMES = {"repeat_penalty": "repetition_penalty", "mirostat": "mirostat_mode"}
"""Names of settings in vLLM and text-generation-webui."""

MAX_TOKENS = 65_536
"""Maximum number of tokens in `logit_bias` and `stop_token_ids`."""


def read_sampling(call: Call, schemas: bool = True) -> Sampling:
    """Return the sampling settings of a request; for `schemas` see `read_grammar`."""
    fields, server = call.fields, call.server
    settings: dict[str, Any] = {}
    for name in _OPTIONS:
        key = fields.name(name, _OTHER_NAMES.get(name, name))
        if key in fields and name != "grammar":
            settings[name] = _read_setting(name, fields, key, call.model.vocabulary)
            values = _OPTIONS[name].allowed
            if name != "seed" and values is not None and not values.accepts(settings[name]):
                raise fields.value_error(key, values.description)
    if (grammar := read_grammar(fields, schemas)) is not None or "grammar" in fields:
        settings["grammar"] = grammar
    if bans := _read_bans(fields, call.model.vocabulary):
        settings["logit_bias"] = (*settings.get("logit_bias", server.sampling.logit_bias), *bans)
    if settings.get("seed", -1) == -1:
        settings["seed"] = random.SystemRandom().randrange(2**32) if server.seed is None else server.seed
    try:
        return Sampling(**_merge({name: getattr(server.sampling, name) for name in _OFF}, settings))
    except ValueError as error:
        message = str(error)
        raise ApiError(400, message, param=next((name for name in _OFF if message.startswith(name)), None)) from error


def _merge(defaults: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the effective settings: those of the request, and the defaults that do not contradict them.

    Settings of samplers that do not run have no effect, and neither has a temperature without its sampler. Mirostat
    replaces all samplers, so their settings have no effect with it.
    """
    result = defaults | settings
    off = set[str]()
    if result["mirostat"]:
        off |= {"samplers"} | {name for name, option in _OPTIONS.items() if option.sampler is not None}
    else:
        off |= {name for name, option in _OPTIONS.items() if option.sampler not in (None, *result["samplers"])}
        if "temperature" not in result["samplers"]:
            result["temperature"] = 1.0
    if result["temperature"] == 0:
        off |= {name for name, option in _OPTIONS.items() if option.needs_sampling and name not in settings}
    return result | {name: _OFF[name] for name in off}


def _read_bans(fields: Fields, vocabulary: Tokenizer) -> list[tuple[int, float]]:
    """Return biases against forbidden tokens: `bad_words` of one token, and with `ignore_eos` all ending tokens."""
    bans = {tokens[0] for tokens in read_bad_words(fields, vocabulary) if len(tokens) == 1}
    if fields.boolean("ignore_eos"):
        bans |= {*ending_tokens(vocabulary)}
    return [(token, -math.inf) for token in sorted(bans)]


def read_bad_words(fields: Fields, vocabulary: Tokenizer) -> list[tuple[int, ...]]:
    """Return the tokens of each of `bad_words`, both without and with a space before the word."""
    words = []
    for word in fields.string_list("bad_words"):
        if not word.strip():
            raise fields.field_error("bad_words", f"{describe_value(word)} is not a word")
        words += [tuple(vocabulary.tokenize(text, special=True, add_bos=False)) for text in (word, f" {word.lstrip()}")]
    return words


def check_token(vocabulary: Tokenizer, value: Any, name: str) -> int:
    """Return a token id; raise an ApiError if the model has no such token."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocabulary.n_vocab:
        ids = f"token ids from 0 to {vocabulary.n_vocab - 1}"
        raise bad_field(name, f"{name} must contain strings or {ids}, got {describe_value(value)}")
    return value


# --------------------------------------------------------------------------- one setting


def _read_setting(name: str, fields: Fields, key: str, vocabulary: Tokenizer) -> Any:
    """Return the value of a setting, which is a number unless the setting has a reader."""
    if name == "logit_bias":
        return _read_biases(fields, key, vocabulary)
    if name in _READERS:
        return _READERS[name](fields, key)
    return fields.number(key) if _TYPES[name] is float else fields.integer(key, minimum=-(2**31))


_SAMPLER_CHARACTERS = 1000  # more than the names of all samplers

_LETTERS = dict(zip("edskypmxti", (*SAMPLERS, *NAMED_ONLY), strict=True))
"""llama.cpp's letters for samplers."""


def _read_samplers(fields: Fields, key: str) -> tuple[str, ...]:
    """Return the names of samplers, which may be given as llama-server's letters, such as "kpt"."""
    names = parse_samplers(";".join(fields.string_list(key, max_characters=_SAMPLER_CHARACTERS)))
    text = fields.data[key]
    if isinstance(text, str) and set(text) <= _LETTERS.keys() and not set(names) <= set(_LETTERS.values()):
        return tuple(_LETTERS[letter] for letter in text)
    return names


_READERS: Mapping[str, Callable[[Fields, str], Any]] = {
    # In llama.cpp, negative numbers also mean all tokens.
    "top_k": lambda fields, key: max(0, fields.integer(key, minimum=-(2**31)) or 0),
    "seed": lambda fields, key: fields.integer(key, -1, minimum=-1, maximum=2**64 - 1) or 0,
    "samplers": _read_samplers,
    "dry_sequence_breakers": lambda fields, key: tuple(fields.string_list(key)),
}


def _read_biases(fields: Fields, key: str, vocabulary: Tokenizer) -> tuple[tuple[int, float], ...]:
    """Return the biases in llama-server's pairs [[15043, 1.0], [" never", false]] or OpenAI's object {"15043": 1}.

    The bias of a text applies to each of its tokens; false forbids them.
    """
    raw = fields.data[key]
    if isinstance(raw, dict):
        fields.check_count(key, len(raw), MAX_TOKENS, "tokens")
        pairs = [[int(name) if name.isdecimal() and len(name) < 12 else name, bias] for name, bias in raw.items()]
    else:
        pairs = fields.list(key)
    fields.check_count(key, len(pairs), MAX_TOKENS, "tokens")
    strings = sum(len(pair[0]) for pair in pairs if isinstance(pair, list) and pair and isinstance(pair[0], str))
    fields.check_count(key, strings, MAX_CHARACTERS, "characters in strings")
    biases = tuple(bias for pair in pairs for bias in _parse_bias(key, pair, vocabulary))
    for token, _ in biases:
        if not 0 <= token < vocabulary.n_vocab:
            raise bad_field(key, f"{key} must contain tokens from 0 to {vocabulary.n_vocab - 1}, got {token}")
    return biases


def _parse_bias(key: str, pair: Any, vocabulary: Tokenizer) -> list[tuple[int, float]]:
    match pair:
        case [bool(), _] | [_, True]:
            pass
        case [int() | str() as token, int() | float() as bias] if abs(bias) <= LARGEST_BIAS:
            tokens = [token] if isinstance(token, int) else vocabulary.tokenize(token, special=True, add_bos=False)
            return [(id, -math.inf if bias is False else float(bias)) for id in tokens]
    pairs = f"pairs of a token or string and a bias from {-LARGEST_BIAS:g} to {LARGEST_BIAS:g} (false: never)"
    raise bad_field(key, f"{key} must contain {pairs}, got {describe_value(pair)}")
