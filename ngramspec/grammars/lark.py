"""`Lark`: a grammar in the Lark dialect of llguidance, and the expressions that such grammars are made of."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from ngramspec.data import GrammarError

# The limits of llguidance on the size of a grammar and on the work for one token are its defaults.
LIMITS = LLParserLimits(verbose_errors=False)
MAX_SIZE = 2_000_000  # maximum length of a grammar in characters

_lock = threading.Lock()

T = TypeVar("T")


class Lark(str):
    """A grammar in the Lark dialect of llguidance, whose start rule is `start`.

    As a separate type, it cannot be confused with the GBNF text that users pass.
    """

    __slots__ = ()


def lark(*rules: str) -> Lark:
    """Return the grammar with these rules; one of them is `start`."""
    # Any tokenization of the text is accepted, as without a grammar, and not only the tokenizer's own.
    return Lark("\n".join(['%llguidance {"no_forcing": true}', *rules, ""]))


def literal(text: str) -> str:
    """Return the expression of exactly this text; raise a GrammarError if it contains half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(f"character {error.start} of {text[:40]!r} is not valid text") from error
    return json.dumps(text)


def encode_controls(text: str, controls: Mapping[str, int]) -> str:
    """Return the expression of a text (not empty), in which the names of control tokens stand for these tokens."""
    names = sorted((name for name in controls if name in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    return " ".join([f"<[{controls[part]}]>" if part in controls else literal(part) for part in parts if part])


def pattern_grammar(pattern: str) -> Lark:
    """Return the grammar of the texts that a pattern of Rust's `regex` matches as a whole; `\\d` etc. are ASCII."""
    inner = pattern.removeprefix("^")
    inner = inner.removesuffix("$") if not inner.endswith("\\$") else inner
    grammar = lark(f"start: /{regex_to_lark(f'(?:{inner})', 'dws')}/")
    if (problem := failure(LLMatcher.grammar_from_lark(grammar))) is not None:
        raise GrammarError(f"the pattern cannot be used: {problem}")
    return grammar


def choice_grammar(texts: Sequence[str]) -> Lark:
    choices = " | ".join([literal(text) for text in dict.fromkeys(texts) if text])
    if not choices:
        return lark('start: ""')
    return lark("start: CHOICE" + (' | ""' if "" in texts else ""), f"CHOICE: {choices}")


def run_on_deep_stack(call: Callable[[], T]) -> T:
    """Return the result of a call of llguidance that is made in a thread with a large stack.

    llguidance compiles rules that refer to each other by recursion, and a stack that is too small ends the process.
    """
    with ThreadPoolExecutor(1, "grammar") as executor:
        with _lock:  # the size belongs to all threads that start meanwhile
            before = threading.stack_size(512 * 2**20)  # a chain in a grammar of `MAX_SIZE` fits
            try:
                result = executor.submit(call)
            finally:
                threading.stack_size(before)
        return result.result()


def compile_lark(grammar: Lark, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile a grammar for a vocabulary; raise a GrammarError if it exceeds a limit of llguidance."""
    text = LLMatcher.grammar_from_lark(grammar)
    matcher = run_on_deep_stack(lambda: LLMatcher(tokenizer, text, log_level=0, limits=LIMITS))
    if matcher.is_error():
        raise GrammarError(f"the grammar cannot be used: {reason(matcher.get_error())}")
    return matcher


def failure(grammar: str) -> str | None:
    """Return the error with which llguidance rejects a grammar in the form for `LLMatcher`; `None` if it is valid."""
    if len(grammar) > MAX_SIZE:
        return f"it has more than {MAX_SIZE:,} characters"
    is_error, messages = run_on_deep_stack(lambda: LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS))
    return reason(messages[0]) if is_error else None


def reason(message: str) -> str:
    """Return why llguidance refuses a grammar, from its message, in one line without places in the Lark text."""
    lines = message.strip().splitlines() or [""]
    line = re.sub(r"^(at )?[0-9]+\([0-9]+\): ", "", lines[0]).removeprefix("failed to compile JSON schema: ")
    if (keys := re.match(r"Unimplemented keys: \[(.*)\]", line)) is not None:
        line = f"unsupported keywords: {keys[1].replace(chr(34), '')}"
    if "regex parse error" in line:
        line = next((candidate for candidate in lines if candidate.startswith("error: ")), line).removeprefix("error: ")
        line = f"a regular expression does not parse: {line}"
    if line.startswith("panic: "):
        line = "llguidance fails on it, perhaps because it is too large"
    return line[:200]
