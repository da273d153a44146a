"""The server as a process: bind, load the model while /health already answers, drain on a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import uvicorn

from anaphora.engine.loop import EngineLoop
from anaphora.errors import ConfigError
from anaphora.server.app import create_app
from anaphora.server.settings import ServerState

logger = logging.getLogger("anaphora.server")

_LOADER = "anaphora-load"
_FLUSH_SECONDS = 5
"""For answers that are finished but not yet read, after the engine has drained."""


def run_server(
    state: ServerState,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    load: Callable[[], EngineLoop] | None = None,
    on_listening: Callable[[str], None] | None = None,
    shutdown_timeout: float = 30.0,
) -> None:
    """Serve until SIGTERM or SIGINT, then return; a second signal ends the process at once.

    `load` makes the (started) engine on a thread of its own, after the port is bound: a port in use is known at
    once, and /health says "loading" until the model is there. `on_listening` gets the base URL. Port 0 = any free.
    Raises ConfigError when the address cannot be bound, and whatever `load` raises.
    """
    sock = bind(host, port)
    if on_listening is not None:
        on_listening(url_of(sock))
    asyncio.run(_until_signal(state, sock, load, shutdown_timeout))
    if any(thread.name == _LOADER for thread in threading.enumerate()):
        sys.stdout.flush()
        os._exit(0)  # native code that still loads cannot be interrupted, and aborts if Python ends under it


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError that says what to change."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"There is no port {port}: choose a --port from 1 to 65535, or 0 for any free one.")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on {host}:{port} ({error}). Choose another --port, or a --host of this machine."
        ) from error
    # accepted sockets inherit it; asyncio would set it only on sockets made with proto=IPPROTO_TCP, and without it
    # a stream's chunks wait up to 40 ms for the client's delayed ACK
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    state: ServerState,
    sock: socket.socket,
    stop: asyncio.Event,
    *,
    load: Callable[[], EngineLoop] | None = None,
    shutdown_timeout: float = 30.0,
) -> None:
    """Serve on `sock` until `stop` is set, then drain: what runs may finish for `shutdown_timeout` seconds.

    While draining, /health and new requests get 503, which load balancers see. Raises what `load` raises.
    State changes: state.engine, state.failure, state.draining; the engine is shut down at the end.
    """
    server = _Server(
        uvicorn.Config(
            create_app(state),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    loading = asyncio.create_task(_load(load, state, stop)) if load is not None else None
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    state.draining = True
    if state.engine is not None:
        await asyncio.to_thread(state.engine.shutdown, shutdown_timeout)
    server.should_exit = True
    await serving
    if loading is not None and loading.done():
        loading.result()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, which would end the process by the signal instead of exit code 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _load(load: Callable[[], EngineLoop], state: ServerState, stop: asyncio.Event) -> None:
    """Run `load` on a daemon thread, so that a signal need not wait for it. A failure stops the server."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[EngineLoop] = loop.create_future()

    def run() -> None:
        try:
            report = partial(loaded.set_result, load())
        except Exception as error:
            report = partial(loaded.set_exception, error)
        with suppress(RuntimeError):  # the server ended first
            loop.call_soon_threadsafe(report)

    threading.Thread(target=run, name=_LOADER, daemon=True).start()
    try:
        state.engine = await loaded
    except Exception as error:
        state.failure = str(error)
        stop.set()
        raise


async def _until_signal(
    state: ServerState, sock: socket.socket, load: Callable[[], EngineLoop] | None, shutdown_timeout: float
) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def begin_to_drain() -> None:
        logger.info("finishing what runs, at most %s seconds; SIGINT ends at once", shutdown_timeout)
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel ends the process, whatever it is doing

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, begin_to_drain)
    await serve(state, sock, stop, load=load, shutdown_timeout=shutdown_timeout)
