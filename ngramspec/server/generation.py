"""`Generation`: the fields of a request to the engine that all APIs share; `make_request`, and readers of prompts.

Every setting of `Sampling`, and every number of `TextRules`, is a field with the same name, as in llama-server, or with
the name in other servers. So a field that is added to these is an HTTP field without further code. The fields of a
request override the server's defaults:

    server's defaults      temperature 0.8, top_k 40
    request                {"temperature": 0, "bad_words": ["foo"], "repetition_penalty": 1.1}
    Sampling               temperature 0.0, top_k 40, logit_bias ((id of "foo", -inf), ...), repeat_penalty 1.1

Every constraint of the text becomes a grammar for llguidance. None is ignored: the status is 400 if the server cannot
satisfy it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from itertools import product
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    create_model,
    model_validator,
)

from ngramspec.data import GrammarError, ModelError
from ngramspec.fill_in import fill_in
from ngramspec.grammars.gbnf import worker
from ngramspec.grammars.json_schema import json_rule
from ngramspec.grammars.lark import MAX_SIZE, choice_grammar, lark, pattern_grammar
from ngramspec.request import Request
from ngramspec.sampling.settings import (
    LARGEST_BIAS,
    NAMED_ONLY,
    SAMPLERS,
    Option,
    ReasoningBudget,
    Sampling,
    TextRules,
    options,
    parse_samplers,
)
from ngramspec.server.answer import Answer
from ngramspec.server.body import (
    Body,
    FieldError,
    Items,
    Name,
    Prompts,
    Tokens,
    check_count,
    check_json,
    describe_value,
    refuse,
    texts,
    whole,
)
from ngramspec.server.json_text import ApiError, context_length_error
from ngramspec.server.limits import MAX_ALTERNATIVES, MAX_ANSWERS, MAX_CHARACTERS, MAX_CHOICES, MAX_TOKENS
from ngramspec.server.state import Call, ServedModel
from ngramspec.tokens import Tokenizer, ending_tokens

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint of the text, which applies from the first token on, but JSON in a chat only after reasoning."""

    field: str  # name of the field that asks for it
    value: Any  # of JSON, a schema; {} means any object
    kind: str = "json"  # "json_schema" is JSON that also in a chat applies from the first token on
    strict: bool = True  # reject unsupported parts of a schema instead of ignoring them

    def make_rule(self) -> str:
        """Return the grammar expression of JSON; raise an ApiError if the schema is not supported."""
        return run_in_worker(self.field, json_rule, self.value, strict=self.strict)

    def make_grammar(self) -> str:
        """Return the grammar; raise an ApiError if it is not supported."""
        match self.kind:
            case "json" | "json_schema":
                return lark(f"start: {self.make_rule()}")
            case "choice":
                return run_in_worker(self.field, choice_grammar, self.value)
            case "regex":
                return run_in_worker(self.field, pattern_grammar, self.value)
        return str(self.value)


def run_in_worker(field: str, make: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    """Return the grammar or expression that a function makes, within the worker's limits; raise errors as ApiErrors."""
    try:
        return worker.call(make, *arguments, **keywords)
    except (GrammarError, RecursionError) as error:
        raise ApiError(400, f"{field}: {error}", param=field) from error


def _read_schema(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        check_json(value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise FieldError("is text that is not JSON") from None
    if not isinstance(value, dict):
        raise FieldError(f"must be an object, got {describe_value(value)}")
    return value


class _Guided(Body):
    """vLLM's constraints."""

    guided_json: Annotated[dict[str, Any] | None, PlainValidator(_read_schema)] = None
    guided_choice: Annotated[tuple[str, ...], texts(MAX_CHOICES, MAX_SIZE), Field(min_length=1)] = ()
    guided_grammar: Name = ""
    guided_regex: Name = ""
    guided_json_object: bool = False
    guided_structural_tag: Annotated[Any, refuse("is not supported; use a grammar (GBNF) instead")] = None


class _StructuredOutputs(_Guided):
    model_config = ConfigDict(alias_generator=lambda name: name.removeprefix("guided_"))


class Constraints(_Guided):
    """The constraints of all APIs, which endpoints combine with their own field."""

    grammar: str = ""  # "" means no grammar, as in llama-server
    json_schema: dict[str, Any] | None = None
    structured_outputs: _StructuredOutputs = _StructuredOutputs()

    def read_constraint(self, own: Constraint | None = None) -> Constraint | None:
        """Return the only constraint of the text; `own` is the JSON in an API's own field."""
        found = [] if own is None else [own]
        if self.grammar:
            found.append(Constraint("grammar", self.grammar, "grammar"))
        if self.json_schema is not None:
            found.append(Constraint("json_schema", self.json_schema, "json_schema"))
        for prefix, source in (("guided_", self), ("structured_outputs.", self.structured_outputs)):
            for name in _Guided.model_fields:
                value, kind = getattr(source, name), name.removeprefix("guided_")
                if value or (kind == "json" and value is not None):  # {} is a schema
                    schema = {} if kind == "json_object" else value
                    found.append(Constraint(f"{prefix}{kind}", schema, kind.removesuffix("_object")))
        if len(found) > 1:
            raise FieldError(f"cannot be combined with {found[0].field}", found[1].field)
        return found[0] if found else None


class _SchemaWrapper(Body):
    json_form: dict[str, Any] = Field(default={}, alias="schema")
    strict: bool = False


class ResponseFormat(_SchemaWrapper):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: _SchemaWrapper | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if self.type == "json_schema" and "json_form" not in self.model_fields_set:
            self.require("json_schema")
        return self

    def read(self) -> Constraint | None:
        inner = (self.json_schema if self.type == "json_schema" else None) or self
        return None if self.type == "text" else Constraint("response_format", inner.json_form, strict=inner.strict)


_OPTIONS = options(Sampling)
_TYPES = get_type_hints(Sampling)
_OFF = {f.name: f.default for f in dataclass_fields(Sampling)}

_LETTERS = dict(zip("edskypmxti", (*SAMPLERS, *NAMED_ONLY), strict=True))
"""llama.cpp's letters for samplers."""


def _read_letters(value: Any) -> Any:
    is_letters = isinstance(value, str) and set(value) <= _LETTERS.keys()
    if is_letters and not set(parse_samplers(value)) <= set(_LETTERS.values()):
        return [_LETTERS[letter] for letter in value]
    return value


_FORMS: Mapping[str, Any] = {
    # In llama.cpp, negative numbers also mean all tokens.
    "top_k": Annotated[int, whole(-(2**31)), AfterValidator(lambda count: max(0, count))],
    "seed": Annotated[int, whole(-1, 2**64 - 1)],  # -1 means a random one
    "samplers": Annotated[
        tuple[str, ...],
        texts(max_characters=1000),  # more than the names of all samplers
        BeforeValidator(_read_letters),
        AfterValidator(lambda names: parse_samplers(";".join(names))),
    ],
    "dry_sequence_breakers": Annotated[tuple[str, ...], texts()],
    "logit_bias": Any,  # texts in it need the vocabulary
}
"""Forms of the settings that are not numbers, or of more numbers than are allowed."""

_OTHER_NAMES = {"repeat_penalty": "repetition_penalty", "mirostat": "mirostat_mode"}
"""Names of settings in vLLM and text-generation-webui."""


def _make_field(name: str, option: Option) -> tuple[Any, Any]:
    def check(value: Any) -> Any:
        if option.allowed is not None and name != "seed" and not option.allowed.accepts(value):
            raise FieldError(f"must be {option.allowed.description}, got {describe_value(value)}")
        return value

    form = _FORMS.get(name) or (float if _TYPES[name] is float else Annotated[int, whole(-(2**31))])
    aliases = AliasChoices(name, _OTHER_NAMES.get(name, name))
    return Annotated[form, AfterValidator(check)], Field(None, validation_alias=aliases)


_UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "adaptive_target": ((-1,), "adaptive-p sampling is not available"),
    "allowed_token_ids": (([],), "use grammar or logit_bias"),
    "grammar_lazy": ((False,), "a grammar applies from the first token on; for tools, use tool_choice"),
    "include_stop_str_in_output": ((False,), "stop strings are never included"),
    "length_penalty": ((0, 1), "beam search is not available"),
    "min_keep": ((0, 1), "samplers keep at least one token"),
    "prompt_logprobs": ((None,), "prompt tokens have no logprobs; use echo with logprobs in /v1/completions"),
    "reasoning_format": (("auto", "deepseek"), "reasoning is returned as reasoning_content"),
    "truncate_prompt_tokens": ((-1,), "prompts are never truncated"),
    "use_beam_search": ((False,), "beam search is not available"),
}
"""Unsupported fields of vLLM and llama-server that change a text, their values without effect, and an alternative."""

_FIELDS: dict[str, Any] = {name: _make_field(name, option) for name, option in _OPTIONS.items() if name != "grammar"}
_FIELDS |= {name: (Annotated[int, whole()], 0) for name in options(TextRules)}
_FIELDS |= {
    name: (Annotated[Any, refuse(f"is not supported; {advice}", *values)], None)
    for name, (values, advice) in _UNSUPPORTED.items()
}
_Settings: Any = create_model("_Settings", __base__=Constraints, **_FIELDS)


_BUDGETS = ("reasoning_budget_tokens", "thinking_budget_tokens")


class Scale(Body):
    id: Annotated[int, whole()] = -1
    scale: float = 1.0


class StreamOptions(Body):
    include_usage: bool = False


def _each(is_valid: Callable[[str], Any], problem: str) -> AfterValidator:
    def check(strings: tuple[str, ...]) -> tuple[str, ...]:
        for string in strings:
            if not is_valid(string):
                raise FieldError(problem.format(describe_value(string)))
        return strings

    return AfterValidator(check)


Stop = Annotated[tuple[str, ...], texts(), _each(bool, "must not contain an empty string")]


class Generation(_Settings):  # type: ignore[misc]
    """The fields of a request that generates a text, besides the settings of `Sampling` and the constraints."""

    model: str = ""
    stream: bool = False
    # Maximum number of tokens; -1 means until the context is full.
    max_tokens: Annotated[int, whole(-1)] = Field(
        -1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens", "n_predict")
    )
    stop: Stop = ()
    n: Annotated[int, whole(1, MAX_ANSWERS)] = Field(1, validation_alias=AliasChoices("n", "n_cmpl"))
    stop_token_ids: Tokens = ()
    bad_words: Annotated[tuple[str, ...], texts(), _each(str.strip, "{} is not a word")] = ()
    ignore_eos: bool = False
    lora: Items[Scale] = ()
    id_slot: Annotated[int, whole(-1)] = -1  # numbers beyond the last slot wrap around; -1 means any slot
    reasoning_budget_tokens: Annotated[int, whole(-1)] = Field(-1, validation_alias=AliasChoices(*_BUDGETS))
    reasoning_budget_message: str | None = None
    post_sampling_probs: bool = False
    stream_options: StreamOptions = StreamOptions()
    verbose: bool | None = None
    return_progress: bool = False
    timings_per_token: bool = False


class TextGeneration(Generation):
    """The fields of a request that continues a text which is not a chat, so that the tags of reasoning are unknown."""

    reasoning_budget_tokens: Annotated[Any, refuse("is supported in chats only; use /v1/chat/completions", -1)] = Field(
        -1, validation_alias=AliasChoices(*_BUDGETS)
    )


def make_request(
    call: Call[Any],
    body: Generation,
    prompt: Sequence[int],
    sampling: Sampling,
    reasoning: ReasoningBudget | None = None,
    **more: Any,
) -> Request:
    """Return the request of a body; `more` contains further fields of `Request`."""
    model, vocabulary = call.model, call.model.vocabulary
    check_count(len(body.stop_token_ids), MAX_TOKENS, "tokens", "stop_token_ids")
    rules = TextRules(
        stop_token_ids=frozenset(check_token(vocabulary, token, "stop_token_ids") for token in body.stop_token_ids),
        # `make_sampling` forbids words of one token.
        bad_words=tuple(tokens for tokens in _tokenize_words(body.bad_words, vocabulary) if len(tokens) > 1),
        reasoning=reasoning,
        **{name: getattr(body, name) for name in options(TextRules)},
    )
    return Request(
        prompt=prompt,
        max_tokens=(model.predict or model.n_ctx) if body.max_tokens == -1 else body.max_tokens,
        sampling=sampling,
        stop=body.stop,
        scales=read_scales(model, body.lora, "lora"),
        slot=None if body.id_slot == -1 else body.id_slot % len(model.service.report().slots),
        rules=rules,
        **more,
    )


def make_text_answers(
    call: Call[Any], body: Generation, prompts: Sequence[Sequence[int]], form: Constraint | None = None, **more: Any
) -> list[Answer]:
    """Return the answers to each prompt that is not a chat; `form` is the JSON in an API's own field."""
    if (count := len(prompts) * body.n) > MAX_ANSWERS:
        raise FieldError(f"must be at most {MAX_ANSWERS} for all prompts together, got {count}", "n")
    request = make_request(call, body, (), make_sampling(call, body, body.read_constraint(form)), **more)
    requests = repeat_with_seeds(request, body.n, len(prompts))
    pairs = enumerate(product(prompts, requests))
    return [Answer(replace(request, prompt=prompt), number) for number, (prompt, request) in pairs]


def repeat_with_seeds(request: Request, count: int, n_prompts: int = 1) -> list[Request]:
    """Repeat a request `count` times, each time with the next seed, for each of `n_prompts` prompts."""
    sampling, n_answers = request.sampling, count * n_prompts
    n_biases = len(sampling.logit_bias) * n_answers
    if n_answers > 1:
        check_count(n_biases, MAX_TOKENS, "tokens for all answers together", "logit_bias")
    others = [replace(sampling, seed=(sampling.seed + i) % 2**64) for i in range(1, count)]
    return [request, *(replace(request, sampling=other) for other in others)]


Alternatives = Annotated[int, whole(maximum=MAX_ALTERNATIVES)]


def read_logprobs(has_logprobs: bool, top_logprobs: int) -> int | None:
    """Return the number of alternatives to report for each token; `None` means no log-probabilities."""
    if top_logprobs and not has_logprobs:
        raise FieldError("requires logprobs to be true", "top_logprobs")
    return top_logprobs if has_logprobs else None


def read_scales(model: ServedModel, scales: Sequence[Scale], name: str) -> tuple[float, ...] | None:
    """Return the scales of all LoRA adapters, 0 for those that a request omits; `None` if it sets no scale."""
    count = len(model.adapters)
    for item in scales:
        if not 0 <= item.id < count:
            number = describe_value(None if item.id < 0 else item.id)
            raise FieldError(f"unknown adapter {number}; there are {count} adapters", name)
    by_number = {item.id: item.scale for item in scales}
    return tuple(by_number.get(number, 0.0) for number in range(count)) if scales else None


def make_sampling(call: Call[Any], body: Generation, constraint: Constraint | None) -> Sampling:
    """Return the settings of the request, and the server's defaults that do not contradict them."""
    server, vocabulary = call.server, call.model.vocabulary
    grammar = None if constraint is None else constraint.make_grammar()
    given: dict[str, Any] = {name: getattr(body, name) for name in _OPTIONS if name in body.model_fields_set}
    if "logit_bias" in given:
        given["logit_bias"] = _read_biases(given["logit_bias"], vocabulary)
    if "grammar" in given or grammar is not None:
        given["grammar"] = grammar
    banned = {tokens[0] for tokens in _tokenize_words(body.bad_words, vocabulary) if len(tokens) == 1}
    if body.ignore_eos:
        banned |= {*ending_tokens(vocabulary)}
    if banned:
        biases = given.get("logit_bias", server.sampling.logit_bias)
        given["logit_bias"] = (*biases, *((token, -math.inf) for token in sorted(banned)))
    if given.get("seed", -1) == -1:
        given["seed"] = random.SystemRandom().randrange(2**32) if server.seed is None else server.seed
    try:
        return Sampling(**_merge({name: getattr(server.sampling, name) for name in _OFF}, given))
    except ValueError as error:
        message = str(error)
        raise ApiError(400, message, param=next((name for name in _OFF if message.startswith(name)), None)) from error


def _merge(defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the effective settings.

    A setting has no effect, and so is off, if its sampler does not run: `samplers` may omit it, and mirostat replaces
    all. The temperature is a sampler, too. Temperature 0 turns off defaults that choose among tokens.
    """
    result = defaults | given
    if result["mirostat"]:
        result["samplers"] = _OFF["samplers"]
    elif "temperature" not in result["samplers"]:
        result["temperature"] = 1.0
    running = () if result["mirostat"] else result["samplers"]
    for name, option in _OPTIONS.items():
        has_no_sampler = option.sampler is not None and option.sampler not in running
        is_default = option.needs_sampling and name not in given
        if has_no_sampler or (is_default and result["temperature"] == 0):
            result[name] = _OFF[name]
    return result


def _tokenize_words(words: Sequence[str], vocabulary: Tokenizer) -> list[tuple[int, ...]]:
    """Return the tokens of each of `bad_words`, both without and with a space before the word."""
    forms = [form for word in words for form in (word, f" {word.lstrip()}")]
    return [tuple(vocabulary.tokenize(form, special=True, add_bos=False)) for form in forms]


def check_token(vocabulary: Tokenizer, value: Any, name: str) -> int:
    """Return a token id; raise an ApiError if the model has no such token."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocabulary.n_vocab:
        ids = f"token ids from 0 to {vocabulary.n_vocab - 1}"
        raise FieldError(f"must contain strings or {ids}, got {describe_value(value)}", name)
    return value


def _read_biases(value: Any, vocabulary: Tokenizer) -> tuple[tuple[int, float], ...]:
    """Return the biases in llama-server's pairs [[15043, 1.0], [" never", false]] or OpenAI's object {"15043": 1}."""
    pairs = value
    if isinstance(value, dict):
        check_count(len(value), MAX_TOKENS, "tokens", "logit_bias")
        pairs = [[int(name) if name.isdecimal() and len(name) < 12 else name, bias] for name, bias in value.items()]
    elif not isinstance(value, list):
        raise FieldError(f"must be a list, got {describe_value(value)}", "logit_bias")
    check_count(len(pairs), MAX_TOKENS, "tokens", "logit_bias")
    strings = sum(len(pair[0]) for pair in pairs if isinstance(pair, list) and pair and isinstance(pair[0], str))
    check_count(strings, MAX_CHARACTERS, "characters in strings", "logit_bias")
    biases = tuple(bias for pair in pairs for bias in _parse_bias(pair, vocabulary))
    for token, _ in biases:
        if not 0 <= token < vocabulary.n_vocab:
            raise FieldError(f"must contain tokens from 0 to {vocabulary.n_vocab - 1}, got {token}", "logit_bias")
    return biases


def _parse_bias(pair: Any, vocabulary: Tokenizer) -> list[tuple[int, float]]:
    match pair:
        case [bool(), _] | [_, True]:
            pass
        case [int() | str() as token, int() | float() as bias] if abs(bias) <= LARGEST_BIAS:
            tokens = [token] if isinstance(token, int) else vocabulary.tokenize(token, special=True, add_bos=False)
            return [(id, -math.inf if bias is False else float(bias)) for id in tokens]
    pairs = f"pairs of a token or string and a bias from {-LARGEST_BIAS:g} to {LARGEST_BIAS:g} (false: never)"
    raise FieldError(f"must contain {pairs}, got {describe_value(pair)}", "logit_bias")


def read_prompts(model: ServedModel, prompts: Prompts | None) -> list[list[int]]:
    """Return the token ids of each prompt. Control tokens in texts are parsed, because clients write them."""
    if prompts is None:
        raise FieldError("is missing", "prompt")
    check_count(len(prompts.values), MAX_ANSWERS, "prompts", "prompt")
    tokens = [read_tokens(model, prompt, "prompt") for prompt in prompts.values]
    if not tokens or not all(tokens):
        raise FieldError("must not be empty", "prompt")
    return tokens


def read_tokens(model: ServedModel, value: str | list[Any], name: str, n_ctx: int | None = None) -> list[int]:
    """Return the token ids of a prompt in the field `name`; `n_ctx` is its maximum size, by default a context."""
    vocabulary = model.vocabulary
    if isinstance(value, str):
        model.check_size(len(value), n_ctx)
        return list(vocabulary.tokenize(value, special=True))
    room = model.n_ctx if n_ctx is None else n_ctx
    if len(value) > room:
        raise context_length_error(len(value), room)
    tokens: list[int] = []
    for i, item in enumerate(value):
        if isinstance(item, str):
            model.check_size(len(item), n_ctx)
            tokens += vocabulary.tokenize(item, special=True, add_bos=i == 0)
        else:
            tokens.append(check_token(vocabulary, item, name))
        if len(tokens) > room:
            raise context_length_error(len(tokens), room)
    return tokens


def fill_in_prompt(model: ServedModel, before: str, after: str, **more: Any) -> list[int]:
    """Return the prompt for the text between two texts; `more` contains further arguments of `fill_in`."""
    try:
        return fill_in(model.vocabulary, before, after, suffix_first=model.suffix_first, **more)
    except ModelError as error:
        raise ApiError(400, str(error), type="not_supported_error") from error
