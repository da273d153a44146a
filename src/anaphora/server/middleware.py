"""What every request passes: it is counted, nothing unexpected leaves the server, and its body has a limit."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anaphora.errors import BodyTooLarge
from anaphora.server.errors import as_request_error, error_response
from anaphora.server.settings import ServerState

_DISCARD_FACTOR = 8
"""Of a body that is too large, this many times the limit is still read and thrown away: a client that is cut off
while it writes would see a broken connection instead of the reason."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class Outermost:
    """Counts answers by method, route and status; answers 500 to what no handler caught."""

    def __init__(self, app: ASGIApp, *, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            answer = error_response(as_request_error(error))
            if status:
                raise
            await answer(scope, receive, watched_send)
        finally:
            self._state.http_requests[(*_labels(scope), str(status))] += 1


def _labels(scope: Scope) -> tuple[str, str]:
    """Method and declared path; what is not known is "other", so that clients cannot make up label values."""
    method = scope["method"] if scope["method"] in _METHODS else "other"
    route = getattr(scope.get("route"), "path_format", None)
    if route is None and scope["path"] in scope["app"].state.paths:
        route = scope["path"]
    return method, route or "other"


class BodyLimit:
    """Reads a body to its end before the route runs, or answers 413; counts bytes, whatever the headers say."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "")
        too_large = declared.isdigit() and int(declared) > self._max_bytes
        if too_large and headers.get("expect", "").lower() == "100-continue":
            await self._refuse(scope, receive, send)  # it waits for a word before it sends
            return
        body, size, more = bytearray(), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
            too_large = too_large or size > self._max_bytes
            if too_large:
                body.clear()
                if size > _DISCARD_FACTOR * self._max_bytes:
                    break
            else:
                body += message.get("body", b"")
        if too_large:
            await self._refuse(scope, receive, send)
            return
        whole: Message | None = {"type": "http.request", "body": bytes(body), "more_body": False}

        async def replay() -> Message:
            nonlocal whole
            message, whole = whole, None
            return message or await receive()

        await self._app(scope, replay, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = BodyTooLarge(
            f"The body is larger than the {self._max_bytes} bytes that this server takes. Send less, or start the "
            "server with a larger --max-body-bytes."
        )
        await error_response(error, {"Connection": "close"})(scope, receive, send)
