"""Server-sent events: a stream of chunks that is never silent for long, and whose errors are told as a dialect does.

An error before the first chunk is a plain HTTP error; one after it is a chunk. A first chunk that is long in coming is
not waited for: clients give up on a server that sends no headers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ngramspec.errors import NGramSpecError
from ngramspec.server.errors import ApiError, of_failure
from ngramspec.server.json_text import dumped

Chunks = AsyncGenerator[str, None]

_PING = b":\n\n"


def event(data: Any, name: str | None = None) -> str:
    """A chunk; `name`: the event's, in dialects that have several."""
    text = f"data: {data if isinstance(data, str) else dumped(data)}\n\n"
    return text if name is None else f"event: {name}\n{text}"


DONE = event("[DONE]")


async def event_stream(chunks: Chunks, ping: float, failed: Callable[[ApiError], str]) -> Response:
    """A response that sends chunks as they come, begun when the first one is there or `ping` seconds are over.

    Args:
        chunks: as `event` makes them; closed with the response.
        ping: seconds of silence after which a comment is sent.
        failed: the last chunk, where an error ends the stream.

    Raises:
        ApiError: what came instead of the first chunk.
    """
    first = asyncio.ensure_future(_next(chunks))
    try:
        await asyncio.wait({first}, timeout=ping)
        if first.done():
            first.result()
    except BaseException:
        await _close(first, chunks)
        raise
    return _EventStream(chunks, first, ping, failed)


async def _next(chunks: Chunks) -> str | None:
    return await anext(chunks, None)


async def _close(pending: asyncio.Future[str | None], chunks: Chunks) -> None:
    pending.cancel()
    await asyncio.wait({pending})
    await chunks.aclose()


class _EventStream(Response):
    media_type = "text/event-stream"

    def __init__(
        self, chunks: Chunks, first: asyncio.Future[str | None], ping: float, failed: Callable[[ApiError], str]
    ) -> None:
        # A proxy must neither keep nor gather what it passes on.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks, self._pending, self._ping, self._failed = chunks, first, ping, failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        now = asyncio.get_running_loop().time
        written = now()

        async def write(raw: bytes, more: bool = True) -> None:
            nonlocal written
            written = now()
            await send({"type": "http.response.body", "body": raw, "more_body": more})

        async def ping() -> None:
            while True:
                if (left := written + self._ping - now()) > 0:
                    await asyncio.sleep(left)
                else:
                    await write(_PING)

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        # One task for all silences: one for each chunk would cost more than sending it.
        pinging = asyncio.ensure_future(ping())
        try:
            if (chunk := await self._pending) is not None:
                await write(chunk.encode())
                async for chunk in self._chunks:
                    await write(chunk.encode())
        except (ApiError, NGramSpecError) as error:
            await write(self._failed(of_failure(error, started=True)).encode())
        except Exception:
            await write(self._failed(ApiError(500, "internal error")).encode(), more=False)
            raise
        finally:
            pinging.cancel()
            await _close(self._pending, self._chunks)
        await write(b"", more=False)
