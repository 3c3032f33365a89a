"""`merged`: several asynchronous iterators as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """What the sources yield, as it comes, with the number of the source. The first error ends all of them."""

    if len(sources) == 1:  # a task for every item would cost more than all else that is done to it
        async with aclosing(sources[0]) as only:
            async for one in only:
                yield 0, one
        return

    async def following(number: int) -> tuple[int, T]:
        return number, await anext(sources[number])

    pending = {asyncio.ensure_future(following(number)): number for number in range(len(sources))}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=pending.__getitem__):
                number = pending.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                pending[asyncio.ensure_future(following(number))] = number
                yield item
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for source in sources:
            await source.aclose()
