"""`ChatTemplate`: chat prompts in which no message can write a control token.

A template turns messages into one text, and that text is tokenized with the control tokens in it parsed: there
"<|im_end|>" ends a message, whoever wrote it. So the template is rendered a second time, with unguessable names in
place of what the messages say. What stands between the names then is the template's own, and only control tokens in
there become control tokens:

    messages  [{"role": "user", "content": "is <|im_end|> a word?"}]
    text      <|im_start|>user\nis <|im_end|> a word?<|im_end|>\n
    skeleton  <|im_start|>user\nx6d1b0x0x<|im_end|>\n
    own       <|im_start|>                           <|im_end|>   (the second of the two in the text)

Templates look at messages: they strip them, or split them at "</think>". White space at the ends of a content and the
strings that the template itself spells out therefore stay in the skeleton. One that changes contents in other ways is
noticed, as putting the contents back does not give the text; then the text must hold the control tokens of the skeleton
and no others, or the messages are refused. Knows no llama.cpp; O(length of the text) but for the tokenizer.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from jinja2 import Environment

from ngramspec.errors import ModelError
from ngramspec.tokens import Tokenizer

_SPACE = " \t\n\v\f\r"  # C's isspace()
_NEVER = re.compile(r"(?!)")

Messages = Sequence[dict[str, str]]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Control:
    """A token that is no text: its id, and whether it swallows the white space before and behind it."""

    token: int
    lstrip: bool = False
    rstrip: bool = False


class ChatTemplate:
    """A chat template over a vocabulary.

    Args:
        source: the template, in Jinja.
        render: messages to text by this template; raises whatever the template raises.
        controls: the vocabulary's control tokens by their text.
        bos: text of the token that begins a prompt, "" if there is none; a template that writes it gets no second one.
    """

    def __init__(
        self,
        source: str,
        render: Callable[[Messages], str],
        controls: Mapping[str, Control],
        bos: str,
    ) -> None:
        self._render, self._controls, self._bos = render, controls, bos
        self._pattern = _any_of(controls)
        self._spelled = _any_of({word for word in _strings(source) if not self._pattern.search(word)})

    def prompt(self, messages: Messages, tokenizer: Tokenizer) -> list[int]:
        """Token ids of a conversation.

        Raises:
            ModelError: a message holds text of a control token, and the template changes messages in a way that
                leaves unclear which of them are its own.
        """
        text = self._render(messages)
        found = [match.span() for match in self._pattern.finditer(text)]
        skeleton, own = self._skeleton(messages, text, found)
        add_bos = not (self._bos and skeleton.startswith(self._bos))
        if found == own:
            return tokenizer.tokenize(text, special=True, add_bos=add_bos)
        tokens, at, before = tokenizer.tokenize("", add_bos=add_bos)[:1], 0, None
        # The tokenizer, too, cuts a text at its control tokens first and takes what is between them by itself.
        for start, end in [*own, (len(text), len(text))]:
            control = self._controls.get(text[start:end])
            piece = text[at:start]
            piece = piece.lstrip(_SPACE) if before is not None and before.rstrip else piece
            piece = piece.rstrip(_SPACE) if control is not None and control.lstrip else piece
            tokens += tokenizer.tokenize(piece, add_bos=False) if piece else []
            tokens += [control.token] if control is not None else []
            at, before = end, control
        return tokens

    def _skeleton(self, messages: Messages, text: str, found: list[Span]) -> tuple[str, list[Span]]:
        """The text with names in place of contents, and where in the text the template's own control tokens are."""
        mark = f"x{secrets.token_hex(8)}x"
        hidden: list[str] = []
        skeleton = self._render([m | {"content": self._hide(m["content"], mark, hidden)} for m in messages])
        own: list[Span] = []
        rebuilt, at = [], 0
        for i, part in enumerate(re.split(rf"{mark}(\d+)x", skeleton)):
            piece = hidden[int(part)] if i % 2 else part
            if not i % 2:
                own += [(at + match.start(), at + match.end()) for match in self._pattern.finditer(part)]
            rebuilt.append(piece)
            at += len(piece)
        if "".join(rebuilt) == text:
            return skeleton, own
        theirs = Counter(text[start:end] for start, end in found)
        theirs -= Counter(match[0] for match in self._pattern.finditer(skeleton))
        if theirs:
            raise ModelError(
                f"a message holds {' '.join(theirs)}, a control token of this model, and its chat template changes"
                " messages in a way that leaves unclear which are its own; take it out of the message"
            )
        return skeleton, found

    def _hide(self, content: str, mark: str, hidden: list[str]) -> str:
        """Replace a content by names, except white space at its ends and the strings that the template spells out."""
        parts = []
        ends = [*(match.span() for match in self._spelled.finditer(content)), (len(content), len(content))]
        at = 0
        for start, end in ends:
            core = content[at:start].strip()
            if core:
                first = content.index(core, at)
                parts += [content[at:first], f"{mark}{len(hidden)}x", content[first + len(core) : start]]
                hidden.append(core)
            else:
                parts.append(content[at:start])
            parts.append(content[start:end])
            at = end
        return "".join(parts)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of some texts, the longest first; without texts it matches nothing."""
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else _NEVER


def _strings(source: str) -> set[str]:
    """The strings that a template spells out, without white space around them; single characters say too little."""
    found = set()
    for _, kind, value in Environment().lex(source):
        if kind == "string":
            # As Jinja reads them: escapes, and line ends as they are.
            found.add(value[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape").strip())
    return {word for word in found if len(word) > 1}
