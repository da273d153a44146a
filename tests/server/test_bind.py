"""The listening socket: what accepted connections inherit from it."""

from __future__ import annotations

import socket

from anaphora.server.run import bind


def test_accepted_connections_send_small_chunks_at_once() -> None:
    with (
        bind("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
