"""HTTP/1.1 for load: one request at a time on a connection, every read stamped before anything is parsed.

A batching engine hands all its streams a chunk in the same instant. A general client spends 0.15 ms on each, so that
the last of 64 is noted 9 ms late; here a read costs some microseconds, and what is in it is looked at only when the
other streams' reads of the same instant have their stamps too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import Literal

import httpx

_HEAD_LIMIT = 1 << 16


@dataclass(slots=True)
class Exchange:
    """One request and its answer. Times are those of `time.perf_counter`."""

    sent: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """Names in lower case."""
    headers_at: float = 0.0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    """Reads of the body and when they came, framing taken off. Who is notified may remove them."""
    end_at: float = 0.0

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)


class Stale(Exception):
    """The server had closed an idle connection; nothing of the answer came, the request may go out again."""


class Cut(httpx.RemoteProtocolError):
    """The body ended early, or its framing is broken: the head had come already."""


class Connection(asyncio.Protocol):
    """Made by `Connection.open`. `usable` says whether another request may follow."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[Exchange] | None = None
        self._used = False
        self._closed = False
        self._last = 0.0
        self._head = b""
        self._framing: _Chunked | _Counted | None = None
        self._notify: Callable[[Exchange], None] = lambda _: None
        self.usable = True

    @classmethod
    async def open(cls, host: str, port: int, context: SSLContext | None, timeout: float) -> Connection:
        """With TLS where there is a context. Raises httpx.ConnectError or httpx.ConnectTimeout."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(min(10.0, timeout)):
                _, made = await loop.create_connection(lambda: cls(timeout), host, port, ssl=context)
        except TimeoutError as error:
            raise httpx.ConnectTimeout("") from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        return made

    async def request(self, content: bytes, notify: Callable[[Exchange], None]) -> Exchange:
        """Send a whole request and read its whole answer. Raises httpx.HTTPError, or Stale. Cancelled: closes.

        `notify` is called when there are pieces where there were none; it must be quick and not raise.
        """
        if self._closed or self._transport is None:
            raise Stale
        self._done = self._loop.create_future()
        self._head, self._framing, self._notify = b"", None, notify
        self._exchange = Exchange(time.perf_counter())
        self._last = self._exchange.sent
        self._transport.write(content)
        self._timer = self._loop.call_later(self._timeout, self._watch)
        try:
            return await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._timer.cancel()
            self._used, self._done, self._exchange = True, None, None

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        at = self._last = time.perf_counter()
        exchange = self._exchange
        if exchange is None:  # bytes that nobody asked for
            self.close()
            return
        try:
            if self._framing is None:
                data = self._read_head(data, at, exchange)
            if self._framing is not None:
                payload = self._framing.feed(data)
                if payload:
                    exchange.pieces.append((at, payload))
                    if len(exchange.pieces) == 1:
                        self._notify(exchange)
                if self._framing.done:
                    self._finish(at)
        except ValueError as error:
            self._fail((Cut if exchange.status else httpx.RemoteProtocolError)(str(error)))

    def connection_lost(self, error: Exception | None) -> None:
        self._closed, self.usable = True, False
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.status and isinstance(self._framing, _Counted) and self._framing.left is None:
            self._finish(time.perf_counter())
        elif exchange.status:
            self._fail(Cut("the connection closed before the answer was complete"))
        elif self._used and not self._head:
            self._fail(Stale())
        else:
            self._fail(httpx.ReadError(str(error or "closed")))

    def _read_head(self, data: bytes, at: float, exchange: Exchange) -> bytes:
        """What follows the head, which may not be complete yet. Raises ValueError. State changes: framing, exchange."""
        self._head += data
        while (end := self._head.find(b"\r\n\r\n")) >= 0:
            status, headers = _parse_head(self._head[:end])
            rest = self._head[end + 4 :]
            self._head = b"-"  # something came
            if status < 200:  # an interim answer; the real one follows
                self._head = rest
                continue
            exchange.status, exchange.headers, exchange.headers_at = status, headers, at
            self._framing = _framing_of(status, headers)
            self.usable = headers.get("connection", "").lower() != "close" and not self._framing.until_close
            return rest
        if len(self._head) > _HEAD_LIMIT or not b"HTTP/".startswith(self._head[:5]):
            raise ValueError("the answer does not begin as HTTP does")
        return b""

    def _watch(self) -> None:
        """One timer per request, moved on only when it fires: a read costs nothing for its timeout."""
        if self._done is None or self._done.done():
            return
        left = self._last + self._timeout - time.perf_counter()
        if left <= 0:
            self._fail(httpx.ReadTimeout(""))
        else:
            self._timer = self._loop.call_later(left, self._watch)

    def _finish(self, at: float) -> None:
        if self._done is not None and not self._done.done() and self._exchange is not None:
            self._exchange.end_at = at
            self._done.set_result(self._exchange)

    def _fail(self, error: Exception) -> None:
        self.usable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class _Counted:
    """A body of `left` bytes; None: until the connection closes."""

    def __init__(self, left: int | None) -> None:
        self.left = left
        self.until_close = left is None
        self.done = left == 0

    def feed(self, data: bytes) -> bytes:
        if self.left is not None:
            data = data[: self.left]
            self.left -= len(data)
            self.done = self.left == 0
        return data


class _Chunked:
    """Chunked transfer coding (RFC 9112, 7.1)."""

    until_close = False

    def __init__(self) -> None:
        self.done = False
        self._line = b""
        self._left = 0
        self._part: Literal["size", "trailer"] = "size"

    def feed(self, data: bytes) -> bytes:
        """The payload in this read. Raises ValueError for a size that is none."""
        found, at = [], 0
        if self._line:
            data, self._line = self._line + data, b""
        while at < len(data) and not self.done:
            if self._left:
                piece = data[at : at + self._left]
                found.append(piece)
                at += len(piece)
                self._left -= len(piece)
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                self._line = data[at:]
                if len(self._line) > _HEAD_LIMIT:
                    raise ValueError("a chunk of the answer has no size")
                break
            self._take_line(data[at:end])
            at = end + 2
        return found[0] if len(found) == 1 else b"".join(found)

    def _take_line(self, line: bytes) -> None:
        if self._part == "trailer":
            self.done = not line
        elif line:  # the empty one is the end of the chunk before
            self._left = int(line.partition(b";")[0], 16)
            if self._left < 0:
                raise ValueError("a chunk of the answer has a negative size")
            if not self._left:
                self._part = "trailer"


def _framing_of(status: int, headers: dict[str, str]) -> _Chunked | _Counted:
    if status in (204, 304):
        return _Counted(0)
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return _Chunked()
    length = headers.get("content-length")
    return _Counted(int(length) if length is not None else None)


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.split(b"\r\n")
    words = first.split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise ValueError("the answer does not begin as HTTP/1.1 does")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.strip().lower().decode("latin-1")] = value.strip().decode("latin-1")
    return int(words[1]), headers
