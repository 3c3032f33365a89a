"""Server-sent events: a stream of chunks that is never silent for long, and whose errors are told as an API does.

An error before the first chunk is a plain HTTP error; one after it is a chunk. A first chunk that is long in coming is
not waited for: clients give up on a server that sends no headers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ngramspec.errors import NGramSpecError
from ngramspec.server.errors import ApiError, of_failure
from ngramspec.server.http import dumped

Chunks = AsyncGenerator[str, None]

COMMENT = ":\n\n"


def event(data: Any, name: str | None = None) -> str:
    """A chunk; `name`: the event's, in APIs that have several."""
    text = f"data: {data if isinstance(data, str) else dumped(data)}\n\n"
    return text if name is None else f"event: {name}\n{text}"


DONE = event("[DONE]")
"""The last chunk of OpenAI's older streams."""


def chunk_maker(head: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], str]:
    """Makes chunks that begin with the same fields, which are turned into JSON once."""
    begun = f"data: {dumped(dict(head))[:-1]},"
    return lambda rest: f"{begun}{dumped(rest)[1:]}\n\n"


async def event_stream(
    chunks: Chunks, seconds: float, silence: Callable[[], str], failed: Callable[[ApiError], str]
) -> Response:
    """A response that sends chunks as they come, begun when the first one is there or `seconds` are over.

    Args:
        chunks: as `event` makes them; closed with the response.
        seconds: of silence, after each of which it is broken.
        silence: makes what breaks it.
        failed: makes the last chunk, where an error ends the stream.

    Raises:
        ApiError: what came instead of the first chunk.
    """
    first = asyncio.ensure_future(_next(chunks))
    try:
        await asyncio.wait({first}, timeout=seconds)
        if first.done():
            first.result()
    except BaseException:
        await _close(first, chunks)
        raise
    return _EventStream(chunks, first, seconds, silence, failed)


async def _next(chunks: Chunks) -> str | None:
    return await anext(chunks, None)


async def _close(pending: asyncio.Future[str | None], chunks: Chunks) -> None:
    pending.cancel()
    await asyncio.wait({pending})
    await chunks.aclose()


class _EventStream(Response):
    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: Chunks,
        first: asyncio.Future[str | None],
        seconds: float,
        silence: Callable[[], str],
        failed: Callable[[ApiError], str],
    ) -> None:
        # A proxy must neither keep nor gather what it passes on.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks, self._first, self._seconds = chunks, first, seconds
        self._silence, self._failed = silence, failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        now = asyncio.get_running_loop().time
        written = now() if self._first.done() else now() - self._seconds

        async def write(chunk: str, more: bool = True) -> None:
            nonlocal written
            written = now()
            await send({"type": "http.response.body", "body": chunk.encode(), "more_body": more})

        async def break_silences() -> None:
            while True:
                if (left := written + self._seconds - now()) > 0:
                    await asyncio.sleep(left)
                else:
                    await write(self._silence())

        breaking = None
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            # One task for all silences: one for each chunk would cost more than sending it.
            breaking = asyncio.ensure_future(break_silences())
            if (first := await self._first) is not None:
                await write(first)
                async for chunk in self._chunks:
                    await write(chunk)
        except (ApiError, NGramSpecError) as error:
            await write(self._failed(of_failure(error, started=True)))
        except Exception:
            await write(self._failed(ApiError(500, "internal error")), more=False)
            raise
        finally:
            if breaking is not None:
                breaking.cancel()
            await _close(self._first, self._chunks)
        await write("", more=False)
