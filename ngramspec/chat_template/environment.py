"""The Jinja sandbox of chat templates, set up like that of Transformers, but lists may be changed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from ngramspec.errors import ModelError

MAX_CHARACTERS = 2**24
"""Maximum number of characters of a prompt, which is more than the longest contexts contain."""

_CHANGES = re.compile(r"\.(append|clear|extend|insert|pop|popitem|remove|reverse|setdefault|sort|update)\s*\(")
"""Calls that may change the values; Transformers forbids them, llama.cpp allows them."""

_CHECKS = re.compile(
    r"""\{%-? if \(message\['content'\] is [a-z ]+ or [^%]*message\['tool_calls'\]\|length == 0\) %\}"""
    r"""|\{%-? if "<\|channel\|>[^%]*" in message\.content %\}"""
)
"""Checks of Mistral's and gpt-oss' templates that reject empty answers, and reasoning in the content of a message."""

Values = Mapping[str, Any]
Render = Callable[[Values], str]


def make_render(source: str, bos: str = "", eos: str = "") -> Render:
    """Return the function from a template's variables to text; both raise ModelErrors about the template."""
    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    environment.filters |= {"tojson": _tojson, "safe": str}  # nothing is escaped, and Markup would escape the rest
    changing = _CHANGES.search(source) is not None
    try:
        template = environment.from_string(
            _CHECKS.sub("{%- if false %}", source),
            {
                "bos_token": bos,
                "eos_token": eos,
                "raise_exception": _raise_exception,
                "strftime_now": lambda form: datetime.now().strftime(form),
                "add_generation_prompt": True,
            },
        )
    except TemplateSyntaxError as error:
        raise ModelError(f"the chat template is not valid Jinja: {error} (line {error.lineno})") from None
    except MemoryError:
        raise
    except Exception as error:  # Jinja evaluates constant expressions when it compiles them
        raise ModelError(f"the chat template is not valid Jinja: {_reason(error)}") from None

    def render(values: Values) -> str:
        parts, length = list[str](), 0
        values = deepcopy(dict(values)) if changing else dict(values)
        try:
            for part in template.generate(values):
                parts.append(part)
                length += len(part)
                if length > MAX_CHARACTERS:
                    raise ModelError(f"the chat template writes more than {MAX_CHARACTERS:,} characters")
        except (ModelError, MemoryError):
            raise
        except Exception as error:
            raise ModelError(f"the chat template rejects this conversation: {_reason(error)}") from None
        return "".join(parts)

    return render


class _Generation(Extension):
    """The block {% generation %}, which marks answers for training: its contents."""

    tags = {"generation"}  # noqa: RUF012 - declared by Jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise ModelError(f"the chat template rejects this conversation: {message}")


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
