"""Tests of tool calls from the request to the response and back, for every template of llama.cpp and every family.

A tiny model has the family's marks as separate tokens and the template in its metadata. A grammar dictates its
answer, with the ids of the marks. The table `ROWS` states how models with these templates write calls and reasoning;
the forms are in `FORMS`. Each answer is asked for in four APIs, whole and streamed, with and without drafts, greedy and
with a seed, and sent back as history with results of its calls. Without llama.cpp's templates, the tests are skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from ngramspec_cli.serve import ServeOptions, open_served_model
from support.dialects import DIALECTS, Dialect
from support.http import parse_chunks, run_server
from support.model_files import write_family_model
from support.templates import find_marks, template_folder

from ngramspec.chat.families import FAMILIES, family_of
from ngramspec.chat.stream import Tool
from ngramspec.loading.load import find
from ngramspec.loading.settings import LoadSettings
from ngramspec.sampling.settings import Sampling
from ngramspec.server.state import ServedModel, Server

pytestmark = pytest.mark.usefixtures("new_user")

N_CTX = 8192

# --------------------------------------------------------------------------- the table

Call = tuple[str, dict[str, Any]]
CITY = "Köln <3"
CALLS: list[Call] = [("weather", {"city": CITY, "days": 2}), ("clock", {})]
TEXT, THOUGHT = "It is 20 °C <b>.", "Hm, [1]."


def _json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


class Form(NamedTuple):
    """How calls are written: the calls, and the text between two of them, before the first and after the last."""

    call: Callable[[str, dict[str, Any], int], str]
    between: str | None = "\n"  # `None` if an answer has one call
    begin: str = ""
    end: str = ""


def _pattern(pattern: str) -> Callable[[str, dict[str, Any], int], str]:
    """Return a writer of calls with NAME, ARGUMENTS and the call's INDEX in a pattern."""

    def write(name: str, arguments: dict[str, Any], index: int) -> str:
        return pattern.replace("NAME", name).replace("INDEX", str(index)).replace("ARGUMENTS", _json(arguments))

    return write


def _tagged(pattern: str, parameter: str) -> Callable[[str, dict[str, Any], int], str]:
    """Return a writer of calls with NAME and PARAMETERS, each of which has KEY, VALUE and IS_STRING."""

    def write(name: str, arguments: dict[str, Any], index: int) -> str:
        parameters = ""
        for key, value in arguments.items():
            text = value if isinstance(value, str) else _json(value)
            is_string = str(isinstance(value, str)).lower()
            parameters += parameter.replace("KEY", key).replace("VALUE", text).replace("IS_STRING", is_string)
        return pattern.replace("NAME", name).replace("PARAMETERS", parameters)

    return write


def _python(name: str, arguments: dict[str, Any], index: int) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _gemma4(name: str, arguments: dict[str, Any], index: int) -> str:
    values = (
        f'{key}:<|"|>{value}<|"|>' if isinstance(value, str) else f"{key}:{value}" for key, value in arguments.items()
    )
    return f"<|tool_call>call:{name}{{{','.join(values)}}}<tool_call|>"


_OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'
_DSML = "｜DSML｜"
_INVOKE = f'<{_DSML}invoke name="NAME">\nPARAMETERS</{_DSML}invoke>'
_PARAMETER = f'<{_DSML}parameter name="KEY" string="IS_STRING">VALUE</{_DSML}parameter>\n'

FORMS = {
    "hermes": Form(_pattern(f"<tool_call>\n{_OBJECT}\n</tool_call>")),
    "list": Form(
        _pattern('{"name": "NAME", "arguments": ARGUMENTS, "id": "INDEX"}'), ", ", "<tool_calls>[", "]</tool_calls>"
    ),
    "lines": Form(_pattern(_OBJECT), begin="<tool_calls>\n", end="\n</tool_calls>"),
    "qwen-coder": Form(
        _tagged(
            "<tool_call>\n<function=NAME>\nPARAMETERS</function>\n</tool_call>",
            "<parameter=KEY>\nVALUE\n</parameter>\n",
        )
    ),
    "seed": Form(
        _tagged(
            "<seed:tool_call>\n<function=NAME>\nPARAMETERS</function>\n</seed:tool_call>",
            "<parameter=KEY>VALUE</parameter>\n",
        )
    ),
    "functionary": Form(_pattern("<function=NAME>ARGUMENTS</function>"), ""),
    "glm": Form(
        _tagged("<tool_call>NAME\nPARAMETERS</tool_call>", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n")
    ),
    "glm-tight": Form(
        _tagged("<tool_call>NAMEPARAMETERS</tool_call>", "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"), ""
    ),
    "minimax": Form(
        _tagged('<invoke name="NAME">\nPARAMETERS</invoke>', '<parameter name="KEY">VALUE</parameter>\n'),
        begin="<minimax:tool_call>\n",
        end="\n</minimax:tool_call>",
    ),
    "dsml": Form(_tagged(_INVOKE, _PARAMETER), begin=f"<{_DSML}function_calls>\n", end=f"\n</{_DSML}function_calls>"),
    "dsml-v4": Form(_tagged(_INVOKE, _PARAMETER), begin=f"<{_DSML}tool_calls>\n", end=f"\n</{_DSML}tool_calls>"),
    "deepseek-v3": Form(
        _pattern("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>"),
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    "deepseek-v3.1": Form(
        _pattern("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>"),
        "",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi": Form(
        _pattern("<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>"),
        "",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "granite": Form(_pattern(_OBJECT), ", ", "<|tool_call|>[", "]"),
    "nemotron-v2": Form(_pattern(_OBJECT), ", ", "<TOOLCALL>[", "]</TOOLCALL>"),
    "gemma4": Form(_gemma4, ""),
    "lfm2": Form(_python, ", ", "<|tool_call_start|>[", "]<|tool_call_end|>"),
    "mistral": Form(_pattern("[TOOL_CALLS]NAME[ARGS]ARGUMENTS"), ""),
    "mistral-ids": Form(_pattern("[TOOL_CALLS]NAME[CALL_ID]12345678INDEX[ARGS]ARGUMENTS"), ""),
    "mistral-list": Form(
        _pattern('{"name": "NAME", "arguments": ARGUMENTS, "id": "12345678INDEX"}'), ", ", "[TOOL_CALLS][", "]"
    ),
    "llama": Form(_pattern('{"name": "NAME", "parameters": ARGUMENTS}'), None),
    "llama-tag": Form(_pattern('{"name": "NAME", "parameters": ARGUMENTS}'), None, "<|python_tag|>"),
    "gemma": Form(_python, None, "```tool_code\n", "\n```"),
    "harmony": Form(_pattern("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS"), None),
}


class Row(NamedTuple):
    """A template, the family that it belongs to, and how models with it write answers.

    `text` is around content, `thoughts` around reasoning, and `marks` are further tokens of the vocabulary.
    """

    template: str
    family: str | None
    form: str
    end: str
    thoughts: tuple[str, str] | None = None
    text: tuple[str, str] = ("", "")
    marks: str = ""


_THINK = ("<think>\n", "\n</think>\n\n")
_TIGHT = ("<think>", "</think>")
_ANALYSIS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
_FINAL = ("<|channel|>final<|message|>", "")
_COHERE = ("<|START_THINKING|>", "<|END_THINKING|>")
_IM, _EOS, _EOT = "<|im_end|>", "<｜end▁of▁sentence｜>", "<|eot_id|>"

ROWS = [
    Row("Apertus-8B-Instruct", None, "hermes", "<|assistant_end|>"),
    Row("Apriel-1.6-15b-Thinker-fixed", "hermes", "list", "<|end|>"),
    Row("Bielik-11B-v3.0-Instruct", "hermes", "hermes", _IM, _THINK),
    Row("ByteDance-Seed-OSS", "qwen-coder", "seed", "<seed:eos>", ("<seed:think>", "</seed:think>")),
    Row("Cohere2MoE", None, "hermes", "<|END_OF_TURN_TOKEN|>", _COHERE, ("<|START_TEXT|>", "<|END_TEXT|>")),
    Row("CohereForAI-c4ai-command-r-plus-tool_use", None, "hermes", "<|END_OF_TURN_TOKEN|>"),
    Row(
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        None,
        "hermes",
        "<|END_OF_TURN_TOKEN|>",
        _COHERE,
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    Row("GLM-4.6", "glm", "glm", "<|user|>", _TIGHT),
    Row("GLM-4.7-Flash", "glm", "glm-tight", "<|user|>", _TIGHT),
    Row("GigaChat3-10B-A1.8B", None, "hermes", "<|message_sep|>"),
    Row("GigaChat3.1-10B-A1.8B", None, "hermes", "<|message_sep|>"),
    Row("HuggingFaceTB-SmolLM3-3B", None, "hermes", _IM, _THINK),
    Row("Kimi-K2-Instruct", "kimi", "kimi", _IM),
    Row("Kimi-K2-Thinking", "kimi", "kimi", _IM, _TIGHT),
    Row("Kimi-K3", None, "hermes", "<|end_of_msg|>"),
    Row("LFM2-8B-A1B", "lfm2", "lfm2", _IM, marks="<|tool_call_start|> <|tool_call_end|>"),
    Row("LFM2.5-8B-A1B", "lfm2", "lfm2", _IM, _THINK),
    Row("LFM2.5-Instruct", "lfm2", "lfm2", _IM, _THINK, marks="<|tool_call_start|> <|tool_call_end|>"),
    Row("MiMo-VL", "hermes", "hermes", _IM),
    Row("MiniMax-M1", "hermes", "lines", "<end_of_sentence>"),
    Row("MiniMax-M2", "minimax", "minimax", "[e~[", _THINK),
    Row("MiniMax-M3", "hermes", "hermes", "[e~[", ("<mm:think>", "</mm:think>")),
    Row("Mistral-Small-3.2-24B-Instruct-2506", "mistral", "mistral-ids", "</s>"),
    Row("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "qwen-coder", "qwen-coder", _IM, _THINK),
    Row("NVIDIA-Nemotron-Nano-v2", "nemotron-v2", "nemotron-v2", "<SPECIAL_12>", _THINK),
    Row("NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", "hermes", "hermes", _IM),
    Row("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "hermes", "hermes", _IM),
    Row("Qwen-QwQ-32B", "hermes", "hermes", _IM, _THINK),
    Row("Qwen-Qwen2.5-7B-Instruct", "hermes", "hermes", _IM),
    Row("Qwen-Qwen3-0.6B", "hermes", "hermes", _IM, _THINK),
    Row("Qwen3-Coder", "qwen-coder", "qwen-coder", _IM),
    Row("Qwen3.5-4B", "qwen-coder", "qwen-coder", _IM, _THINK),
    Row("Reka-Edge", "hermes", "hermes", "<sep>", _THINK),
    Row("Spark2.5", "glm", "glm-tight", _EOS, _TIGHT),
    Row("StepFun3.5-Flash", "qwen-coder", "qwen-coder", _IM, _THINK),
    Row("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "deepseek-v3", "deepseek-v3", _EOS, _THINK),
    Row("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "deepseek-v3", "deepseek-v3", _EOS, _THINK),
    Row("deepseek-ai-DeepSeek-V3.1", "deepseek-v3.1", "deepseek-v3.1", _EOS, _TIGHT),
    Row("deepseek-ai-DeepSeek-V3.2", "deepseek-v3.2", "dsml", _EOS, _TIGHT, marks=_DSML),
    Row("deepseek-ai-DeepSeek-V4", "deepseek-v3.2", "dsml-v4", _EOS, _TIGHT, marks=_DSML),
    Row("deepseek-ai-DeepSeek-V4-Flash-0731", "deepseek-v3.2", "dsml-v4", _EOS, _TIGHT, marks=_DSML),
    Row("fireworks-ai-llama-3-firefunction-v2", None, "hermes", _EOT),
    Row("google-gemma-2-2b-it", "gemma", "gemma", "<end_of_turn>"),
    Row("google-gemma-4-31B-it", "gemma4", "gemma4", "<turn|>", ("<|channel>thought\n", "<channel|>")),
    Row("google-gemma-4-31B-it-interleaved", "gemma4", "gemma4", "<turn|>", ("<|channel>thought\n", "<channel|>")),
    Row("ibm-granite-granite-3.3-2B-Instruct", "granite", "granite", "<|end_of_text|>", _TIGHT),
    Row("ibm-granite-granite-4.0", "hermes", "hermes", "<|end_of_text|>"),
    Row("ibm-granite-granite-4.1", "hermes", "hermes", "<|end_of_text|>"),
    Row("inclusionai-ling-3.0-flash", "glm", "glm", "<|role_end|>", _TIGHT),
    Row("llama-cpp-deepseek-r1", "deepseek-v3", "deepseek-v3", _EOS, _THINK),
    Row("llama-cpp-rwkv-world", None, "hermes", "<|endoftext|>", _TIGHT),
    Row("meetkai-functionary-medium-v3.1", "qwen-coder", "functionary", "<|eom_id|>"),
    Row("meetkai-functionary-medium-v3.2", None, "hermes", _EOT),
    Row("meta-llama-Llama-3.1-8B-Instruct", "llama", "llama", _EOT),
    Row("meta-llama-Llama-3.2-3B-Instruct", "llama", "llama", _EOT),
    Row("meta-llama-Llama-3.3-70B-Instruct", "llama", "llama-tag", "<|eom_id|>"),
    Row("microsoft-Phi-3.5-mini-instruct", None, "hermes", "<|end|>"),
    Row("mistralai-Ministral-3-14B-Reasoning-2512", "mistral", "mistral", "</s>", ("[THINK]", "[/THINK]")),
    Row("mistralai-Mistral-Nemo-Instruct-2407", "mistral-list", "mistral-list", "</s>"),
    Row("moonshotai-Kimi-K2", "kimi", "kimi", _IM),
    Row("muse-glimmer", None, "hermes", "<|eot|>"),
    Row("openai-gpt-oss-120b", "harmony", "harmony", "<|call|>", _ANALYSIS, _FINAL, "<|constrain|>"),
    Row("openbmb-MiniCPM5-1B", None, "hermes", _IM, _THINK),
    Row("poolside-Laguna-S-2.1", "glm", "glm-tight", "</assistant>", _TIGHT),
    Row("poolside-Laguna-XS-2.1", "glm", "glm", "</assistant>", _TIGHT),
    Row("poolside-Laguna-XS.2", "glm", "glm", "</assistant>", _TIGHT),
    Row("tencent-Hy3", None, "hermes", "<｜hy_eos:opensource｜>"),
    Row("unsloth-Apriel-1.5", "hermes", "list", "<|end|>"),
    Row("unsloth-mistral-Devstral-Small-2507", "mistral", "mistral", "</s>"),
    Row("upstage-Solar-Open-100B", None, "hermes", "<|flush|>"),
]

CASES = ("text", "call", "calls", "thoughts and call", "thoughts and text", "cut call")


class Answer(NamedTuple):
    """The parts of a response that a client reads; arguments are JSON."""

    text: str = ""
    thoughts: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reason: str = "stop"  # "stop", "calls" or "length"

    def normalized(self) -> Answer:
        """Return the answer with arguments in one form of JSON; broken JSON stays as it is."""
        calls = []
        for name, arguments in self.calls:
            try:
                calls.append((name, json.dumps(json.loads(arguments), sort_keys=True)))
            except ValueError:
                calls.append((name, arguments))
        return self._replace(calls=tuple(calls))


def write_answer(row: Row, case: str, opening: str) -> tuple[str, Answer]:
    """Return the text of an answer after the end of a prompt, and what it contains."""
    form, (before, after) = FORMS[row.form], row.text
    opens, closes = row.thoughts or ("", "")
    is_open = bool(opens) and opening.rstrip().endswith(opens.rstrip())
    thinks = "thoughts" in case
    start = ("" if is_open else opens) + (THOUGHT if thinks else "") + closes if thinks or is_open else ""
    n_calls = {"text": 0, "thoughts and text": 0, "calls": 2}.get(case, 1)
    calls = [form.call(*call, index) for index, call in enumerate(CALLS[:n_calls])]
    body = form.begin + (form.between or "").join(calls) + form.end if calls else before + TEXT + after
    told = tuple((name, _json(arguments)) for name, arguments in CALLS[:n_calls])
    answer = Answer("" if calls else TEXT, THOUGHT if thinks else "", told, "calls" if calls else "stop")
    return start + body, answer.normalized()


# --------------------------------------------------------------------------- requests and responses

TOOLS = (
    Tool(
        "weather",
        "Tells the weather.",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": [CITY, "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
        },
    ),
    Tool("clock", "Tells the time."),
)
QUESTION = "How is it?"


_FUNCTIONS = [{"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in TOOLS]
_TOOLS_OF = {
    "responses": [{"type": "function", **function} for function in _FUNCTIONS],
    "messages": [{"name": t.name, "description": t.description, "input_schema": t.parameters} for t in TOOLS],
}
_CALL_REASONS = {"chat completions": "tool_calls", "messages": "tool_use"}
_LENGTH_REASONS = {"length", "incomplete", "max_tokens"}
CHAT = DIALECTS["chat completions"]


def read(dialect: Dialect, body: Any) -> tuple[Answer, list[Any]]:
    """Return the parts of a response, and the turns after the question: the response and results of its calls."""
    turn = dialect.read(body)
    is_cut = turn.reason in _LENGTH_REASONS
    if (call_reason := _CALL_REASONS.get(dialect.name)) is not None:
        assert (turn.reason == call_reason) == (bool(turn.calls) and not is_cut)
    reason = "length" if is_cut else "calls" if turn.calls else "stop"
    history = [message for message in turn.history if message.get("content") != []]
    return Answer(turn.text, turn.reasoning, tuple(turn.calls), reason).normalized(), [*history, *turn.results]


# --------------------------------------------------------------------------- the server


class Served:
    """A model of a row behind HTTP, with and without drafts."""

    def __init__(self, row: Row, folder: Path, opened: ExitStack) -> None:
        template = _read_template(row)
        marks = [*sorted(find_marks("".join([template, *self._written(row)]))), *row.marks.split()]
        path = write_family_model(folder / f"{row.template}.gguf", template, marks, row.end)
        self.row = row
        self._models = {drafts: self._open(path, drafts) for drafts in (True, False)}
        for model in self._models.values():
            opened.callback(model.service.stop)
        self._server = Server()
        url = opened.enter_context(run_server(self._server))
        self._client = opened.enter_context(httpx.Client(base_url=url, timeout=60))
        self.vocabulary = self._models[True].vocabulary
        question = [{"role": "user", "content": QUESTION}]
        self.opening = self.vocabulary.chats.prompt(question, TOOLS).opening
        self._ids = {
            mark: ids[0]
            for mark in dict.fromkeys([*marks, row.end])
            if len(ids := self.vocabulary.tokenize(mark, special=True, add_bos=False)) == 1
        }
        names = sorted(self._ids, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, names))})")

    @staticmethod
    def _written(row: Row) -> Iterator[str]:
        for case in CASES:
            yield write_answer(row, case, "")[0]

    @staticmethod
    def _open(path: Path, drafts: bool) -> ServedModel:
        load = LoadSettings(ctx_size=N_CTX, threads=1, exact="on", no_memory=True, no_draft=not drafts)
        return open_served_model(load, ServeOptions(parallel=1), find(str(path), load))

    def tokenize(self, text: str) -> list[int]:
        return self.vocabulary.tokenize(text, special=True, add_bos=False)

    def dictate(self, text: str, *, as_tokens: bool) -> str:
        """Return a grammar that allows only this answer; marks are tokens, and with `as_tokens` so is other text."""
        parts = self.tokenize(text) if as_tokens else [self._ids.get(p, p) for p in self._split.split(text) if p]
        words = [json.dumps(part, ensure_ascii=False) if isinstance(part, str) else f"<[{part}]>" for part in parts]
        return f"root ::= {' '.join(words)} <[{self._ids[self.row.end]}]>"

    def ask(
        self,
        dialect: Dialect,
        turns: Sequence[Any],
        grammar: str | None,
        *,
        stream: bool,
        drafts: bool,
        heat: float,
        limit: int,
        **fields: Any,
    ) -> Any:
        """Return the whole response to a conversation, or the error of the server as a text."""
        server = self._server
        server.model, server.seed = self._models[drafts], 7
        server.sampling = Sampling(temperature=heat, seed=7, grammar=grammar)
        tools = _TOOLS_OF.get(dialect.name, [{"type": "function", "function": f} for f in _FUNCTIONS])
        messages = {dialect.messages: [{"role": "user", "content": QUESTION}, *turns]}
        body = dialect.body(limit=limit, stream=stream, tools=tools, **fields) | messages
        response = self._client.post(dialect.path, json=body)
        if response.status_code != 200:
            return f"{response.status_code} {response.text}"
        if not stream:
            return response.json()
        events = parse_chunks(response.text)
        errors = [event for event in events if event.get("error")]
        return f"stream: {errors}" if errors else events


def _read_template(row: Row) -> str:
    folder = template_folder()
    assert folder is not None
    return (folder / f"{row.template}.jinja").read_text("utf-8")


# --------------------------------------------------------------------------- the tests

needs_templates = pytest.mark.skipif(
    template_folder() is None, reason="needs llama.cpp's templates: tools/templates.sh, or $LLAMA_CPP_TEMPLATES"
)
VARIANTS = list(product((True, False), (0.0, 0.8)))
"""With and without drafts, each greedy and sampled with a seed."""

SAMPLE = {row.family: row.template for row in reversed(ROWS)}.values()
"""A template of each family, of which the default suite tests a third of the ways; the exhaustive one tests all."""


def check_case(served: Served, case: str, *, is_sample: bool) -> Iterator[str]:
    """Yield what is wrong with an answer in each API, with the history that it makes, and with other settings."""
    text, expected = write_answer(served.row, case, served.opening)
    is_cut, limit = case == "cut call", 2000
    grammar = served.dictate(text, as_tokens=is_cut)
    if is_cut:
        limit, expected = len(served.tokenize(text[: text.index(CITY)])) + 1, Answer(reason="length")
    for number, (name, stream) in enumerate(product(DIALECTS, (False, True))):
        if is_sample and (number + CASES.index(case)) % 3:
            continue
        (drafts, heat), dialect = VARIANTS[number % len(VARIANTS)], DIALECTS[name]
        how = f"{case}, {name}{' streamed' if stream else ''}"
        body = served.ask(dialect, [], grammar, stream=stream, drafts=drafts, heat=heat, limit=limit)
        if isinstance(body, str):
            yield f"{how}: {body}"
            continue
        answer, history = read(dialect, body)
        # A stream has shown the beginning of the call, and some APIs return it as incomplete.
        begun = tuple(call for call in answer.calls[:1] if is_cut and call[0] == CALLS[0][0])
        if answer != expected._replace(calls=begun or expected.calls):
            yield f"{how}: {answer}"
        if is_sample and not answer.calls:
            continue
        after = served.ask(dialect, history, None, stream=False, drafts=False, heat=0.0, limit=1)
        if isinstance(after, str):
            yield f"history of {how}: {after}"
    for drafts, heat in VARIANTS if case == "calls" or (case == "text" and not is_sample) else ():
        body = served.ask(CHAT, [], grammar, stream=False, drafts=drafts, heat=heat, limit=limit)
        if isinstance(body, str) or read(CHAT, body)[0] != expected:
            yield f"{case}, drafts {drafts}, temperature {heat}: {body}"


def check_forced_call(served: Served) -> Iterator[str]:
    """Yield what is wrong with a call that the request demands and the model's weights choose."""
    # With random weights, white space may continue forever.
    bias = {str(token): -30 for token in range(served.vocabulary.n_vocab) if served.vocabulary.piece(token).isspace()}
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "reasoning_budget_tokens": 3, "logit_bias": bias}
    answers: dict[float, Answer] = {}
    for drafts, heat in VARIANTS:
        body = served.ask(CHAT, [], None, stream=False, drafts=drafts, heat=heat, limit=400, **fields)
        answer = Answer(body) if isinstance(body, str) else read(CHAT, body)[0]
        if (
            len(answer.calls) != 1
            or answer.calls[0][0] not in dict(CALLS)
            or answer != answers.setdefault(heat, answer)
        ):
            yield f"forced call, drafts {drafts}, temperature {heat}: {answer}"


def check(row: Row, folder: Path, *, is_sample: bool = False) -> list[str]:
    """Return what is wrong with the answers of a model with a template, one text for each mistake.

    With `is_sample`, each API is asked either for the whole answer or for the stream, in turns, and only calls are sent
    back as history.
    """
    with ExitStack() as opened:
        served = Served(row, folder, opened)
        wrong = [*check_forced_call(served)]
        for case in CASES:
            if ("thoughts" in case and row.thoughts is None) or (case == "calls" and FORMS[row.form].between is None):
                continue
            wrong += check_case(served, case, is_sample=is_sample)
    return wrong


@needs_templates
def test_table_contains_every_template_and_family() -> None:
    folder = template_folder()
    assert folder is not None
    assert {row.template for row in ROWS} == {path.stem for path in folder.glob("*.jinja")}
    families = {row.template: family_of(_read_template(row)) for row in ROWS}
    assert {row.template: row.family for row in ROWS} == {n: family and family.name for n, family in families.items()}
    assert {family.name for family in FAMILIES} <= {row.family for row in ROWS}
    assert {row.form for row in ROWS} == set(FORMS)


@needs_templates
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.template, marks=[] if row.template in SAMPLE else [pytest.mark.exhaustive])
        for row in ROWS
    ],
)
def test_answers_of_each_template_are_read_and_accepted_as_history(
    row: Row, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    assert check(row, tmp_path, is_sample=not request.config.getoption("--exhaustive")) == []
