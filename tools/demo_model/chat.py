"""Chat documents in the demo model's ChatML template, generated from Python source code.

Functions with docstrings become tasks with a known answer: write the function, explain it, add the
docstring, rename a variable, complete it, repeat it, list its parameters as JSON. `talk.py` adds
hand-written questions and answers. No text comes from a language model or a chat log.
"""

from __future__ import annotations

import ast
import io
import json
import random
import re
import textwrap
import tokenize
from collections.abc import Callable
from dataclasses import dataclass

from talk import SYSTEM_PROMPTS, data_task, small_talk

MAX_SOURCE = 1400  # characters; longer functions leave no room for an answer in 1,024 tokens
MAX_SUMMARY = 160
FOLLOW_UPS = [
    ("Thanks!", "You are welcome!"),
    ("Thank you.", "You are welcome. Is there anything else?"),
    ("ok", "Let me know if you need anything else."),
    ("Great, thanks.", "Glad to help!"),
]

Turn = tuple[str, str]  # user message and assistant answer


@dataclass(frozen=True)
class Function:
    """Dedented function with its docstring (`source`), without it (`bare`), and its summary and names."""

    name: str
    source: str
    bare: str
    summary: str
    parameters: tuple[str, ...]
    variables: tuple[str, ...]


def render(turns: list[Turn], system: str | None = None) -> str:
    """Return the conversation in ChatML; every message ends with <|im_end|>."""
    messages = [("system", system)] if system else []
    for question, answer in turns:
        messages += [("user", question), ("assistant", answer)]
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)


def fence(code: str) -> str:
    return f"```python\n{code}\n```"


def find_functions(text: str) -> list[Function]:
    """Return the functions of a module that have a one-sentence summary and fit in a chat turn."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines = text.splitlines()
    functions = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            function = _describe(node, lines)
            if function:
                functions.append(function)
    return functions


def _describe(node: ast.FunctionDef, lines: list[str]) -> Function | None:
    docstring = ast.get_docstring(node)
    if not docstring or len(node.body) < 2 or node.name.startswith("test"):
        return None
    summary = re.split(r"(?<=[.!?])\s|\n\n", " ".join(docstring.split("\n\n")[0].split()))[0]
    if not 15 <= len(summary) <= MAX_SUMMARY or ">>>" in summary or not summary.isascii():
        return None
    doc_node = node.body[0]
    if doc_node.end_lineno is None or doc_node.lineno == node.lineno:
        return None
    source_lines = lines[node.lineno - 1 : node.end_lineno]
    doc_start, doc_end = doc_node.lineno - node.lineno, doc_node.end_lineno - node.lineno + 1
    indent = " " * (doc_node.col_offset)
    # The answer contains only the summary, because a long docstring cannot be predicted from the code.
    short_doc = [f'{indent}"""{summary}"""']
    source = textwrap.dedent("\n".join(source_lines[:doc_start] + short_doc + source_lines[doc_end:]))
    bare = textwrap.dedent("\n".join(source_lines[:doc_start] + source_lines[doc_end:]))
    if not 60 <= len(source) <= MAX_SOURCE or '"' * 3 in summary or "\\" in summary:
        return None
    arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    parameters = tuple(a.arg for a in arguments if a.arg not in {"self", "cls"})
    variables = {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
    return Function(node.name, source, bare, summary, parameters, tuple(sorted(variables)))


def rename(source: str, old: str, new: str) -> str | None:
    """Return `source` with `new` in place of every NAME token `old`; `None` means that it does not tokenise."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, IndentationError, SyntaxError):
        return None
    lines = source.splitlines(keepends=True)
    for token in reversed(tokens):
        if token.type == tokenize.NAME and token.string == old:
            row, column = token.start
            line = lines[row - 1]
            lines[row - 1] = line[:column] + new + line[column + len(old) :]
    return "".join(lines)


def _lower_first(sentence: str) -> str:
    text = sentence.rstrip(".")
    return text if text[:2].isupper() else text[0].lower() + text[1:]


def write_it(function: Function, rng: random.Random) -> Turn:
    wish = _lower_first(function.summary)
    question = rng.choice(
        [
            f"Write a Python function that does the following: {wish}.",
            f"Write a Python function `{function.name}`: {wish}.",
            f"Write a function called {function.name} in Python. It should {wish}.",
            f"Implement `{function.name}` in Python. {function.summary}",
            f"Can you write a Python function to {wish}?",
        ]
    )
    opening = rng.choice(["", "Here is the function:\n\n", f"Here is `{function.name}`:\n\n"])
    return question, opening + fence(function.source)


def explain_it(function: Function, rng: random.Random) -> Turn:
    question = rng.choice(
        [
            "What does this function do?",
            "Explain this code.",
            f"What does `{function.name}` do?",
            "Explain this Python function:",
            "Summarize this function in one sentence.",
        ]
    )
    takes = ", ".join(f"`{name}`" for name in function.parameters[:4])
    answer = f"The function `{function.name}` does this: {function.summary}"
    if takes and rng.random() < 0.5:
        answer += f"\n\nIt takes {takes}."
    return f"{question}\n\n{fence(function.bare)}", answer


def document_it(function: Function, rng: random.Random) -> Turn:
    question = rng.choice(
        [
            "Add a docstring to this function:",
            "Add a docstring to this function.",
            f"Write a docstring for `{function.name}`.",
            "Document this Python function.",
        ]
    )
    opening = rng.choice(["", "Here is the function with a docstring:\n\n"])
    return f"{question}\n\n{fence(function.bare)}", opening + fence(function.source)


def rename_it(function: Function, rng: random.Random) -> Turn | None:
    names = function.variables + function.parameters
    if not names:
        return None
    old = rng.choice(names)
    new = rng.choice(["value", "item", "result", "data", "name", "count", f"new_{old}", f"{old}_2"])
    code = rename(function.bare, old, new)
    if code is None or new in function.bare:
        return None
    question = rng.choice(
        [
            f"Rename the variable `{old}` to `{new}` in this code:",
            f"Rename {old} to {new}.",
            f"Please rename `{old}` to `{new}` in the following function.",
        ]
    )
    return f"{question}\n\n{fence(function.bare)}", fence(code)


def complete_it(function: Function, rng: random.Random) -> Turn | None:
    lines = function.source.splitlines()
    if len(lines) < 5:
        return None
    start = "\n".join(lines[: rng.randint(2, len(lines) // 2)])
    question = rng.choice(["Complete this function:", "Finish this Python function."])
    return f"{question}\n\n{fence(start)}", fence(function.source)


def repeat_it(function: Function, rng: random.Random) -> Turn:
    question = rng.choice(["Repeat this code exactly:", "Copy this function.", "Print this code again, unchanged:"])
    return f"{question}\n\n{fence(function.bare)}", fence(function.bare)


def signature_as_json(function: Function, rng: random.Random) -> Turn | None:
    if not function.parameters:
        return None
    question = rng.choice(
        [
            "Give the name and the parameters of this function as JSON.",
            "Convert the signature of this function to JSON:",
        ]
    )
    facts = {"name": function.name, "parameters": list(function.parameters)}
    code = f"```json\n{json.dumps(facts, indent=2)}\n```"
    return f"{question}\n\n{fence(function.bare)}", code


TASKS: list[tuple[Callable[[Function, random.Random], Turn | None], float]] = [
    (write_it, 5.0),
    (explain_it, 3.0),
    (document_it, 3.0),
    (rename_it, 3.0),
    (complete_it, 1.0),
    (repeat_it, 1.0),
    (signature_as_json, 1.0),
]


def chat_documents(texts: list[str], rng: random.Random, *, rounds: int, talk: bool) -> list[str]:
    """Return shuffled conversations with `rounds` tasks per distinct function of `texts`.

    With `talk`, hand-written small talk, questions about Python and data conversions make up a
    further third of the documents. A held-out set omits them, because all of them are in training.
    """
    functions = {f.bare: f for text in texts for f in find_functions(text)}
    tasks, weights = zip(*TASKS, strict=True)
    documents = []
    for function in functions.values():
        for task in rng.choices(tasks, weights, k=rounds):
            turn = task(function, rng)
            if turn:
                turns = [turn]
                if rng.random() < 0.1:
                    turns.append(rng.choice(FOLLOW_UPS))
                documents.append(_with_system(turns, rng))
    if talk:
        for _ in range(len(documents) // 4):
            documents.append(_with_system([small_talk(rng)], rng))
            documents.append(_with_system([data_task(rng)], rng))
    rng.shuffle(documents)
    return documents


def _with_system(turns: list[Turn], rng: random.Random) -> str:
    return render(turns, rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.2 else None)
