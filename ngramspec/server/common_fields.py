"""The fields that all APIs share which generate text: how tokens are chosen, how many, what the text must be like.

Every setting of `Sampling` is a field of the same name, which is llama-server's too, or of other servers' names; a
request's take the place of the server's defaults. A value that cannot be is an `ApiError` that names its field.
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

_OTHER_NAMES = {"repeat_penalty": "repetition_penalty", "mirostat": "mirostat_mode"}  # vLLM's, text-generation-webui's

MAX_TOKENS = 65_536
"""Maximum number of tokens in `logit_bias` and `stop_token_ids`."""

MOST_ANSWERS = 128  # texts that one request may ask for: OpenAI's limit


def read_sampling(call: Call, schemas: bool = True) -> Sampling:
    """The sampling that a request asks for; `schemas` as in `read_grammar`."""
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
    """The settings that have a say: what was asked for, and the defaults that do not contradict it.

    Settings of samplers that do not run have none, nor has a temperature without its sampler; nor have those of any
    sampler under mirostat, which takes their place.
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
    """Tokens that may not come at all, as biases: `bad_words` of one token, and with `ignore_eos` those that end."""
    banned = {tokens[0] for tokens in _bad_words(given, vocabulary) if len(tokens) == 1}
    if given.flag("ignore_eos"):
        banned |= {*ending_tokens(vocabulary)}
    return [(token, -math.inf) for token in sorted(banned)]


def _bad_words(given: Fields, vocabulary: Tokenizer) -> list[tuple[int, ...]]:
    """The tokens of each of `bad_words`, as it begins a text and with a space before it."""
    found = []
    for word in given.texts("bad_words"):
        if not word.strip():
            raise given.refused("bad_words", f"{shown(word)} is not a word")
        found += [tuple(vocabulary.tokenize(text, add_bos=False)) for text in (word, f" {word.lstrip()}")]
    return found


def read_rules(call: Call) -> TextRules:
    """`min_tokens`, `stop_token_ids` and `bad_words`, as vLLM has them."""
    given, vocabulary = call.given, call.model.vocabulary
    least = given.whole("min_tokens", 0) or 0
    given.check_count("stop_token_ids", len(given.list("stop_token_ids")), MAX_TOKENS, "tokens")
    ends = frozenset(check_token(vocabulary, token, "stop_token_ids") for token in given.list("stop_token_ids"))
    return TextRules(least, ends, tuple(tokens for tokens in _bad_words(given, vocabulary) if len(tokens) > 1))


def check_token(vocabulary: Tokenizer, value: Any, name: str) -> int:
    """A token id of this model."""
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
"""llama.cpp's letters of samplers."""


def _samplers(given: Fields, key: str) -> tuple[str, ...]:
    """Names of samplers, or llama-server's text with a letter for each: "kpt"."""
    names, text = parse_samplers(";".join(given.texts(key, characters=_SAMPLER_CHARACTERS))), given.data[key]
    if isinstance(text, str) and set(text) <= _LETTERS.keys() and not set(names) <= set(_LETTERS.values()):
        return tuple(_LETTERS[letter] for letter in text)
    return names


_READERS: Mapping[str, Callable[[Fields, str], Any]] = {
    "top_k": lambda given, key: max(0, given.whole(key, least=-(2**31)) or 0),  # llama.cpp's other way to say "all"
    "seed": lambda given, key: given.whole(key, -1, least=-1, most=2**64 - 1) or 0,
    "samplers": _samplers,
    "dry_sequence_breakers": lambda given, key: tuple(given.texts(key)),
}


def _biases(given: Fields, key: str, vocabulary: Tokenizer) -> tuple[tuple[int, float], ...]:
    """llama-server's pairs [[15043, 1.0], [" never", false]], or OpenAI's object {"15043": 1}.

    A text stands for each of its tokens, and false for "never".
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
    """The strings that end a text."""
    stop = given.texts("stop")
    if not all(stop):
        raise bad_field("stop", "stop must not contain an empty string")
    return tuple(stop)


def read_prediction(given: Fields) -> str:
    """OpenAI's predicted output: `{"type": "content", "content": ...}`."""
    prediction = given.object("prediction")
    if prediction is None:
        return ""
    prediction.needed_choice("type", ("content",))
    prediction.needed("content")
    return "".join(prediction.parts("content", lambda part: part.needed_text("text")))


def read_slot(call: Call) -> int | None:
    """The slot to prefer; any number means one of them."""
    slot = call.given.whole("id_slot", -1, least=-1)
    return None if slot is None or slot == -1 else slot % len(call.model.service.report().slots)


def read_scales(call: Call, name: str = "lora") -> tuple[float, ...] | None:
    """Return the scales of all LoRA adapters that a request asks for; None if it asks for none.

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
    """How many answers to each prompt are asked for."""
    count = given.whole(given.name("n", "n_cmpl"), least=1, most=MOST_ANSWERS) or 1
    if prompts * count > MOST_ANSWERS:
        raise bad_field("n", f"n must be at most {MOST_ANSWERS} for all prompts together, got {prompts * count}")
    return count


def read_usage_too(call: Call) -> bool:
    """Whether the answer is a stream that ends in a chunk with the usage."""
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


# --------------------------------------------------------------------------- what a text must be like
# None is dropped in silence: what cannot be kept is a 400.

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
"""vLLM's and llama-server's fields that would change a text, their values that do not, and what to do instead."""

MAX_CHOICES = 100_000
"""Maximum number of strings in `guided_choice`."""

_SCHEMAS = ("json", "json_object")
_GUIDED = ("json", "choice", "grammar", "regex", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True)
class Form:
    """The JSON that an answer must be."""

    schema: Mapping[str, Any]  # {} means any object
    field: str  # name of the field that asks for it
    strict: bool = True  # refuse what cannot be kept of the schema; otherwise leave it out

    def rule(self) -> str:
        """Return the expression of this JSON; an ApiError that names the field if it cannot be kept."""
        return prepared(self.field, json_rule, self.schema, strict=self.strict)

    def grammar(self) -> Lark:
        """Return the grammar of texts that are this JSON; raises as `rule` does."""
        return lark(f"start: {self.rule()}")


def prepared(field: str, make: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Return the grammar or expression that a function makes, in the worker's process and time.

    Raises:
        ApiError: it cannot be made; the message begins with the name of the field.
    """
    try:
        return worker.call(make, *arguments, **named)
    except (GrammarError, RecursionError) as error:
        raise bad_field(field, f"{field}: {error}") from error


def read_grammar(given: Fields, schemas: bool = True) -> str | None:
    """Return the grammar that a request asks for, except for a `response_format`; None if it asks for none.

    Args:
        given: Fields of the request.
        schemas: Take vLLM's `guided_json` into account. Otherwise `read_form` reads it, for answers with thoughts.
    """
    for name, (agreeing, instead) in _UNSUPPORTED.items():
        if name in given and given.data[name] not in agreeing:
            raise given.refused(name, f"is not supported; {instead}")
    grammar = given.text("grammar") or None  # llama-server's way to say "none" is ""
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
    """vLLM's constraints by kind: `guided_json` and such, or the same within `structured_outputs`."""
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
    """Return the JSON that the answer must be, by an API's own field or one of vLLM's; None for any text."""
    for kind, (where, name) in _guided(given).items():
        if kind in _SCHEMAS:
            if own is not None:
                raise where.refused(name, "goes with no other constraint of the text")
            own = _guided_form(where, name, kind)
    return own


def read_format(given: Fields) -> Form | None:
    """Return what `response_format` asks for, or one of vLLM's fields, as `read_form` does."""
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
