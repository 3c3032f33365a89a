"""Budgets of reasoning: `budget_for` makes the budget of a response, and `BudgetSampler` applies it to the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from encodings import utf_8
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ngramspec.sampling.distribution import Distribution, point_mass
from ngramspec.sampling.sampler import Sampler, WrappedSampler
from ngramspec.sampling.settings import ReasoningBlock, ReasoningBudget
from ngramspec.tokens import Tokenizer


def budget_for(
    limit: int,
    message: str,
    tags: Mapping[str, str],
    tokenizer: Tokenizer,
    *,
    prompt: Sequence[int] = (),
    start: str | None = None,
) -> ReasoningBudget | None:
    """Return the budget of the response to a prompt that has opened the tag `start`; `None` without `tags`."""
    if not tags:
        return None
    before = tokenizer.tokenize(message, add_bos=False) if message else []
    blocks = {
        tag: ReasoningBlock(tag.strip(), end, (*before, *tokenizer.tokenize(end, special=True, add_bos=False)))
        for tag, end in tags.items()
    }
    piece = tokenizer.display_piece
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
            rest = sum(sizes) - at - len(raw)
            return sum(end <= rest for end in accumulate(sizes))
    return 0


class BudgetSampler(WrappedSampler):
    """A sampler that closes a block of reasoning when its budget is used up.

    An optional message and the closing tag are forced, which no setting can forbid; a grammar can delay them. The rules
    are llama.cpp's: a budget counts all tokens after the opening tag, each block has the whole budget, and a character
    is completed before its block is closed. But tags are found in the text, whichever tokens the model writes them
    with. The count depends only on the tokens of prompt and text, so drafts change nothing.
    """

    def __init__(self, sampler: Sampler, budget: ReasoningBudget) -> None:
        super().__init__(sampler)
        self._budget = budget
        self._longest = max(len(tag) for block in budget.blocks for tag in (block.start, block.end))

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self.closing: Sequence[int] = ()  # tokens that must come next; empty means that any token may come
        self._block = self._budget.open_block  # block at the end of the text; `None` outside reasoning
        self._left = self._budget.limit - self._budget.used  # tokens left in that block
        self._decoder = utf_8.IncrementalDecoder(errors="replace")
        self._text = ""  # end of the text, which may contain a part of a tag
        self._close_if_due()

    def accept(self, token: int) -> None:
        super().accept(token)
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
        if self._block is not None and self._left <= 0 and not self._decoder.buffer:
            closing, grammar = self._block.closing, self.grammar
            if grammar is None or grammar.count_allowed(closing) == len(closing):
                self.closing = closing

    def draw(self, logits: NDArray[np.float32], position: int, distributions: list[Distribution] | None = None) -> int:
        if not self.closing:
            return self._sampler.draw(logits, position, distributions)
        if distributions is not None:
            distributions.append(point_mass(self.closing[0]))
        return self.closing[0]

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        return point_mass(self.closing[0]) if self.closing else self._sampler.distribution(logits)
