"""Rules of one text (`TextRules`): its minimum length, tokens that end it, forbidden words and a reasoning budget.

They depend on the tokens before, so no logit bias can express them. A field that is declared with `option` is an option
of `complete` and `chat`, a setting of `/set`, a field of every HTTP API, and one of Ollama's `options`, without further
code; `complete --beams` rejects it. `ngramspec.decoding.text` applies the rules to tokens.
`ngramspec.decoding.text` ends the text at a token, and `ngramspec.decoding.text` at a string.

A block of reasoning that has used up its budget is closed by tokens that are forced one after the other: an optional
message, then the closing tag. The count depends only on the tokens of prompt and text, so drafts change nothing. The
rules are those of llama.cpp's sampler for reasoning budgets: a budget counts all tokens after the opening tag, each
block has the whole budget, and a character is completed before its block is closed. llama.cpp compares tokens; here
tags are found in the text, as by the parser of the response, whichever tokens the model writes them with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from encodings import utf_8

from ngramspec.sampling.option import allow_range, option
from ngramspec.tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class ReasoningBlock:
    """A pair of tags around reasoning."""

    start: str  # opening tag
    end: str  # closing tag
    closing: tuple[int, ...]  # token ids that close the block: the message and the closing tag


@dataclass(frozen=True, slots=True)
class ReasoningBudget:
    """Maximum number of tokens in each block of reasoning; `budget_for` makes it for a prompt."""

    limit: int  # tokens after the opening tag; 0 closes a block as soon as it is opened
    blocks: tuple[ReasoningBlock, ...]  # blocks that the model may open
    piece: Callable[[int], bytes] = field(repr=False)  # bytes of a token, names of control tokens included
    open_block: ReasoningBlock | None = None  # block that the prompt has opened
    used: int = 0  # tokens of the prompt after the opening tag of that block


@dataclass(frozen=True, slots=True)
class TextRules:
    """Rules of one text, in addition to the limit and the stop strings of its `Request`.

    Rules that vLLM also has are named like its fields. A whole number declared with `option` needs no reader.
    """

    # Minimum number of tokens before the text may end, by a token or a stop string. Limits have priority: `max_tokens`,
    # the context, and those of the server's text readers.
    min_tokens: int = option(
        0,
        metavar="N",
        help="Minimum number of tokens before the text may end; stop strings within them do not count; 0: off.",
        allowed=allow_range(0),
    )
    stop_token_ids: frozenset[int] = frozenset()  # tokens that end the text, in addition to those of the vocabulary
    bad_words: tuple[tuple[int, ...], ...] = ()  # forbidden sequences of token ids, of two or more tokens each
    reasoning: ReasoningBudget | None = None  # budget of reasoning; `None` means no limit

    @property
    def restriction(self) -> str:
        """Name of a rule that forbids or forces tokens; empty without one. `stop_token_ids` does neither."""
        if self.reasoning is not None:
            return "a reasoning budget"
        return "min_tokens" if self.min_tokens else "bad_words" if self.bad_words else ""


NO_RULES = TextRules()


def budget_for(
    limit: int,
    message: str,
    tags: Mapping[str, str],
    tokenizer: Tokenizer,
    piece: Callable[[int], bytes],
    *,
    prompt: Sequence[int] = (),
    start: str | None = None,
) -> ReasoningBudget | None:
    """Return the budget of the response to a prompt, or `None` if the model does not reason.

    `message` is inserted before the closing tag when the budget is used up; it contains no control tokens. `tags` are
    closing tags by opening tags; without any, the model does not reason. The prompt has opened the tag `start`.
    """
    if not tags:
        return None
    before = tokenizer.tokenize(message, add_bos=False) if message else []
    blocks = {
        tag: ReasoningBlock(tag.strip(), end, (*before, *tokenizer.tokenize(end, special=True, add_bos=False)))
        for tag, end in tags.items()
    }
    used = 0 if start is None else _tokens_after(start.strip(), prompt, piece)
    return ReasoningBudget(limit, tuple(blocks.values()), piece, None if start is None else blocks[start], used)


def _tokens_after(tag: str, prompt: Sequence[int], piece: Callable[[int], bytes]) -> int:
    """Return the number of tokens after the last occurrence of a tag; a token that contains its end does not count."""
    raw, start, sizes = tag.encode(), b"", list[int]()
    for token in reversed(prompt):
        text = piece(token)
        sizes.append(len(text))
        start = (text + start)[: len(text) + len(raw)]
        at = start.find(raw)
        if at >= 0:
            rest, count = sum(sizes) - at - len(raw), 0
            for size in sizes:
                rest -= size
                if rest < 0:
                    break
                count += 1
            return count
    return 0


class ReasoningCounter:
    """Counts the tokens of reasoning in one text.

    `can_close` returns False if a grammar forbids the closing tokens at the current position. The block then stays open
    until the grammar allows them.
    """

    def __init__(self, budget: ReasoningBudget, can_close: Callable[[Sequence[int]], bool]) -> None:
        self.closing: Sequence[int] = ()  # tokens that must come next; empty means that any token may come
        self._budget, self._can_close = budget, can_close
        self._block = budget.open_block  # block at the end of the text; `None` outside reasoning
        self._left = budget.limit - budget.used  # tokens left in that block
        self._decoder = utf_8.IncrementalDecoder(errors="replace")
        self._text = ""  # end of the text, which may contain a part of a tag
        self._longest = max(len(tag) for block in budget.blocks for tag in (block.start, block.end))
        self._close_if_due()

    def accept(self, token: int) -> None:
        """Continue after a token of the text."""
        if self.closing:
            self.closing = self.closing[1:]
            if not self.closing:
                self._block, self._text = None, ""
            return
        self._text += self._decoder.decode(self._budget.piece(token))
        if self._block is None:
            self._open()
        elif self._block.end in self._text:
            self._text = self._text.partition(self._block.end)[2]
            self._block = None
        else:
            self._left -= 1
        self._text = self._text[-self._longest :]
        self._close_if_due()

    def _open(self) -> None:
        """Enter the block whose opening tag is in the text, if any."""
        for block in self._budget.blocks:
            if block.start in self._text:
                self._block, self._left = block, self._budget.limit
                self._text = self._text.partition(block.start)[2]
                return

    def _close_if_due(self) -> None:
        """Force the closing tokens if the budget is used up, no character is incomplete and the grammar agrees."""
        due = self._block is not None and self._left <= 0 and not self._decoder.buffer
        if due and self._block is not None and self._can_close(self._block.closing):
            self.closing = self._block.closing
