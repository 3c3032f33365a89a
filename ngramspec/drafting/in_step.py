"""The drafts of several texts, made in step: what they ask of a draft model at a time goes through it together.

A drafter asks for a pass by yielding a `Wish`, and goes on when it is sent the logits:

    draft = made_alone(drafter.drafting(8, price=price))
    drafts = made_together([drafter.drafting(8, price=price) for drafter in drafters], price)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from ngramspec.backend import Logits
from ngramspec.drafting.draft import NO_DRAFT, Draft, Drafting
from ngramspec.drafting.model_passes import LEAVE, Wish
from ngramspec.drafting.price import TokenPrice


def made_alone(drafting: Drafting) -> Draft:
    """The draft of one text, all of whose wishes are granted."""
    rows: Logits | None = None
    while True:
        try:
            wish = drafting.send(rows)
        except StopIteration as done:
            return cast(Draft, done.value)
        rows = wish.passes.evaluate([wish])[0] if wish.tokens else LEAVE


def made_together(draftings: Sequence[Drafting], price: TokenPrice | None) -> list[Draft]:
    """The drafts of several texts, made in step: what they wish of the draft model at a time goes through it together.

    Args:
        draftings: of the texts, all at the same price, none of them begun.
        price: as in `Drafter.propose`.
    """
    if len(draftings) == 1:
        return [made_alone(draftings[0])]
    drafts = [NO_DRAFT] * len(draftings)
    wishes: dict[int, Wish] = {}

    def go_on(text: int, rows: Logits | None) -> None:
        try:
            wishes[text] = draftings[text].send(rows)
        except StopIteration as done:
            drafts[text] = done.value

    for text in range(len(draftings)):
        go_on(text, None)
    while wishes:
        asked = dict(wishes)
        wishes.clear()
        passes = next(iter(asked.values())).passes
        chosen = passes.worthwhile(asked, price)
        for text in asked.keys() - set(chosen):
            go_on(text, None)
        for text in chosen:
            if not asked[text].tokens:
                go_on(text, LEAVE)
        for group in passes.groups([text for text in chosen if asked[text].tokens], asked):
            for text, rows in zip(group, passes.evaluate([asked[text] for text in group]), strict=True):
                go_on(text, rows)
    return drafts
