"""Connections of the Valkey client that keep a deadline and read values straight into the caller's memory.

The client's own parsers wait up to the socket's timeout at every read, so a server that sends a byte now and then
holds them for ever; they copy every value twice; and they take as many bytes as the server cares to announce.
This parser of RESP2 (https://valkey.io/topics/protocol/) shares one deadline over a whole exchange, lets the socket
write into the views where the value belongs, and drops what it did not ask for without keeping it.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable, Sequence
from typing import Any

from valkey._parsers.base import BaseParser
from valkey.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from valkey.exceptions import ConnectionError as Disconnected
from valkey.exceptions import InvalidResponse, ResponseError

from anaphora.tiers.remote.deadline import Deadline

Reply = int | bytes | None | ResponseError | list["Reply"]

BUFFER_BYTES = 64 << 10
LARGEST_REPLY = 1 << 20
"""Bytes of a reply that is kept here (settings, topology); values are not, they go to the caller's views."""
DEEPEST_REPLY = 8
_COALESCE = 16 << 10
_MOST_BUFFERS = 512
"""Of one call of sendmsg; Linux takes 1,024."""


class BoundedParser(BaseParser):
    """One connection's replies. `deadline` is set before every exchange."""

    def __init__(self, socket_read_size: int = BUFFER_BYTES) -> None:
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._socket: socket.socket | None = None
        self.deadline = Deadline(0)

    def on_connect(self, connection: Any) -> None:
        self._socket = connection._sock
        self._start = self._end = 0

    def on_disconnect(self) -> None:
        self._socket = None
        self._start = self._end = 0

    def can_read(self, timeout: float = 0) -> bool:
        """Whether something waits to be read; on a connection at rest that is its end, or an answer to nobody."""
        if self._start < self._end:
            return True
        assert self._socket is not None
        self._socket.settimeout(timeout)
        try:
            self._start, self._end = 0, _at_least_one(self._socket.recv_into(self._view))
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            return False
        return True

    def read_response(self, disable_decoding: bool = False) -> Reply:
        """The next reply, whole. Raises InvalidResponse for what is not RESP2 or larger than any we ask for."""
        return self._reply(0)

    def read_into(self, views: Sequence[memoryview]) -> int | ResponseError | None:
        """The next reply, a value: scattered over `views` when its length is theirs together, else dropped.

        The answer is its length, None where there is no value, or the error the server gave.
        """
        line = self._line()
        if line[:1] == b"-":
            return self._error(line)
        if line[:1] != b"$":
            raise InvalidResponse(f"the server answered {line[:20]!r} where a value was asked for")
        length = _number(line)
        if length < 0:
            return None
        if length == sum(map(len, views)):
            for view in views:
                self._fill(view)
        else:
            self._drop(length)
        self._line_end()
        return length

    def _reply(self, depth: int) -> Reply:
        line = self._line()
        kind = line[:1]
        if kind == b"+":
            return line[1:]
        if kind == b"-":
            return self._error(line)
        if kind not in (b":", b"$", b"*"):
            raise InvalidResponse(f"the server answered {line[:20]!r}, which is not the Valkey protocol")
        number = _number(line)
        if kind == b":":
            return number
        if number < 0:
            return None
        if number > LARGEST_REPLY or depth > DEEPEST_REPLY:
            raise InvalidResponse(f"the server announced {number} bytes or elements where a few were asked for")
        if kind == b"*":
            return [self._reply(depth + 1) for _ in range(number)]
        data = bytearray(number)
        self._fill(memoryview(data))
        self._line_end()
        return bytes(data)

    def _error(self, line: bytes) -> ResponseError:
        error: Exception = self.parse_error(line[1:].decode("utf-8", "replace"))  # type: ignore[no-untyped-call]
        if isinstance(error, Disconnected):
            raise error
        assert isinstance(error, ResponseError)
        return error

    def _line(self) -> bytes:
        """Up to the next CR LF, which goes too."""
        seen = 0
        while (stop := self._buffer.find(b"\r\n", self._start + max(0, seen - 1), self._end)) < 0:
            seen = self._end - self._start
            if seen == BUFFER_BYTES:
                raise InvalidResponse(f"the server sent {BUFFER_BYTES} bytes without an end of line")
            self._receive()
        line = bytes(self._view[self._start : stop])
        self._start = stop + 2
        return line

    def _line_end(self) -> None:
        if self._line():
            raise InvalidResponse("a value is longer than the server announced")

    def _fill(self, view: memoryview) -> None:
        """Exactly len(view) bytes: first what lies in the buffer, then from the socket, without a copy of ours."""
        done = min(len(view), self._end - self._start)
        view[:done] = self._view[self._start : self._start + done]
        self._start += done
        while done < len(view):
            done += self._receive_direct(view[done:])

    def _drop(self, length: int) -> None:
        """Read `length` bytes and forget them; the deadline bounds it."""
        while length > 0:
            if self._start == self._end:
                self._receive()
            gone = min(length, self._end - self._start)
            self._start += gone
            length -= gone

    def _receive(self) -> None:
        """At least one more byte behind what is unread in the buffer, which is not full."""
        unread = self._end - self._start
        if self._end == BUFFER_BYTES or not unread:
            self._buffer[:unread] = self._buffer[self._start : self._end]
            self._start, self._end = 0, unread
        self._end += self._receive_direct(self._view[self._end :])

    def _receive_direct(self, room: memoryview) -> int:
        if self._socket is None:
            raise Disconnected("the connection is closed")
        self._socket.settimeout(self.deadline.left())
        return _at_least_one(self._socket.recv_into(room))


def _at_least_one(count: int) -> int:
    if count == 0:
        raise Disconnected("the server closed the connection")
    return count


def _number(line: bytes) -> int:
    digits = line[1:]
    if not digits.removeprefix(b"-").isdigit() or len(digits) > 20:
        raise InvalidResponse(f"the server sent {line[:20]!r} where a number belongs")
    return int(digits)


class _Bounded(AbstractConnection):
    """What a connection of any kind gains. Not thread-safe: the pool lends it to one caller at a time."""

    def prepare(self, deadline: Deadline) -> None:
        """Connect and authenticate, unless that was done and the server still listens."""
        self._parser.deadline = deadline
        if self._sock is not None:
            try:
                if not self._parser.can_read():
                    return
            except (OSError, Disconnected):
                pass  # closed while it lay in the pool: the server restarted, or dropped it as idle
            self.disconnect()  # type: ignore[no-untyped-call]
        self.socket_connect_timeout = self.socket_timeout = deadline.left()
        self.connect()  # type: ignore[no-untyped-call]

    def send(self, frames: Iterable[bytes | memoryview]) -> None:
        """Send the frames one after another; small ones travel together, and with the large one that they precede."""
        together: list[bytes | memoryview] = []
        size = 0
        for frame in frames:
            together.append(frame)
            size += len(frame)
            if size > _COALESCE:
                self._send(together)
                together, size = [], 0
        self._send(together)

    def _send(self, frames: list[bytes | memoryview]) -> None:
        while frames:
            sent = self._ready_to_send().sendmsg(frames[:_MOST_BUFFERS])
            whole = 0
            while whole < len(frames) and len(frames[whole]) <= sent:
                sent -= len(frames[whole])
                whole += 1
            frames = frames[whole:]
            if sent:
                frames[0] = memoryview(frames[0])[sent:]

    def _ready_to_send(self) -> socket.socket:
        if self._sock is None:
            raise Disconnected("the connection is closed")
        self._sock.settimeout(self._parser.deadline.left())
        return self._sock

    def fileno(self) -> int:
        """To wait for the first byte of an answer; between exchanges none is buffered."""
        if self._sock is None:
            raise Disconnected("the connection is closed")
        return int(self._sock.fileno())

    def receive(self) -> Reply:
        reply: Reply = self._parser.read_response()
        return reply

    def receive_into(self, views: Sequence[memoryview]) -> int | ResponseError | None:
        length: int | ResponseError | None = self._parser.read_into(views)
        return length


class BoundedConnection(_Bounded, Connection):
    """TCP."""


class BoundedTLSConnection(_Bounded, SSLConnection):
    """TCP and TLS."""

    def _send(self, frames: list[bytes | memoryview]) -> None:
        if frames:  # TLS sockets have no sendmsg
            self._ready_to_send().sendall(b"".join(frames))


class BoundedUnixConnection(_Bounded, UnixDomainSocketConnection):
    """A Unix socket."""
