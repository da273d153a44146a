"""Server-sent events: one JSON object per event, `[DONE]` at the end, and a reader who left is noticed at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from anaphora.server.errors import ClientDisconnected, as_request_error, error_body
from anaphora.server.generation import Generation, while_connected
from anaphora.server.responses import REQUEST_ID_HEADER, to_json

_KEEP_ALIVE_SECONDS = 15.0


class EventStream(Response):
    """Sends `chunks` as they come, then closes `generation`, however it ends.

    An error after the start is one event of OpenAI's error shape; the stream then ends without `[DONE]`.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, chunks: AsyncIterator[BaseModel]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", REQUEST_ID_HEADER: generation.request_id}
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._generation = generation
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except ClientDisconnected:
            return
        finally:
            self._generation.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        keep_alive = asyncio.create_task(_keep_alive(send))
        try:
            async for chunk in self._chunks:
                keep_alive.cancel()
                await send(_event(to_json(chunk)))
            await send(_event("[DONE]"))
        except Exception as error:
            await send(_event(to_json(error_body(as_request_error(error)))))
        finally:
            keep_alive.cancel()
        await send({"type": "http.response.body", "body": b""})


async def _keep_alive(send: Send) -> None:
    """An SSE comment now and then until the first chunk: a long prefill outlasts many a proxy's read timeout."""
    while True:
        await asyncio.sleep(_KEEP_ALIVE_SECONDS)
        await send({"type": "http.response.body", "body": b": computing the prompt\n\n", "more_body": True})


def _event(data: str) -> Message:
    return {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}
