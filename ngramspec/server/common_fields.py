"""The fields that all APIs for generation share: sampling, number of tokens, and constraints of the text.

Every setting of `Sampling` is a field of the same name, as in llama-server, or of the name in other servers. The fields
of a request override the server's defaults. An invalid value raises an `ApiError` that names its field.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, get_type_hints

from ngramspec.errors import GrammarError
from ngramspec.grammars.json_schema import json_rule
from ngramspec.grammars.lark import MAX_SIZE, Lark, choice_grammar, lark, pattern_grammar
from ngramspec.grammars.worker import worker
from ngramspec.request import Request
from ngramspec.sampling.option import options
from ngramspec.sampling.sampler import TextRules
from ngramspec.sampling.settings import LARGEST_BIAS, NAMED_ONLY, SAMPLERS, Sampling, parse_samplers
from ngramspec.server.call import MAX_CHARACTERS, ApiError, Call, Fields, bad_field, shown
from ngramspec.tokens import Tokenizer, ending_tokens

_OPTIONS = options(Sampling)
_TYPES = get_type_hints(Sampling)
T = TypeVar("T")
_OFF = {f.name: f.default for f in fields(Sampling)}

_OTHER_NAMES = {"repeat_penalty": "repetition_penalty", "mirostat": "mirostat_mode"}
"""Names of settings in vLLM and text-generation-webui."""

MAX_TOKENS = 65_536
"""Maximum number of tokens in `logit_bias` and `stop_token_ids`."""

MOST_ANSWERS = 128  # maximum number of answers of a request, which is OpenAI's limit


def read_sampling(call: Call, schemas: bool = True) -> Sampling:
    """Return the sampling settings of a request; for `schemas` see `read_grammar`."""
    given, server = call.given, call.server
    asked: dict[str, Any] = {}
    for name in _OPTIONS:
        key = given.name(name, _OTHER_NAMES.get(name, name))
        if key in given and name != "grammar":
            asked[name] = _read_setting(name, given, key, call.model.vocabulary)
            allowed = _OPTIONS[name].allowed
            if name != "seed" and allowed is not None and not allowed.holds(asked[name]):
                raise given.wrong(key, allowed.words)
    if (grammar := read_grammar(given, schemas)) is not None or "grammar" in given:
        asked["grammar"] = grammar
    banned = _banned(given, call.model.vocabulary)
    if banned:
        asked["logit_bias"] = (*asked.get("logit_bias", server.sampling.logit_bias), *banned)
    if asked.get("seed", -1) == -1:
        asked["seed"] = random.SystemRandom().randrange(2**32) if server.seed is None else server.seed
    try:
        return Sampling(**_consistent({name: getattr(server.sampling, name) for name in _OFF}, asked))
    except ValueError as error:
        message = str(error)
        raise ApiError(400, message, param=next((name for name in _OFF if message.startswith(name)), None)) from error


def _consistent(defaults: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """Return the effective settings: those of the request, and the defaults that do not contradict them.

    Settings of samplers that do not run have no effect, and neither has a temperature without its sampler. Mirostat
    replaces all samplers, so their settings have no effect with it.
    """
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


def _banned(given: Fields, vocabulary: Tokenizer) -> list[tuple[int, float]]:
    """Return biases against forbidden tokens: `bad_words` of one token, and with `ignore_eos` all ending tokens."""
    banned = {tokens[0] for tokens in _bad_words(given, vocabulary) if len(tokens) == 1}
    if given.flag("ignore_eos"):
        banned |= {*ending_tokens(vocabulary)}
    return [(token, -math.inf) for token in sorted(banned)]


def _bad_words(given: Fields, vocabulary: Tokenizer) -> list[tuple[int, ...]]:
    """Return the tokens of each of `bad_words`, both without and with a space before the word."""
    found = []
    for word in given.texts("bad_words"):
        if not word.strip():
            raise given.refused("bad_words", f"{shown(word)} is not a word")
        found += [tuple(vocabulary.tokenize(text, add_bos=False)) for text in (word, f" {word.lstrip()}")]
    return found


def read_rules(call: Call) -> TextRules:
    """Return the rules in vLLM's fields `min_tokens`, `stop_token_ids` and `bad_words`."""
    given, vocabulary = call.given, call.model.vocabulary
    least = given.whole("min_tokens", 0) or 0
    given.check_count("stop_token_ids", len(given.list("stop_token_ids")), MAX_TOKENS, "tokens")
    ends = frozenset(check_token(vocabulary, token, "stop_token_ids") for token in given.list("stop_token_ids"))
    return TextRules(least, ends, tuple(tokens for tokens in _bad_words(given, vocabulary) if len(tokens) > 1))


def check_token(vocabulary: Tokenizer, value: Any, name: str) -> int:
    """Return a token id; raise an ApiError if the model has no such token."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocabulary.n_vocab:
        most = vocabulary.n_vocab - 1
        raise bad_field(name, f"{name} must contain strings or token ids from 0 to {most}, got {shown(value)}")
    return value


# --------------------------------------------------------------------------- one setting


def _read_setting(name: str, given: Fields, key: str, vocabulary: Tokenizer) -> Any:
    """Return the value of a setting, which is a number unless the setting has a reader."""
    if name == "logit_bias":
        return _biases(given, key, vocabulary)
    if name in _READERS:
        return _READERS[name](given, key)
    return given.number(key) if _TYPES[name] is float else given.whole(key, least=-(2**31))


_SAMPLER_CHARACTERS = 1000  # more than the names of all samplers

_LETTERS = dict(zip("edskypmxti", (*SAMPLERS, *NAMED_ONLY), strict=True))
"""llama.cpp's letters for samplers."""


def _samplers(given: Fields, key: str) -> tuple[str, ...]:
    """Return the names of samplers, which may be given as llama-server's letters, such as "kpt"."""
    names, text = parse_samplers(";".join(given.texts(key, characters=_SAMPLER_CHARACTERS))), given.data[key]
    if isinstance(text, str) and set(text) <= _LETTERS.keys() and not set(names) <= set(_LETTERS.values()):
        return tuple(_LETTERS[letter] for letter in text)
    return names


_READERS: Mapping[str, Callable[[Fields, str], Any]] = {
    # In llama.cpp, negative numbers also mean all tokens.
    "top_k": lambda given, key: max(0, given.whole(key, least=-(2**31)) or 0),
    "seed": lambda given, key: given.whole(key, -1, least=-1, most=2**64 - 1) or 0,
    "samplers": _samplers,
    "dry_sequence_breakers": lambda given, key: tuple(given.texts(key)),
}


def _biases(given: Fields, key: str, vocabulary: Tokenizer) -> tuple[tuple[int, float], ...]:
    """Return the biases in llama-server's pairs [[15043, 1.0], [" never", false]] or OpenAI's object {"15043": 1}.

    The bias of a text applies to each of its tokens; false forbids them.
    """
    raw = given.data[key]
    if isinstance(raw, dict):
        given.check_count(key, len(raw), MAX_TOKENS, "tokens")
        pairs = [[int(name) if name.isdecimal() and len(name) < 12 else name, bias] for name, bias in raw.items()]
    else:
        pairs = given.list(key)
    given.check_count(key, len(pairs), MAX_TOKENS, "tokens")
    strings = sum(len(pair[0]) for pair in pairs if isinstance(pair, list) and pair and isinstance(pair[0], str))
    given.check_count(key, strings, MAX_CHARACTERS, "characters in strings")
    biases = tuple(bias for pair in pairs for bias in _bias(key, pair, vocabulary))
    for token, _ in biases:
        if not 0 <= token < vocabulary.n_vocab:
            raise bad_field(key, f"{key} must contain tokens from 0 to {vocabulary.n_vocab - 1}, got {token}")
    return biases


def _bias(key: str, pair: Any, vocabulary: Tokenizer) -> list[tuple[int, float]]:
    match pair:
        case [bool(), _] | [_, True]:
            pass
        case [int() | str() as token, int() | float() as bias] if abs(bias) <= LARGEST_BIAS:
            tokens = [token] if isinstance(token, int) else vocabulary.tokenize(token, add_bos=False)
            return [(one, -math.inf if bias is False else float(bias)) for one in tokens]
    pairs = f"pairs of a token or string and a bias from {-LARGEST_BIAS:g} to {LARGEST_BIAS:g} (false: never)"
    raise bad_field(key, f"{key} must contain {pairs}, got {shown(pair)}")


# --------------------------------------------------------------------------- how much is generated


def read_max_tokens(given: Fields) -> int | None:
    """Return the maximum number of tokens, under any of its names; `None` and -1 mean until the context is full."""
    most = given.whole(given.name("max_completion_tokens", "max_tokens", "n_predict"), -1, least=-1)
    return None if most == -1 else most


def read_stop(given: Fields) -> tuple[str, ...]:
    """Return the stop strings."""
    stop = given.texts("stop")
    if not all(stop):
        raise bad_field("stop", "stop must not contain an empty string")
    return tuple(stop)


def read_prediction(given: Fields) -> str:
    """Return OpenAI's predicted output, which is `{"type": "content", "content": ...}`."""
    prediction = given.object("prediction")
    if prediction is None:
        return ""
    prediction.needed_choice("type", ("content",))
    prediction.needed("content")
    return "".join(prediction.parts("content", lambda part: part.needed_text("text")))


def read_slot(call: Call) -> int | None:
    """Return the preferred slot; numbers beyond the last slot wrap around."""
    slot = call.given.whole("id_slot", -1, least=-1)
    return None if slot is None or slot == -1 else slot % len(call.model.service.report().slots)


def read_scales(call: Call, name: str = "lora") -> tuple[float, ...] | None:
    """Return the scales of all LoRA adapters in a request; `None` if it sets no scale.

    The field is a list such as `[{"id": 0, "scale": 0.5}]`. Adapters that it omits have scale 0, as in llama-server.
    """
    scales: dict[int, float] = {}
    for item in call.given.objects(name):
        count = len(call.model.adapters)
        number = item.whole("id")
        if number is None or number >= count:
            raise bad_field(name, f"{name}: unknown adapter {shown(number)}; there are {count} adapters")
        scales[number] = 1.0 if (scale := item.number("scale")) is None else scale
    if not scales:
        return None
    return tuple(scales.get(number, 0.0) for number in range(len(call.model.adapters)))


def read_answers(given: Fields, prompts: int = 1) -> int:
    """Return the requested number of answers to each prompt."""
    count = given.whole(given.name("n", "n_cmpl"), least=1, most=MOST_ANSWERS) or 1
    if prompts * count > MOST_ANSWERS:
        raise bad_field("n", f"n must be at most {MOST_ANSWERS} for all prompts together, got {prompts * count}")
    return count


def read_usage_too(call: Call) -> bool:
    """Return True if the response is a stream that ends with a chunk of usage."""
    options = call.given.object("stream_options") if call.streamed else None
    return options is not None and options.flag("include_usage")


def read_shared(call: Call, sampling: Sampling, max_tokens: int | None, stop: tuple[str, ...]) -> Request:
    """Return a request without a prompt, with all fields that have the same name in every API."""
    most, scales = call.model.most(max_tokens), read_scales(call)
    return Request((), most, sampling, stop=stop, slot=read_slot(call), scales=scales, rules=read_rules(call))


def several_seeds(request: Request, count: int) -> list[Request]:
    """Repeat a request `count` times, each time with the next seed."""
    sampling = request.sampling
    return [replace(request, sampling=replace(sampling, seed=(sampling.seed + i) % 2**64)) for i in range(count)]


# --------------------------------------------------------------------------- constraints of the text
# A constraint is never ignored: the status is 400 if the server cannot satisfy it.

_FORMATS = ("text", "json_object", "json_schema")

_UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "adaptive_target": ((-1,), "adaptive-p sampling is not available"),
    "allowed_token_ids": (([],), "use grammar or logit_bias"),
    "grammar_lazy": ((False,), "a grammar applies from the first token on; for tools, use tool_choice"),
    "include_stop_str_in_output": ((False,), "stop strings are never included"),
    "length_penalty": ((0, 1), "beam search is not available"),
    "min_keep": ((0, 1), "samplers keep at least one token"),
    "prompt_logprobs": ((), "prompt tokens have no logprobs; use echo with logprobs in /v1/completions"),
    "reasoning_format": (("auto", "deepseek"), "reasoning is returned as reasoning_content"),
    "truncate_prompt_tokens": ((-1,), "prompts are never truncated"),
    "use_beam_search": ((False,), "beam search is not available"),
}
"""Unsupported fields of vLLM and llama-server that change a text, their values without effect, and an alternative."""

MAX_CHOICES = 100_000
"""Maximum number of strings in `guided_choice`."""

_SCHEMAS = ("json", "json_object")
_GUIDED = ("json", "choice", "grammar", "regex", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True)
class Form:
    """The JSON that an answer must be."""

    schema: Mapping[str, Any]  # {} means any object
    field: str  # name of the field that asks for it
    strict: bool = True  # reject unsupported parts of the schema instead of ignoring them

    def rule(self) -> str:
        """Return the grammar expression of this JSON; raise an ApiError if the schema is not supported."""
        return prepared(self.field, json_rule, self.schema, strict=self.strict)

    def grammar(self) -> Lark:
        """Return the grammar of texts that are this JSON; it raises the same errors as `rule`."""
        return lark(f"start: {self.rule()}")


def prepared(field: str, make: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Return the grammar or expression that a function makes, within the worker's limits.

    Args:
        field: Name of the field, for error messages.
        make: Function that makes the grammar or expression.
        arguments: Arguments of the function.
        named: Keyword arguments of the function.

    Raises:
        ApiError: The grammar cannot be made; the message begins with the name of the field.
    """
    try:
        return worker.call(make, *arguments, **named)
    except (GrammarError, RecursionError) as error:
        raise bad_field(field, f"{field}: {error}") from error


def read_grammar(given: Fields, schemas: bool = True) -> str | None:
    """Return the grammar of a request, except that of a `response_format`; `None` if there is no grammar.

    Args:
        given: Fields of the request.
        schemas: Include vLLM's `guided_json`. Otherwise `read_form` reads it, for answers with reasoning.
    """
    for name, (agreeing, instead) in _UNSUPPORTED.items():
        if name in given and given.data[name] not in agreeing:
            raise given.refused(name, f"is not supported; {instead}")
    grammar = given.text("grammar") or None  # "" means no grammar, as in llama-server
    if "json_schema" in given:
        if "grammar" in given:
            raise bad_field("json_schema", "json_schema and grammar exclude each other")
        grammar = Form(given.needed_object("json_schema").data, "json_schema").grammar()
    for kind, (where, name) in _guided(given).items():
        if kind in _SCHEMAS and not schemas:
            continue
        if grammar is not None:
            raise where.refused(name, "goes with no other constraint of the text")
        grammar = _guided_grammar(where, name, kind)
    return grammar


def _guided(given: Fields) -> dict[str, tuple[Fields, str]]:
    """Return vLLM's constraints by kind, from `guided_json` and so on, or from `structured_outputs`."""
    found: dict[str, tuple[Fields, str]] = {}
    for where, prefix in ((given, "guided_"), (given.object("structured_outputs") or Fields({}), "")):
        for kind in _GUIDED:
            name = prefix + kind
            if name in where and where.data[name] is not False:
                if kind in found:
                    raise where.refused(name, f"cannot be combined with guided_{kind}")
                found[kind] = where, name
    return found


def _guided_grammar(where: Fields, name: str, kind: str) -> str:
    if kind == "grammar":
        return where.needed_name(name)
    if kind == "choice":
        texts = where.texts(name, most=MAX_CHOICES, characters=MAX_SIZE)
        if not texts:
            raise where.wrong(name, "a list of texts")
        return prepared(where.path + name, choice_grammar, texts)
    if kind == "regex":
        return prepared(where.path + name, pattern_grammar, where.needed_name(name))
    if kind in _SCHEMAS:
        return _guided_form(where, name, kind).grammar()
    raise where.refused(name, "is not supported; use a grammar (GBNF) instead")


def _guided_form(where: Fields, name: str, kind: str) -> Form:
    schema = {} if kind == "json_object" else where.data[name]
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise where.refused(name, "is text that is not JSON") from None
    if not isinstance(schema, dict):
        raise where.wrong(name, "an object")
    return Form(schema, where.path + name)


def read_form(given: Fields, own: Form | None = None) -> Form | None:
    """Return the JSON that the answer must be, from an API's own field or one of vLLM's; `None` means any text."""
    for kind, (where, name) in _guided(given).items():
        if kind in _SCHEMAS:
            if own is not None:
                raise where.refused(name, "goes with no other constraint of the text")
            own = _guided_form(where, name, kind)
    return own


def read_format(given: Fields) -> Form | None:
    """Return the JSON that the answer must be, from `response_format` or one of vLLM's fields."""
    asked = given.object("response_format")
    kind = "text" if asked is None else asked.choice("type", _FORMATS, "text")
    if asked is None or kind == "text":
        return read_form(given)
    wrapped = asked.object("json_schema") if kind == "json_schema" else None
    if kind == "json_schema" and wrapped is None and "schema" not in asked:
        raise bad_field("response_format.json_schema", "response_format.json_schema is missing")
    form = wrapped or asked
    schema = form.object("schema")
    return read_form(given, Form({} if schema is None else schema.data, "response_format", form.flag("strict")))
