"""The fields that all APIs share which generate text: how tokens are chosen, how many, and prompts.

Every setting of `Sampling` is a field of its own name, which is llama-server's too, or of other servers' names; a
request's take the place of the server's defaults. A value that cannot be is an `ApiError` that names its field.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, get_type_hints

from ngramspec.batching.request import Request
from ngramspec.sampling.option import options
from ngramspec.sampling.sampler import TextRules
from ngramspec.sampling.settings import LARGEST_BIAS, NAMED_ONLY, SAMPLERS, Sampling, parse_samplers
from ngramspec.server.call import ApiError, Call, Fields, ServedModel, bad_field, shown
from ngramspec.server.constraints import read_grammar
from ngramspec.tokens import Tokenizer, ending_tokens

_OPTIONS = options(Sampling)
_TYPES = get_type_hints(Sampling)
_OFF = {f.name: f.default for f in fields(Sampling)}

_OTHER_NAMES = {"repeat_penalty": "repetition_penalty", "mirostat": "mirostat_mode"}  # vLLM's, text-generation-webui's

MOST_ANSWERS = 128  # texts that one request may ask for: OpenAI's limit


def read_sampling(call: Call, schemas: bool = True) -> Sampling:
    """The sampling that a request asks for; `schemas` as in `read_grammar`."""
    check_adapters(call)
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
            raise given.refused("bad_words", f"{shown(word)} is no word")
        found += [tuple(vocabulary.tokenize(text, add_bos=False)) for text in (word, f" {word.lstrip()}")]
    return found


def read_rules(call: Call) -> TextRules:
    """`min_tokens`, `stop_token_ids` and `bad_words`, as vLLM has them."""
    given, vocabulary = call.given, call.model.vocabulary
    least = given.whole("min_tokens", 0) or 0
    ends = frozenset(check_token(vocabulary, token, "stop_token_ids") for token in given.list("stop_token_ids"))
    return TextRules(least, ends, tuple(tokens for tokens in _bad_words(given, vocabulary) if len(tokens) > 1))


# --------------------------------------------------------------------------- one setting


def _read_setting(name: str, given: Fields, key: str, vocabulary: Tokenizer) -> Any:
    """The value of a setting; without a reader of its own it is a number."""
    if name == "logit_bias":
        return _biases(given, key, vocabulary)
    if name in _READERS:
        return _READERS[name](given, key)
    return given.number(key) if _TYPES[name] is float else given.whole(key, least=-(2**31))


_LETTERS = dict(zip("edskypmxti", (*SAMPLERS, *NAMED_ONLY), strict=True))
"""llama.cpp's letters of samplers."""


def _samplers(given: Fields, key: str) -> tuple[str, ...]:
    """Names of samplers, or llama-server's text with a letter for each: "kpt"."""
    names, text = parse_samplers(";".join(given.texts(key))), given.data[key]
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
        pairs = [[int(name) if name.isdecimal() and len(name) < 12 else name, bias] for name, bias in raw.items()]
    else:
        pairs = given.list(key)
    biases = tuple(bias for pair in pairs for bias in _bias(key, pair, vocabulary))
    for token, _ in biases:
        if not 0 <= token < vocabulary.n_vocab:
            raise bad_field(key, f"{key} names token {token}, but there are 0 to {vocabulary.n_vocab - 1}")
    return biases


def _bias(key: str, pair: Any, vocabulary: Tokenizer) -> list[tuple[int, float]]:
    match pair:
        case [bool(), _] | [_, True]:
            pass
        case [int() | str() as token, int() | float() as bias] if abs(bias) <= LARGEST_BIAS:
            tokens = [token] if isinstance(token, int) else vocabulary.tokenize(token, add_bos=False)
            return [(one, -math.inf if bias is False else float(bias)) for one in tokens]
    pairs = f"pairs of a token or text and a bias of at most {LARGEST_BIAS:g} either way (false: never)"
    raise bad_field(key, f"{key} holds {shown(pair)}, but must hold {pairs}")


# --------------------------------------------------------------------------- how much is generated


def read_max_tokens(given: Fields) -> int | None:
    """Most tokens to emit, under any of its names; None: as many as the context holds, which -1 means too."""
    most = given.whole(given.name("max_completion_tokens", "max_tokens", "n_predict"), -1, least=-1)
    return None if most == -1 else most


def read_stop(given: Fields) -> tuple[str, ...]:
    """The strings that end a text."""
    stop = given.texts("stop")
    if not all(stop):
        raise bad_field("stop", "stop holds an empty text, but must hold none")
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


ADAPTERS_STAY = "LoRA adapters and their scales are given when the server is started, and cannot be changed"


def check_adapters(call: Call) -> None:
    """Refuse a request that wants other scales of LoRA adapters (`lora`: [{"id": 0, "scale": 0.5}]) than there are."""
    wanted = {one.whole("id"): one.number("scale") for one in call.given.objects("lora")}
    if strange := wanted.keys() - range(len(call.model.adapters)):
        raise bad_field(
            "lora", f"lora names adapter {min(map(str, strange))}, but there are {len(call.model.adapters)}"
        )
    for number, (_, scale) in enumerate(call.model.adapters):
        if wanted and wanted.get(number, 0.0) != scale:
            raise ApiError(501, ADAPTERS_STAY)


def read_answers(given: Fields, prompts: int = 1) -> int:
    """How many answers to each prompt are asked for."""
    count = given.whole(given.name("n", "n_cmpl"), least=1, most=MOST_ANSWERS) or 1
    if prompts * count > MOST_ANSWERS:
        raise bad_field("n", f"n asks for {prompts * count} texts, but at most {MOST_ANSWERS} are given")
    return count


def read_usage_too(call: Call) -> bool:
    """Whether the answer is a stream that ends in a chunk with the usage."""
    options = call.given.object("stream_options") if call.streamed else None
    return options is not None and options.flag("include_usage")


def read_requests(
    call: Call, prompts: Sequence[Sequence[int]], sampling: Sampling, logprobs: int | None, **more: Any
) -> list[Request]:
    """Requests that continue each prompt as often as answers are wanted; `more`: of what `Request` has."""
    given, count = call.given, read_answers(call.given, len(prompts))
    most, slot, rules = call.model.most(read_max_tokens(given)), read_slot(call), read_rules(call)
    asked = Request((), most, sampling, read_stop(given), logprobs, slot=slot, rules=rules, **more)
    return [one for prompt in prompts for one in several_seeds(replace(asked, prompt=prompt), count)]


def several_seeds(request: Request, count: int) -> list[Request]:
    """One request so many times, each with the seed after the last one's."""
    sampling = request.sampling
    return [replace(request, sampling=replace(sampling, seed=(sampling.seed + i) % 2**64)) for i in range(count)]


# --------------------------------------------------------------------------- prompts


def read_prompts(model: ServedModel, given: Fields) -> list[list[int]]:
    """The token ids of each prompt. A text spells out control tokens too: clients put them there."""
    value = given.data.get("prompt")
    if value is None:
        raise bad_field("prompt", "prompt is missing")
    prompts = [read_tokens(model, one, "prompt") for one in (value if several(value) else [value])]
    if not prompts or not all(prompts):
        raise bad_field("prompt", "prompt is empty: there is nothing to continue")
    if len(prompts) > MOST_ANSWERS:
        raise bad_field("prompt", f"prompt holds {len(prompts)} prompts, but must hold at most {MOST_ANSWERS}")
    return prompts


def several(value: Any) -> bool:
    """Whether the value of `prompt` is a list of prompts, not one of tokens and texts."""
    if not isinstance(value, list):
        return False
    return any(isinstance(item, list) for item in value) or all(isinstance(item, str) for item in value)


def read_tokens(model: ServedModel, value: Any, name: str, n_ctx: int | None = None) -> list[int]:
    """The token ids of a text, or of a list of token ids and texts, for a context of `n_ctx`; None: a request's."""
    vocabulary = model.vocabulary
    if isinstance(value, dict) and value.keys() == {"prompt_string"}:  # llama-server's form of a text with images
        value = value["prompt_string"]
    if isinstance(value, str):
        model.check_size(len(value), n_ctx)
        return list(vocabulary.tokenize(value, special=True))
    if not isinstance(value, list):
        raise bad_field(name, f"{name} holds {shown(value)}, but must hold text, token ids or lists of them")
    tokens: list[int] = []
    for i, item in enumerate(value):
        if isinstance(item, str):
            model.check_size(len(item), n_ctx)
            tokens += vocabulary.tokenize(item, special=True, add_bos=i == 0)
        else:
            tokens.append(check_token(vocabulary, item, name))
    return tokens


def check_token(vocabulary: Tokenizer, value: Any, name: str) -> int:
    """A token id of this model."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocabulary.n_vocab:
        most = vocabulary.n_vocab - 1
        raise bad_field(name, f"{name} holds {shown(value)}, but must hold text or token ids from 0 to {most}")
    return value
