"""How tokens are chosen, out of the fields of a request: every setting of `Sampling` under its own name, which is
llama-server's too, and under other servers' names.

A request's settings take the place of the server's defaults. `samplers` says which samplers run: settings of others,
and a temperature without its sampler, have no say; nor have those of any sampler under mirostat, which takes their
place.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from ngramspec.errors import GrammarError
from ngramspec.llama.json_schema import schema_grammar
from ngramspec.sampling.option import options
from ngramspec.sampling.settings import LARGEST_BIAS, Sampling, parse_samplers
from ngramspec.server.errors import ApiError, bad_field
from ngramspec.server.fields import Fields, shown
from ngramspec.tokens import Tokenizer

_OPTIONS = options(Sampling)
_TYPES = get_type_hints(Sampling)
_OFF = {f.name: f.default for f in fields(Sampling)}

_OTHER_NAMES = {"repeat_penalty": "repetition_penalty", "mirostat": "mirostat_mode"}
"""What vLLM and text-generation-webui call them."""

_FORMATS = ("text", "json_object", "json_schema")

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that says nothing gets.

    Attributes:
        sampling: the settings.
        seed: the seed; None: a random one for each request.
    """

    sampling: Sampling
    seed: int | None = None


def read_sampling(given: Fields, defaults: SamplingDefaults, vocabulary: Tokenizer) -> Sampling:
    """The sampling that a request asks for, its grammar included, but for a `response_format`.

    Raises:
        ApiError: a value that cannot be, or a contradiction.
    """
    asked: dict[str, Any] = {}
    for name in _OPTIONS:
        key = given.name(name, _OTHER_NAMES.get(name, name))
        if key in given:
            asked[name] = _reader(name)(given, key, vocabulary)
            allowed = _OPTIONS[name].allowed
            if name != "seed" and allowed is not None and not allowed.holds(asked[name]):
                raise given.wrong(key, allowed.words)
    if "json_schema" in given:
        if "grammar" in asked:
            raise bad_field("json_schema", "json_schema and grammar exclude each other")
        asked["grammar"] = grammar_of(given.data["json_schema"], "json_schema")
    if given.flag("ignore_eos"):
        ends = tuple((token, -math.inf) for token in range(vocabulary.n_vocab) if vocabulary.is_eog(token))
        asked["logit_bias"] = (*asked.get("logit_bias", defaults.sampling.logit_bias), *ends)
    for token, _ in asked.get("logit_bias", ()):
        if not 0 <= token < vocabulary.n_vocab:
            raise bad_field(
                "logit_bias", f"logit_bias names token {token}, but there are 0 to {vocabulary.n_vocab - 1}"
            )
    if asked.get("seed", -1) == -1:
        asked["seed"] = random_seed() if defaults.seed is None else defaults.seed
    try:
        return Sampling(**_consistent({name: getattr(defaults.sampling, name) for name in _OFF}, asked))
    except ValueError as error:
        message = str(error)
        raise ApiError(400, message, param=next((name for name in _OFF if message.startswith(name)), None)) from error


def random_seed() -> int:
    return random.SystemRandom().randrange(2**32)


def _consistent(defaults: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """The settings that have a say: what was asked for, and the defaults that do not contradict it."""
    chosen = defaults | asked
    off = set[str]()
    if chosen["mirostat"]:
        off |= {"samplers"} | {name for name, known in _OPTIONS.items() if known.sampler is not None}
    else:
        off |= {name for name, known in _OPTIONS.items() if known.sampler not in (None, *chosen["samplers"])}
        if "temperature" not in chosen["samplers"]:
            chosen["temperature"] = 1.0
    if chosen["temperature"] == 0:
        off |= {name for name, known in _OPTIONS.items() if known.draws and name not in asked}
    return chosen | {name: _OFF[name] for name in off}


def read_format(given: Fields) -> Mapping[str, Any] | None:
    """The JSON schema of `response_format`; None: free text."""
    asked = given.object("response_format")
    if asked is None:
        return None
    kind = asked.choice("type", _FORMATS, "text")
    if kind == "text":
        return None
    wrapped = asked.object("json_schema") if kind == "json_schema" else None
    if kind == "json_schema" and wrapped is None and "schema" not in asked:
        raise bad_field("response_format.json_schema", "response_format.json_schema is missing")
    schema = (wrapped or asked).object("schema")
    return ANY_OBJECT if schema is None or not schema.data else schema.data


def grammar_of(schema: Any, name: str) -> str:
    """The grammar of a JSON schema; `name`: the field that holds it."""
    if not isinstance(schema, dict):
        raise bad_field(name, f"{name} is {shown(schema)}, but must be an object")
    try:
        return schema_grammar(json.dumps(schema))
    except (GrammarError, RecursionError) as error:
        raise bad_field(name, f"{name}: {error}") from error


# --------------------------------------------------------------------------- one setting

_Reader = Callable[[Fields, str, Tokenizer], Any]


def _reader(name: str) -> _Reader:
    """How a setting is read: as the number that it is, if nothing else is known about it."""
    if name in _READERS:
        return _READERS[name]
    if _TYPES[name] is float:
        return lambda given, key, _: given.number(key)
    return lambda given, key, _: given.whole(key, least=-(2**31))


def _top_k(given: Fields, key: str, _: Tokenizer) -> int:
    return max(0, given.whole(key, least=-(2**31)) or 0)  # llama.cpp's other way to say "all"


def _seed(given: Fields, key: str, _: Tokenizer) -> int:
    return given.whole(key, -1, least=-1, most=2**64 - 1) or 0


def _samplers(given: Fields, key: str, _: Tokenizer) -> tuple[str, ...]:
    return parse_samplers(";".join(given.texts(key)))


def _breakers(given: Fields, key: str, _: Tokenizer) -> tuple[str, ...]:
    return tuple(given.texts(key))


def _grammar(given: Fields, key: str, _: Tokenizer) -> str | None:
    return given.text(key) or None  # llama-server's way to say "none" is ""


def _biases(given: Fields, key: str, vocabulary: Tokenizer) -> tuple[tuple[int, float], ...]:
    """llama-server's pairs [[15043, 1.0], [" never", false]], or OpenAI's object {"15043": 1}.

    A text stands for each of its tokens, and false for "never".
    """
    raw = given.data[key]
    if isinstance(raw, dict):
        pairs = [[int(name) if name.isdecimal() and len(name) < 12 else name, bias] for name, bias in raw.items()]
    else:
        pairs = given.list(key)
    return tuple(bias for pair in pairs for bias in _bias(key, pair, vocabulary))


def _bias(key: str, pair: Any, vocabulary: Tokenizer) -> list[tuple[int, float]]:
    match pair:
        case [bool(), _] | [_, True]:
            pass
        case [int() | str() as token, int() | float() as bias] if abs(bias) <= LARGEST_BIAS:
            tokens = [token] if isinstance(token, int) else vocabulary.tokenize(token, add_bos=False)
            return [(one, -math.inf if bias is False else float(bias)) for one in tokens]
    raise bad_field(key, f"{key} holds {shown(pair)}, but must hold pairs of a token or text and a bias (false: never)")


_READERS: Mapping[str, _Reader] = {
    "top_k": _top_k,
    "seed": _seed,
    "samplers": _samplers,
    "dry_sequence_breakers": _breakers,
    "grammar": _grammar,
    "logit_bias": _biases,
}
