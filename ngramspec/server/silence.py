"""Silence made visible: some clients give up on a stream without events, and comments are none to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

T = TypeVar("T")


async def with_silences(source: AsyncGenerator[T, None], seconds: float) -> AsyncGenerator[T | None, None]:
    """What a source yields, and None after each `seconds` in which it yielded nothing. Closes the source at the end."""
    pending = asyncio.ensure_future(_next(source))
    try:
        while True:
            await asyncio.wait({pending}, timeout=seconds)
            if not pending.done():
                yield None
                continue
            try:
                item = pending.result()
            except StopAsyncIteration:
                return
            pending = asyncio.ensure_future(_next(source))
            yield item
    finally:
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        await source.aclose()


async def _next(source: AsyncGenerator[T, None]) -> T:
    return await anext(source)
